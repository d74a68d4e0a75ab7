"""Errors of ranks and of Ray as errors of hpctrain's, in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.toolkit.commands import reason

if TYPE_CHECKING:
    from hpctrain.api import HpctrainError


def error_of(code: int | None, sentence: str) -> HpctrainError:
    """The error with which ranks have ended, by the exit code that they agreed on."""
    from hpctrain.api import CheckpointError, EnvironmentUnfitError, TrainingError, UsageError

    kinds = (UsageError, EnvironmentUnfitError, CheckpointError)
    return next((one for one in kinds if one.exit_code == code), TrainingError)(sentence)


def first_line(error: BaseException) -> str:
    """The sense of an error of Ray's, in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in (reason(cause) if isinstance(cause, Exception) else str(cause)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)
