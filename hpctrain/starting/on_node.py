"""A program of its own, which mpiexec starts in a rank's place: the ranks of a node are forked from one process. Linux only.

    python -m hpctrain.starting.on_node START COMMAND...

START is JSON: the job's [environment], and the key of this start. The first
process of a node keeps the fork server. The others send it their variables and descriptors over a socket in a private
directory. Each waits for its rank, passes signals on and ends as the rank does, so that mpiexec sees what it would see of the
rank. Where ranks can't be forked, the process becomes the command.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hpctrain.base.child_python import words_behind
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import set_variables
from hpctrain.ranks.process import binds_threads
from hpctrain.ranks.starter_directory import is_private
from hpctrain.starting.fork_client import FORK_SECONDS, IMPORT_SECONDS, ForkedRank, ForkServerClient
from hpctrain.starting.fork_server import DESCRIPTORS, FOR_RANKS, LONGEST
from hpctrain.starting.pmi import FD_VARIABLE

_MEETING_SECONDS = 10.0
"""Limit for the first process of the node to begin."""
_LEAVING_SECONDS = 1.0
"""How long the node's other ranks may take to end after the first one has ended with an error; then mpiexec must learn of it."""
_POLL = 0.02
_LONGEST_PLACE = 100
"""The longest name of a socket, in bytes: unix(7) allows 107."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED gives them."""
_KEPT: list[int] = []
"""Signals that came before there was a rank."""
_OF_TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


class _FirstProcess:
    """The first process's side: its fork server, its own rank, and a connection for each other rank of the node."""

    def __init__(self, server: ForkServerClient, listener: socket.socket, command: Sequence[str]) -> None:
        self._server, self._listener, self._command = server, listener, command
        self._ranks: dict[socket.socket, ForkedRank] = {}
        self._cores = os.sched_getaffinity(0)
        self._own = self._fork(_request(), _descriptors())
        _pass_signals_to(self._own.pid)

    def serve(self) -> int:
        """Fork the other ranks and wait; the status of this process's own."""
        give_up: float | None = None
        while True:
            self._look()
            status = self._own.poll()
            if status is not None and (not self._ranks or status < 0):
                return status
            if status:
                give_up = give_up or time.monotonic() + _LEAVING_SECONDS
                if time.monotonic() > give_up:
                    return status

    def _look(self) -> None:
        """Wait for what is said by a process of the node or by the server, and act on it."""
        watched: list[ForkServerClient | socket.socket] = [self._server, self._listener, *self._ranks]
        ready, _, _ = select.select(watched, [], [], _LEAVING_SECONDS)
        if self._listener in ready:
            self._admit()
        for connection in [one for one in ready if one in self._ranks]:
            self._ranks[connection].kill()  # mpiexec has ended its process
        for connection, rank in list(self._ranks.items()):
            status = rank.poll()
            if status is not None:
                _say(connection, ended=status)
                del self._ranks[connection]
                connection.close()

    def _admit(self) -> None:
        """Fork a rank for a process of this node, or close the connection, which then starts it anew."""
        connection, _ = self._listener.accept()
        connection.settimeout(FORK_SECONDS)
        with suppress(OSError):
            if not _is_ours(connection):
                return
            content, descriptors, _, _ = socket.recv_fds(connection, LONGEST, DESCRIPTORS)
            request = json.loads(content) if content else None
            rank = self._fork(request, descriptors) if request and self._fits(request) else None
            for one in descriptors:
                os.close(one)
            if rank is not None:
                self._ranks[connection] = rank
                _say(connection, pid=rank.pid)

    def _fits(self, request: Mapping[str, Any]) -> bool:
        """Whether OpenMP, which has chosen the places of its threads in the server, may go on so on the rank's cores."""
        name = binds_threads(request["environment"])
        if name is None or set(request["cores"]) == self._cores:
            return True
        print(
            f"hpctrain: {name} is set, and mpiexec has given the ranks cores of their own; so each starts on its own, with its own "
            "imports",
            file=sys.stderr,
            flush=True,
        )
        return False

    def _fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> ForkedRank:
        theirs: dict[str, str] = request["environment"]
        absent = dict.fromkeys(os.environ.keys() - theirs.keys())
        differing = {name: value for name, value in theirs.items() if os.environ.get(name) != value}
        return self._server.fork(
            self._command, {**absent, **differing}, descriptors[3:], descriptors[:3], request["cores"]
        )


def main(told: dict[str, Any], command: list[str]) -> NoReturn:
    """Run the command in a forked process, if possible, and end as it does."""
    _keep_signals()
    for name, value in told.pop("environment").items():
        os.environ.setdefault(name, value)  # as a rank does, before its first import that reads them
    place = _place(told.pop("key"))
    if place is None:
        _become(command)
    directory, is_first = place
    status = _lead(directory, command) if is_first else _follow(directory)
    if status is None:
        _become(command)
    _end_as(status)


def _place(key: str) -> tuple[Path, bool] | None:
    """The directory in which the processes of this node meet, and whether this one is the first. None for a rank on its own."""
    told = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
    set_variables(told)
    local_rank, local_size = (int(told.get(name, 0)) for name in _OF_TORCHRUN)
    # mpiexec's process on a node starts all ranks there; nodes may share the directory
    node = hashlib.sha256(f"{socket.gethostname()} {os.getppid()}".encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir(), f"hpctrain-{os.geteuid()}-{key}-{node}")
    if local_size < 2 or len(os.fsencode(directory)) > _LONGEST_PLACE:
        return None
    return directory, local_rank == 0


def _lead(directory: Path, command: Sequence[str]) -> int | None:
    """The status of this process's rank; None if ranks can't be forked, which the others learn from the closed socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            directory.mkdir(mode=0o700)
            listener.bind(str(directory / "socket"))
            listener.listen(4096)
            server = ForkServerClient(words_behind(command))
        except OSError:  # no room, memory or descriptor is left
            shutil.rmtree(directory, ignore_errors=True)
            return None
        status: int | None = None
        try:
            status = _FirstProcess(server, listener, command).serve() if server.is_ready(lambda: False) else None
        except EnvironmentUnfitError as error:
            print(f"hpctrain: {error}", file=sys.stderr, flush=True)
            status = 1
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            if status is not None and status < 0:
                # at once: ranks of other nodes fail, too, and mpiexec names the first. The server ends with this process
                _end_as(status)
            server.close()
        return status


def _follow(directory: Path) -> int | None:
    """The status of this process's rank; None if the first process of the node forks no rank for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(IMPORT_SECONDS + FORK_SECONDS)
        request = json.dumps(_request()).encode()
        if len(request) > LONGEST:
            return None
        try:
            _connect(connection, directory / "socket")
            socket.send_fds(connection, [request], _descriptors())
            answer = connection.recv(LONGEST)
        except OSError:
            return None
        if not answer:
            return None
        _pass_signals_to(json.loads(answer)["pid"])
        # as long as the rank runs: the first process, which may end before, closes the connection then
        connection.settimeout(None)
        end = b""
        with suppress(OSError):
            end = connection.recv(LONGEST)
        return int(json.loads(end)["ended"]) if end else 1


def _connect(connection: socket.socket, path: Path) -> None:
    """Raises OSError when the first process has not begun within the limit, or is another user's."""
    give_up = time.monotonic() + _MEETING_SECONDS
    while True:
        try:
            if is_private(path.parent):
                connection.connect(str(path))
                if _is_ours(connection):
                    return
            raise PermissionError(f"{path.parent} is another user's")
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > give_up:
                raise
            time.sleep(_POLL)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user: a directory may change hands between a look and a connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _request() -> dict[str, Any]:
    """The rank's variables, torchrun's included: the server has those of the node's first rank."""
    environment = dict(os.environ)
    set_variables(environment)
    return {"environment": environment, "cores": sorted(os.sched_getaffinity(0))}


def _descriptors() -> list[int]:
    """The standard streams, and that of PMI where mpiexec gives one."""
    return [0, 1, 2, *([int(os.environ[FD_VARIABLE])] if FD_VARIABLE in os.environ else [])]


def _say(connection: socket.socket, **message: Any) -> None:
    with suppress(OSError):  # its process has ended: the next look notices
        connection.send(json.dumps(message).encode())


def _keep_signals() -> None:
    """Keep signals until there is a rank that they are meant for."""
    for number in FOR_RANKS:
        signal.signal(number, lambda number, _: _KEPT.append(number))


def _pass_signals_to(pid: int) -> None:
    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in FOR_RANKS:
        signal.signal(number, pass_on)
    for kept in _KEPT:
        pass_on(kept, None)


def _become(command: Sequence[str]) -> NoReturn:
    """Become the rank. A signal that came meanwhile acts as on any process that has just begun."""
    for number in FOR_RANKS:
        signal.signal(number, signal.SIG_DFL)
    for kept in _KEPT:
        os.kill(os.getpid(), kept)
    os.execv(command[0], list(command))


def _end_as(status: int) -> NoReturn:
    """status: as from subprocess.Popen."""
    sys.stdout.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one, if any
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
