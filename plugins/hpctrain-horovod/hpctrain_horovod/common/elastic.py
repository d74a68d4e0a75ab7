"""State that outlives lost workers, and the loop around a training function that goes back to it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from hpctrain_horovod.engine import runtime
from hpctrain_horovod.engine.errors import HorovodInternalError, HostsUpdatedInterrupt


class State:
    """The state that a training function changes and must not lose. Subclasses say how it is saved, restored and synchronized."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """bcast_object: gives all workers rank 0's object. get_rank: this worker's rank."""
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call after the workers have changed, to scale the learning rate, say."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """The workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in memory, and let waiting workers in. Raises HostsUpdatedInterrupt for `run`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all workers if others wait to take part."""
        world = runtime.working().world
        if self._bcast_object(world.rank == 0 and world.has_updates()):
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Remember the present state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the workers have changed, before the callbacks."""


class ObjectState(State):
    """Plain Python values, as attributes: `ObjectState(..., epoch=0, batch=0)`."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **values: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = values
        self._names = list(values)
        self._take(values)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        self._take(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self._names:
            self._saved = self._bcast_object({name: getattr(self, name) for name in self._names})
            self._take(copy.deepcopy(self._saved))

    def _take(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func(state, ...)`, begun again from the last commit when a worker is lost, and from where it was when others join.

    reset: meets the new set of workers.
    """

    @functools.wraps(func)
    def wrapper(state: State, *arguments: Any, **options: Any) -> Any:
        synchronizes = True
        while True:
            try:
                if synchronizes:
                    state.sync()
                    runtime.working().world.has_synchronized()
                return func(state, *arguments, **options)
            except HorovodInternalError:
                if runtime.is_running() and runtime.known().has_lost_ranks():
                    raise  # nobody comes in their place
                state.restore()
                synchronizes = True
            except HostsUpdatedInterrupt as interrupt:
                synchronizes = not interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper
