"""The hook `ray-learner`: a rank that waits for its next batch tells the watchdog that it has not hung."""

from __future__ import annotations

from hpctrain.api import Hook, Membership, Options, hookimpl

WAITING = "waits for a batch"


class RayLearner(Hook):
    """Keeps a rank of hpctrain_ray.Training from counting as hung while it has nothing to do. `Training` adds it."""

    name = "ray-learner"
    Options = Options

    def start(self) -> _Waiting:
        return _Waiting()


class _Waiting:
    """The loop that this process is in; it is in one at a time."""

    current: Membership | None = None

    @hookimpl
    def hpctrain_job_start(self, membership: Membership) -> None:
        _Waiting.current = membership


def tell_waiting() -> None:
    """Tell the watchdog that this process's rank waits for a batch."""
    if _Waiting.current is not None:
        _Waiting.current.busy(WAITING)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [RayLearner]
