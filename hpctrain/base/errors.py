"""The errors that a user can cause or meet, each with its exit code.

A message says what was found, what was expected and what to do. Imports nothing from hpctrain.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_TRAINING = 4
EXIT_CHECKPOINT = 5
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start me again
EXIT_CANCELLED = 143  # as a process that SIGTERM has ended


def escaped(text: str) -> str:
    """`text` with terminal control characters escaped, except for newlines: another person's file may contain any."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


class _Short(reprlib.Repr):
    """Shows only plain values: the repr of any other object may be endless."""

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
"""Any value, of any size and type, in a few words for a message."""


class HpctrainError(Exception):
    """Base of all errors that the command reports as a sentence instead of a traceback."""

    exit_code = EXIT_TRAINING

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))


def reason(error: Exception) -> str:
    """The error's message; for the operating system's errors without the number in front."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def name_ranks(ranks: Sequence[int]) -> str:
    """`[3]` -> "rank 3", `[0, 1, 2, 5]` -> "ranks 0-2, 5"."""
    text = spans(ranks, ", ")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def spans(numbers: Sequence[int], separator: str = ",") -> str:
    """`[0, 1, 2, 5]` -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class UsageError(HpctrainError):
    """Bad usage or a bad job file: exit 2."""

    exit_code = EXIT_USAGE


class JobFileError(UsageError):
    """A job file that cannot be read; the message begins with `file:line`."""


class EnvironmentUnfitError(HpctrainError):
    """The environment (MPI, a GPU, a plugin) does not fit the job, or the ranks disagree: exit 3."""

    exit_code = EXIT_ENVIRONMENT


class ContractError(EnvironmentUnfitError):
    """A plugin breaks its contract: exit 3."""


class TrainingError(HpctrainError):
    """Training itself failed: exit 4."""


class WriteError(HpctrainError):
    """A command could not write its file, for instance on a full disk: exit 4."""


class CheckpointError(HpctrainError):
    """No checkpoint can be used, or it belongs to another model: exit 5."""

    exit_code = EXIT_CHECKPOINT
