"""Processes of a job without MPI, here or on another host, and the ranks that they get."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.starting.hosts import HERE, Hosts

STARTER, WORKER = "HPCTRAIN_HOROVOD_STARTER", "HPCTRAIN_HOROVOD_WORKER"
_SSH_FAILED = 255
_PASSED_ON = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


@dataclass(eq=False)
class Worker:
    """asked, answered: how often it has asked for a rank and got one. asked_at: when it last asked, by time.monotonic.
    since: the generation in which it came, 0 before. holds: it has the training state, from a `state.sync()`. dropped: it was told
    to leave."""

    name: str
    host: str
    process: subprocess.Popen[bytes]
    asked: int = 0
    answered: int = 0
    asked_at: float = 0.0
    started_at: float = field(default_factory=time.monotonic)
    since: int = 0
    holds: bool = False
    dropped: bool = False

    def has_lost_host(self, code: int) -> bool:
        """Whether an exit code means that ssh has lost the host, not that the program failed."""
        return code == _SSH_FAILED and self.host not in HERE

    def kill(self) -> None:
        """End it, with the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_worker(name: str, host: str, command: Sequence[str], file: Path, where: str, ssh: Sequence[str]) -> Worker:
    """A worker on `host`. ssh: options of ssh.

    file: has the store's address and secret, `where`; another host gets them over ssh's standard input.
    """
    if host in HERE:
        environment = {**os.environ, STARTER: str(file), WORKER: name}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        return Worker(name, host, process)
    variables = {key: value for key, value in os.environ.items() if key in _PASSED_ON or key.startswith("HOROVOD_")}
    settings = [f"{key}={shlex.quote(value)}" for key, value in {**variables, WORKER: name}.items()]
    script = (
        "umask 077 && there=$(mktemp) && cat > $there && "
        f"cd {shlex.quote(os.getcwd())} && env {' '.join(settings)} {STARTER}=$there {shlex.join(command)}"
        '; code=$?; rm -f "$there"; exit $code'
    )
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", *ssh, host, script]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    with suppress(OSError):  # it has ended: its exit code tells
        process.stdin.write(where.encode())
        process.stdin.close()
    return Worker(name, host, process)


def with_slots(workers: Iterable[Worker], hosts: Hosts, most: int) -> list[Worker]:
    """The workers that have a slot, up to `most`, in the order of their ranks: rank 0 has the state that the others take over."""
    slots = dict(hosts.named)
    kept: list[Worker] = []
    for worker in sorted(workers, key=lambda one: (not one.holds, one.since or sys.maxsize, int(one.name))):
        if slots.get(worker.host, 0) > 0 and len(kept) < most:
            slots[worker.host] -= 1
            kept.append(worker)
    return kept


def places(workers: Sequence[Worker], generation: int) -> list[dict[str, Any]]:
    """The rank of each of the workers in a generation, as it is told."""
    hosts = {host: [worker for worker in workers if worker.host == host] for host in {one.host for one in workers}}
    told = []
    for rank, worker in enumerate(workers):
        here = hosts[worker.host]
        local = here.index(worker)
        across = [host for host, ones in sorted(hosts.items()) if len(ones) > local]
        told.append({
            "generation": generation, "rank": rank, "size": len(workers), "local_rank": local, "local_size": len(here),
            "cross_rank": across.index(worker.host), "cross_size": len(across),
            "homogeneous": len({len(ones) for ones in hosts.values()}) == 1,
        })  # fmt: skip
    return told
