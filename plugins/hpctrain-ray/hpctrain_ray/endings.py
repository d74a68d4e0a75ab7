"""How ranks end: the exit codes that they leave behind, and hpctrain's own sentences in what they say."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.toolkit.starting import exit_code_in

if TYPE_CHECKING:
    from hpctrain.api import HpctrainError

_SENTENCE = re.compile(r"(hpctrain: |(?=job: |\S+:\d+: ))(?P<text>.+)")
"""An error as hpctrain prints it: with the program's name in front, or for a job's problems with their place."""
_MOST = 3
_BEFORE_TRACEBACK = " failed:"
"""The end of the sentence in front of a traceback, whose last line is the error."""


@dataclass(frozen=True)
class Remains:
    """The places on a rank's node where its process leaves its exit code, and what it says on standard error."""

    directory: Path
    log: Path | None


@dataclass(frozen=True)
class Ending:
    """How a rank's process has ended. code: None for one that was killed."""

    code: int | None
    said: list[str]


def sentences(lines: Iterable[str]) -> list[str]:
    """The last sentences of hpctrain's among `lines`."""
    found, kept = [], [line.rstrip() for line in lines if line.strip()]
    for line in kept:
        if (match := _SENTENCE.match(line)) is not None:
            text = match["text"]
            found.append(f"{text} {kept[-1]}" if text.endswith(_BEFORE_TRACEBACK) and line is not kept[-1] else text)
    return found[-_MOST:]


def error_of(code: int | None, sentence: str) -> HpctrainError:
    """The error with which ranks have ended, by the exit code that they agreed on."""
    from hpctrain.api import CheckpointError, EnvironmentUnfitError, TrainingError, UsageError

    kinds = (UsageError, EnvironmentUnfitError, CheckpointError)
    return next((one for one in kinds if one.exit_code == code), TrainingError)(sentence)


def ending_of(remains: Remains) -> Ending:
    """The end of a rank's process. Runs on its node, and removes what is left there."""
    code, said = exit_code_in(remains.directory), list[str]()
    with suppress(OSError):
        if remains.log is not None:
            said = sentences(remains.log.read_text(errors="replace").splitlines())
    shutil.rmtree(remains.directory, ignore_errors=True)
    return Ending(code, said)
