"""The history of the operations in the format of Chrome's trace viewer, written by rank 0 as it goes.

The viewer needs no end of the file: a job that is killed leaves all operations that have run.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from hpctrain_horovod.engine.negotiation import Agreed
from hpctrain_horovod.engine.request import Key, title
from hpctrain_horovod.engine.submission import Submission


class Timeline:
    """Two rows of time for each operation's name: its negotiation, and its run. Thread-safe; does nothing until it starts."""

    def __init__(self, of_cpu: str) -> None:
        """of_cpu: the name of what moves the CPU's tensors, such as "MPI"."""
        self._of_cpu = of_cpu
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._marks = False
        self._begin = 0.0
        self._numbers: dict[str, int] = {}

    def start(self, path: str | Path, marks: bool) -> None:
        """Write to `path` from now on. marks: also the moments at which ranks agreed. Raises OSError."""
        with self._lock:
            self._close()
            self._file = open(path, "w")  # noqa: SIM115 - closed by stop
            self._file.write("[\n")
            self._marks, self._begin = marks, time.monotonic()
            self._numbers = {}
            # the moment of `ts` 0, with which files of several jobs can be laid side by side
            moment = {"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0}
            self._write(moment | {"args": {"value": int(time.time() * 1e6)}})
            self._file.flush()

    def stop(self) -> None:
        """Finish the file."""
        with self._lock:
            self._close()

    def mark_cycle(self) -> None:
        """The ranks have agreed on operations."""
        if self._file is not None and self._marks:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0, "ts": self._since(time.monotonic())})

    def record(self, batch: Sequence[Agreed], mine: Sequence[Submission | None], begin: float) -> None:
        """A batch has run, from `begin` (time.monotonic()) until now. mine: this rank's submissions, None where it has joined."""
        if self._file is None:
            return
        end = time.monotonic()
        with self._lock:
            for one, submission in zip(batch, mine, strict=True):
                kind = one.request.kind.upper()
                if submission is not None:
                    self._span(one.key, f"NEGOTIATE_{kind}", max(submission.submitted, self._begin), begin)
                self._span(one.key, kind, begin, end)
                self._span(one.key, f"{self._transport(one.request.device)}_{kind}", begin, end)
            self._flush()

    def _transport(self, device: str) -> str:
        """The name of what moves the data, in capitals as the original writes it."""
        return self._of_cpu if device == "cpu" else dist.Backend.default_device_backend_map[device].upper()

    def _span(self, key: Key, name: str, begin: float, end: float) -> None:
        event = {"name": name, "ph": "X", "pid": self._number(title(key)), "ts": self._since(begin)}
        self._write(event | {"dur": max(0, self._since(end) - self._since(begin))})

    def _number(self, name: str) -> int:
        """The trace viewer's number for an operation's name."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
        return number

    def _since(self, moment: float) -> int:
        return int((moment - self._begin) * 1e6)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event) + ",\n")

    def _flush(self) -> None:
        """Give all events to the system. Where that fails, the timeline ends and training goes on."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            print(
                f"hpctrain_horovod: the timeline {file.name} ends here: {error.strerror}", file=sys.stderr, flush=True
            )
            with suppress(OSError):
                file.close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.write("{}]\n")
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None
