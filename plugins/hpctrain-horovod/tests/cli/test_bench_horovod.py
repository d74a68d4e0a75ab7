"""`hpctrain bench horovod`: operations and steps beside torch.distributed's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import hpctrain, run

SMALL = """
import dataclasses, json, torch
from torch import nn
from hpctrain.mpi import MPI
from hpctrain_horovod.benchmark import VOCABULARY, measure

torch.set_num_threads(1)


def model():
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))


rows = measure(repetitions=1, steps=1, sizes=(4096,), model=model)
if MPI.COMM_WORLD.Get_rank() == 0:
    print(json.dumps([dataclasses.asdict(row) for row in rows]))
"""


def refuse_wrong(text: str, sizes: set[int]) -> None:
    rows = json.loads(text)
    for operation in ("allreduce", "allgather", "broadcast"):
        found = {(row["engine"], row["nbytes"]) for row in rows if row["operation"] == operation}
        assert found >= {(name, size) for name in ("torch mpi", "torch gloo", "mpi4py", "hpctrain") for size in sizes}
    assert {row["engine"] for row in rows if row["operation"] == "training step"} >= {
        "torch ddp",
        "single rank",
        "hpctrain",
    }
    reference: dict[tuple[str, int], float] = {}
    for row in rows:
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        first = reference.setdefault((row["operation"], row["nbytes"]), row["seconds"])
        assert row["ratio"] == pytest.approx(row["seconds"] / first)


@pytest.mark.nightly
def test_small_operations_are_measured(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    done = run([str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "small.py"], tmp_path)
    assert done.code == 0, done
    refuse_wrong(done.out, {4096})


@pytest.mark.nightly
def test_the_command(tmp_path: Path) -> None:
    done = run(hpctrain("bench", "horovod", "-n", "2", "--json"), tmp_path, 600)
    assert done.code == 0, done
    refuse_wrong(done.out, {4096, 2**20, 2**26})
