"""Where compilers keep their kernels, and which kept ones are used: they are code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hpctrain_tools.kernels.hook import _kept, load_kernels

from hpctrain.base import torch_private
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.job import environment
from hpctrain.job.environment import cached_on_node, refuse_shared_caches

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


@pytest.fixture(autouse=True)
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's own disk."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"hpctrain-{os.geteuid()}-kernels"


def test_caches_are_private_and_on_the_node(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/shell")
    with cached_on_node():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(disk / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == "/of/the/shell"
        assert disk.stat().st_mode & 0o777 == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "/of/the/shell"


@pytest.mark.parametrize("found", ["open to others", "a link", "a file"])
def test_a_directory_that_others_can_write_is_not_used(
    found: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "a link":
        disk.symlink_to(tmp_path)
    elif found == "a file":
        disk.touch()
    else:
        disk.mkdir()
        disk.chmod(0o777)
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    with cached_on_node():
        assert {Path(os.environ[name]).parent for name in VARIABLES} == {home / "hpctrain" / "compilers"}
    home.chmod(0o777)  # somebody else could put another directory there
    with cached_on_node():
        assert {Path(os.environ[name]).parent.parent for name in VARIABLES} == {Path("/tmp")}
        refuse_shared_caches()
        monkeypatch.setattr(environment, "_places", lambda: [home / "x", home / "y"])
    with cached_on_node(), pytest.raises(EnvironmentUnfitError, match=r"\[compile\]: kernels are code, .* set TMPDIR"):
        refuse_shared_caches()


def test_a_cache_of_the_shell_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with (
        pytest.raises(EnvironmentUnfitError, match=r"TRITON_CACHE_DIR=.*other users can write there"),
        cached_on_node(),
    ):
        pass


def test_kernels_that_others_can_write_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded: list[bytes] = []
    monkeypatch.setattr(torch_private, "load_kernels", lambda content: loaded.append(content) is None)
    directory = _kept(tmp_path / "run")
    directory.mkdir(parents=True)
    for mode in (0o600, 0o660, 0o606):
        file = directory / f"{mode:o}.kernels"
        file.write_bytes(f"{mode:o}".encode())
        file.chmod(mode)
    (directory / "link.kernels").symlink_to(directory / "600.kernels")
    assert load_kernels(tmp_path / "run") == 1 and loaded == [b"600"]
    assert load_kernels(tmp_path / "another run") == 0
