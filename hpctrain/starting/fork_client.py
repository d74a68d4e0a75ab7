"""The starter's side of the fork server (fork_server.py): a command's ranks are forked from a process that has imported torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.base.child_python import python_module
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.ranks.process import ROOM, ROOM_VARIABLE
from hpctrain.starting.fork_server import LONGEST

IMPORT_SECONDS = 300.0
"""Limit of all imports."""
FORK_SECONDS = 60.0
_ENDING_SECONDS = 5.0
"""How long the ranks of a server that has ended may take to end: the system kills them."""
_POLL = 0.1
_WORD = " " * 200
"""The last word of the server's command line, which `ps` does not show: a rank's may take as much."""
_OFF = '[job] start = "spawn" asks for that'


class ForkedRank:
    """A rank, with the methods of subprocess.Popen that the starter uses."""

    def __init__(self, server: ForkServerClient, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The rank's status once it has ended."""
        self._server.look()
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServerClient:
    """A running fork server. It imports torch and hpctrain while the starter goes on."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: of `hpctrain`, as in a rank. The job's [environment] must be set already."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = python_module("hpctrain.starting.fork_server", str(theirs.fileno()), *command, _WORD)
        self._process = subprocess.Popen(
            words,
            env={**os.environ, ROOM_VARIABLE: ROOM},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the ranks from the starter only
        )
        theirs.close()
        self._give_up = time.monotonic() + IMPORT_SECONDS
        self._state = "importing"  # then "ready", or "ended"
        self._ranks: dict[int, ForkedRank] = {}
        self._answers: list[ForkedRank | str] = []
        self._send(json.dumps({"command": command[0]}).encode())

    @property
    def has_ended(self) -> bool:
        """Whether it forks no more ranks."""
        self.look()
        return self._state == "ended"

    def is_ready(self, stops: Callable[[], bool]) -> bool:
        """Wait until ranks can be forked; false if they can't be, which is told, or when `stops` does no longer want to wait."""
        while self._state == "importing" and not stops():
            if time.monotonic() > self._give_up:
                self._refuse(f"the import of torch and hpctrain took longer than {IMPORT_SECONDS:.0f} s")
            self.look(_POLL)
        return self._state == "ready"

    def fork(self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> ForkedRank:
        """A rank that runs `command`. Raises EnvironmentUnfitError. environment: what differs from this process's."""
        content = json.dumps({"command": list(command), "environment": dict(environment)}).encode()
        if len(content) > LONGEST:
            raise EnvironmentUnfitError(
                f"a rank could not be forked: its command and variables take {len(content)} bytes, expected {LONGEST} at most; "
                '[job] start = "spawn" has no limit'
            )
        self._answers.clear()
        self._send(content, descriptors)
        give_up = time.monotonic() + FORK_SECONDS
        while not self._answers:
            if self._state == "ended" or time.monotonic() > give_up:
                raise EnvironmentUnfitError("a rank could not be forked: the fork server does not answer")
            self.look(_POLL)
        answer = self._answers.pop()
        if isinstance(answer, str):
            raise EnvironmentUnfitError(f"a rank could not be forked: {answer}")
        return answer

    def look(self, seconds: float = 0.0) -> None:
        """Take the server's messages; wait up to `seconds` for the first."""
        while self._state != "ended":
            self._control.settimeout(seconds)
            try:
                content = self._control.recv(LONGEST)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                content = b""
            if not content:
                self._note_end()
                return
            self._take(json.loads(content))
            seconds = 0.0

    def close(self) -> None:
        """End the server. Its ranks have ended, or end with it."""
        self._control.close()
        self._state = "ended"
        give_up = time.monotonic() + _POLL
        while _runs(self._process.pid) and time.monotonic() < give_up:
            time.sleep(0.01)
        if self._process.returncode is None:  # not waited for: the number of its group is still its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._state = "ready"
        elif "unfit" in message:
            self._refuse(message["unfit"])
        elif "ended" in message:
            self._ranks.pop(message["ended"]).returncode = message["status"]
        elif "forked" in message:
            rank = self._ranks[message["forked"]] = ForkedRank(self, message["forked"])
            self._answers.append(rank)
        else:
            self._answers.append(str(message["failed"]))

    def _send(self, content: bytes, descriptors: Sequence[int] = ()) -> None:
        self._control.settimeout(FORK_SECONDS)
        with suppress(OSError):  # it has ended: the next look notices
            socket.send_fds(self._control, [content], list(descriptors))

    def _refuse(self, why: str) -> None:
        _say(f"{why}; so each rank starts on its own, with its own imports ({_OFF})")
        self.close()

    def _note_end(self) -> None:
        """The server has ended by itself."""
        status = self._process.wait()
        if self._state == "importing":
            self._refuse(f"the fork server ended with {_how(status)} during the import of torch and hpctrain")
            return
        self._state = "ended"
        if self._ranks:
            _say(f"the fork server, from which the ranks are forked, ended with {_how(status)}, and its ranks with it")
        give_up = time.monotonic() + _ENDING_SECONDS
        for rank in self._ranks.values():
            while _runs(rank.pid) and time.monotonic() < give_up:
                time.sleep(0.01)
            rank.returncode = -signal.SIGKILL
        self._ranks.clear()


def _runs(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _how(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"


def _say(sentence: str) -> None:
    print(f"hpctrain: {sentence}", file=sys.stderr, flush=True)
