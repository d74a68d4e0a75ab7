"""Newest values for a monitoring service, sent from a thread every few seconds. A service that is away may come back."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from hpctrain.api import LogWriter
from hpctrain_plugins.logger.background import FINISH_SECONDS
from hpctrain_plugins.logger.series import Series

LOG = logging.getLogger("hpctrain")


class Service(ABC):
    """A service that takes values. All calls come from one thread."""

    @abstractmethod
    def send(self) -> None:
        """Send the newest values. Raises an error if the service has not taken them."""

    def finish(self) -> None:
        """Let go of the service: nothing more is sent."""
        return


class Periodic(LogWriter):
    """Sends to a service at regular times and at the end. A failure is told once, and it is tried again."""

    def __init__(self, name: str, series: Series, service: Service, seconds: float) -> None:
        """seconds: the time between two sends."""
        self._name, self._series, self._service, self._seconds = name, series, service, seconds
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        self._series.take(row)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(FINISH_SECONDS + 5)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the last values were not taken within {FINISH_SECONDS + 5:g} s; metrics.jsonl has them"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while not self._ended.wait(self._seconds):
            self._send()
        self._send()
        try:
            self._service.finish()
        except Exception as error:
            self._error = self._error or error

    def _send(self) -> None:
        before, self._error = self._error, None
        try:
            self._service.send()
        except Exception as error:
            self._error = error
            if before is None and not self._ended.is_set():
                LOG.warning("logger %s: the values were not taken, and are sent again: %s", self._name, error)
