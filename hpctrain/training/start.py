"""Starts a job on this rank: the ranks meet, agree on it, take its directory, set torch.distributed up and watch each other."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from hpctrain.base.errors import EXIT_DONE, HpctrainError, UsageError, reason
from hpctrain.base.torch_private import clear_sharding_cache
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.resolved import refuse_other_run, resolved_tables, write_resolved
from hpctrain.checkpoint.directory import behind_name
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.scheduler import CANCELLED, JOB_FILE
from hpctrain.job.environment import cached_on_node, described, refuse_shared_caches
from hpctrain.job.output_lock import OutputLock, set_aside
from hpctrain.job.raw import RawJob
from hpctrain.ranks.accelerators import agree_on_communicator
from hpctrain.ranks.binding import bound
from hpctrain.ranks.detection import fallback_notice, torchrun_variables
from hpctrain.ranks.failure import world_of_ranks
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.meeting import World, compare_ranks, start_communication, take_device
from hpctrain.ranks.prints import labelled_prints, own, tell
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.signals import StopRequest
from hpctrain.ranks.watchdog.monitor import watched
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.registry.blame import retell_model_error, retell_plugin_error
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.log_file import logged_to_file
from hpctrain.training.starts import note_start

LOG = logging.getLogger("hpctrain")

# the watchdog's limit as a share of the communicator's: it can say more than a communication that fails
_EARLIER = 0.9
# seconds for which communications wait by default where kernels are compiled: for the slowest rank's first step
_COMPILATION = 3600.0


@dataclass
class Start:
    """A job on its way to the training on this rank: each step of TRAINING sets what later ones need, `undo` leaves it in reverse.

    read: gives the job, on rank 0. resume: "auto", "never" or a checkpoint. begin: of the run, on time.monotonic(). cores: of this
    rank, in words. queries: of other terminals. alarmed: a context for work that communicates. exit_code: when all is done.
    """

    identity: Identity
    channel: RankChannel
    read: Callable[[], RawJob]
    resume: str = "auto"
    begin: float = field(default_factory=time.monotonic)
    undo: ExitStack = field(default_factory=ExitStack)
    lock: OutputLock = field(default_factory=OutputLock)
    stop: StopRequest = field(default_factory=StopRequest)
    world: World = field(init=False)
    checked: CheckedJob = field(init=False)
    device: torch.device = field(init=False)
    hooks: LifeCycle = field(init=False)
    cores: str = ""
    queries: Queries | None = None
    alarmed: Callable[[], AbstractContextManager[None]] = nullcontext
    cancel_mark: int | None = None
    exit_code: int = EXIT_DONE

    def is_cancelled(self) -> bool:
        """Whether `hpctrain cancel` has ended the job since its start. Collective."""
        mark = partial(_cancel_mark, self.checked)
        return bool(self.world.share("cancelled", lambda: mark() not in (None, self.cancel_mark)))

    def say(self, name: str, text: str) -> None:
        """A line of the start on rank 0's screen, and in its log."""
        if self.identity.rank == 0:
            LOG.info("%-12s %s", name, text)
            with suppress(OSError):  # nobody reads it
                print(f"{name:<12} {text}", file=own(sys.stdout), flush=True)


Preparation = Callable[[Start], None]


@contextmanager
def started(
    identity: Identity,
    read: Callable[[], RawJob],
    channel: RankChannel,
    preparations: Sequence[Preparation],
    resume: str = "auto",
    begun: float | None = None,
) -> Iterator[Start]:
    """Prepare the job in this order, and let it run in this context.

    begun: when the starter of these ranks, which may have started others before them, began, on time.time(); None: now.
    """
    since = 0.0 if begun is None else max(0.0, time.time() - begun)  # another host's clock may be ahead
    if resume not in ("auto", "never"):
        resume = str(behind_name(Path(resume)))
    start = Start(identity, channel, read, resume, time.monotonic() - since)
    with start.undo:
        for prepare in preparations:
            prepare(start)
        yield start


def meet(start: Start) -> None:
    """Meet the other ranks; from now on an error of one of several ranks ends all."""
    start.undo.callback(start.lock.close)  # of the output directory: kept until all ranks have left
    start.world = start.undo.enter_context(world_of_ranks(start.identity, start.channel))
    start.undo.push(lambda kind, *_: None if kind else start.channel.report_exit(start.exit_code))
    start.undo.enter_context(torchrun_variables(start.identity))
    start.undo.enter_context(cached_on_node())


def take_signals(start: Start) -> None:
    """Keep signals for the loop: one during building must not end a single rank. Put the rank before users' lines."""
    start.undo.enter_context(start.stop)
    start.undo.enter_context(labelled_prints(start.identity, start.channel.terminal, start.channel.error_terminal))
    start.channel.answers_signals()


def agree(start: Start) -> None:
    """Agree on the job that rank 0 reads."""
    start.checked = agree_on_job(start.world, start.read)
    if start.identity.rank == 0:  # before anything slow: a later mark is meant for this start
        start.cancel_mark = _cancel_mark(start.checked)


def take_directory(start: Start) -> None:
    """Take the job's directory, and write this rank's log there."""
    identity, checked = start.identity, start.checked
    directory = checked.job.output_dir
    notice = fallback_notice(identity)
    if notice and identity.rank == 0:
        tell(f"hpctrain: {notice}")

    def take() -> None:
        if start.resume == "never":
            _set_aside(directory)
        elif start.resume != "auto":
            refuse_other_run(Path(start.resume), resolved_tables(checked))
        write_resolved(checked, identity.size, start.lock)

    start.world.share("output", take)  # by rank 0, before anything is built
    start.undo.enter_context(logged_to_file(directory, identity))
    if text := described(checked.raw.tables):
        LOG.info("environment: %s", text)  # each rank's own
        start.say("environment", text)
    guarded = start.world.guarded
    for sentence in guarded.server.refused if guarded and guarded.server else ():  # from before the log existed
        LOG.info("%s", sentence)


def communicate(start: Start) -> None:
    """Take this rank's device and cores, set torch.distributed up, and prepare the hooks."""
    job, parts, world, undo = start.checked.job, start.checked.parts, start.world, start.undo
    if job.job.deterministic:
        from hpctrain.training.determinism import deterministic

        undo.enter_context(deterministic())
    undo.enter_context(_retold(start))
    agreed = agree_on_communicator(world, parts.communicator, parts.communicators, job.communicator.device)
    if agreed.remark and world.identity.rank == 0:
        tell(f"hpctrain: warning: {agreed.remark}")
    start.checked = replace(start.checked, parts=replace(parts, communicator=agreed.communicator))
    start.device = take_device(world, agreed.communicator, agreed.accelerator)
    # before there are threads that compute
    start.cores = undo.enter_context(bound(world, job.job.cpu_bind)).sentence
    patience = job.communicator.timeout_seconds  # after the first step, the watchdog's is shorter
    if job.compile.enabled and "timeout_seconds" not in job.communicator.model_fields_set:
        patience = max(patience, _COMPILATION)
    start_communication(world, agreed.communicator, patience)  # before hooks: they may communicate from their start on
    start.hooks = LifeCycle(start.checked.registry, start.identity, parts.hooks, parts.profile)
    start.hooks.position.compiles = job.compile.enabled
    undo.push(partial(_clear_caches, start))
    if job.compile.enabled:
        refuse_shared_caches()
        undo.callback(torch.compiler.reset)  # else it would treat this job's and the next job's shapes as one model's


def watch(start: Start) -> None:
    """Tell and note the start, and watch the ranks from now on."""
    job, world = start.checked.job, start.world
    if start.cores:
        start.say("cores", start.cores)
    since = time.time() - (time.monotonic() - start.begin)
    hosts = gather_values(world.identity.node)  # the first collective: a group that doesn't connect fails here
    sources = start.checked.registry.sources
    plugins = list(dict.fromkeys(f"{one.distribution} {one.version}" for one in sources if one.distribution))
    world.share("start", lambda: note_start(job.output_dir, world.identity, hosts, plugins, since, start.device))
    limit = job.watchdog.timeout_seconds or _EARLIER * job.communicator.timeout_seconds
    start.queries = Queries(job.output_dir)
    start.alarmed = start.undo.enter_context(watched(world, hosts, start.hooks.position, limit, start.queries))


TRAINING: tuple[Preparation, ...] = (meet, take_signals, agree, take_directory, communicate, watch)


@contextmanager
def _retold(start: Start) -> Iterator[None]:
    """Tell the hooks of an error; those of plugins and of the user's own model become sentences."""
    try:
        yield
    except Exception as error:
        LOG.info("%s: %s", type(error).__name__, error)  # the log has what the screen has
        if hasattr(start, "hooks"):
            with suppress(HpctrainError):  # it is in the log; the first error is the one to report
                start.hooks.call("hpctrain_exception", exception=error, identity=start.identity)
        retell_plugin_error(error, start.checked.registry, start.identity)
        retell_model_error(error)
        raise
    finally:
        if hasattr(start, "hooks"):
            start.hooks.close()


def _clear_caches(start: Start, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None:
        clear_sharding_cache(start.device)
    elif start.identity.size == 1:  # several ranks end now
        with suppress(RuntimeError):  # of a device that has failed, which is told
            clear_sharding_cache(start.device)


def agree_on_job(world: World, read: Callable[[], RawJob]) -> CheckedJob:
    """Rank 0 reads the job; every rank checks it against its own plugins. A difference ends all ranks."""
    raw = RawJob.from_json(world.share("job", lambda: read().as_json()))
    checked, error = None, None
    try:
        checked = check(raw, world.identity.size)
    except HpctrainError as problem:
        error = problem
    sources = [] if checked is None else [f"{s.module} {s.version}".strip() for s in checked.registry.sources]
    compare_ranks(world, sources, error)
    assert checked is not None  # compare_ranks has raised otherwise
    if world.identity.rank == 0:
        for fault in checked.registry.faults:
            if fault.state == "broken":
                tell(f"hpctrain: warning: plugin {fault.source} is not used: {fault.why}")
        for remark in checked.registry.notes():
            tell(f"hpctrain: warning: {remark}")
    return checked


def _set_aside(directory: Path) -> None:
    """Rename an earlier run's directory: `--resume never` deletes nothing."""
    try:
        aside = set_aside(directory)
    except OSError as error:
        raise UsageError(
            f"[job] output_dir: {directory} holds an earlier run and can't be renamed ({reason(error)}); use another output_dir"
        ) from None
    if aside is not None:
        tell(f"hpctrain: --resume never: the earlier run is in {aside} now")


def _cancel_mark(checked: CheckedJob) -> int | None:
    """The time at which `hpctrain cancel` last ended the submitted job of this run, in ns by the file system's clock; None if
    never. The mark of an earlier start stays: only `hpctrain submit` removes it."""
    directory = checked.job.output_dir
    if os.path.realpath(checked.raw.source) != os.path.realpath(directory / JOB_FILE):
        return None  # nobody has submitted this start
    try:
        return os.lstat(directory / CANCELLED).st_mtime_ns
    except OSError:
        return None
