"""The collectives and bytes of a step on up to 1,024 ranks, counted on one of them, against the formula of its layout."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))
from hpctrain_tools.plan.simulation import plan_rank
from training import job

from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.build import build_on_meta

FLOAT = 4
HIDDEN, LAYERS, VOCABULARY, LENGTH = 64, 2, 256, 16
MODEL = {"hidden_size": HIDDEN, "vocab_size": VOCABULARY, "max_seq_length": LENGTH, "layers": LAYERS}
ALIGNMENT = 64
ACTIVATIONS = LENGTH * HIDDEN * FLOAT
"""Bytes of the activations of a micro batch, which is one sequence, between two layers."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[pytest.param(8, marks=pytest.mark.nightly), 1024])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


class Step:
    """The communication of a step after the first one, for each rank of a data axis or another one."""

    def __init__(self, ranks: int, directory: Path, **tables: Any) -> None:
        made = job(
            job={"output_dir": str(directory), "steps": 3},
            model=MODEL,
            batch={"global_size": ranks, "micro_size": 1},
            **tables,
        )
        self._exchanges = plan_rank(check(RawJob(made, {}, "job"), ranks), 0, ranks, per_node=8).exchanges

    def bytes_of(self, operation: str) -> dict[int, int]:
        """Bytes of this rank's inputs, by the number of ranks."""
        return {one.ranks: one.nbytes for one in self._exchanges if one.operation == operation}

    def calls_of(self, operation: str, ranks: int) -> int:
        return sum(one.calls for one in self._exchanges if (one.operation, one.ranks) == (operation, ranks))

    @property
    def operations(self) -> set[str]:
        return {one.operation for one in self._exchanges}


def shapes() -> dict[str, tuple[int, ...]]:
    module = build_on_meta(check(RawJob(job(model=MODEL), {}, "job"), 1).parts.model)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def parameters() -> int:
    return sum(prod(shape) for shape in shapes().values())


def up_to(multiple: int, number: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


def in_slices(ranks: int) -> int:
    """Bytes of a bucket with all parameters, of which each rank has a slice that begins at a multiple of ALIGNMENT."""
    return up_to(ALIGNMENT, up_to(ranks, parameters()) // ranks * FLOAT) * ranks


def in_rows(ranks: int, of: str = "") -> int:
    """Bytes of the parameters whose names begin so, each cut into equally many rows for each rank."""
    return sum(
        up_to(ranks, shape[0]) * prod(shape[1:]) * FLOAT for name, shape in shapes().items() if name.startswith(of)
    )


def test_stage_0(ranks: int, tmp_path: Path) -> None:
    step = Step(ranks, tmp_path)
    assert step.operations == {"all_reduce"} and step.bytes_of("all_reduce") == {ranks: parameters() * FLOAT}


@pytest.mark.cases(thorough=["1024-1"])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2(ranks: int, tmp_path: Path, stage: int) -> None:
    step = Step(ranks, tmp_path, sharding={"stage": stage})
    assert step.operations == {"reduce_scatter", "all_gather"}
    assert step.bytes_of("reduce_scatter") == {ranks: in_slices(ranks)}
    assert step.bytes_of("all_gather") == {ranks: in_slices(ranks) // ranks}


@pytest.mark.cases(rest="thorough")
def test_stage_3(ranks: int, tmp_path: Path) -> None:
    """A block is gathered for its forward and for its backward, what is around the blocks once."""
    step = Step(ranks, tmp_path, sharding={"stage": 3})
    assert step.operations == {"reduce_scatter", "all_gather"}
    assert step.bytes_of("reduce_scatter") == {ranks: in_rows(ranks)}
    assert step.bytes_of("all_gather") == {ranks: (in_rows(ranks) + in_rows(ranks, "layers.")) // ranks}
    assert step.calls_of("reduce_scatter", ranks) == LAYERS + 1 and step.calls_of("all_gather", ranks) == 2 * LAYERS + 1


@pytest.mark.cases(thorough=["1024-3"])
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_sharding(ranks: int, tmp_path: Path, stage: int) -> None:
    """Sums over the ranks of a replica, then of this rank's slice over the replicas."""
    step = Step(ranks, tmp_path, sharding={"stage": stage}, parallelism={"replicate": 4})
    inside = ranks // 4
    whole = in_slices(inside) if stage == 1 else in_rows(inside)
    assert step.bytes_of("reduce_scatter") == {inside: whole}
    assert step.bytes_of("all_reduce") == {4: whole // inside}


@pytest.mark.cases(rest="thorough")
def test_tensor_parallelism(ranks: int, tmp_path: Path) -> None:
    """Activations are summed behind the embedding, attention and MLP, gradients in front of the head, attention and MLP; the loss
    takes the maximum and two sums over the vocabulary for each token. Gradients of a half of the matrices go over the data axis."""
    step = Step(ranks, tmp_path, parallelism={"tensor": 2})
    micro_batches = 2
    assert step.operations == {"all_reduce"}
    assert step.calls_of("all_reduce", 2) == micro_batches * ((1 + 2 * LAYERS) * 2 + 3)
    tokens = 3 * LENGTH * FLOAT
    assert step.bytes_of("all_reduce")[2] == micro_batches * ((1 + 2 * LAYERS) * 2 * ACTIVATIONS + tokens)
    uncut = ("norm.weight", "norm.bias", "output.bias", "down.bias", "position_embedding.weight")
    whole = sum(prod(shape) for name, shape in shapes().items() if name.endswith(uncut))
    assert step.bytes_of("all_reduce")[ranks // 2] == ((parameters() - whole) // 2 + whole) * FLOAT


@pytest.mark.cases(rest="thorough")
def test_ring_attention(ranks: int, tmp_path: Path) -> None:
    """Keys and values go around once in forward and once in backward, and their gradients come home."""
    size = 8
    step = Step(ranks, tmp_path, parallelism={"context": size})
    messages = size * LAYERS * (2 * (size - 1) + size)  # of as many micro batches as the ring has ranks
    assert step.operations == {"all_reduce", "send", "recv"}
    assert step.calls_of("send", size) == step.calls_of("recv", size) == messages
    assert step.bytes_of("send") == step.bytes_of("recv") == {size: messages * 2 * ACTIVATIONS // size}
    assert step.bytes_of("all_reduce") == {ranks: parameters() * FLOAT}
