"""The ranks meet in a store, agree on the job and on their plugins, and set up torch.distributed."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpctrain.base.devices import use_device
from hpctrain.base.errors import EnvironmentUnfitError, HpctrainError
from hpctrain.base.torch_groups import HashStore
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.base.store.client import GuardedStore

LOG = logging.getLogger("hpctrain")

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long the ranks wait for each other before the job's own timeout is known."""


class PeerError(HpctrainError):
    """Another rank prints the error; this rank exits with the same code and prints nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank reports the error")
        self.exit_code = exit_code


@dataclass(frozen=True)
class World:
    """The ranks that have met, and their store."""

    identity: Identity
    store: Store
    channel: RankChannel
    guarded: GuardedStore | None = None
    """The store, if the ranks are several processes."""

    def close(self) -> None:
        """Leave the store; on rank 0 this stops it."""
        if self.guarded is not None:
            from hpctrain.ranks.restricted_pickle import allow_objects

            allow_objects()
            self.guarded.close()

    def share(self, key: str, make: Callable[[], Any]) -> Any:
        """Rank 0's JSON value, on every rank. An error of rank 0 is raised there, and PeerError elsewhere."""
        return self._from_rank_0([key], lambda: [make()], key)

    def deal(self, key: str, make: Callable[[], Sequence[Any]]) -> Any:
        """This rank's JSON value of those that rank 0 makes, one for each rank. Errors as `share`."""
        keys = [f"{key}/{rank}" for rank in range(self.identity.size)]
        return self._from_rank_0(keys, make, keys[self.identity.rank])

    def tell(self, key: str, value: Any) -> None:
        """Put this rank's JSON `value` into the store for rank 0 to collect."""
        self.store.set(f"{key}/{self.identity.rank}", json.dumps(value))

    def collect(self, key: str) -> list[Any]:
        """Every rank's `value`. EnvironmentUnfitError names the ranks that did not send theirs in time."""
        keys = [f"{key}/{rank}" for rank in range(self.identity.size)]
        self._await(keys, range(self.identity.size), MEETING_TIMEOUT)
        return [json.loads(self.store.get(key)) for key in keys]

    def _from_rank_0(self, keys: Sequence[str], make: Callable[[], Sequence[Any]], mine: str) -> Any:
        """The value of the key `mine` among those that rank 0 makes for all keys."""
        if self.identity.rank == 0:
            try:
                values = make()
            except HpctrainError as error:
                for key in keys:
                    self.store.set(key, json.dumps({"exit_code": error.exit_code}))
                raise
            for key, value in zip(keys, values, strict=True):
                self.store.set(key, json.dumps({"value": value}, default=str))
            return values[0]
        self._await([mine], [0], 2 * MEETING_TIMEOUT)  # rank 0 may itself have waited for a rank
        answer = json.loads(self.store.get(mine))
        if "exit_code" in answer:
            raise PeerError(answer["exit_code"])
        return answer["value"]

    def _await(self, keys: Sequence[str], ranks: Sequence[int], limit: timedelta) -> None:
        """Wait until each of the ranks has set its key. EnvironmentUnfitError names those that have not in time."""
        if self.guarded is None:  # a rank alone waits for nobody
            return
        from hpctrain.ranks.meeting_place import await_ranks

        await_ranks(self.store, self.identity, keys, ranks, limit)


def meet(identity: Identity, channel: RankChannel, timeout: timedelta = MEETING_TIMEOUT) -> World:
    """Find the other ranks. EnvironmentUnfitError if they do not come within `timeout`."""
    if identity.source == "alone":
        return World(identity, PrefixStore("hpctrain", HashStore()), channel)
    if identity.source == "mpi":
        from hpctrain.mpi.rendezvous import open_over_mpi

        try:
            store = open_over_mpi(timeout)
        except EnvironmentUnfitError as error:  # of all ranks
            raise PeerError(error.exit_code) if identity.rank else error from None
    else:
        from hpctrain.ranks.meeting_place import meeting_place, open_or_join

        store = open_or_join(meeting_place(identity), identity, timeout)
    return World(identity, PrefixStore("hpctrain", store), channel, store)


def compare_ranks(world: World, plugins: list[str], error: HpctrainError | None) -> None:
    """Raise the same error on all ranks: rank 0's own, or one that lists the differences between ranks by rank and node."""
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
        nodes = [report["node"] for report in reports]
        if len([*groupby(nodes)]) > len({*nodes}):
            LOG.warning(
                "ranks        rank 0 is on %s, rank 1 on %s, and so on in turn: neighbours in the mesh talk over the network; let "
                "the launcher number ranks node by node (srun --distribution=block, mpirun --map-by slot)", *nodes[:2],
            )  # fmt: skip

    world.share("verdict", verdict)


def _differences(reports: list[dict[str, Any]]) -> list[str]:
    """A line for each difference from rank 0, with rank and node."""
    first, lines = reports[0], []
    for rank, report in enumerate(reports[1:], start=1):
        where = f"rank {rank} on {report['node']}"
        if report["error"] is not None:
            lines.append(f"{where}: {report['error']}")
        # a rank that failed to check the job has no list of plugins
        for kind in ("software", "plugins") if report["error"] is None else ("software",):
            extra = [item for item in report[kind] if item not in first[kind]]
            missing = [item for item in first[kind] if item not in report[kind]]
            if extra or missing:
                found, expected = ", ".join(extra) or "nothing", ", ".join(missing) or "nothing"
                lines.append(f"{where}: {kind}: found {found}; rank 0 on {first['node']} has {expected}")
    return lines


def take_device(world: World, communicator: Communicator, accelerator: int | None = None) -> torch.device:
    """The device that this rank computes on from now on. accelerator: the index of the one that rank 0 has dealt to it."""
    device = communicator.device(replace(world.identity, accelerator=accelerator))
    use_device(device)
    return device


def start_communication(world: World, communicator: Communicator, seconds: float) -> None:
    """Set up torch.distributed over `communicator`."""
    if world.guarded is not None:
        from hpctrain.ranks.restricted_pickle import restrict_objects  # a rank alone gets no pickles

        restrict_objects()
        # NCCL's threads ask this store for news of a failure, by default each rank once a second: rank 0 answers in Python
        os.environ.setdefault("TORCH_NCCL_COORD_CHECK_MILSEC", "60000")
    dist.init_process_group(
        communicator.backend(),
        store=PrefixStore("group", world.store),
        rank=world.identity.rank,
        world_size=world.identity.size,
        timeout=timedelta(seconds=seconds),
        pg_options=communicator.backend_options(),
    )
