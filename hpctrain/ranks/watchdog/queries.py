"""Questions of `hpctrain where`, from another terminal, about a running job: small files in the run's directory.

where.TOKEN.question asks, where.TOKEN.answer has the sentences as a JSON list.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import UsageError, escaped, reason
from hpctrain.base.safe_files import SMALL_BYTES, reading, replacing

LOG = logging.getLogger("hpctrain")

_QUESTION = re.compile(r"where\.([0-9a-f]{16})\.question")
_POLL, _LOOK = 0.1, 2.0
"""Seconds between two looks of the one who asks, and of the job."""


class Queries:
    """The side of the running job, on rank 0. It looks on a thread of its own, because the file system may hang."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._questions: list[str] = []
        self._answered: set[str] = set()

    def start(self, closing: threading.Event) -> None:
        """Look for questions until `closing`."""
        threading.Thread(target=self._look, args=(closing,), name="watchdog's questions", daemon=True).start()

    @property
    def is_waiting(self) -> bool:
        """Whether there is a question."""
        return bool(self._questions)

    def answer(self, lines: list[str]) -> None:
        """Answer all questions."""
        questions, self._questions = self._questions, []
        threading.Thread(target=self._write, args=(questions, lines), name="watchdog's answer", daemon=True).start()

    def _look(self, closing: threading.Event) -> None:
        while not closing.wait(_LOOK):
            with suppress(OSError):
                found = [match[1] for name in os.listdir(self._directory) if (match := _QUESTION.fullmatch(name))]
                new = [token for token in found if token not in self._answered]
                self._answered.update(new)
                self._questions += new

    def _write(self, questions: list[str], lines: list[str]) -> None:
        for token in questions:
            try:
                with replacing(self._directory / f"where.{token}.answer") as file:
                    file.write(json.dumps(lines).encode())
            except OSError as error:
                LOG.info("a question of hpctrain where could not be answered: %s", reason(error))


def ask(directory: Path, patience: float) -> list[str]:
    """The sentences of the job that runs in `directory`. Raises UsageError if none answers within `patience` seconds."""
    token = secrets.token_hex(8)
    question, answer = directory / f"where.{token}.question", directory / f"where.{token}.answer"
    try:
        with replacing(question) as file:
            file.write(b"")
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            lines = _read(answer)
            if lines is not None:
                return lines
            time.sleep(_POLL)
    except OSError as error:
        raise UsageError(
            f"{directory}: {reason(error)}; expected the directory of a running job that you may write to"
        ) from None
    finally:
        for left in (question, answer):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    raise UsageError(
        f"no job answered in {directory} within {patience:g} s; it has ended, has not begun to train, or its rank 0 does not run "
        "(its log is in log/rank-00000.log)"
    )


def _read(answer: Path) -> list[str] | None:
    """The lines of an answer; None if there is none yet. Raises UsageError for anything else."""
    try:
        with reading(answer) as fd:
            lines = json.loads(os.read(fd, SMALL_BYTES))
    except FileNotFoundError:
        return None
    except ValueError:
        lines = None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UsageError(f"{answer} is no answer of a job; expected a JSON list of sentences")
    return [escaped(line) for line in lines]
