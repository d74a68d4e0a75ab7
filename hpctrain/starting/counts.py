"""Asks which numbers of ranks fit a job, in a process of its own: the starter imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import TrainingError

_SECONDS = 300.0
_PROGRAM = "from hpctrain.checking.counts import main; main()"


@dataclass(frozen=True)
class Counts:
    """fits: the numbers that fit, the largest first. why: why others don't."""

    fits: Sequence[int]
    why: Mapping[int, str]

    def best(self, most: int) -> int | None:
        """The largest number that fits, of those up to `most`."""
        return next((number for number in self.fits if number <= most), None)


def ask_counts(job: Path, overrides: Sequence[str], least: int, most: int) -> Counts:
    """The numbers from `least` to `most` that fit the job. Raises TrainingError if the job cannot be checked."""
    words = [sys.executable, "-c", _PROGRAM, str(job), str(least), str(most), *overrides]
    try:
        # a session of its own: Ctrl-C must reach the starter only
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, start_new_session=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        why = (
            done.stderr.strip().splitlines()[-1:] if not isinstance(error, subprocess.TimeoutExpired) else [str(error)]
        )
        raise TrainingError(
            f"the job could not be checked for fewer than {most + 1} ranks: {' '.join(why)}; `hpctrain check {job}` tells more"
        ) from None
    if "error" in answer:
        raise TrainingError(f"the job could not be checked for fewer than {most + 1} ranks: {answer['error']}")
    return Counts(answer["fits"], {int(number): why for number, why in answer["why"].items()})
