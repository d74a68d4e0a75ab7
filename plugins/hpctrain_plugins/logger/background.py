"""Rows for a tracking service, sent from a thread: a server that does not answer must not hold up the training."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hpctrain.api import LogWriter

FINISH_SECONDS = 20.0
"""How long the end of a run waits for the service: Slurm kills a job half a minute after its time limit."""
# rows to send at once
_MOST_ROWS = 50


class Run(ABC):
    """A run of a tracking service. All calls come from one thread."""

    @abstractmethod
    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some rows, in their order."""

    def refill(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some rows from before the step after which the run goes on: send those that the service lacks."""
        self.send(rows)

    @abstractmethod
    def finish(self) -> None:
        """Write what is left: there are no more rows."""


class Sender(LogWriter):
    """Opens a run and sends it rows. What fails there is raised by the next call here, which drops the logger."""

    def __init__(self, start: Callable[[], Run], name: str, kept: Iterator[Mapping[str, Any]]) -> None:
        """kept: the rows from before."""
        self._start, self._name, self._kept = start, name, kept
        self._rows: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._rows.put(dict(row))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join(FINISH_SECONDS + 5)  # services have a limit of their own
        if self._thread.is_alive():
            raise TimeoutError(f"the last rows were not taken within {FINISH_SECONDS + 5:g} s; metrics.jsonl has them")
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            run = self._start()
            while before := list(islice(self._kept, _MOST_ROWS)):
                run.refill(before)
            while rows := self._waiting():
                run.send(rows)
            run.finish()
        except Exception as error:
            self._error = error

    def _waiting(self) -> list[Mapping[str, Any]]:
        """The next rows, at least one; none at the end."""
        rows: list[Mapping[str, Any]] = []
        row = self._rows.get()
        while row is not None:
            rows.append(row)
            if len(rows) == _MOST_ROWS or self._rows.empty():
                return rows
            row = self._rows.get()
        if rows:
            self._rows.put(None)  # for the next call
        return rows
