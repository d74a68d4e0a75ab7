"""The errors that a user can cause or meet, each with the exit code that the command returns for it.

A message says what was found, what was expected and what to do. Imports nothing of hpctrain.
"""

from __future__ import annotations

import reprlib
from typing import Any

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_TRAINING = 4
EXIT_CHECKPOINT = 5
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start me again


def escaped(text: str) -> str:
    """`text` without characters that would steer a terminal, lines apart: a file that others made may hold any."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


class _Short(reprlib.Repr):
    """Plain values only: the repr of anything else may have no end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = self.maxlist = self.maxtuple = self.maxdict = 3

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, (bool, float, type(None))):
            return repr(x)
        return self.repr_tuple(tuple(x), level) if isinstance(x, tuple) else f"a {type(x).__name__}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[:40])


shown = _Short().repr
"""A value of any size and kind as a few words of a sentence."""


class HpctrainError(Exception):
    """Base of every error that the command reports as a sentence instead of a traceback."""

    exit_code = EXIT_TRAINING

    def __init__(self, message: str, everywhere: bool = False) -> None:
        """`everywhere`: every rank raises it, so that all can leave in order and rank 0 speaks for them."""
        super().__init__(escaped(message))
        self.everywhere = everywhere


def reason(error: Exception) -> str:
    """What it says, and what the operating system says without the number in front."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


class UsageError(HpctrainError):
    """Bad usage or a bad job file: exit 2."""

    exit_code = EXIT_USAGE


class JobFileError(UsageError):
    """A job file that cannot be read; the message begins with `file:line`."""


class EnvironmentUnfitError(HpctrainError):
    """MPI, a GPU, a plugin or the agreement between ranks is not fit for the job: exit 3."""

    exit_code = EXIT_ENVIRONMENT


class TrainingError(HpctrainError):
    """Training itself failed: exit 4."""

    exit_code = EXIT_TRAINING


class WriteError(HpctrainError):
    """A command could not write its file, for lack of room say: exit 4."""

    exit_code = EXIT_TRAINING


class CheckpointError(HpctrainError):
    """No checkpoint can be used, or it is of another model: exit 5."""

    exit_code = EXIT_CHECKPOINT
