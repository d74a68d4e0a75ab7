"""The fork server of ranks: what an import must not leave behind, and who may be on a node's socket."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import JobFile
from launching import run, wait_until

from hpctrain.starting.fork_client import ForkServerClient
from hpctrain.starting.on_node import _is_ours

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
SLOW = """
import time
open("begun", "w").close()
try:
    time.sleep(100)
finally:
    open("cleaned", "w").close()
"""
STARTING = """
import subprocess
child = subprocess.Popen(["sleep", "100"])
with open("child", "w") as file:
    file.write(str(child.pid))
"""


def server(directory: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> ForkServerClient:
    """A fork server that imports a module with this content."""
    (directory / "mine.py").write_text(content)
    monkeypatch.chdir(directory)
    return ForkServerClient(["run", "job.toml"], {"modules": ["mine"]})


@pytest.mark.thorough
def test_an_import_that_is_given_up_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's lock, for instance, which would keep the ranks waiting."""
    forks = server(tmp_path, SLOW, monkeypatch)
    wait_until((tmp_path / "begun").exists, 60, "the import")
    begin = time.monotonic()
    forks.close()
    assert (tmp_path / "cleaned").exists() and time.monotonic() - begin < 4


@pytest.mark.thorough
def test_a_process_that_an_import_has_started_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    forks = server(tmp_path, STARTING, monkeypatch)
    assert not forks.is_ready(lambda: False) and "the import of mine started a process" in capfd.readouterr().err
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", 10, "its end")


@pytest.mark.thorough
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_ranks_are_forked_where_a_standard_stream_is_closed(job: JobFile, closed: str) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "hpctrain", "run", "job.toml", "-n", "2"]
    done = run(words, job.directory)
    assert done.code == 0 and not done.err and len(job.losses()) == 4, done


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("user", [0, 65534])
def test_the_user_at_the_other_end_of_a_socket_is_known(user: int) -> None:
    """As SECURITY.md says of the processes of a node."""
    place = f"\0hpctrain-test-{os.getpid()}-{user}"
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(user)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(place)
            listener.listen()
            os.write(begun, b"!")
            listener.accept()[0].recv(1)
        os._exit(0)
    os.read(ready, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(place)
        assert _is_ours(connection) == (user == 0)
    os.waitpid(child, 0)
