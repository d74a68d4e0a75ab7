"""Load and power of this rank's accelerator, asked of the vendor's library in the background."""

from __future__ import annotations

import math
import threading
from statistics import fmean

import torch

from hpctrain.base.devices import device_load

_SECONDS = 1.0
"""Time between two questions, each of which takes milliseconds."""


class DeviceLoad:
    """Means since the last call of `take`. Without an accelerator, or the library that torch asks, there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._seen: list[tuple[float, float]] = []
        self._last = (math.nan, math.nan)
        self._thread: threading.Thread | None = None
        if device_load(device) is not None:
            self._thread = threading.Thread(target=self._ask, name="device load", daemon=True)
            self._thread.start()

    def take(self) -> list[float]:
        """The share of the time in which the accelerator computed, and watts; NaN for unknown ones."""
        with self._lock:
            seen, self._seen = self._seen, []
        if seen:
            self._last = fmean(one for one, _ in seen), fmean(one for _, one in seen)
        return list(self._last)

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _ask(self) -> None:
        while not self._closed.wait(_SECONDS):
            found = device_load(self._device)
            if found is None:
                return
            with self._lock:
                self._seen.append(found)
