"""Files of a run: what is in their place isn't followed, waited for or overwritten, and who may enter its directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from jobs import JobFile
from launching import in_process

from hpctrain.base.errors import HpctrainError, shown
from hpctrain.base.safe_files import (
    closed_directory,
    created,
    make_directory,
    open_to_change,
    own_directory,
    read_bytes,
    replacing,
    scratch_directory,
    stays,
)
from hpctrain.cli.options import say
from hpctrain.training.progress import BestSoFar
from hpctrain.training.report import Goodput, MetricsFile


def test_only_regular_files_are_read_and_no_more_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, expected at most 4"):
        read_bytes(tmp_path / "file", 4)
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("missing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "nowhere", "pipe", "directory"):
        with pytest.raises(OSError, match="symbolic link" if name in ("link", "nowhere") else "no regular file"):
            read_bytes(tmp_path / name)
    for name in ("link", "nowhere"):
        with pytest.raises(OSError, match="symbolic link"):
            open_to_change(tmp_path / name, os.O_WRONLY)
        with pytest.raises(FileExistsError), created(tmp_path / name):
            pass
    assert not (tmp_path / "missing").exists()


def test_a_file_with_another_name_elsewhere_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    os.link(tmp_path / "file", tmp_path / "other")
    with pytest.raises(OSError, match="it has 2 names"):
        open_to_change(tmp_path / "file", os.O_WRONLY)


def test_a_replacement_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"1", b"2"):
        with replacing(path) as file:
            file.write(content)
            (temporary,) = set(tmp_path.iterdir()) - {path}
            assert temporary.name.startswith(".file.") and len(temporary.name) > 20
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"3")
        raise ZeroDivisionError
    assert path.read_bytes() == b"2" and list(tmp_path.iterdir()) == [path]


def test_directories_in_shared_places_are_closed(tmp_path: Path) -> None:
    before = os.umask(0)
    path, other = own_directory(tmp_path / "a" / "b"), closed_directory("y-", tmp_path)
    with scratch_directory("x-", tmp_path) as scratch:
        os.umask(before)
        for one in (path, other, scratch):
            assert stat.S_IMODE(one.stat().st_mode) == 0o700 and own_directory(one) == one
    assert not scratch.exists() and scratch.name.startswith("hpctrain-x-")
    with pytest.raises(FileExistsError):
        own_directory(path, exist_ok=False)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").touch()
    path.chmod(0o770)
    for name in ("link", "file", "a/b"):
        with pytest.raises(OSError):
            own_directory(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
def test_another_user_s_directory_is_not_used(tmp_path: Path) -> None:
    path = own_directory(own_directory(tmp_path / "theirs") / "ours")
    assert stays(path)
    os.chown(path.parent, 65533, 65533)
    assert not stays(path)
    with pytest.raises(PermissionError, match="other users may use it"):
        own_directory(path.parent)


def test_a_link_is_no_directory_of_a_run(tmp_path: Path) -> None:
    make_directory(tmp_path / "a")
    make_directory(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(OSError, match="symbolic link"):
        make_directory(tmp_path / "link")


@pytest.mark.parametrize(
    ("permissions", "umask", "mode"),
    [
        (None, 0o022, 0o700),
        ("0750", 0o022, 0o750),
        ("770", 0o027, 0o750),
        ("umask", 0o027, 0o750),
        ("0777", 0o077, 0o700),
    ],
)
def test_who_may_enter_a_run(permissions: str | None, umask: int, mode: int, job: JobFile) -> None:
    job.set(job={"output_dir": "runs/x", "steps": 1, **({} if permissions is None else {"permissions": permissions})})
    before = os.umask(umask)
    try:
        assert in_process("run", "job.toml", cwd=job.directory).code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(job.output.stat().st_mode) == mode
    assert stat.S_IMODE(job.output.parent.stat().st_mode) == 0o777 & ~umask, "only the run's own directory"


def test_a_directory_that_is_there_keeps_its_mode_and_may_lie_behind_a_link(job: JobFile) -> None:
    scratch = job.directory / "scratch"
    scratch.mkdir(mode=0o755)
    (job.directory / "out").symlink_to("scratch")
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o755 and (scratch / "metrics.jsonl").is_file()


@pytest.mark.parametrize("permissions", ["0077", "rwx", "07000", ""])
def test_permissions_that_are_none(permissions: str, job: JobFile) -> None:
    done = in_process("check", "job.toml", "--set", f"job.permissions='{permissions}'", cwd=job.directory)
    assert done.code == 2 and "lets the owner in" in done.err, done


def test_a_pipe_in_place_of_metrics_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        MetricsFile(tmp_path / "metrics.jsonl", 0, Goodput(0.0), BestSoFar())


def test_what_is_told_of_a_file_steers_no_terminal_and_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert str(HpctrainError("a\x1b[2J\nb")) == "a\\x1b[2J\nb"
    say("a\x1b]0;x\x07b\u202e")
    assert capsys.readouterr().out == "a\\x1b]0;x\\x07b\\u202e\n"
    nested: list[object] = ["x"]
    for _ in range(60):
        nested = [nested, nested]
    for value in (nested, "x" * 10**6, 10**5000, {"x": nested}, object(), (1, 2), None, True, b"x" * 100):
        length = len(shown(value))  # not in the assertion: pytest would print all of it
        assert length < 500
    assert shown((1, None)) == "(1, None)"
