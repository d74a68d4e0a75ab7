"""The cost and savings of sharding stages: bytes held per rank, and bytes sent per step. See docs/sharding.md."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from hpctrain_plugins.sharding.communication import HostBuffers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from training import Rows, job, session_of

import hpctrain.mpi
from hpctrain.api import ShardedModel
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train
from hpctrain.training.session import Session

pytestmark = pytest.mark.usefixtures("world")

MODEL = {"hidden_size": 64, "vocab_size": 256, "max_seq_length": 16, "layers": 2}
BLOCK = 12 * 64**2 + 13 * 64
PARAMETERS = 2 * 256 * 64 + 16 * 64 + 2 * BLOCK + 2 * 64
FLOAT = 4  # bytes


_ELSEWHERE = (type, ModuleType, FunctionType, dist.ProcessGroup, DeviceMesh, ShardedModel, HostBuffers)
"""The search does not enter these: parameters, gradients and optimizer state are reached without them."""


def held_bytes(*roots: object) -> int:
    """The bytes of all storages of tensors reachable from `roots`, each counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[object] = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _ELSEWHERE):
            continue
        seen.add(id(one))
        if isinstance(one, DTensor):
            waiting += [one._local_tensor, one.grad]
        elif isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            waiting.append(one.grad)
        waiting += gc.get_referents(one)
    return sum(storages.values())


@pytest.mark.cases(default=["{'stage': 0}-1"], thorough=["{'stage': 3}-2"], rest="nightly")
@pytest.mark.parametrize(
    ("sharding", "replicate"),
    [
        *(({"stage": stage}, 1) for stage in range(4)),
        *(pytest.param({"stage": stage}, 2, marks=pytest.mark.ranks(4)) for stage in (1, 2, 3)),
    ],
    ids=str,
)
def test_bytes_per_rank(root, sharding: dict[str, Any], replicate: int) -> None:
    """float32 AdamW: 4 bytes each of parameter and gradient, 8 of optimizer state; after the step, nothing is freed yet."""
    tables = job(
        job={"output_dir": str(root), "steps": 3}, model=MODEL, sharding=sharding, batch={"micro_size": 1},
        parallelism={"replicate": replicate},
    )  # fmt: skip
    measured: list[int] = []
    with session_of(
        tables,
        Rows(lambda: measured.append(held_bytes(session.model.module, session.model.pieces, session.model.optimizer))),
    ) as session:
        train(session, StopRequest())
    ranks = dist.get_world_size() // replicate
    per_parameter = {
        0: 4 + 4 + 8,
        1: 4 + 4 + 8 / ranks,
        2: 4 + (4 + 8) / ranks,
        3: (4 + 4 + 8) / ranks,
    }[sharding["stage"]]
    assert measured == pytest.approx([PARAMETERS * per_parameter] * 3, rel=0.05)


@pytest.mark.ranks(2)
@pytest.mark.shown_on(2)
def test_stage_2_has_three_buckets_of_whole_gradients_at_most(root) -> None:
    tables = job(
        job={"output_dir": str(root), "steps": 3}, model=MODEL, batch={"micro_size": 1},
        sharding={"stage": 2, "reduce_bucket_size": 20_000},
    )  # fmt: skip
    with session_of(tables) as session:
        train(session, StopRequest())
        sharded = session.model.sharded
        everything = held_bytes(
            session.model.module, session.model.pieces, session.model.optimizer, *vars(sharded).values()
        )
        buffers = everything - held_bytes(session.model.module, session.model.pieces, session.model.optimizer)
    assert 0 < buffers <= 3 * 256 * 64 * FLOAT * 1.02  # the largest parameter is a separate bucket


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.shown_on(2)
def test_stage_3_has_buffers_for_some_units_only(root, prefetch: int) -> None:
    layers = 8
    tables = job(
        job={"output_dir": str(root), "steps": 3}, model={**MODEL, "layers": layers}, batch={"micro_size": 1},
        sharding={"stage": 3, "prefetch": prefetch},
    )  # fmt: skip
    with session_of(tables) as session:
        train(session, StopRequest())
        found = [one for one in gc.get_objects() if isinstance(one, HostBuffers)]
        held = max(sum(buffer.nbytes for buffer in one._free) for one in found)
    assert held <= (4 + prefetch) * BLOCK * FLOAT * 1.1 < layers * BLOCK * FLOAT  # 3 ranks pad 64 rows to 66


class Traffic:
    """Counts what this rank sends until `then` is called, from where an operation counts for the next one."""

    def __init__(self, before: Mapping[str, hpctrain.mpi.OperationStatistics] | None = None) -> None:
        self._before = hpctrain.mpi.statistics().operations if before is None else before

    def then(self) -> Traffic:
        self._after = hpctrain.mpi.statistics().operations
        return Traffic(self._after)

    def calls(self, name: str) -> int:
        return self._difference(name).calls

    def volume(self, ranks: int) -> dict[str, float]:
        """Bytes by kind of operation, with the best algorithms: each other rank's slice, once or twice."""
        whole = {
            "all_reduce": 2 * self._difference("all_reduce").bytes,
            "reduce_scatter": self._difference("reduce_scatter_tensor").bytes,
            "all_gather": ranks * self._difference("all_gather_into_tensor").bytes,
        }
        return {name: nbytes * (ranks - 1) / ranks for name, nbytes in whole.items() if nbytes}

    def _difference(self, name: str) -> hpctrain.mpi.OperationStatistics:
        nothing = hpctrain.mpi.OperationStatistics()
        after, before = self._after.get(name, nothing), self._before.get(name, nothing)
        return hpctrain.mpi.OperationStatistics(after.calls - before.calls, after.bytes - before.bytes)


def step(session: Session) -> list[Traffic]:
    """Run one optimizer step; return the traffic of forward and backward, of the synchronization, and of the update."""
    loader = session.feed.training_loader(session.progress)
    micro_batches, _ = loader.step()
    loader.close()
    compute = Traffic()
    session.model.runner.train(micro_batches, 1000, 0)
    synchronize = compute.then()
    session.model.sharded.synchronize()
    update = synchronize.then()
    session.model.optimizer.step()
    session.model.sharded.refresh()
    update.then()
    return [compute, synchronize, update]


@pytest.mark.cases(thorough=["3"])
@pytest.mark.ranks(2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.shown_on(2)
def test_bytes_per_step(root, accumulate: int) -> None:
    ranks = dist.get_world_size()
    whole = PARAMETERS * FLOAT * (ranks - 1) / ranks
    volumes: dict[int, dict[str, float]] = {}
    for stage in range(4):
        tables = job(
            job={"output_dir": str(root), "steps": 1}, model=MODEL, sharding={"stage": stage},
            batch={"global_size": accumulate * ranks, "micro_size": 1},
        )  # fmt: skip
        with session_of(tables) as session:
            step(session)  # the first one sets up
            traffic = step(session)
        phases = [one.volume(ranks) for one in traffic]
        volumes[stage] = {k: sum(p.get(k, 0) for p in phases) for k in ("all_reduce", "reduce_scatter", "all_gather")}
        if stage == 1:
            calls = [one.calls("reduce_scatter_tensor") for one in traffic]
            assert calls[2] == 0 and sum(calls) == 1, "the step's last backward sums the bucket"
            assert [one.calls("all_gather_into_tensor") for one in traffic] == [0, 0, 1]
        if stage == 2:
            calls = [one.calls("reduce_scatter_tensor") for one in traffic]
            assert sum(calls) == accumulate and not calls[2], "one in each backward"
            assert phases[2].keys() == {"all_gather"}
        if stage == 3:
            assert phases[2] == {}, "parameters are gathered when they are used"
    near = {"rel": 0.03}  # padding
    assert volumes[0] == pytest.approx({"all_reduce": 2 * whole, "reduce_scatter": 0, "all_gather": 0}, **near)
    assert volumes[1] == pytest.approx({"all_reduce": 0, "reduce_scatter": whole, "all_gather": whole}, **near)
    assert volumes[2] == pytest.approx(
        {"all_reduce": 0, "reduce_scatter": accumulate * whole, "all_gather": whole}, **near
    )
    blocks = 2 * BLOCK * FLOAT * (ranks - 1) / ranks
    gathered = accumulate * (whole + blocks)  # the root's parameters stay gathered from forward to backward
    assert volumes[3] == pytest.approx(
        {"all_reduce": 0, "reduce_scatter": accumulate * whole, "all_gather": gathered}, **near
    )
    if accumulate == 1:
        assert sum(volumes[1].values()) == pytest.approx(sum(volumes[0].values()), **near)
        assert sum(volumes[2].values()) == pytest.approx(sum(volumes[0].values()), **near)
        assert sum(volumes[3].values()) <= 1.5 * sum(volumes[0].values()) * 1.02
