"""Merges the traces of a window into one for Perfetto and chrome://tracing: on rank 0's clock, in the order of time, with names
for the ranks. Memory stays bounded: the events are sorted in pieces on disk."""

from __future__ import annotations

import gzip
import heapq
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.toolkit.commands import UsageError, reason
from hpctrain_tools.profile.layout import MERGED
from hpctrain_tools.profile.traces import Events, StoredWindow, Traced, refuse_empty, told

# bytes of events that are sorted in memory at a time
_SORTED = 128 * 2**20
_LEVEL = 3
# nanoseconds: more than any event takes
_LONGEST = 10**15
# digits of a time in ns, and of the whole key by which events are sorted: the time, then the longer one first
_TIME, _KEY = 20, 36
# events that are packed at once
_TOGETHER = 4096


def write_merged(window: StoredWindow, path: Path | None) -> tuple[Path, int]:
    """Merge a window's traces into the file `path`, by default beside them; returns it and the number of events."""
    refuse_empty(window)
    target = path or window.directory / MERGED
    between = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(between, "xb") as file, told(window.directory):
            count = merge(window, file, target.parent)
        between.replace(target)
    except OSError as error:
        raise UsageError(f"{target} can't be written: {reason(error)}; -o takes another file") from None
    finally:
        with suppress(OSError):  # what hindered the writing may hinder this, too
            between.unlink()
    return target, count


def merge(window: StoredWindow, target: BinaryIO, scratch: Path) -> int:
    """Write the merged trace to `target`, as gzip; the number of events. scratch: a directory for as much as the traces have
    unpacked, in gzip's fastest form."""
    processes = _Processes()
    with ExitStack() as closing, gzip.GzipFile(fileobj=target, mode="wb", compresslevel=_LEVEL, mtime=0) as out:
        pieces = list(_sorted_pieces(_lines(window, processes), scratch, closing))
        lines = heapq.merge(*pieces)
        line = next(lines, b"")
        first, count = int(line[:_TIME] or 0), 0
        out.write(_head(window, first, processes))
        while line:
            written: list[bytes] = []
            while line and len(written) < _TOGETHER:
                after = int(line[:_TIME]) - first
                written.append(b',\n{"ts":%d.%03d,%b' % (after // 1000, after % 1000, line[_KEY + 1 : -1]))
                line = next(lines, b"")
            out.write(b"".join(written))
            count += len(written)
        out.write(b"\n]}\n")
    return count


def _lines(window: StoredWindow, processes: _Processes) -> Iterator[bytes]:
    """The events of all ranks, each as its key and JSON without its time."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    for of in window.ranks:
        events = Events(of.trace)
        for event in events:
            if event.get("ph") == "M":
                processes.note(of, event)
                continue
            if "ts" not in event:
                continue
            time = events.base_ns + round(event.pop("ts") * 1000) - of.offset_ns
            event["pid"] = processes.number(of, event.get("pid"))
            if "id" in event:  # arrows between events of a rank
                event["id"] = f"{of.rank}.{event['id']}"
            length = min(_LONGEST, round(event.get("dur", 0) * 1000))
            yield b"%020d%016d%b\n" % (time, _LONGEST - length, encode(event).encode())


def _sorted_pieces(lines: Iterable[bytes], scratch: Path, closing: ExitStack) -> Iterator[Iterable[bytes]]:
    """The lines in sorted pieces: the last one in memory, the others in files."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _SORTED:
            piece.sort()
            file = closing.enter_context(tempfile.TemporaryFile(dir=scratch))  # noqa: SIM115 - open until it is merged
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed:
                packed.write(b"".join(piece))
            file.seek(0)
            yield closing.enter_context(gzip.GzipFile(fileobj=file, mode="rb"))
            piece, size = [], 0
    piece.sort()
    yield piece


def _head(window: StoredWindow, first_ns: int, processes: _Processes) -> bytes:
    """The begin of the file, up to the first event of a time."""
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first_ns,
        "ranks": [
            {"rank": one.rank, "label": one.label, "clock_offset_ns": one.offset_ns, "clock_error_ns": one.error_ns}
            for one in window.ranks
        ],
    }
    named = ",\n".join(json.dumps(one, separators=(",", ":")) for one in processes.named())
    return f'{json.dumps(head)[:-1]}, "traceEvents":[\n{named}'.encode()


class _Processes:
    """The processes of the merged trace. Each rank has several: itself, its devices, and what the profiler tells of itself."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Any], int] = {}
        self._of: dict[int, tuple[Traced, Any]] = {}
        self._labels: dict[int, str] = {}
        self._threads: dict[tuple[int, Any, str], dict[str, Any]] = {}

    def number(self, of: Traced, pid: Any) -> int:
        """The number of a rank's process in the merged trace."""
        key = of.rank, pid
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers) + 1
            self._of[self._numbers[key]] = of, pid
        return self._numbers[key]

    def note(self, of: Traced, event: dict[str, Any]) -> None:
        """Take the names of threads, and the label of a process, such as "GPU 0"."""
        number, name, given = self.number(of, event.get("pid")), event.get("name"), event.get("args", {})
        if name == "process_labels":
            self._labels[number] = str(given.get("labels", ""))
        elif name in ("thread_name", "thread_sort_index"):
            told = {"ph": "M", "name": name, "pid": number, "tid": event.get("tid"), "args": given}
            self._threads[number, event.get("tid"), name] = told

    def named(self) -> Iterator[dict[str, Any]]:
        """The events that name processes and threads."""
        for place, number in enumerate(sorted(self._of, key=lambda one: (self._of[one][0].rank, self._order(one)))):
            of, pid = self._of[number]
            label = self._labels.get(number, "" if isinstance(pid, int) else str(pid) or "window")
            name = of.label if label == "CPU" else f"{of.label}: {label}"
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": place}}
        yield from self._threads.values()

    def _order(self, number: int) -> tuple[int, str]:
        label = self._labels.get(number, "")
        return (0 if label == "CPU" else 1 if label else 2), label
