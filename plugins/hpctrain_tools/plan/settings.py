"""Settings of a job that `hpctrain plan --fit` tries: layouts, strategies of sharding, activation checkpointing, micro batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from hpctrain.checking.check import CheckedJob
from hpctrain.job.raw import RawJob, merge
from hpctrain.registry.registry import build_registry

_MODES = "none", "selective", "full"
_LARGEST_AXIS = 64


@dataclass(frozen=True)
class Settings:
    """The keys that a try sets. axes: sizes in [parallelism] by name. offload: the optimizer's state is in the host's memory."""

    axes: Mapping[str, int]
    stage: int
    checkpointing: str
    micro_size: int
    offload: bool = False

    def tables(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a job file that makes these settings on top of the job `base`."""
        sharding: dict[str, Any] = {"stage": self.stage}
        if "name" in base.get("sharding", {}):
            sharding = {"name": f"zero-{self.stage}"}
        if self.offload or base.get("sharding", {}).get("offload_optimizer"):
            sharding["offload_optimizer"] = self.offload
        made: dict[str, Any] = {
            "sharding": sharding,
            "activation_checkpointing": {"mode": self.checkpointing},
            "batch": {"micro_size": self.micro_size},
        }
        given = base.get("parallelism", {})
        axes = {
            name: {"size": size} if isinstance(given.get(name), Mapping) else size
            for name, size in self.axes.items()
            if size > 1 or name in given
        }
        return {**made, "parallelism": axes} if axes else made

    def on(self, raw: RawJob) -> RawJob:
        """The job with these settings."""
        return replace(raw, tables=merge(raw.tables, self.tables(raw.tables)))

    def __str__(self) -> str:
        words = [f"{name} {size}" for name, size in self.axes.items() if size > 1]
        words += [f"stage {self.stage}", f"micro_size {self.micro_size}"]
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        return ", ".join([*words, "optimizer offloaded"] if self.offload else words)


@dataclass(frozen=True)
class Space:
    """The settings to try. layouts: sizes of axes, those first in which the fewest ranks share a model; long: layouts that also
    cut samples. modes: of activation checkpointing, the fastest first. samples: of a global batch."""

    layouts: list[dict[str, int]]
    long: list[dict[str, int]]
    modes: list[str]
    samples: int
    ranks: int

    @staticmethod
    def of(checked: CheckedJob, samples: int, ranks: int, per_node: int) -> Space:
        """Take the axes that are installed and those of the job, of each kind one. Axes that share a layer stay in a node."""
        parallelism, plugins = checked.parts.parallelism, checked.job.plugins
        registry = build_registry(plugins.load, plugins.block)  # the job's has only what it names
        installed = [one for one in registry.instances("parallelism") if not one.traits.has_own_parameters]
        names = {one.traits.ranks_have: one.name for one in reversed(installed)}
        names |= {one.traits.ranks_have: name for name, one in parallelism.items()}
        most = {"other parameters": ranks, "parts of samples": ranks, "the same samples": per_node}
        sizes = {name: _powers(most[kind]) for kind, name in names.items()}
        layouts = [dict(zip(sizes, chosen, strict=True)) for chosen in product(*sizes.values())]
        layouts = sorted((one for one in layouts if ranks % prod(one.values()) == 0), key=_order)
        cuts = names.get("parts of samples", "")
        short = [one for one in layouts if one.get(cuts, 1) == 1]
        modes = [mode for mode in _MODES if ("activation_checkpointing", mode) in registry.entries]
        return Space(short, [one for one in layouts if one not in short], modes, samples, ranks)

    def micro_sizes(self, axes: Mapping[str, int]) -> list[int]:
        """The sizes of micro batches that divide a rank's part of the global batch: powers of two, and all of it."""
        mine = self.samples * prod(axes.values()) // self.ranks
        return [size for size in _powers(mine, mine) if mine % size == 0] + ([mine] if mine & (mine - 1) else [])

    def stages(self, axes: Mapping[str, int]) -> list[int]:
        """The stages of sharding, the fastest first: stage 1 sends what stage 0 sends, and needs less memory."""
        return [1, 2, 3] if self.ranks > prod(axes.values()) else [0]


def _order(axes: Mapping[str, int]) -> tuple[int, list[int]]:
    return prod(axes.values()), list(axes.values())


def _powers(most: int, limit: int = _LARGEST_AXIS) -> list[int]:
    return [2**exponent for exponent in range(min(most, limit).bit_length())]
