"""Searches settings with which a job fits into memory, and is fast: plans of many settings, those of each layout in a process.

A try is a whole plan. The search leaves out what can't be better: settings that need more memory than some that do not fit, and
ones that are slower and save memory which is not needed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hpctrain.base.errors import HpctrainError, UsageError, reason
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob, merge
from hpctrain_tools.plan.job_plan import JobPlan, gigabytes
from hpctrain_tools.plan.plan import Hardware, plan_checked, planned_job
from hpctrain_tools.plan.rank_plan import OTHERS
from hpctrain_tools.plan.settings import Settings, Space

# the share of an accelerator's memory that is left to CUDA, NCCL and the like
_OF_LIBRARIES = 0.03
# how often the number of ranks is doubled at most, in search of one that fits
_DOUBLED = 10


@dataclass(frozen=True)
class Trial:
    """Settings and their plan, or why there is none."""

    settings: Settings
    plan: JobPlan | None
    why: str = ""

    @property
    def seconds(self) -> float:
        """The estimated time of a step."""
        assert self.plan is not None and self.plan.time is not None
        return self.plan.time.seconds

    @property
    def fits(self) -> bool:
        """Whether it is known to fit."""
        return self.plan is not None and bool(self.plan.fits)

    @property
    def lacks(self) -> float:
        """The bytes that a device has too few."""
        assert self.plan is not None and self.plan.memory is not None
        return self.plan.largest.most - self.plan.memory


def search(raw: RawJob, hardware: Hardware, tell: Callable[[Trial], None] = lambda _: None) -> list[Trial]:
    """Try settings of the job on the hardware, which has a machine; `tell` gets each trial as it ends. Raises UsageError for a job
    that can't be searched, and the errors of `hpctrain check`."""
    raw, hardware = _prepared(raw, hardware)
    checked = check(raw, None)
    samples = checked.job.batch.global_size
    if samples is None:
        raise UsageError(
            "--fit: [batch] tokens: found batches by a budget of tokens, expected global_size and micro_size"
        )
    space = Space.of(checked, samples, hardware.ranks, hardware.per_node)
    found: list[Trial] = []
    for layouts in (space.layouts, space.long):
        best = float("inf")
        for _, level in groupby(layouts, key=lambda axes: prod(axes.values())):
            new = list(_tried(list(level), space, raw, hardware, tell))
            found += new
            fastest = min((one.seconds for one in new if one.fits), default=float("inf"))
            if any(one.fits for one in new) and fastest >= best:
                break  # more ranks that share a model make it slower
            best = min(best, fastest)
        if best < float("inf"):
            break
    return found


def _prepared(raw: RawJob, hardware: Hardware) -> tuple[RawJob, Hardware]:
    if hardware.memory is not None and not hardware.on_cpu:
        hardware = replace(hardware, memory=hardware.memory * (1 - _OF_LIBRARIES))
    return planned_job(raw, hardware.machine), hardware


def remedies(raw: RawJob, hardware: Hardware, trials: list[Trial]) -> Iterator[str]:
    """Sentences about what to change where no trial fits, each of them planned."""
    planned = [one for one in trials if one.plan is not None]
    if not planned:
        return
    raw, hardware = _prepared(raw, hardware)
    nearest = min(planned, key=lambda one: one.lacks)
    assert nearest.plan is not None and hardware.memory is not None
    settings, largest, memory = nearest.settings, nearest.plan.largest, hardware.memory
    yield (
        f"nothing fits: what comes nearest needs {gigabytes(largest.most)} GB of the {gigabytes(memory)} GB of a device "
        f"({settings}). What to change:"
    )
    kept = largest.parameters + largest.gradients + largest.optimizer_state
    yield from _more_ranks(
        raw, hardware, replace(settings, stage=3, offload=False), kept / (memory + kept - largest.most)
    )
    tables = {"sharding": {"offload_parameters": True}} if settings.stage == 3 else {}
    tables |= {"activation_checkpointing": {"offload": True}} if settings.checkpointing == "full" else {}
    keys = " and ".join(f"[{name}] {key} = true" for name, table in tables.items() for key in table)
    trial = _try(replace(settings, offload=False), raw, hardware, tables) if keys and not hardware.on_cpu else nearest
    if trial.fits:
        yield f"  {keys}: {gigabytes(_most(trial))} GB, with these settings"
    samples = largest.at_peak[OTHERS] / settings.micro_size
    yield f"  shorter samples or a smaller model: activations and buffers of one sample take {gigabytes(samples)} GB at the peak"
    share = 1.0 if hardware.on_cpu else 1 - _OF_LIBRARIES
    yield f"  devices of {gigabytes(largest.most / share)} GB"


def _more_ranks(raw: RawJob, hardware: Hardware, settings: Settings, times: float) -> Iterator[str]:
    """The number of ranks on which the settings fit. times: as many as here, if all that is kept were shared out."""
    here = raw.tables["batch"]["global_size"]
    for doubled in range(max(1, math.ceil(math.log2(times))), _DOUBLED + 1) if times > 0 else ():
        ranks = hardware.ranks * 2**doubled
        samples = math.lcm(here, ranks // prod(settings.axes.values()) * settings.micro_size)
        trial = _try(settings, raw, replace(hardware, ranks=ranks), {"batch": {"global_size": samples}})
        if trial.fits:
            changed = f", and [batch] global_size = {samples}, which changes the training" if samples != here else ""
            yield f"  {ranks} ranks instead of {hardware.ranks}{changed}: {gigabytes(_most(trial))} GB, with {settings}"
            return


def shortlist(trials: list[Trial]) -> list[Trial]:
    """The trials that fit, the fastest first, each with less memory than all before it."""
    found: list[Trial] = []
    for one in sorted((one for one in trials if one.fits), key=lambda one: (one.seconds, _most(one))):
        if not found or _most(one) < _most(found[-1]):
            found.append(one)
    return found


def _most(trial: Trial) -> float:
    assert trial.plan is not None
    return trial.plan.largest.most


def _tried(
    layouts: list[dict[str, int]], space: Space, raw: RawJob, hardware: Hardware, tell: Callable[[Trial], None]
) -> Iterator[Trial]:
    """The trials of the layouts, as many at once as there are cores."""
    context, waiting = multiprocessing.get_context("fork"), list(layouts)
    running: dict[Connection, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_search_layout, args=(sender, waiting.pop(0), space, raw, hardware))
                process.start()
                sender.close()
                running[receiver] = process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                try:
                    trial = ready.recv()
                except EOFError:
                    running.pop(ready).join()
                    continue
                tell(trial)
                yield trial
    finally:
        for process in running.values():
            process.terminate()
            process.join()


def _search_layout(sender: Connection, axes: Mapping[str, int], space: Space, raw: RawJob, hardware: Hardware) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of torch's pool
    known: dict[str, Trial] = {}

    def attempt(settings: Settings) -> Trial:
        name = str(settings)
        if name not in known:
            known[name] = _try(settings, raw, hardware)
            sender.send(known[name])
        return known[name]

    for _ in trials_of(axes, space, attempt):
        pass
    sender.close()


def _try(settings: Settings, raw: RawJob, hardware: Hardware, more: dict[str, Any] | None = None) -> Trial:
    """more: tables on top of the settings."""
    job = settings.on(raw)
    job = replace(job, tables=merge(job.tables, more or {}))
    try:
        return Trial(settings, plan_checked(check(job, hardware.ranks), hardware, quick=True))
    except HpctrainError as error:
        return Trial(settings, None, str(error))
    except Exception as error:  # a plugin's
        return Trial(settings, None, f"{type(error).__name__}: {reason(error)}")


def trials_of(axes: Mapping[str, int], space: Space, attempt: Callable[[Settings], Trial]) -> Iterator[Trial]:
    """Try one layout: first what needs the least memory; if that fits, the fastest settings on."""
    sizes, stages = space.micro_sizes(axes), space.stages(axes)
    if not sizes:
        return
    for mode, stage in product(reversed(space.modes), reversed(stages)):
        least = attempt(Settings(axes, stage, mode, sizes[0]))
        yield least
        if least.plan is not None:
            break
    if not least.fits:
        if least.plan is not None and least.settings.stage:
            yield attempt(replace(least.settings, offload=True))
        return
    for mode in space.modes:
        largest = 0
        for stage in stages:
            for trial in _micro_sizes(Settings(axes, stage, mode, sizes[0]), sizes, attempt):
                yield trial
                largest = max(largest, trial.settings.micro_size if trial.fits else 0)
            if largest > 1 or largest == sizes[-1]:
                return  # to save more memory would only be slower


def _micro_sizes(first: Settings, sizes: list[int], attempt: Callable[[Settings], Trial]) -> Iterator[Trial]:
    """Try the smallest micro batch, then the largest that should fit, and smaller ones until one does."""
    smallest = attempt(first)
    yield smallest
    if not smallest.fits or smallest.plan is None or smallest.plan.memory is None:
        return
    largest, memory = smallest.plan.largest, smallest.plan.memory
    others = max(1, largest.at_peak[OTHERS] // sizes[0])
    room = (memory - (largest.most - largest.at_peak[OTHERS])) // others
    for size in reversed([size for size in sizes[1:] if size <= 2 * room]):
        trial = attempt(replace(first, micro_size=size))
        yield trial
        if trial.fits:
            return
