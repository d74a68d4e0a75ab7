"""Starts a job on this rank: the ranks meet, agree on it, take its directory, set torch.distributed up and watch each other."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import EXIT_DONE, HpctrainError, TrainingError, UsageError, reason
from hpctrain.base.torch_private import clear_sharding_cache
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.combinations import comparison_problems
from hpctrain.checking.resolved import refuse_other_run, resolved_tables, write_resolved
from hpctrain.checkpoint.directory import behind_name
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.scheduler import CANCELLED, JOB_FILE
from hpctrain.job.environment import cached_on_node, described, in_effect, refuse_shared_caches
from hpctrain.job.output_lock import OutputLock, put_back, set_aside
from hpctrain.job.raw import RawJob
from hpctrain.job.run_files import METRICS
from hpctrain.job.tables import Job
from hpctrain.model.conformance.trials import try_communicator
from hpctrain.plugins.blame import retell_plugin_error
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.plugins.user_code.calling import retell_model_error
from hpctrain.plugins.user_code.model import CALLS
from hpctrain.ranks.accelerators import agree_on_communicator
from hpctrain.ranks.binding import Binding, bound
from hpctrain.ranks.detection import fallback_notice, torchrun_variables
from hpctrain.ranks.failure import leave
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.meeting import World, compare_ranks, meet, start_communication, take_device
from hpctrain.ranks.prints import labelled_prints, own, tell
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.restricted_pickle import allow_objects
from hpctrain.ranks.signals import StopRequest
from hpctrain.ranks.watchdog.blocks import parted_in_failure
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.ranks.watchdog.watch import watched
from hpctrain.training.determinism import deterministic
from hpctrain.training.log_file import logged_to_file
from hpctrain.training.starts import note_start

LOG = logging.getLogger("hpctrain")

_EARLIER = 0.9
"""The watchdog's limit as a share of the communicator's: it can say more than a communication that fails."""
_COMPILATION = 3600.0
"""Seconds for which communications wait by default where kernels are compiled: for the slowest rank's first step."""


@dataclass
class Start:
    """A job that has started on this rank, and is watched.

    resume: "auto", "never" or a checkpoint. begin: of the run, on time.monotonic(). stop: asks this rank to stop. queries: of other
    terminals. alarmed: a context for work that communicates. exit_code: of this rank, when all is done.
    """

    world: World
    checked: CheckedJob
    device: torch.device
    hooks: LifeCycle
    resume: str = "auto"
    begin: float = field(default_factory=time.monotonic)
    stop: StopRequest = field(default_factory=StopRequest)
    queries: Queries | None = None
    alarmed: Callable[[], AbstractContextManager[None]] = nullcontext
    mark: int | None = None
    """`_cancel_mark` at the start."""
    exit_code: int = EXIT_DONE

    def is_cancelled(self) -> bool:
        """Whether `hpctrain cancel` has ended the job since its start. Collective."""
        return bool(self.world.share("cancelled", lambda: _cancel_mark(self.checked) not in (None, self.mark)))


@contextmanager
def started(
    identity: Identity, read: Callable[[], RawJob], resume: str, channel: RankChannel, begun: float | None = None
) -> Iterator[Start]:
    """Meet the other ranks, agree on the job that rank 0 reads, and let it run in this context.

    begun: when the starter of these ranks, which may have started others before them, began, on time.time(); None: now.
    """
    begin = time.monotonic() - (0.0 if begun is None else max(0.0, time.time() - begun))
    if resume not in ("auto", "never"):
        resume = str(behind_name(Path(resume)))
    with closing(OutputLock()) as lock, on_rank(identity, channel) as world:
        channel = world.channel
        # already here: a signal during building must not end a single rank
        with StopRequest() as stop, labelled_prints(world.identity, channel.terminal, channel.error_terminal):
            channel.answers_signals()
            checked = agree_on_job(world, read)
            # before anything slow: a later mark is meant for this start
            mark = _cancel_mark(checked) if world.identity.rank == 0 else None
            with (
                _in_output_dir(world, checked, resume, lock),
                _running(world, checked, resume, begin, stop, mark) as run,
            ):
                yield run
        channel.report_exit(run.exit_code)


@contextmanager
def on_rank(identity: Identity, channel: RankChannel) -> Iterator[World]:
    """Meet the other ranks; an error of one of several ranks in this context ends all."""
    world = meet(identity, channel)
    try:
        with torchrun_variables(identity), cached_on_node():
            yield world
    except BaseException as error:
        if identity.size == 1:
            raise
        leave(world, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        allow_objects()
        world.close()


@contextmanager
def _in_output_dir(world: World, checked: CheckedJob, resume: str, lock: OutputLock) -> Iterator[None]:
    """Take the job's directory, and write this rank's log there."""
    identity, aside = world.identity, list[Path]()
    notice = fallback_notice(identity)
    if notice and identity.rank == 0:
        tell(f"hpctrain: {notice}")

    def take_output_dir() -> None:
        if resume == "never":
            aside.extend(_set_aside(checked.job.output_dir))
        elif resume != "auto":
            refuse_other_run(Path(resume), resolved_tables(checked))
        write_resolved(checked, identity.size, lock)

    world.share("output", take_output_dir)  # by rank 0, before anything is built
    with _taken_back(aside, checked.job.output_dir), logged_to_file(checked.job.output_dir, identity):
        _tell_environment(checked, identity)
        for sentence in world.strangers:  # from before the log existed
            LOG.info("%s", sentence)
        yield


@contextmanager
def _running(
    world: World, checked: CheckedJob, resume: str, begin: float, stop: StopRequest, mark: int | None
) -> Iterator[Start]:
    """Communicate, and watch the ranks."""
    with deterministic(checked.job.job.deterministic), communicating(world, checked) as of_rank:
        checked, device, hooks, binding = of_rank
        if binding.told:
            _say(world.identity, "cores", binding.told)
        _note_start(world, checked, begin, device)
        job = checked.job
        limit = job.watchdog.timeout_seconds or _EARLIER * job.communicator.timeout_seconds
        hooks.position.compiles = job.compile.enabled
        queries = Queries(job.output_dir)
        with watched(world, hooks.position, limit, queries) as alarmed:
            yield Start(world, checked, device, hooks, resume, begin, stop, queries, alarmed, mark)


@contextmanager
def communicating(world: World, checked: CheckedJob) -> Iterator[tuple[CheckedJob, torch.device, LifeCycle, Binding]]:
    """Set torch.distributed up, and yield the job with its communicator, the device, the hooks and this rank's cores. Errors
    of plugins and of the user's own model become sentences."""
    identity, hooks = world.identity, None
    try:
        checked, card = _with_communicator(world, checked)
        device = take_device(world, checked.parts.communicator, card)
        with bound(world, device, checked.job.job.cpu_bind) as binding:  # before there are threads that compute
            start_communication(
                world, checked.parts.communicator, _patience(checked.job), partial(_wrap, checked.job, identity)
            )
            try_communicator(checked.parts.communicator, device)
            hooks = LifeCycle(checked.registry, identity, checked.parts.hooks, checked.parts.profile)
            if checked.job.compile.enabled:
                refuse_shared_caches()
            try:
                yield checked, device, hooks, binding
            except BaseException:
                if identity.size == 1:  # several ranks end now
                    with suppress(RuntimeError):  # of a device that has failed, which is told
                        clear_sharding_cache(device)
                raise
            else:
                clear_sharding_cache(device)
            finally:
                if checked.job.compile.enabled:
                    torch.compiler.reset()  # else the compiler would treat this job's and the next job's shapes as one model's
    except Exception as error:
        LOG.info("%s: %s", type(error).__name__, error)  # the log has what the screen has
        if hooks is not None:
            with suppress(HpctrainError):  # it is in the log; the first error is the one to report
                hooks.call("hpctrain_exception", exception=error, identity=identity)
            why = parted_in_failure(world, hooks.position) if isinstance(error, dist.DistBackendError) else None
            if why is not None:
                raise TrainingError(why) from error
        retell_plugin_error(error, checked.registry, identity)
        retell_model_error(error, CALLS)
        raise
    finally:
        if hooks is not None:
            hooks.close()


def agree_on_job(world: World, read: Callable[[], RawJob]) -> CheckedJob:
    """Rank 0 reads the job; every rank checks it against its own plugins. A difference ends all ranks."""
    raw = RawJob.from_json(world.share("job", lambda: read().as_json()))
    checked, error = None, None
    try:
        checked = check(raw, world.identity.size)
    except HpctrainError as problem:
        error = problem
    sources = [] if checked is None else [f"{s.module} {s.version}".strip() for s in checked.registry.sources]
    remarks = compare_ranks(world, sources, error, in_effect(raw.tables))
    assert checked is not None  # compare_ranks has raised otherwise
    if world.identity.rank == 0:
        for fault in checked.registry.faults:
            if fault.state == "broken":
                tell(f"hpctrain: warning: plugin {fault.source} is not used: {fault.why}")
        for remark in (*checked.registry.told(), *remarks):
            tell(f"hpctrain: warning: {remark}")
    return checked


def _with_communicator(world: World, checked: CheckedJob) -> tuple[CheckedJob, int | None]:
    """The job with the communicator that all ranks take, and the index of this rank's accelerator. Collective."""
    parts, device = checked.parts, checked.job.communicator.device
    agreed = agree_on_communicator(world, parts.communicator, parts.communicators, device)
    if world.identity.rank == 0:
        for remark in agreed.remarks:
            tell(f"hpctrain: warning: {remark}")
    for problem in comparison_problems(checked.job, parts, agreed.communicator.on_accelerators):
        raise UsageError(problem.message, everywhere=True)
    return replace(checked, parts=replace(parts, communicator=agreed.communicator)), agreed.accelerator


def _wrap(job: Job, identity: Identity, backend: str, options: Any) -> tuple[str, Any]:
    """The backend and its options with what the job wants around them. Registers backends."""
    if identity.size > 1:  # a rank alone waits for nobody
        from hpctrain.ranks.timed_gloo import timed

        backend, options = timed(backend, options)
    if job.communicator.check:
        from hpctrain.ranks.watchdog.comparison import compared

        backend, options = compared(backend, options)
    return backend, options


def _patience(job: Job) -> float:
    """The time limit of communications in seconds. After the first step, the watchdog's is shorter."""
    table = job.communicator
    waits = job.compile.enabled and "timeout_seconds" not in table.model_fields_set
    return max(table.timeout_seconds, _COMPILATION) if waits else table.timeout_seconds


def _note_start(world: World, checked: CheckedJob, begin: float, device: torch.device) -> None:
    """Write down versions, command and hosts. Collective. begin: of the run, on time.monotonic()."""
    since = time.time() - (time.monotonic() - begin)
    hosts = gather_values(world.identity.node)
    plugins = dict.fromkeys(f"{one.distribution} {one.version}" for one in checked.registry.sources if one.distribution)
    world.share(
        "start", lambda: note_start(checked.job.output_dir, world.identity, hosts, list(plugins), since, device)
    )


def _tell_environment(checked: CheckedJob, identity: Identity) -> None:
    """The variables of [environment] as this rank has them, in its log, and rank 0's on the screen."""
    text = described(checked.raw.tables)
    if text:
        LOG.info("environment: %s", text)
        _say(identity, "environment", text)


def _say(identity: Identity, name: str, text: str) -> None:
    """A line of the start on rank 0's screen."""
    if identity.rank == 0:
        LOG.info("%-12s %s", name, text)
        with suppress(OSError):  # nobody reads it
            print(f"{name:<12} {text}", file=own(sys.stdout), flush=True)


@contextmanager
def _taken_back(aside: Sequence[Path], directory: Path) -> Iterator[None]:
    """Give an earlier run its directory back if this one fails before its first step."""
    try:
        yield
    except BaseException:
        metrics = directory / METRICS
        if aside and not (metrics.exists() and metrics.stat().st_size):
            with suppress(OSError):
                failed = put_back(aside[0], directory)
                said = (
                    f"no step was trained: the earlier run is in {directory} again, the log of this start in {failed}"
                )
                tell(f"hpctrain: {said}")
        raise


def _set_aside(directory: Path) -> list[Path]:
    """Rename an earlier run's directory: `--resume never` deletes nothing. Returns the new name, if there was a run."""
    try:
        aside = set_aside(directory)
    except OSError as error:
        raise UsageError(
            f"[job] output_dir: {directory} holds an earlier run and can't be renamed ({reason(error)}); use another output_dir"
        ) from None
    if aside is None:
        return []
    tell(f"hpctrain: --resume never: the earlier run is in {aside} now")
    return [aside]


def _cancel_mark(checked: CheckedJob) -> int | None:
    """The time at which `hpctrain cancel` last ended the submitted job of this run, in ns by the file system's clock; None if
    never. The mark of an earlier start stays: only `hpctrain submit` removes it."""
    directory = checked.job.output_dir
    if os.path.realpath(checked.raw.source) != os.path.realpath(directory / JOB_FILE):
        return None
    try:
        return os.lstat(directory / CANCELLED).st_mtime_ns
    except OSError:
        return None
