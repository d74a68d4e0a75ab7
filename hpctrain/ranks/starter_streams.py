"""A rank's side of a starter on another host: the standard streams of mpiexec, as hpctrain_tools/launch/channel_streams.py says."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress

from hpctrain.base.launcher_variables import mpiexec_rank
from hpctrain.ranks.rank_channel import RankChannel

WORD = "mpiexec"
"""The word in place of a directory in `--started-by`."""
ON_TERMINAL, ERRORS_ON_TERMINAL = ":terminal", ":error-terminal"
"""Additions behind the word, in this order."""


def is_word(text: str) -> bool:
    """Whether a starter has given it, and no directory."""
    return re.fullmatch(f"{WORD}({ON_TERMINAL})?({ERRORS_ON_TERMINAL})?", text) is not None


def attach_to_mpiexec(text: str) -> RankChannel:
    """A rank's side. Call it before MPI starts: the starter counts the ranks that have started."""
    rank = mpiexec_rank()
    out = os.dup(2)  # what users' code does to standard error does not matter
    ready = threading.Event()
    if rank == 0:
        read = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that the rank starts must not take the signals
        threading.Thread(target=_take_signals, args=(read, ready), daemon=True).start()

    def say(what: str, number: int) -> None:
        with suppress(OSError):  # the launcher is gone, and ends the ranks
            os.write(out, f"\x1ehpctrain {what} {number}\x1f".encode())

    def answers_signals() -> None:
        ready.set()
        say("ready", rank)

    say("started", rank)
    terminal, error_terminal = ON_TERMINAL in text, ERRORS_ON_TERMINAL in text
    return RankChannel(terminal, error_terminal, lambda code: say("exit", code), answers_signals)


def _take_signals(read: int, ready: threading.Event) -> None:
    with os.fdopen(read, "rb") as lines:
        for line in lines:
            ready.wait()
            if line.strip().isdigit():
                os.kill(os.getpid(), int(line))
