"""Gives each rank cores of its own on its node, where the launcher has bound none: an even part of those that all may use."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from hpctrain.base.errors import spans
from hpctrain.ranks.meeting import World

LOG = logging.getLogger("hpctrain")

CpuBind = Literal["auto", "none"]

_SYSTEM = Path("/sys/devices/system/cpu")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Binding(NamedTuple):
    """The CPUs of this rank, its threads for computing, and what was done, as a sentence for people."""

    cpus: Sequence[int]
    threads: int
    sentence: str = ""
    by_hpctrain: bool = False


@contextmanager
def bound(world: World, bind: CpuBind) -> Iterator[Binding]:
    """This rank on cores of its own, with a thread for each. Collective. Afterwards the rank has the CPUs that it had before.

    bind: "none" only shares out the threads.
    """
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    binding = _agree(world, bind, mask)
    torch.set_num_threads(binding.threads)
    if binding.sentence:
        LOG.info("cores: %s; threads: %d", binding.sentence, binding.threads)
    try:
        yield binding
    finally:
        if binding.by_hpctrain:
            _move(mask)


def _agree(world: World, bind: CpuBind, mask: Sequence[int]) -> Binding:
    """The binding of a rank that may use the CPUs `mask`, after comparing them with those of the other ranks of its machine."""
    cores = topology(mask)
    world.tell("cores", [machine_id(world.identity.node), spans(mask)])
    ranks, alike, place = world.deal("cores/dealt", lambda: places(world.collect("cores")))
    if ranks == 1:
        return Binding(mask, _threads(len(cores)))
    if alike < ranks:  # some may use other CPUs: a launcher has dealt them out
        return Binding(mask, _threads(len(cores) // alike), f"CPU {spans(mask)}, bound by the launcher")
    if bind == "auto" and len(cores) >= ranks:
        own = cores[len(cores) * place // ranks : len(cores) * (place + 1) // ranks]  # neighbours, by NUMA node
        cpus = [cpu for core in own for cpu in core]
        with suppress(OSError):  # a container may forbid it
            _move(cpus)
            return Binding(cpus, _threads(len(own)), f"CPU {spans(cpus)}, bound by hpctrain", by_hpctrain=True)
    # a share of the threads, else each rank would start one for every core
    return Binding(mask, _threads(len(cores) // ranks), f"CPU {spans(mask)}, shared by {ranks} ranks, not bound")


def places(reports: Sequence[Sequence[str]]) -> list[tuple[int, int, int]]:
    """The number of ranks on each rank's machine, of those that may use the same CPUs, and its place among these.

    reports: each rank's machine and CPUs.
    """
    of_machine, alike = Counter(machine for machine, _ in reports), Counter(map(tuple, reports))
    next_place = {report: itertools.count() for report in alike}
    return [(of_machine[report[0]], alike[report], next(next_place[report])) for report in map(tuple, reports)]


def topology(cpus: Iterable[int], system: Path = _SYSTEM) -> list[list[int]]:
    """The physical cores, by NUMA node, each with its CPUs among `cpus`. A CPU of which the system tells nothing is one."""
    of_core: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(cpus):
        files, siblings = system / f"cpu{cpu}", f"alone {cpu}"
        numa = next((int(path.name[4:]) for path in files.glob("node[0-9]*")), 0)
        with suppress(OSError):
            siblings = (files / "topology" / "thread_siblings_list").read_text()
        of_core.setdefault((numa, siblings), []).append(cpu)
    return [core for _, core in sorted((numa, core) for (numa, _), core in of_core.items())]


def machine_id(node: str) -> str:
    """A name for this machine: its start, or `node`, the host's name. Containers with names of their own may share a machine."""
    return _BOOT.read_text().strip() if _BOOT.exists() else node


def _threads(cores: int) -> int:
    """OMP_NUM_THREADS if it is a number, else one for each core of this rank's."""
    given = os.environ.get("OMP_NUM_THREADS", "")  # not torch's number: it may have been set after torch, or be empty
    return int(given) if given.isdigit() and int(given) > 0 else max(1, cores)


def _move(cpus: Sequence[int]) -> None:
    """Bind every thread of this process: NumPy, MPI and the store have started some; later ones inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)
