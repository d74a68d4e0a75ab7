"""Analyses of the accelerators' traces with HolisticTraceAnalysis (HTA), an optional package."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.toolkit.commands import EnvironmentUnfitError, UsageError
from hpctrain_tools.profile.operators import is_of_device
from hpctrain_tools.profile.table import aligned
from hpctrain_tools.profile.traces import Events, StoredWindow

_STEP = "ProfilerStep"


class Report:
    """HTA's analyses of a window."""

    def __init__(self, window: StoredWindow) -> None:
        """Raises EnvironmentUnfitError without HTA, UsageError if no rank had an accelerator."""
        try:
            from hta.trace_analysis import TraceAnalysis
        except ImportError:
            raise EnvironmentUnfitError("HolisticTraceAnalysis is not installed; pip install 'hpctrain[hta]'") from None
        files = {one.rank: str(one.trace) for one in window.ranks if any(map(is_of_device, Events(one.trace)))}
        if not files:
            raise UsageError(
                f"{window.directory}: found no event of an accelerator, expected ranks that compute on one: HolisticTraceAnalysis "
                "has nothing to say of CPUs; `hpctrain profile show` and `merge` do"
            )
        self.window, self.ranks = window, [*files]
        self.failed: dict[str, str] = {}
        """Analyses in which HTA failed, with its reason."""
        with _quiet():
            analysis: Any = TraceAnalysis(files, str(window.directory), include_last_profiler_step=True)
            self.times = self._tried("times", lambda: _records(analysis.get_temporal_breakdown(visualize=False)))
            self.overlap = self._tried("overlap", lambda: _records(analysis.get_comm_comp_overlap(visualize=False)))
            self.idle = self._tried(
                "idle", lambda: _records(analysis.get_idle_time_breakdown(self.ranks, visualize=False)[0])
            )
            self.path = self._tried("critical path", lambda: [self._path(analysis, rank) for rank in self.ranks])

    def _tried(self, what: str, ask: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        try:
            return ask()
        except Exception as error:  # another package's code: the other analyses are of use without this one
            self.failed[what] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return []

    @staticmethod
    def _path(analysis: Any, rank: int) -> dict[str, Any]:
        """Shares in percent of the critical path of the first step."""
        graph, is_found = analysis.critical_path_analysis(rank, _STEP, 0)
        shares = graph.get_critical_path_breakdown().groupby("bound_by")["duration"].sum() if is_found else {}
        total = sum(shares) or 1.0
        return {
            "rank": rank,
            **{str(kind): round(100 * float(share) / total, 2) for kind, share in dict(shares).items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON, with HTA's own names."""
        return {
            "window": self.window.directory.name, "times": self.times, "overlap": self.overlap, "idle": self.idle,
            "critical_path": self.path, "failed": self.failed,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Tables."""
        lines = [
            *_table("Time of each accelerator", self.times),
            *_table("Communication behind computing, in percent", self.overlap),
            *_table("Causes of idle time, by stream", self.idle),
            *_table("Critical path of the first step, in percent", self.path),
        ]
        return lines + [f"{what}: HolisticTraceAnalysis failed: {why}" for what, why in self.failed.items()]


def _records(frame: Any) -> list[dict[str, Any]]:
    """The rows of a data frame, with Python's own numbers."""
    return [
        {str(key): value.item() if hasattr(value, "item") else value for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _table(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        keys = dict.fromkeys(key for row in rows for key in row)
        yield title
        yield from aligned([[*keys], *([str(row.get(key, "")) for key in keys] for row in rows)])
        yield ""


@contextmanager
def _quiet() -> Iterator[None]:
    """HTA tells of each file, and pandas of HTA."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
