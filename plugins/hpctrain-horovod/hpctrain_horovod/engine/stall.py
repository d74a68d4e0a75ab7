"""Tells which ranks an operation waits for, when some have submitted it and others have not."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from hpctrain_horovod.engine.request import title
from hpctrain_horovod.engine.settings import EngineSettings
from hpctrain_horovod.engine.submission import Submission

_COLLECT = 2.5  # seconds in which all ranks publish what they wait for


class StallCheck:
    """A rank's look at a process set, about once a second; the set's first rank reports.

    Nothing is exchanged before an operation has waited for `settings.stall_warning` seconds. Then the ranks publish in the store
    what they wait for.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int, settings: EngineSettings) -> None:
        self._store, self._ranks, self._rank, self._settings = store, ranks, rank, settings
        self._published = False
        self._next_report: float | None = None

    def look(self, pending: Sequence[Submission]) -> str | None:
        """The reason to end all operations, if one has waited for longer than `stall_shutdown`."""
        warning, shutdown = self._settings.stall_warning, self._settings.stall_shutdown
        if not warning or len(self._ranks) == 1:
            return None
        now = time.monotonic()
        ages = {title(submission.key): now - submission.submitted for submission in pending}
        oldest = max(ages.values(), default=0.0)
        if oldest > warning:
            self._store.set("stalled", "")
        if oldest > warning or self._published or ((self._rank == 0 or ages) and self._store.check(["stalled"])):
            self._store.set(f"waiting/{self._rank}", json.dumps(ages))
            self._published = True
            if self._rank == 0:
                self._report(now)
        if shutdown and oldest > shutdown:
            name = max(ages, key=lambda name: ages[name])
            return f"Horovod has been shut down: {name} has stalled for more than {shutdown:g} s. {self._missing(name)}"
        return None

    def _report(self, now: float) -> None:
        if self._next_report is None:
            self._next_report = now + _COLLECT
        if now < self._next_report:
            return
        stalled = {
            name: ranks for name, ranks in self._waiting().items() if max(ranks.values()) > self._settings.stall_warning
        }
        if not stalled:
            return
        self._next_report = now + self._settings.stall_warning
        lines = [f"  {name}\n    {self._absent(list(ranks))}" for name, ranks in sorted(stalled.items())]
        print(
            f"hpctrain_horovod: stalled for more than {self._settings.stall_warning:g} s, because only some ranks have "
            "submitted these operations:\n" + "\n".join(lines),
            file=sys.stderr,
            flush=True,
        )

    def _waiting(self) -> dict[str, dict[int, float]]:
        """The ranks that have submitted each operation, and for how many seconds they wait."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for rank in range(len(self._ranks)):
            if self._store.check([f"waiting/{rank}"]):
                for name, age in json.loads(self._store.get(f"waiting/{rank}")).items():
                    found[name][rank] = age
        return found

    def _missing(self, name: str) -> str:
        return self._absent(list(self._waiting().get(name, {})))

    def _absent(self, waiting: Sequence[int]) -> str:
        absent = [rank for place, rank in enumerate(self._ranks) if place not in waiting]
        return f"Missing ranks: {', '.join(map(str, absent)) or 'none'}"
