"""Modules in the current directory, where others may write, never take the place of installed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import JobFile
from launching import in_process, run

from hpctrain.base.child_python import python_code, python_module

NAMES = (
    "numpy",
    "torch",
    "mpi4py",
    "click",
    "pydantic",
    "h5py",
    "psutil",
    "yaml",
    "jinja2",
    "rich",
    "sitecustomize",
    "runpy",
    "multiprocessing",
    "selectors",
)
STRANGE = """
import os
open(os.path.join(os.path.dirname(__file__), "taken"), "a").write(__name__ + "\\n")
raise ImportError("a stranger's module")
"""


@pytest.mark.cases(thorough=["run0"], rest="nightly")
@pytest.mark.parametrize(
    "words",
    [
        ("run", "job.toml", "-n", "2"), ("plan", "job.toml", "-n", "2", "--machine", "h100"),
        ("submit", "job.toml", "--to", "slurm", "--time", "1h", "--dry-run"), ("doctor", "-n", "2"),
        ("run", "job.toml", "-n", "2", "--set", "job.start=spawn"),
        ("run", "job.toml", "--set", "dataset.workers=1"),
        ("run", "job.toml", "--set", "dataset.workers=1", "--set", "dataset.start_method=spawn"),
    ],
    ids=lambda words: " ".join(words[:1]),
)  # fmt: skip
def test_no_command_imports_them(job: JobFile, words: tuple[str, ...]) -> None:
    job.write()
    for name in NAMES:
        (job.directory / f"{name}.py").write_text(STRANGE)
    done = run([str(Path(sys.executable).with_name("hpctrain")), *words], job.directory, timeout=200)
    assert not (job.directory / "taken").exists(), (job.directory / "taken").read_text()
    assert done.code == 0, done


def test_a_child_has_the_words_and_not_the_directory(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text(STRANGE)
    code = "import json, sys; print(json.dumps([sys.argv[1:], sys.path[:1]]))"
    for more in ({}, {"PYTHONSAFEPATH": "1"}):
        done = subprocess.run(
            python_code(code, "a", "-b"), cwd=tmp_path, env=os.environ | more, capture_output=True, text=True
        )
        assert (
            done.stdout.startswith('[["a", "-b"], [') and str(tmp_path) not in done.stdout and '""' not in done.stdout
        ), done
        for python in (sys.executable, str(Path(sys.executable).with_name("python"))):
            words = python_module("json.tool", "--help", python=python)
            done = subprocess.run(words, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True)
            assert done.returncode == 0 and "usage:" in done.stdout, done


def test_a_module_of_ones_own_with_the_name_of_an_installed_one_is_told(job: JobFile) -> None:
    (job.directory / "numpy.py").write_text("def model(): ...\n")
    job.tables["model"] = {"name": "numpy:model", "loss": "torch.nn.functional:mse_loss"}
    job.write()
    done = in_process("check", "job.toml", cwd=job.directory)
    assert done.code == 2 and "numpy is in the current directory, but numpy is the module " in done.err, done
