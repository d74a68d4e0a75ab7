"""Questions from another terminal about a running job: small files in the run's directory.

NAME.TOKEN.question asks, with a JSON object. Those of `hpctrain where` are answered by the watchdog. All others are requests, which
the ranks take together after a step; until then the watchdog says where rank 0 is. NAME.TOKEN.answer has the newest answer, a JSON
object, until the one who asks removes both.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import UsageError, escaped, reason
from hpctrain.base.safe_files import SMALL_BYTES, read_bytes, replacing

__all__ = ["Asked", "ask", "asked", "silence"]

LOG = logging.getLogger("hpctrain")

_QUESTION = re.compile(r"([a-z]+)\.([0-9a-f]{16})\.question")
_WHERE = "where"
_POLL, _LOOK = 0.1, 2.0
"""Seconds between two looks of the one who asks, and of the job."""
_LAST = 2.0
"""Seconds for the last answers of a job that ends."""


@dataclass(frozen=True)
class Question:
    """A question that lies in the run's directory."""

    name: str
    token: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.name}.{self.token}.question"

    @property
    def answer(self) -> str:
        """The name of its answer's file."""
        return f"{self.name}.{self.token}.answer"


class Queries:
    """The side of the running job, on rank 0. It looks on a thread of its own, because the file system may hang."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._waiting: dict[str, Question] = {}
        """Questions by token, oldest first; a thread replaces the whole table when questions come or are withdrawn."""
        self._seen: set[str] = set()
        self._answers: dict[str, Mapping[str, Any]] = {}
        """Answers to be written, by token."""
        self._writers: list[threading.Thread] = []
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def start(self, closing: threading.Event) -> None:
        """Look for questions until `closing`."""
        threading.Thread(target=self._look, args=(closing,), name="watchdog's questions", daemon=True).start()

    @property
    def is_waiting(self) -> bool:
        """Whether `hpctrain where` has asked."""
        return any(one.name == _WHERE for one in self._waiting.values())

    @property
    def has_request(self) -> bool:
        """Whether there is a request that the ranks may take."""
        return any(one.name != _WHERE for one in self._waiting.values())

    def answer(self, lines: list[str]) -> None:
        """Answer `hpctrain where`."""
        for one in self._take(lambda question: question.name == _WHERE):
            self.tell(one, {"lines": lines})

    def take(self) -> Question | None:
        """The oldest request, which is the ranks' from now on; None if it was withdrawn."""
        with self._lock:
            oldest = next((one for one in self._waiting.values() if one.name != _WHERE), None)
        return None if oldest is None else next(iter(self._take(lambda question: question is oldest)), None)

    def acknowledge(self, where: str) -> None:
        """Tell those who wait with a request that the job runs. where: rank 0's position in words."""
        with self._lock:  # the answer of those who take a request meanwhile comes later
            for one in self._waiting.values():
                if one.name != _WHERE:
                    self._put(one, {"state": "waiting", "where": where})

    def close(self, why: str) -> None:
        """Refuse all requests, which no rank will take; wait for the last answers."""
        for one in self._take(lambda question: question.name != _WHERE):
            self.tell(one, {"state": "refused", "why": why})
        give_up = time.monotonic() + _LAST
        for writer in self._writers:
            writer.join(max(0.0, give_up - time.monotonic()))

    def tell(self, question: Question, answer: Mapping[str, Any]) -> None:
        """Write an answer, if somebody still waits for it."""
        with self._lock:
            self._put(question, answer)

    def _put(self, question: Question, answer: Mapping[str, Any]) -> None:
        """Let a thread write an answer. The caller has the lock."""
        self._answers[question.token] = answer
        writer = threading.Thread(target=self._write, args=(question,), name="watchdog's answer", daemon=True)
        self._writers = [*(one for one in self._writers if one.is_alive()), writer]
        writer.start()

    def _take(self, wanted: Callable[[Question], bool]) -> list[Question]:
        with self._lock:
            found = [one for one in self._waiting.values() if wanted(one)]
            self._waiting = {token: one for token, one in self._waiting.items() if one not in found}
        return found

    def _look(self, closing: threading.Event) -> None:
        while not closing.wait(_LOOK):
            with suppress(OSError):
                names = [match for name in os.listdir(self._directory) if (match := _QUESTION.fullmatch(name))]
                there = {match[2] for match in names}
                new = [self._read(match[1], match[2]) for match in names if match[2] not in self._seen]
                with self._lock:
                    kept = {token: one for token, one in self._waiting.items() if token in there}
                    self._waiting = kept | {one.token: one for one in new if one is not None}
                self._seen = there

    def _read(self, name: str, token: str) -> Question | None:
        bare = Question(name, token)
        try:
            values = json.loads(read_bytes(self._directory / bare.file) or b"{}")
        except (OSError, ValueError, RecursionError):
            return None
        return Question(name, token, values) if isinstance(values, dict) else None

    def _write(self, question: Question) -> None:
        with self._writing:  # else an older answer could be written last
            with self._lock:
                answer = self._answers.pop(question.token, None)
            try:
                if answer is not None and (self._directory / question.file).exists():
                    with replacing(self._directory / question.answer) as file:
                        file.write(json.dumps(answer).encode())
            except OSError as error:
                LOG.info("a question of hpctrain %s could not be answered: %s", question.name, reason(error))


class Asked:
    """The side of the one who asks."""

    def __init__(self, directory: Path, question: Question) -> None:
        self._answer = directory / question.answer
        self._newest: dict[str, Any] | None = None

    def answers(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Each answer that differs from the one before, for so many seconds."""
        give_up = time.monotonic() + seconds
        while True:
            found = _read_answer(self._answer)
            if found is not None and found != self._newest:
                self._newest = found
                yield found
            if time.monotonic() > give_up:
                return
            time.sleep(_POLL)


@contextmanager
def asked(directory: Path, name: str, values: Mapping[str, Any]) -> Iterator[Asked]:
    """A question to the job that runs in `directory`; withdrawn at the end. Raises UsageError if the directory is unfit."""
    question = Question(name, secrets.token_hex(8))
    try:
        with replacing(directory / question.file) as file:
            file.write(json.dumps(values).encode())
    except OSError as error:
        raise UsageError(
            f"{directory}: {reason(error)}; expected the directory of a running job that you may write to"
        ) from None
    try:
        yield Asked(directory, question)
    finally:
        for left in (question.file, question.answer):
            with suppress(OSError):
                (directory / left).unlink(missing_ok=True)


def silence(directory: Path, seconds: float) -> UsageError:
    """The error about a job that does not answer."""
    return UsageError(
        f"no job answered in {directory} within {seconds:g} s; it has ended, has not begun to train, or its rank 0 does not run "
        "(its log is in log/rank-00000.log)"
    )


def ask(directory: Path, patience: float) -> list[str]:
    """The lines of `hpctrain where` on the job that runs in `directory`. Raises UsageError if none comes in `patience` seconds."""
    with asked(directory, _WHERE, {}) as job:
        found = next(job.answers(patience), None)
    if found is None:
        raise silence(directory, patience)
    lines = found.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UsageError(f"{directory}: found an answer without lines, expected those of a job")
    return [escaped(line) for line in lines]


def _read_answer(answer: Path) -> dict[str, Any] | None:
    """The answer; None if there is none yet. Raises UsageError for anything else."""
    try:
        found = json.loads(read_bytes(answer, SMALL_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{answer}: {reason(error)}; expected the answer of a job") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{answer} is no answer of a job; expected a JSON object")
    return found
