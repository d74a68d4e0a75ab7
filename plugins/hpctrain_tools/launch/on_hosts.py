"""Ranks on several hosts, under the mpiexec that fits mpi4py's MPI library."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain_tools.launch.channel_streams import Heard, signals, word
from hpctrain_tools.launch.hosts import Hosts
from hpctrain_tools.launch.mpi_library import ask_library
from hpctrain_tools.launch.mpiexec import UnderMpiexec, find_mpiexec

APPEAR_SECONDS = 120.0
"""Limit for the start of Python on all ranks. Without it, an ssh to a host that is off would hang for minutes."""
# how long mpiexec may take to end after the ranks have told an error: it waits for a host that is gone
_LEAVING_SECONDS = 30.0
# seconds within which mpiexec runs ssh or srun; then, again and again, whether it does
_START_OF_LAUNCHER = 2.5
# signals this soon after the first count as the same one, as on a rank
_SAME_SECONDS = 1.0
_POLL = 0.1
# seconds for the hosts' proxies to end their ranks after mpiexec was killed
_GRACE = 2.0


class OnHosts:
    """Running ranks, and the starter's channel to them."""

    failed_rank: int | None = None
    """Unknown: mpiexec tells the node (failed_host)."""

    def __init__(self, command: Sequence[str], hosts: Hosts) -> None:
        """hosts: as many slots as ranks. Raises EnvironmentUnfitError without an MPI."""
        library = ask_library()
        if library is None:
            raise EnvironmentUnfitError(
                "--hostfile: found no MPI library, expected one to start ranks on other hosts; load your site's MPI module, or "
                "pip install 'hpctrain[mpich]'"
            )
        mpiexec = find_mpiexec(library.flavour)
        self._hosts, self._heard = hosts, Heard()
        words = [*hosts.words(mpiexec.flavour), *command, "--started-by", word()]
        self._ranks = UnderMpiexec(mpiexec, words, hosts.slots, self._heard)
        self._begin, self._told_at = time.monotonic(), 0.0
        self._next_look = self._begin + _START_OF_LAUNCHER
        self._passed_on, self._asked_at = 0, 0.0

    def poll(self) -> int | None:
        return self._ranks.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all ranks. Those that do not start, or do not end after an error, are killed."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._ranks.wait(_POLL)
            if self._is_overdue():
                self.kill()
            elif give_up is not None and time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("ranks", timeout or 0)

    def kill(self) -> None:
        """Kill mpiexec; its proxies end the ranks. An ssh that still tries to reach a host would stay."""
        below = self._children()
        self._ranks.kill()
        _, left = psutil.wait_procs(below, _GRACE)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def pass_on(self, numbers: Sequence[int]) -> int:
        """Send each of these signals once to rank 0; the number of ranks that act on them.

        0 if rank 0 can't answer yet, and for a second request to stop: rank 0 would end at once, and mpiexec wait for the others.
        """
        if 0 not in self._heard.ready:
            return 0
        new, now = numbers[self._passed_on :], time.monotonic()
        if self._passed_on and any(number != signal.SIGUSR1 for number in new) and now - self._asked_at > _SAME_SECONDS:
            return 0
        if new:
            self._asked_at = self._asked_at or now
            self._ranks.send(signals(new))
            self._passed_on = len(numbers)
        return self._hosts.slots

    def kill_ranks(self) -> None:
        self.kill()

    @property
    def exit_code(self) -> int | None:
        """The exit code that the ranks agreed on; None when no rank told it."""
        return self._heard.code

    @property
    def failed_host(self) -> str | None:
        """The first host on which a rank failed or did not start, if that is known."""
        told = self._told_host()
        if told is not None:
            return told
        absent = self._absent()
        return self._hosts.by_rank[absent[0]] if absent and self._heard.code is None else None

    @property
    def why_not_started(self) -> str | None:
        """A sentence about ranks that have not started."""
        absent = self._absent()
        if not absent or self._heard.code is not None:
            return None
        by_rank = self._hosts.by_rank
        failed = self._told_host()
        hosts = [failed] if failed else list(dict.fromkeys(by_rank[rank] for rank in absent))
        return (
            f"{'no' if failed else 'not every'} rank started on {', '.join(hosts)}; expected `ssh {hosts[0]} true` to work "
            f"without a password, or a Slurm allocation with each host, and {sys.executable} and {Path.cwd()} to be there"
        )

    def _told_host(self) -> str | None:
        return next((host for node in self._heard.failed if (host := self._hosts.called(node)) is not None), None)

    def _absent(self) -> list[int]:
        if self._heard.ready:
            return []  # these have met all others
        return [rank for rank in range(self._hosts.slots) if rank not in self._heard.started]

    def _children(self) -> list[psutil.Process]:
        """The processes below mpiexec."""
        with suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self._ranks.pid).children(recursive=True))
        return []

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        if self._heard.code:
            self._told_at = self._told_at or now
            return now - self._told_at > _LEAVING_SECONDS
        if now < self._next_look or not self._absent():
            return False
        self._next_look = now + _START_OF_LAUNCHER
        # MPICH waits for ever for an srun that has failed
        return now - self._begin > APPEAR_SECONDS or not self._children()
