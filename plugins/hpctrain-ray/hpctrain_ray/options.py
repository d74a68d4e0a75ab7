"""The options of `[scheduler.ray]`, which `hpctrain submit`, `hpctrain_ray.run` and `python -m hpctrain_ray` share."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from pydantic import ValidationError, model_validator

from hpctrain.api import Field, Options, UsageError
from hpctrain.toolkit.scripts import Line
from hpctrain_ray.order import Bundle, Strategy

OF_CORE = ("nodes", "ranks_per_node", "cpus_per_rank", "time", "save_seconds")
"""Keys of [scheduler.NAME] that are hpctrain's own."""


_OF_RAY = ("CPU", "GPU", "memory", "object_store_memory")


class Worker(Options):
    """The resources of some ranks."""

    cpus: float = Field(default=1.0, ge=0, description="CPUs of each rank")
    gpus: float = Field(default=0.0, ge=0, description="GPUs of each rank; 0.5 leaves half of one to other actors")
    resources: dict[str, float] = Field(default={}, description="other resources of each rank, by Ray's names")
    count: int = Field(default=1, ge=1, description="ranks with these resources")

    @model_validator(mode="after")
    def _can_be_placed(self) -> Worker:
        for name, amount in {"gpus": self.gpus, "cpus": self.cpus, **self.resources}.items():
            if name in _OF_RAY or not (amount > 0 or name in ("gpus", "cpus")) or amount == inf:
                raise ValueError(
                    f"resources: found {name} = {amount:g}, expected a name of the cluster's own and more than 0"
                )
            if amount > 1 and amount != int(amount):
                raise ValueError(f"{name}: found {amount:g}, expected a part of one, or a whole number, as Ray has it")
        if not self.bundle.as_ray():
            raise ValueError("expected cpus, gpus or resources above 0: Ray places only what needs something")
        return self

    @property
    def bundle(self) -> Bundle:
        """The resources of one of these ranks."""
        return Bundle(self.cpus, self.gpus, self.resources)


class RayOptions(Options):
    """The place of the ranks, and what they need."""

    address: Line = Field(
        default="auto", description='the cluster: "auto" finds that of this node, or HOST:PORT of its head'
    )
    strategy: Strategy = Field(
        default="PACK", description="how ranks share nodes: PACK and SPREAD try, STRICT_PACK and STRICT_SPREAD insist"
    )
    cpus: float = Field(default=1.0, ge=0, description="CPUs of each rank")
    gpus: float = Field(default=0.0, ge=0, description="GPUs of each rank; 0.5 leaves half of one to other actors")
    resources: dict[str, float] = Field(default={}, description="other resources of each rank, by Ray's names")
    workers: list[Worker] = Field(
        default=[], description="ranks of different resources, in place of cpus, gpus and resources"
    )
    placement_limit: float = Field(default=300.0, gt=0, description="seconds until the cluster has room for the ranks")
    restarts: int = Field(
        default=3, ge=0, description="how often the ranks may start again after a loss or an error in training"
    )

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> RayOptions:
        if self.workers and self.model_fields_set & {"cpus", "gpus", "resources"}:
            raise ValueError("workers: expected either workers, or cpus, gpus and resources of all ranks")
        Worker(cpus=self.cpus, gpus=self.gpus, resources=self.resources)
        return self

    def bundles(self, ranks: int) -> list[Bundle]:
        """The resources of each rank. Raises UsageError if `workers` are not as many."""
        if not self.workers:
            return [Bundle(self.cpus, self.gpus, self.resources)] * ranks
        found = [one.bundle for one in self.workers for _ in range(one.count)]
        if len(found) != ranks:
            raise UsageError(f"[scheduler.ray] workers: found {len(found)}, expected one for each of {ranks} ranks")
        return found

    @property
    def count(self) -> int | None:
        """The ranks of `workers`; None without them."""
        return sum(one.count for one in self.workers) or None


def read_options(table: Mapping[str, Any]) -> RayOptions:
    """The options of a table [scheduler.ray]; those of the core are left out. Raises UsageError."""
    try:
        return RayOptions(**{key: value for key, value in table.items() if key not in OF_CORE})
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in error.errors()
        )
        raise UsageError(f"[scheduler.ray]: {wrong}; `hpctrain plugins show scheduler ray` lists the options") from None
