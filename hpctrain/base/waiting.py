"""Seconds that a thread has waited for other ranks: counted where it waits, read where its work is timed. Imports nothing else."""

from __future__ import annotations

import threading


class _Waited(threading.local):
    seconds = 0.0


_WAITED = _Waited()


def note_waited(seconds: float) -> None:
    """This thread has waited for other ranks. Communicators call it that wait on the CPU."""
    _WAITED.seconds += seconds


def waited() -> float:
    """The seconds that this thread has waited so far."""
    return _WAITED.seconds
