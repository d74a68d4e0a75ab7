"""Loops of one's own on real ranks: each example against one process of itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import Finished, run
from own_loops import NAMES

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
LOOPS = str(Path(__file__).parents[1] / "own_loops.py")


def write_job(directory: Path, stage: int, ranks: int, steps: int = 6, **more: dict[str, Any]) -> Path:
    """The job of the loops in `directory`. Stage 3 gathers each layer by itself."""
    sharding = {"stage": stage, **({"wrap": "size", "min_parameters": 1} if stage == 3 else {})}
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": "OUTPUT", "steps": steps, "output_dir": "OUTPUT"},
        "precision": {"mode": "fp64"},
        "sharding": sharding,
        **more,
    }
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    ]
    path = directory / "job.toml"
    path.write_text("\n".join(lines))
    (directory / "samples.toml").write_text(f"[batch]\nglobal_size = 24\nmicro_size = {24 // ranks}\n")
    return path


def loops(job: Path, ranks: int, *named: str) -> Finished:
    """Run the loops one after the other on so many ranks."""
    launcher = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
    done = run([*launcher, sys.executable, LOOPS, str(job), *named], job.parent, timeout=300)
    assert done.code == 0, done
    return done


def rows(directory: Path) -> list[dict[str, float]]:
    """The numbers of each step that don't depend on the machine."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "lr", "reward")
    return [{key: value for key, value in json.loads(one).items() if key.startswith(names)} for one in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has run all loops."""
    directory = tmp_path_factory.mktemp("alone")
    loops(write_job(directory, stage=0, ranks=1), 1, *NAMES)
    return directory


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(3, 2),
        *(pytest.param(stage, ranks, marks=pytest.mark.thorough) for stage in range(4) for ranks in (2, 3)),
    ],
)
def test_ranks_train_as_one_process(alone: Path, tmp_path: Path, stage: int, ranks: int) -> None:
    loops(write_job(tmp_path, stage, ranks), ranks, *NAMES)
    for name in NAMES:
        expected, found = rows(alone / name), rows(tmp_path / name)
        assert len(expected) == len(found) == 6
        assert expected[0]["loss"] != expected[-1]["loss"], name
        for one, other in zip(expected, found, strict=True):
            assert other == pytest.approx(one, rel=1e-10, abs=1e-12), name
