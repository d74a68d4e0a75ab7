"""Writes rows to metrics.csv and evaluations.csv, which spreadsheets, pandas and csv.DictReader read while the run goes on."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.api import Logger, LogWriter, hookimpl, open_regular, reading, replacing
from hpctrain_plugins.logger.rows import flat, is_evaluation, kept_rows


class CSV(Logger):
    """output_dir/metrics.csv with the steps, output_dir/evaluations.csv with the evaluations."""

    name = "csv"

    def open(self, output_dir: Path, resumed_step: int) -> Tables:
        return Tables(output_dir, resumed_step)


class Tables(LogWriter):
    """Steps and evaluations have different columns, hence two files."""

    def __init__(self, output_dir: Path, resumed_step: int) -> None:
        self._steps, self._evaluations = (
            _Table(
                output_dir / name,
                resumed_step,
                (_fields(row) for row in kept_rows(output_dir, resumed_step) if is_evaluation(row) is measures),
            )
            for name, measures in (("metrics.csv", False), ("evaluations.csv", True))
        )

    def log(self, row: Mapping[str, Any]) -> None:
        (self._evaluations if is_evaluation(row) else self._steps).add(_fields(row))


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(row) if not isinstance(value, list)}  # a histogram's counts fit no field


class _Table:
    """A CSV file that grows by rows, and now and then by a column."""

    def __init__(self, path: Path, resumed_step: int, kept: Iterable[Mapping[str, Any]]) -> None:
        """Drops the rows after `resumed_step`: their steps run again. kept: all before, of which the file may lack some."""
        self._path = path
        self._columns: list[str] = []
        if resumed_step:
            self._columns, found = _content(path)
            by_step: dict[int, Mapping[str, Any]] = {int(row["step"]): row for row in found}
            lacking = {row["step"]: row for row in kept if row["step"] not in by_step}
            self._columns += list(
                dict.fromkeys(key for row in lacking.values() for key in row if key not in self._columns)
            )
            rows = [row for step, row in sorted((by_step | lacking).items()) if step <= resumed_step]
        if self._columns:
            self._rewrite(rows)
        else:
            path.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append `row` at once, so that readers who follow the file see it. A new key becomes the last column."""
        new = [key for key in row if key not in self._columns]
        if new:
            rows = _content(self._path)[1]
            self._columns += new
            self._rewrite(rows)
        line = _lines(self._columns, [row])
        fd = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        with open(fd, "ab") as file:
            file.write(line)

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with replacing(self._path) as file:
            file.write(_lines(self._columns, [dict(zip(self._columns, self._columns, strict=True)), *rows]))


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A missing value is an empty field."""
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _content(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the complete rows; a line that a crash has cut short is dropped."""
    if not os.path.lexists(path):
        return [], []
    with reading(path) as fd, open(fd, encoding="utf-8", errors="replace", newline="", closefd=False) as file:
        reader = csv.reader(_complete(file))
        columns = next(reader, [])
        rows = [dict(zip(columns, fields, strict=True)) for fields in reader if len(fields) == len(columns)]
    return (columns, [row for row in rows if row.get("step", "").isdecimal()]) if "step" in columns else ([], [])


def _complete(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if line.endswith("\n"))


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [CSV]
