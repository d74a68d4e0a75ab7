"""Sharding without ranks: how slices become rectangles, and what is refused or told."""

from __future__ import annotations

import json
import logging
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hpctrain_plugins.sharding.communication import HostBuffers
from hpctrain_plugins.sharding.wrapping import units_of
from hypothesis import given
from hypothesis import strategies as st
from jobs import TINY
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import hpctrain
from hpctrain.base.errors import UsageError
from hpctrain.checking.check import check
from hpctrain.contracts.pieces import offsets_of
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob
from hpctrain.toolkit.partitioned import rectangles


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_slice_of_a_flat_tensor_is_its_rectangles_one_after_the_other(shape: list[int], data: st.DataObject) -> None:
    size = prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    tensor = torch.arange(size).view(shape)
    found = rectangles(tuple(shape), begin, end)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    parts = [
        tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].flatten()
        for offsets, lengths in found
    ]
    assert all(len(part) for part in parts)
    assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(begin, end))


@given(st.integers(0, 30), st.lists(st.integers(1, 4), min_size=2, max_size=2), st.booleans())
def test_parts_of_what_two_axes_cut_lie_where_chunks_of_chunks_do(
    rows: int, sizes: list[int], last_first: bool
) -> None:
    """Stage 3 cuts what tensor parallelism has cut; its axis is the first one nevertheless."""
    first, second = (1, 0) if last_first else (0, 1)
    placements = [_StridedShard(0, split_factor=sizes[1]), Shard(0)] if last_first else [Shard(0), Shard(0)]
    for coordinate in product(*map(range, sizes)):
        part = torch.arange(rows)
        for axis in (first, second):
            chunks = part.chunk(sizes[axis])
            part = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else part[:0]
        begin, column = offsets_of((rows, 3), placements, sizes, coordinate)
        assert column == 0 and (not len(part) or begin == part[0])
        assert 0 <= begin <= rows


def job(**changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in changes.items():
        tables.setdefault(name, {}).update(table)
    return tables


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        ({"stage": 0, "offload_optimizer": True}, "unknown key 'offload_optimizer' in [sharding]; an option of stage = 1, 2, 3"),
        ({"stage": 1, "prefetch": 2}, "unknown key 'prefetch' in [sharding]; an option of stage = 3"),
        ({"stage": 3, "reduce_bucket_size": 9}, "unknown key 'reduce_bucket_size' in [sharding]; an option of stage = 0, 1, 2"),
        ({"stage": 3, "prefetsch": 2}, "unknown key 'prefetsch' in [sharding]; did you mean 'prefetch'?"),
        ({"stage": 3, "min_parameters": 7}, 'min_parameters goes with wrap = "size"; with wrap = "block" it has no effect'),
        ({"stage": 3, "wrap": "module:Block"}, 'expected wrap = "block", "size" or "class:NAME"'),
        ({"stage": 2, "reduce_bucket_size": 0}, "greater than 0"),
        ({"stage": 2, "allgather_bucket_size": "5 parsecs"}, "expected a size in bytes"),
    ],
)  # fmt: skip
def test_refusals_of_the_check(sharding: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as error:
        check(RawJob(job(sharding=sharding), {}, "job.toml"), 1)
    assert sentence in str(error.value)


def test_replicas_that_do_not_divide_the_ranks() -> None:
    tables = job(sharding={"stage": 2}, parallelism={"replicate": 3})
    with pytest.raises(JobError, match="replicate 3 needs a multiple of 3 ranks, but there are 4"):
        check(RawJob(tables, {}, "job.toml"), 4)


def test_what_stage_3_cannot_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that is not there, a scalar, and tensors that torch does not see: those of a model would get no gradients."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"no module is a 'Blok'; the model is made of Attention, Block, "):
        hpctrain.run(job(sharding={"stage": 3, "wrap": "class:Blok"}))
    (tmp_path / "scaled.py").write_text(
        "import torch\n"
        "class Scaled(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 1)\n"
        "        self.scale = torch.nn.Parameter(torch.tensor(2.0))\n"
        "class Given:\n"
        "    def __init__(self, y): self.y = y\n"
        "class Giving(torch.nn.Linear):\n"
        "    def forward(self, x): return Given(super().forward(x))\n"
        "class Taking(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one = Giving(2, 1)\n"
        "    def forward(self, x): return self.one(x)\n"
        "def loss(given, y): return (given.y - y).square().sum(1)\n"
        "def data(split): return [(torch.ones(2), torch.ones(1))] * 8 if split == 'train' else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {
        "job": {"name": "scaled", "steps": 1},
        "model": {"name": "scaled:Scaled", "loss": "torch.nn.functional:mse_loss"}, "dataset": {"name": "scaled:data"},
        "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4},
        "sharding": {"stage": 3},
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"stage = 3: scale of the model .* is a scalar"):
        hpctrain.run(tables)
    tables |= {"job": {"name": "taking", "steps": 1}, "model": {"name": "scaled:Taking", "loss": "scaled:loss"}}
    with pytest.raises(UsageError, match="backward reached no output of the model; expected a tensor, or a tuple"):
        hpctrain.run(tables)
    with pytest.raises(UsageError, match="a Giving returns a Given; expected a tensor"):
        hpctrain.run({**tables, "sharding": {"stage": 3, "wrap": "class:Giving"}})


@pytest.mark.parametrize(
    "sharding", [{"stage": 2, "offload_optimizer": True}, {"stage": 3, "offload_parameters": True}]
)
def test_offload_on_a_cpu_says_that_it_saves_nothing(
    sharding: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        hpctrain.run(job(job={"steps": 1}, sharding=sharding))
    assert [m for m in caplog.messages if "offload" in m] == [
        "[sharding] offload: it saves no memory, because the ranks compute on CPUs"
    ]


class Tied(nn.Module):
    """`head` has `embedding`'s weight: neither can be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 10), nn.Linear(10, 100, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)) for _ in range(3))
        self.head.weight = self.embedding.weight


def test_units_by_size_leave_tied_parameters_to_the_whole(caplog: pytest.LogCaptureFixture) -> None:
    module = Tied()
    spec = check(RawJob(job(), {}, "j"), 1).parts.model
    assert units_of(module, spec, "size", 200) == list(module.layers)
    assert units_of(module, spec, "size", 100) == [one for layer in module.layers for one in layer]
    assert units_of(module, spec, "class:Linear", 1) == [one for layer in module.layers for one in layer]
    with caplog.at_level(logging.WARNING, "hpctrain"):
        assert units_of(module, spec, "block", 1) == []
    assert "has no blocks, so all of it is gathered at once" in caplog.text


def test_a_buffer_that_is_given_back_while_torch_only_pretends() -> None:
    """Memory may be collected at any time, as while a DTensor finds out shapes."""
    buffers = HostBuffers()
    first = buffers.take([3], torch.float32)
    with FakeTensorMode():
        buffers.give_back(first)
    again = buffers.take([6], torch.bfloat16)
    assert again.data_ptr() == first.data_ptr() and type(again) is torch.Tensor and again.shape == (6,)


class Borrowing(nn.Module):
    """An attention whose forward takes the weight of a module in it, parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(100))])


def test_units_are_what_forward_calls() -> None:
    module = Borrowing()
    spec = check(RawJob(job(), {}, "j"), 1).parts.model
    assert units_of(module, spec, "size", 50) == [module.attention]
    with pytest.raises(UsageError, match="a ParameterList has no forward before which it could be gathered; name the"):
        units_of(module, spec, "class:ParameterList", 1)
