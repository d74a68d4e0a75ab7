"""A program of its own, the fork server: imports torch and hpctrain, and forks the ranks. Linux only.

    python -m hpctrain.starting.fork_server FD WORD... ROOM

FD is its end of a socket pair to the starter (fork_client.py), on which both send JSON, a message at a time. The words are those of
`hpctrain` in a rank. ROOM gives the command line the room that a rank's takes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.base.child_python import words_behind
from hpctrain.ranks.process import ROOM_VARIABLE
from hpctrain.starting.forking import become_rank, end_with_parent, open_streams

LONGEST = 2**17
"""The longest message, in bytes."""
FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that may reach all processes of a job, and are meant for the ranks."""
DESCRIPTORS = 8
"""The most that a message carries."""
_LEAVING_SECONDS = 5.0
"""How long ranks may take to end by themselves once the starter has ended."""


class ForkServer:
    """The starter's requests, and the forked ranks that run."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: set[int] = set()
        self._former = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        for file in (control, self._woken):
            self._selector.register(file, selectors.EVENT_READ)

    def tell(self, **message: Any) -> None:
        """Send a message."""
        with suppress(OSError):  # the starter has ended: the next look notices
            self._control.send(json.dumps(message).encode())

    def next_request(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and its descriptors. Tells meanwhile how ranks end; does not return when the starter has ended."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._woken in ready:
                os.read(self._woken, LONGEST)
                self._reap()
            if self._control in ready:
                content, descriptors, _, _ = socket.recv_fds(self._control, LONGEST, DESCRIPTORS)
                if not content:
                    self._leave()
                return json.loads(content), descriptors

    def forked(self, pid: int) -> None:
        """A rank that this process has to wait for."""
        self._ranks.add(pid)
        self.tell(forked=pid)
        self._reap()

    def close(self) -> None:
        """Give up everything of the server's in a forked process."""
        self._selector.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._former)
        os.close(self._woken)
        os.close(self._wakes)
        self._control.close()

    def _reap(self) -> None:
        for pid in list(self._ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ranks.remove(pid)
                self.tell(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _leave(self) -> NoReturn:
        """Ranks notice the end of the starter, too, and remove its directory (channel_directory.py)."""
        give_up = time.monotonic() + _LEAVING_SECONDS
        while self._ranks and time.monotonic() < give_up:
            self._reap()
            time.sleep(0.02)
        os._exit(0)  # the system kills those that are left


def main(descriptor: int) -> None:
    """Serve, and return in the ranks only."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_RANKS)
    open_streams()
    os.environ.pop(ROOM_VARIABLE, None)
    end_with_parent(signal.SIGKILL)  # an import may take long
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    content = control.recv(LONGEST)
    if not content:
        sys.exit()
    from hpctrain.starting.preloading import preload

    unfit = preload(json.loads(content)["command"])
    if unfit is not None:
        control.send(json.dumps({"unfit": unfit}).encode())
        os._exit(0)
    server = ForkServer(control)
    end_with_parent(0)
    gc.collect()
    gc.freeze()  # else a collection would copy the pages that ranks share
    server.tell(ready=True)
    parent = os.getpid()
    request, descriptors = _fork_all(server)
    server.close()
    become_rank(parent, request["command"], request["environment"], descriptors, mask)
    gc.enable()
    sys.argv[1:] = words_behind(request["command"])


def _fork_all(server: ForkServer) -> tuple[dict[str, Any], list[int]]:
    """Fork a rank for each request; returns in a rank, with its request and descriptors."""
    while True:
        request, descriptors = server.next_request()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        try:
            pid = os.fork()
        except OSError as error:
            server.tell(failed=error.strerror)
        else:
            if pid == 0:
                return request, descriptors
            server.forked(pid)
        for one in descriptors:
            os.close(one)


if __name__ == "__main__":
    # modules of the user's see the words of a rank
    words, sys.argv = sys.argv, [str(Path(__file__).parents[1] / "__main__.py"), *sys.argv[2:-1]]
    main(int(words[1]))
    # as `python -m hpctrain` does it; here, so that nothing of the server is on the stack
    runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
