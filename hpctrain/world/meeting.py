"""The ranks meet in a store, agree on the job and on their plugins, and set up torch.distributed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plan import Machine
from hpctrain.devices import use_device
from hpctrain.errors import EnvironmentUnfitError, HpctrainError
from hpctrain.store.client import GuardedStore
from hpctrain.store.server import warn_of_stranger
from hpctrain.torch_private import HashStore
from hpctrain.version import __version__
from hpctrain.world.launcher_channel import LauncherChannel
from hpctrain.world.meeting_place import meeting_place, not_met, open_or_join
from hpctrain.world.objects import restrict_objects

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long the ranks wait for each other before the job's own timeout is known."""


class PeerError(HpctrainError):
    """Another rank has printed the error; this one leaves with the same code and prints nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank reports the error", everywhere=True)
        self.exit_code = exit_code


@dataclass(frozen=True)
class World:
    """The ranks that have met, and the store that they met in."""

    identity: Identity
    store: Store
    channel: LauncherChannel
    strangers: list[str] = field(default_factory=list)
    """Rank 0's sentences about refused connections."""
    close: Callable[[], None] = lambda: None
    """Leave the store; on rank 0 it ends."""

    def share(self, key: str, make: Callable[[], Any]) -> Any:
        """Rank 0's JSON value, on every rank. An error of rank 0 is raised there, and PeerError elsewhere."""
        if self.identity.rank == 0:
            try:
                value = make()
            except HpctrainError as error:
                self.store.set(key, json.dumps({"exit_code": error.exit_code}))
                error.everywhere = True
                raise
            self.store.set(key, json.dumps({"value": value}, default=str))
            return value
        answer = self._answer(key)
        if "exit_code" in answer:
            raise PeerError(answer["exit_code"])
        return answer["value"]

    def tell(self, key: str, value: Any) -> None:
        """Put this rank's JSON `value` into the store for rank 0 to collect."""
        self.store.set(f"{key}/{self.identity.rank}", json.dumps(value))

    def collect(self, key: str) -> list[Any]:
        """Every rank's `value`; EnvironmentUnfitError names the ranks that have not told theirs in time."""
        keys = [f"{key}/{rank}" for rank in range(self.identity.size)]
        try:
            self.store.wait(keys, MEETING_TIMEOUT)
        except RuntimeError:
            missing = [str(rank) for rank, of_rank in enumerate(keys) if not self.store.check([of_rank])]
            raise not_met(self.identity, ", ".join(missing), MEETING_TIMEOUT) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def _answer(self, key: str) -> Any:
        """Rank 0's value. Rank 0 may itself have waited for a rank, hence twice the time."""
        try:
            self.store.wait([key], 2 * MEETING_TIMEOUT)
        except RuntimeError:
            raise not_met(self.identity, "0", 2 * MEETING_TIMEOUT) from None
        return json.loads(self.store.get(key))


def meet(identity: Identity, channel: LauncherChannel) -> World:
    """Find the other ranks."""
    strangers: list[str] = []

    def tell(sentence: str) -> None:
        strangers.append(sentence)
        warn_of_stranger(sentence)

    store: GuardedStore | HashStore
    if identity.source == "mpi":
        from hpctrain.mpi.rendezvous import open_over_mpi

        store = open_over_mpi(MEETING_TIMEOUT, tell)
    elif identity.source == "alone":
        store = HashStore()
    else:
        store = open_or_join(meeting_place(identity), identity, MEETING_TIMEOUT, tell)
    close = store.close if isinstance(store, GuardedStore) else lambda: None
    return World(identity, PrefixStore("hpctrain", store), channel, strangers, close)


def compare_ranks(world: World, plugins: list[str], error: HpctrainError | None) -> None:
    """Raise the same verdict on all ranks: rank 0's own error, or a difference between ranks by rank and node."""
    mine = {
        "node": world.identity.node,
        "error": None if error is None else str(error),
        "software": [f"hpctrain {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"],
        "plugins": plugins,
    }
    world.tell("report", mine)

    def verdict() -> None:
        if error is not None:
            raise error
        reports = world.collect("report")
        differences = _differences(reports)
        if differences:
            raise EnvironmentUnfitError("the ranks do not agree; make all nodes alike:\n  " + "\n  ".join(differences))

    world.share("verdict", verdict)


def _differences(reports: list[dict[str, Any]]) -> list[str]:
    """A line for each rank that differs from rank 0, by node and by what differs."""
    first, lines = reports[0], []
    for rank, report in enumerate(reports[1:], start=1):
        where = f"rank {rank} on {report['node']}"
        if report["error"] is not None:
            lines.append(f"{where}: {report['error']}")
        # a rank that could not check the job cannot say which plugins it would have
        for kind in ("software", "plugins") if report["error"] is None else ("software",):
            extra = [item for item in report[kind] if item not in first[kind]]
            missing = [item for item in first[kind] if item not in report[kind]]
            if extra or missing:
                found, expected = ", ".join(extra) or "nothing", ", ".join(missing) or "nothing"
                lines.append(f"{where}: {kind}: found {found}; rank 0 on {first['node']} has {expected}")
    return lines


def start_communication(world: World, communicator: Communicator, seconds: float) -> torch.device:
    """Set up torch.distributed over `communicator`, and this rank's device and threads."""
    why = communicator.missing(Machine(world.identity))
    if why is not None:
        raise EnvironmentUnfitError(f"[communicator] name = {communicator.name!r}: {why}")
    device = communicator.device(world.identity)
    use_device(device)
    torch.set_num_threads(threads_per_rank(world.identity))
    restrict_objects()
    dist.init_process_group(
        communicator.backend(),
        store=PrefixStore("group", world.store),
        rank=world.identity.rank,
        world_size=world.identity.size,
        timeout=timedelta(seconds=seconds),
        pg_options=communicator.backend_options(),
    )
    return device


def mpi_backend() -> str:
    """The name of torch.distributed's backend over MPI, registered; for communicators that use it.

    Its options are MPISettings.
    """
    import hpctrain.mpi

    return hpctrain.mpi.BACKEND


def gloo_backend() -> str:
    """The name of torch.distributed's backend over gloo whose groups are proved by the ranks, registered."""
    from hpctrain.store.gloo import BACKEND

    return BACKEND


def gloo_transport() -> str | None:
    """The transport of this process's gloo groups, "" for the default; None before the first, until which it may be set."""
    from hpctrain.store.gloo import transport_in_use

    return transport_in_use()


def threads_per_rank(identity: Identity) -> int:
    """OMP_NUM_THREADS where it is set, else an equal share of the cores that this rank may run on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // identity.local_size)
