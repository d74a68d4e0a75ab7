"""Errors of communication between ranks. Imports nothing of hpctrain."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError


class CommunicationError(DistBackendError):
    """MPI reported an error, or the group is unusable after an earlier one."""


class CommunicationTimeoutError(CommunicationError):
    """An operation did not finish in time; the message names the missing ranks."""


class OperationMismatchError(CommunicationError):
    """The ranks of a group called different operations, sizes or dtypes at the same time."""


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
