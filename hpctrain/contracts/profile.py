"""The slot `profile`: records what the ranks do."""

from __future__ import annotations

from hpctrain.contracts.life_cycle import Hook


class Profiler(Hook):
    """Records what ranks do, as the table `[profile]` says or when `hpctrain profile RUN_DIR --now` asks a running job.

    Every job starts its profiler, whose default options must record nothing: then `start()` returns an object that has
    `hpctrain_request` and costs a step nothing. What takes part in a window of steps joins for that time (`Membership`).
    """
