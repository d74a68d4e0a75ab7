"""Gives each rank cores of its own on its node, where the launcher has not done so: near its accelerator, within a NUMA node.

CPUs are the operating system's numbers. A core is a physical one; with simultaneous multithreading it has several CPUs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from hpctrain.base.devices import pci_address
from hpctrain.mpi.errors import spans
from hpctrain.ranks.meeting import World
from hpctrain.ranks.process import binds_threads

LOG = logging.getLogger("hpctrain")

CpuBind = Literal["auto", "none"]

_SYSTEM = Path("/sys/devices/system/cpu")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Core:
    """numa: the NUMA node that it belongs to."""

    numa: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """The CPUs of this rank, its threads for computing, and what was done, as a sentence for people."""

    cpus: frozenset[int]
    threads: int
    told: str
    by_hpctrain: bool = False


@contextmanager
def bound(world: World, device: torch.device, bind: CpuBind) -> Iterator[Binding]:
    """This rank on cores of its own, with a thread for each. Collective. Afterwards the rank has the CPUs that it had before.

    bind: "none" only shares out the threads.
    """
    before = _mask()
    binding = _agree(world, device, bind)
    torch.set_num_threads(binding.threads)
    if binding.told:
        LOG.info("cores: %s; threads: %d", binding.told, binding.threads)
    try:
        yield binding
    finally:
        if binding.by_hpctrain:
            _move(before)


def shares(masks: Sequence[Iterable[int]], homes: Sequence[int | None], cores: Sequence[Core]) -> list[set[int] | None]:
    """New CPUs for each rank of a machine, None for those that keep theirs.

    masks: the CPUs of each rank. homes: the NUMA node of each rank's accelerator, if known. cores: all of the machine.
    A rank whose mask is all that the ranks have together is not bound yet. If there are fewer cores than such ranks, none is bound.
    """
    of_ranks = [set(mask) for mask in masks]
    everything: set[int] = set().union(*of_ranks)
    unbound = [rank for rank, mask in enumerate(of_ranks) if mask == everything]
    taken: set[int] = set().union(*(mask for mask in of_ranks if mask != everything))
    free = sorted((core.numa, core.cpus) for core in cores if set(core.cpus) <= everything - taken)
    new: list[set[int] | None] = [None] * len(of_ranks)
    if len(of_ranks) == 1 or not unbound or len(free) < len(unbound):
        return new
    least, more = divmod(len(free), len(unbound))
    near_first = sorted(unbound, key=lambda rank: homes[rank] is None)  # the others take what is left
    for number, rank in enumerate(near_first):
        count = least + (number < more)
        numa = _nearest(free, homes[rank], count)
        picked = sorted(free, key=lambda core: core[0] != numa)[:count]
        free = [core for core in free if core not in picked]
        new[rank] = {cpu for _, cpus in picked for cpu in cpus}
    return new


def _nearest(free: Sequence[tuple[int, tuple[int, ...]]], home: int | None, count: int) -> int:
    """The NUMA node for a rank: its accelerator's, else the first that has enough cores, else the first."""
    nodes = [numa for numa, _ in free]
    if home in nodes:
        return home
    return next((numa for numa in nodes if nodes.count(numa) >= count), nodes[0])


def _agree(world: World, device: torch.device, bind: CpuBind) -> Binding:
    """Rank 0 shares out the cores of each machine, and each rank takes its own."""
    mask = _mask()
    cores = topology(mask)
    if world.identity.size == 1 or not mask:
        return _kept(mask, cores, world.identity.local_size, "")
    name = binds_threads(os.environ)
    mine = {
        "machine": machine_id(world.identity.node),
        "mask": sorted(mask),
        "home": numa_of(device),
        "cores": [[core.numa, core.cpus] for core in cores],
        "why_not": (f"{name} is set" if name else "") if bind == "auto" else '[job] cpu_bind is "none"',
    }
    world.tell("cores", mine)
    answer = world.deal("cores/dealt", lambda: _share_out(world.collect("cores")))
    if answer["cpus"] is None:
        return _kept(mask, cores, answer["sharing"], answer["said"])
    cpus = frozenset(answer["cpus"])
    try:
        _move(cpus)
    except OSError as error:  # a container may forbid it
        return _kept(mask, cores, answer["ranks"], f"not bound: {error.strerror}")
    return Binding(cpus, _threads(cpus, cores, 1), f"{_named(cpus, cores)}, bound by hpctrain", by_hpctrain=True)


def _share_out(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An answer to each rank's report.

    cpus: the new CPUs, or None. ranks: those of the machine. sharing: how many ranks, with this one, then have some of its CPUs.
    said: what to tell people about a rank that keeps its CPUs.
    """
    answers: list[dict[str, Any]] = [{} for _ in reports]
    for machine in dict.fromkeys(report["machine"] for report in reports):
        ranks = [rank for rank, report in enumerate(reports) if report["machine"] == machine]
        found = [reports[rank] for rank in ranks]
        cores = [Core(numa, cpus) for numa, cpus in {(n, tuple(c)) for report in found for n, c in report["cores"]}]
        why_not = next((report["why_not"] for report in found if report["why_not"]), "")
        new: Sequence[set[int] | None] = [None] * len(ranks)
        if not why_not:
            new = shares([report["mask"] for report in found], [report["home"] for report in found], cores)
        if not why_not and len(cores) < len(ranks):
            why_not = f"{len(ranks)} ranks on {len(cores)} core{'s' * (len(cores) > 1)}"
        masks = [set(report["mask"]) if cpus is None else cpus for report, cpus in zip(found, new, strict=True)]
        for rank, cpus, mask in zip(ranks, new, masks, strict=True):
            sharing = sum(bool(mask & other) for other in masks)
            shared = f"shared by {sharing} ranks, not bound by hpctrain: {why_not or 'the launcher has bound ranks'}"
            said = shared if sharing > 1 else "bound by the launcher" if len(ranks) > 1 else ""
            dealt = None if cpus is None else sorted(cpus)
            answers[rank] = {"cpus": dealt, "ranks": len(ranks), "sharing": sharing, "said": said}
    return answers


def _kept(mask: frozenset[int], cores: Sequence[Core], sharing: int, said: str) -> Binding:
    """said: "" for a rank that is alone."""
    return Binding(mask, _threads(mask, cores, sharing), f"{_named(mask, cores)}, {said}" if said else "")


def _threads(cpus: frozenset[int], cores: Sequence[Core], sharing: int) -> int:
    """OMP_NUM_THREADS if set, else one for each of this rank's cores, or of its share of them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    own = sum(bool(cpus.intersection(core.cpus)) for core in cores) or os.cpu_count() or 1
    return max(1, own // sharing)


def _named(cpus: Iterable[int], cores: Sequence[Core]) -> str:
    """ "CPUs 0-3 (NUMA node 0)" """
    cpus = frozenset(cpus)
    nodes = sorted({core.numa for core in cores if cpus.intersection(core.cpus)})
    return f"CPU{'s' * (len(cpus) > 1)} {spans(list(cpus))} (NUMA node{'s' * (len(nodes) > 1)} {spans(nodes)})"


def topology(cpus: Iterable[int], system: Path = _SYSTEM) -> list[Core]:
    """The cores that have any of `cpus`, with these. Where the system does not tell, each CPU is a core of NUMA node 0."""
    of_core: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(cpus):
        place = system / f"cpu{cpu}"
        numa = next((int(path.name[4:]) for path in place.glob("node[0-9]*")), 0)
        siblings = f"alone {cpu}"
        with suppress(OSError):
            siblings = (place / "topology" / "thread_siblings_list").read_text()
        of_core.setdefault((numa, siblings), []).append(cpu)
    return [Core(numa, tuple(found)) for (numa, _), found in of_core.items()]


def numa_of(device: torch.device) -> int | None:
    """The NUMA node that an accelerator is connected to; None if it has none or the system does not tell."""
    address = pci_address(device)
    with suppress(OSError, ValueError):
        numa = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text()) if address else -1
        return numa if numa >= 0 else None
    return None


def own_numa_node() -> int | None:
    """The NUMA node of this process's CPUs; None if they are in several."""
    nodes = {core.numa for core in topology(_mask())}
    return nodes.pop() if len(nodes) == 1 else None


def machine_id(node: str) -> str:
    """A name for this machine: its start, or `node`, the host's name. Containers with names of their own may share a machine."""
    return _BOOT.read_text().strip() if _BOOT.exists() else node


def _mask() -> frozenset[int]:
    """The CPUs that this process may use; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _move(cpus: frozenset[int]) -> None:
    """Bind every thread of this process: MPI and the store have started some; later ones inherit it."""
    os.sched_setaffinity(0, cpus)
    with suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cpus)
