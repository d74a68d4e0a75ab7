"""Another user of the machine attacks a job from before its start to its end. The job must train undisturbed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from besieging import PYTHON, besieged, needs_root, open_job
from launching import hpctrain, run, started

pytestmark = [pytest.mark.timeout(400), needs_root]

HOST = "10.78.0.1"
OTHER_HOST = """
import socket, sys, time
from pathlib import Path

def is_open(port):
    with socket.socket() as one:
        return one.connect_ex((sys.argv[1], port)) == 0

end = time.monotonic() + 120
while not Path(sys.argv[2]).exists() and time.monotonic() < end:
    time.sleep(0.1)
print([port for port in range(1, 2**16) if is_open(port)])
"""
"""Tries every port of a host once a file is there."""
TRIED = """
import pathlib
import time

from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    while step > 100 and not pathlib.Path("tried").exists():
        time.sleep(0.1)
"""
"""A plugin that keeps a job from ending before its ports were tried."""


@contextmanager
def network() -> Iterator[list[str]]:
    """Runs a command in a separate network, because the stranger knocks at every port, also at those of other tests."""
    holder = subprocess.Popen(
        ["unshare", "--net", "bash", "-c", "ip link set lo up && echo up && read"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
    yield ["nsenter", "--target", str(holder.pid), "--net"]
    holder.communicate(timeout=30)  # ends its standard input


@pytest.fixture
def networks() -> Iterator[tuple[list[str], list[str]]]:
    """Run a command on a host with an address, and on another one that reaches it."""
    with network() as here, network() as there:
        link = next(
            (name for name in os.listdir("/sys/class/net") if name != "lo"), "eth0"
        )  # UCX looks for names there
        subprocess.run([*here, "ip", "link", "add", link, "type", "veth", "peer", link, "netns", there[2]], check=True)
        for enter, address in (here, HOST), (there, "10.78.0.2"):
            subprocess.run([*enter, "ip", "address", "add", f"{address}/30", "dev", link], check=True)
            subprocess.run([*enter, "ip", "link", "set", link, "up"], check=True)
        yield here, there


def listening(enter: list[str]) -> list[str]:
    """The addresses of a network on which a process waits."""
    shown = subprocess.run([*enter, "ss", "-Hlntu"], capture_output=True, text=True, check=True, timeout=30)
    return [line.split()[4] for line in shown.stdout.splitlines()]


@pytest.mark.thorough
def test_a_job_trains_as_if_nobody_were_there(networks: tuple[list[str], list[str]]) -> None:
    """With MPICH. The ports of gloo, torchrun and Open MPI's launcher trust whoever connects (SECURITY.md)."""
    inside, outside = networks
    words = [*inside, *hpctrain("run", "job.toml", "-n", "2")]
    with open_job() as job:
        quiet = run([*words, "--set", "job.output_dir='quiet'"], job.directory)
        assert quiet.code == 0, quiet
        (job.directory / "tried.py").write_text(TRIED)
        knocking = [*outside, PYTHON, "-c", OTHER_HOST, HOST, str(job.output / "metrics.jsonl")]
        with (
            subprocess.Popen(knocking, stdout=subprocess.PIPE, text=True) as other_host,
            besieged(job, enter=inside, everywhere=True) as tried,
            started([*words, "--set", "plugins.load=['attacked', 'tried']"], job.directory) as command,
        ):
            job.wait_for_steps(1)
            waiting = listening(inside)
            opened, _ = other_host.communicate(timeout=120)
            (job.directory / "tried").touch()
            done = command.finish(200)
        assert done.code == 0, done
        assert job.losses() == job.losses("quiet"), done
        log = (job.output / "log" / "rank-00000.log").read_text()
        assert log.count("a connection from 127.0.0.1 port") == 1, log
    assert tried["addresses"] == waiting and len(waiting) == 1, (tried, waiting)
    assert waiting[0].startswith("127.0.0.1:") and opened == "[]\n", (waiting, opened)
