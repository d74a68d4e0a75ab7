"""Hostfiles, and what the starter hears from ranks on other hosts."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hpctrain_tools.launch.channel_streams import Heard, Listener
from hpctrain_tools.launch.hosts import Hosts, read_hostfile
from hpctrain_tools.launch.placement import Placement

from hpctrain.base.errors import TrainingError, UsageError


def test_a_hostfile_in_either_form(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all\nnode1 slots=4\nnode2:2 # as MPICH\n\n  node3.cluster slots = 1\nnode4\nnode2\n")
    hosts = read_hostfile(file)
    assert hosts.named == (("node1", 4), ("node2", 3), ("node3.cluster", 1), ("node4", 1))
    assert hosts.slots == 9 and not hosts.are_here
    assert hosts.first(6).named == (("node1", 4), ("node2", 2))
    assert hosts.first(6).by_rank == ["node1"] * 4 + ["node2"] * 2


@pytest.mark.parametrize("line", ["node1 slots=", "node1 slot=2", "node1:0", "a b", "-oProxyCommand=x"])
def test_lines_that_are_no_hosts_are_shown(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"node0\n{line}\n")
    with pytest.raises(UsageError, match="hosts:2: found"):
        read_hostfile(file)


def test_a_host_has_several_names() -> None:
    hosts = Hosts((("node1.cluster", 1), ("localhost", 1), ("node10", 1)))
    assert hosts.called("node1") == hosts.called("node1.cluster") == "node1.cluster"
    assert hosts.called(socket.gethostname()) == "localhost"
    assert hosts.called("node10.cluster") == "node10" and hosts.called("node2") is None


SAID = b"""step 1
\x1ehpctrain started 1\x1fa line\x1ehpctrain ready 0\x1f
no message: \x1ehpctrain exit x\x1f and \x1e
=   PID 17 RUNNING AT node2
hpctrain: rank 3 on node1 failed:
\x1ehpctrain exit 75\x1f\x1ehpctrain exit 4\x1fthe end"""


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_are_taken_out_of_a_stream(size: int) -> None:
    heard = Heard()
    listener = Listener(heard)
    shown = b"".join(listener.take(SAID[at : at + size]) for at in range(0, len(SAID), size)) + listener.rest()
    assert shown == (
        b"step 1\na line\nno message: \x1ehpctrain exit x\x1f and \x1e\n=   PID 17 RUNNING AT node2\n"
        b"hpctrain: rank 3 on node1 failed:\nthe end"
    )
    assert (heard.started, heard.ready, heard.code, heard.failed) == ({1}, {0}, 75, ["node2", "node1"])


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("prterun noticed that process rank 1 with PID 6023 on node vm1 exited on", "vm1"),
        ("ssh: Could not resolve hostname vm1: Name or service not known", "vm1"),
        ("ssh: connect to host vm1 port 22: No route to host", "vm1"),
        ("me@vm1: Permission denied (publickey).", "vm1"),
        ("  Remote host:   vm1", "vm1"),
        ("  missing: rank 1 on vm1 has sent no heartbeat for 5 s: stopped", "vm1"),
        ("  missing: ranks 2-3, 5 on vm1 are in step 3, forward for 6 s", "vm1"),
        ("hpctrain: my.py:3: raised ZeroDivisionError in forward, on rank 3 on vm1", "vm1"),
    ],
)
def test_sentences_that_name_a_failed_node(line: str, node: str) -> None:
    heard = Heard()
    assert Listener(heard).take(f"{line}\n".encode()) == f"{line}\n".encode()
    assert heard.failed == [node]


def test_a_long_line_takes_no_longer_than_its_bytes() -> None:
    """A sample of the data, or a hash, in base64."""
    heard, begin = Heard(), time.monotonic()
    listener = Listener(heard)
    for _ in range(200):
        listener.take(b"a" * 10_000)
    listener.take(b"\nssh: connect to host vm1 port 22: No route to host\n")
    assert time.monotonic() - begin < 5 and heard.failed == ["vm1"]


def test_the_hostfile_is_read_before_each_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\nb\nc\n")
    placement = Placement(file, 3)
    hosts, ranks = placement.next()
    assert hosts is not None and (hosts.named, ranks) == ((("a", 1), ("b", 1), ("c", 1)), 3)
    for _ in range(2):
        placement.note_failure("b")
    assert "ranks on b failed first in 2 starts" in capsys.readouterr().err
    file.write_text("a slots=3\n")
    hosts, _ = placement.next()
    assert hosts is not None and hosts.named == (("a", 3),)
    file.write_text("a\n")
    with pytest.raises(TrainingError, match=r"found 1 slot for 3 ranks; .* the same command continues once"):
        placement.next()
