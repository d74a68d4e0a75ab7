"""The HOROVOD_ variables that tell a worker of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpctrain_horovod.engine.variables import of_launcher, of_place, of_started
from hpctrain_horovod.starter.workers import STARTER, start_worker


def test_horovods_variables_of_a_launcher_and_of_places() -> None:
    """A launcher tells nothing of several nodes; torchrun's variables are not asked."""
    mine = of_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "RANK": "9"})
    assert {name: mine[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CONTROLLER")} == {
        "RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CONTROLLER": "mpi"
    }  # fmt: skip
    assert "HOROVOD_CROSS_RANK" not in mine and of_launcher({"RANK": "0", "PATH": "/bin"}) == {}
    names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"
    for rank, by_name, expected in (
        (0, False, "0 4 0 2 0 3 b"), (1, False, "1 4 1 2 0 1 b"), (2, False, "2 4 0 1 1 3 c"), (3, False, "3 4 0 1 2 3 a"),
        (0, True, "0 4 0 2 1 3 b"), (3, True, "3 4 0 1 0 3 a"),
    ):  # fmt: skip
        place = of_place(["b", "b", "c", "a"], rank, by_name)
        assert [place[f"HOROVOD_{name}"] for name in names] == expected.split(), (rank, by_name)
    hosts = ["a", "a", "b", "b"]
    for local, placed in (("0", True), ("1", False)):  # mapped by slot, and by node
        told = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": local}
        assert bool(of_started(hosts, 2, of_launcher(told))) is placed
    assert of_started(hosts, 2, None) == of_place(hosts, 2, by_name=True)
    assert not of_started(["a"], 2, of_launcher(told)), "the launcher has started more"


def test_another_host_keeps_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in ssh's place, which runs the command here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text('#!/bin/sh\nfor word; do :; done\nexec sh -c "$word"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    command = ["sh", "-c", f'stat -c %a "${STARTER}" > {tmp_path}/out; cat "${STARTER}" >> {tmp_path}/out; exit 7']
    worker = start_worker("a", "other", command, tmp_path / "unused", "secret", [])
    assert worker.process.wait(30) == 7
    assert (tmp_path / "out").read_text() == "600\nsecret" and not [*(tmp_path / "tmp").iterdir()]
