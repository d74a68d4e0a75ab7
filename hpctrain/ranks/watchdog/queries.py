"""Questions from another terminal about a running job: small files in the run's directory. hpctrain_tools/runs/asking.py asks.

NAME.TOKEN.question asks, with a JSON object. Those of `hpctrain where` are answered by the watchdog. All others are requests, which
the ranks take together after a step; until then the watchdog says where rank 0 is. NAME.TOKEN.answer has the newest answer, a JSON
object, until the one who asks removes both.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.base.errors import reason
from hpctrain.base.safe_files import read_bytes, replacing

LOG = logging.getLogger("hpctrain")

_QUESTION = re.compile(r"([a-z]+)\.([0-9a-f]{16})\.question")
WHERE = "where"  # the name of what the watchdog answers
_LOOK = 2.0  # seconds between two looks
_LAST = 2.0  # seconds for the last answers of a job that ends


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
    """The side of the running job, on rank 0. A thread looks for questions and writes answers: the file system may hang."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        # by token, oldest first: questions of `hpctrain where`, and requests
        self._where: dict[str, Question] = {}
        self._requests: dict[str, Question] = {}
        self._answers: dict[str, tuple[Question, Mapping[str, Any]]] = {}  # the newest of each token, to be written
        self._known: set[str] = set()  # tokens of questions that have been read
        self._lock, self._due, self._has_ended = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="watchdog's questions", daemon=True)

    def start(self) -> None:
        """Look for questions until `close`."""
        self._thread.start()

    @property
    def is_waiting(self) -> bool:
        """Whether `hpctrain where` has asked."""
        return bool(self._where)

    @property
    def has_request(self) -> bool:
        """Whether there is a request that the ranks may take."""
        return bool(self._requests)

    def take(self) -> Question | None:
        """The oldest request, which is the ranks' from now on."""
        with self._lock:
            token = next(iter(self._requests), "")
            return self._requests.pop(token, None)

    def tell(self, question: Question, answer: Mapping[str, Any]) -> None:
        """Give an answer, if somebody still waits for it."""
        with self._lock:
            self._answers[question.token] = question, answer
        self._due.set()

    def answer(self, lines: list[str]) -> None:
        """Answer `hpctrain where`."""
        with self._lock:
            self._answers |= {token: (question, {"lines": lines}) for token, question in self._where.items()}
            self._where.clear()
        self._due.set()

    def acknowledge(self, where: str) -> None:
        """Tell those who wait with a request that the job runs. where: rank 0's position in words."""
        answer = {"state": "waiting", "where": where}
        with self._lock:  # the answer of those who take a request meanwhile comes later
            self._answers |= {token: (question, answer) for token, question in self._requests.items()}

    def close(self, why: str) -> None:
        """Refuse all requests, which no rank will take; wait for the last answers."""
        while (question := self.take()) is not None:
            self.tell(question, {"state": "refused", "why": why})
        self._has_ended = True
        self._due.set()
        self._thread.join(_LAST)

    def _run(self) -> None:
        while not self._has_ended:
            self._due.wait(_LOOK)
            self._due.clear()
            with suppress(OSError):
                self._look()
            self._write()
        self._write()

    def _look(self) -> None:
        names = [match for name in os.listdir(self._directory) if (match := _QUESTION.fullmatch(name))]
        there = {match[2] for match in names}
        new = [question for match in names if match[2] not in self._known and (question := self._read(*match.groups()))]
        with self._lock:
            for question in new:
                (self._where if question.name == WHERE else self._requests)[question.token] = question
            for waiting in (self._where, self._requests):
                for token in waiting.keys() - there:
                    del waiting[token]
        self._known = there

    def _read(self, name: str, token: str) -> Question | None:
        try:
            values = json.loads(read_bytes(self._directory / Question(name, token).file) or b"{}")
        except (OSError, ValueError, RecursionError):
            return None
        return Question(name, token, values) if isinstance(values, dict) else None

    def _write(self) -> None:
        with self._lock:
            answers, self._answers = self._answers, {}
        for question, answer in answers.values():
            try:
                if (self._directory / question.file).exists():
                    with replacing(self._directory / question.answer) as file:
                        file.write(json.dumps(answer).encode())
            except OSError as error:
                LOG.info("a question of hpctrain %s could not be answered: %s", question.name, reason(error))
