"""Errors of communication between ranks. Imports nothing of hpctrain."""

from __future__ import annotations

from torch.distributed import DistBackendError


class CommunicationError(DistBackendError):
    """MPI reported an error, or the group is unusable after an earlier one."""


class CommunicationTimeoutError(CommunicationError):
    """An operation did not finish in time; the message names the missing ranks."""


class OperationMismatchError(CommunicationError):
    """The ranks of a group called different operations, sizes or dtypes at the same time."""
