"""Finds hpctrain's own sentences in what a rank says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SENTENCE = re.compile(r"(hpctrain: |(?=job: |\S+:\d+: ))(?P<text>.+)")
"""An error as hpctrain prints it: with the program's name in front, or for a job's problems with their place."""
_MOST = 3


def sentences(lines: Iterable[str]) -> list[str]:
    """The last sentences of hpctrain's among `lines`."""
    return [found["text"] for line in lines if (found := _SENTENCE.match(line))][-_MOST:]


def last_sentences(log: str) -> list[str]:
    """The last sentences of hpctrain's in a file, such as a process's standard error. Runs on the process's node."""
    try:
        return sentences(Path(log).read_text(errors="replace").splitlines())
    except OSError:
        return []
