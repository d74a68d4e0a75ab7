"""Gives each rank cores of its own on its node, where the launcher has not done so: an even part of those that all may use.

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


def _agree(world: World, device: torch.device, bind: CpuBind) -> Binding:
    """Ranks of a machine that may use the same cores get as many each, in one piece."""
    mask = _mask()
    cores = topology(mask)
    if world.identity.size == 1 or not mask:
        return Binding(mask, _threads(mask, cores, world.identity.local_size), "")
    name = binds_threads(os.environ)
    why_not = (f"{name} is set" if name else "") if bind == "auto" else '[job] cpu_bind is "none"'
    machine, home = machine_id(world.identity.node), numa_of(device)
    world.tell("cores", {"machine": machine, "mask": sorted(mask), "home": home, "why_not": why_not})
    mine = world.deal("cores/dealt", lambda: share_out(world.collect("cores")))
    if mine["sharing"] == 1:
        said = "bound by the launcher" if mine["ranks"] > 1 else ""
        return Binding(mask, _threads(mask, cores, 1), f"{_named(mask, cores)}, {said}" if said else "")
    why_not = mine["why_not"] or ("" if mine["sharing"] == mine["alike"] else "the launcher has bound ranks")
    if not mine["why_not"] and len(cores) < mine["alike"]:
        why_not = f"{mine['alike']} ranks on {len(cores)} core{'s' * (len(cores) > 1)}"
    if not why_not:
        own = part_of(cores, mine["place"], mine["alike"])
        try:
            _move(own)
        except OSError as error:  # a container may forbid it
            why_not = str(error.strerror)
        else:
            return Binding(own, _threads(own, cores, 1), f"{_named(own, cores)}, bound by hpctrain", by_hpctrain=True)
    said = f"shared by {mine['sharing']} ranks, not bound by hpctrain: {why_not}"
    return Binding(mask, _threads(mask, cores, mine["sharing"]), f"{_named(mask, cores)}, {said}")


def share_out(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An answer to each rank's report.

    ranks: those of the machine. sharing: how many of them, with this one, may use some of its CPUs. alike: how many may use the
    same ones, and place: this rank's among these, those near the first NUMA nodes' accelerators first.
    """
    machines: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        machines.setdefault(report["machine"], []).append(rank)
    answers = []
    for rank, mine in enumerate(reports):
        here = machines[mine["machine"]]
        alike = [other for other in here if reports[other]["mask"] == mine["mask"]]
        alike.sort(key=lambda other: (reports[other]["home"] is None, reports[other]["home"]))
        answers.append({
            "ranks": len(here), "alike": len(alike), "place": alike.index(rank),
            "sharing": sum(bool({*mine["mask"]} & {*reports[other]["mask"]}) for other in here),
            "why_not": next((reports[other]["why_not"] for other in here if reports[other]["why_not"]), ""),
        })  # fmt: skip
    return answers


def part_of(cores: Sequence[Core], place: int, parts: int) -> frozenset[int]:
    """The CPUs of an even part of `cores`, neighbours in the order of NUMA nodes."""
    whole = sorted(cores, key=lambda core: (core.numa, core.cpus))
    mine = whole[len(whole) * place // parts : len(whole) * (place + 1) // parts]
    return frozenset(cpu for core in mine for cpu in core.cpus)


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
