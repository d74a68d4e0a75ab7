"""The fork server of ranks: its streams, and who may be on a node's socket."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from conftest import JobFile
from launching import run

from hpctrain.starting.on_node import _is_ours

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")


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
