"""Turns a job into a trained model on this rank, for `hpctrain run` and `hpctrain.run`."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import EXIT_CANCELLED, EXIT_DONE, EXIT_STOPPED, HpctrainError, UsageError, reason
from hpctrain.base.torch_private import clear_sharding_cache
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.resolved import refuse_other_run, resolved_tables, write_resolved
from hpctrain.checkpoint.directory import behind_name
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.scheduler import CANCELLED, JOB_FILE
from hpctrain.data.pool import refuse_in_worker
from hpctrain.job.environment import described, exported, in_effect
from hpctrain.job.output_lock import OutputLock, put_back, set_aside
from hpctrain.job.raw import RawJob
from hpctrain.job.run_files import METRICS
from hpctrain.job.tables import Job
from hpctrain.model.conformance.trials import try_communicator
from hpctrain.plugins.blame import retell_plugin_error
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.plugins.user_code.calling import retell_model_error
from hpctrain.plugins.user_code.model import CALLS
from hpctrain.plugins.user_code.python_objects import given_objects
from hpctrain.ranks.accelerators import agree_on_communicator
from hpctrain.ranks.binding import Binding, bound
from hpctrain.ranks.detection import detect, fallback_notice, torchrun_variables
from hpctrain.ranks.failure import end_on_signals, leave
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.meeting import World, compare_ranks, meet, start_communication, take_device
from hpctrain.ranks.prints import labelled_prints, own, tell
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.restricted_pickle import allow_objects
from hpctrain.ranks.signals import StopRequest
from hpctrain.ranks.watchdog.position import BETWEEN, END
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.ranks.watchdog.watch import watched
from hpctrain.training.assembly import assemble
from hpctrain.training.determinism import deterministic
from hpctrain.training.inference import Question, answer
from hpctrain.training.kernels import cached_on_node, load_kernels
from hpctrain.training.log_file import AS_CANCELLED, DONE, STOPPED, logged_to_file
from hpctrain.training.loop import train
from hpctrain.training.session import Session
from hpctrain.training.starts import note_start

LOG = logging.getLogger("hpctrain")

_EARLIER = 0.9
"""The watchdog's limit as a share of the communicator's: it can say more than a communication that fails."""
_COMPILATION = 3600.0
"""Seconds for which communications wait by default where kernels are compiled: for the slowest rank's first step."""


def run(job: Job | Mapping[str, Any], resume: str = "auto") -> dict[str, Any]:
    """Train `job` on this process's rank: one of many under mpiexec, srun or torchrun, else the only rank.

    job: as `hpctrain.load_job` gives it, or tables as in a job file, in which a function, a class or another object may stand in
    place of "package.module:callable": {"model": {"name": make_model, "loss": my_loss}, "dataset": {"name": data}, ...}.
    resume: "auto", "never", or a checkpoint.

    The result has `step`, `loss` (of the last step), `losses` (of the steps of this call), `metrics` (the newest step's row),
    `evaluation` (the metrics of the newest evaluation, or None), `checkpoint` (the newest one, for `hpctrain.load`) and
    `exit_code`: 0, or 75 if a signal stopped training after a save. After Ctrl-C, the save is followed by KeyboardInterrupt on
    all ranks. Errors that a user can fix are HpctrainErrors. With several ranks, an error on one rank ends the processes of all.
    """
    refuse_in_worker()
    if dist.is_initialized():
        raise UsageError(
            "hpctrain.run sets torch.distributed up itself, but it is set up already; call destroy_process_group() before"
        )
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    with given_objects(tables) as plain:
        raw = RawJob(plain, {}, "job").refuse_values()
        hook = sys.excepthook
        try:
            with exported(plain):
                result = run_rank(detect(), lambda: raw, resume, RankChannel())
        finally:
            sys.excepthook = hook  # torch puts the rank before tracebacks, once more with each job
    # The job's groups end with its last object. A thread of gloo that lived until Python ends would abort the process.
    gc.collect()
    if result.pop("interrupted"):
        raise KeyboardInterrupt
    return result


def run_rank(
    identity: Identity, read: Callable[[], RawJob], resume: str, channel: RankChannel, begun: float | None = None
) -> dict[str, Any]:
    """Meet the other ranks, agree on the job that rank 0 reads, and train it.

    begun: when the starter of these ranks, which may have started others before them, began, on time.time(); None: now.
    """
    begin = time.monotonic() - (0.0 if begun is None else max(0.0, time.time() - begun))
    if resume not in ("auto", "never"):
        resume = str(behind_name(Path(resume)))
    lock = OutputLock()

    def work(world: World) -> dict[str, Any]:
        # already here: a signal during building must not end a single rank
        channel = world.channel
        with StopRequest() as stop, labelled_prints(world.identity, channel.terminal, channel.error_terminal):
            channel.answers_signals()
            return _run_in(world, read, resume, stop, lock, begin)

    try:
        return _on_rank(identity, channel, work)
    finally:
        lock.release()


def answer_on_rank(
    identity: Identity, read: Callable[[], RawJob], question: Question, channel: RankChannel
) -> dict[str, Any]:
    """Meet the other ranks, agree on the job, and ask its model, with the weights of a checkpoint."""
    question = replace(question, weights=behind_name(question.weights))
    end_on_signals(channel)

    def work(world: World) -> dict[str, Any]:
        with labelled_prints(world.identity):
            checked = agree_on_job(world, read)
            with _communicating(world, checked) as (checked, device, hooks, _):
                return {**answer(checked, world, device, hooks, question), "exit_code": EXIT_DONE}

    return _on_rank(identity, channel, work)


def _on_rank(identity: Identity, channel: RankChannel, work: Callable[[World], dict[str, Any]]) -> dict[str, Any]:
    """Meet the other ranks and do `work`; an error of one of several ranks ends all."""
    world = meet(identity, channel)
    try:
        with torchrun_variables(identity), cached_on_node():
            result = work(world)
        channel.report_exit(result["exit_code"])
        return result
    except BaseException as error:
        if identity.size == 1:
            raise
        leave(world, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            clear_sharding_cache()
        allow_objects()
        world.close()


def _run_in(
    world: World, read: Callable[[], RawJob], resume: str, stop: StopRequest, lock: OutputLock, begin: float
) -> dict[str, Any]:
    identity = world.identity
    checked = agree_on_job(world, read)
    # before anything slow: a later mark is meant for this start
    mark = _cancel_mark(checked) if identity.rank == 0 else None
    notice = fallback_notice(identity)
    if notice and identity.rank == 0:
        tell(f"hpctrain: {notice}")

    aside: list[Path] = []

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
        return _train(world, checked, resume, stop, begin, mark)


def _train(
    world: World, checked: CheckedJob, resume: str, stop: StopRequest, begin: float, mark: int | None
) -> dict[str, Any]:
    """Build and train the model. mark: `_cancel_mark` at the start."""
    with deterministic(checked.job.job.deterministic), _communicating(world, checked) as communicating:
        checked, device, hooks, binding = communicating
        if binding.told:
            _say(world.identity, "cores", binding.told)
        _note_start(world, checked, begin, device)
        job, position = checked.job, hooks.position
        limit = job.watchdog.timeout_seconds or _EARLIER * job.communicator.timeout_seconds
        position.compiles = job.compile.enabled
        queries = Queries(job.output_dir)
        with watched(world, position, limit, queries) as alarmed:
            with alarmed():
                session = assemble(checked, world, device, resume, hooks, begin, queries)
            try:
                checked.registry.refuse_unfit_parts()
                with alarmed():
                    position.move(BETWEEN)
                    result = train(session, stop)
                    if result["exit_code"] == EXIT_STOPPED and world.share(
                        "cancelled", lambda: _cancel_mark(checked) not in (None, mark)
                    ):
                        result["exit_code"] = EXIT_CANCELLED
                position.move(END)
            finally:
                session.close()
    _say_goodbye(session, result, time.monotonic() - begin)
    return result


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
def _communicating(world: World, checked: CheckedJob) -> Iterator[tuple[CheckedJob, torch.device, LifeCycle, Binding]]:
    """Set torch.distributed up, and yield the job with its communicator, the device, the hooks and this rank's cores. Errors
    of plugins and of the user's own model become sentences."""
    identity, hooks = world.identity, None
    try:
        checked, card = _with_communicator(world, checked)
        device = take_device(world, checked.parts.communicator, card)
        with bound(world, device, checked.job.job.cpu_bind) as binding:  # before there are threads that compute
            start_communication(world, checked.parts.communicator, _patience(checked.job), _wrap(checked.job))
            try_communicator(checked.parts.communicator, device)
            hooks = LifeCycle(checked.registry, identity, checked.parts.hooks, checked.parts.profile)
            if checked.job.compile.enabled and load_kernels(checked.job.output_dir):
                _say(identity, "compile", "with the kernels that an earlier start has made")
            try:
                yield checked, device, hooks, binding
            finally:
                if checked.job.compile.enabled:
                    torch.compiler.reset()  # else the compiler would treat this job's and the next job's shapes as one model's
    except Exception as error:
        LOG.info("%s: %s", type(error).__name__, error)  # the log has what the screen has
        if hooks is not None:
            with suppress(HpctrainError):  # it is in the log; the first error is the one to report
                hooks.call("hpctrain_exception", exception=error, identity=identity)
        retell_plugin_error(error, checked.registry, identity)
        retell_model_error(error, CALLS)
        raise
    finally:
        if hooks is not None:
            hooks.close()


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


def _wrap(job: Job) -> Callable[[str, Any], tuple[str, Any]] | None:
    if not job.communicator.check:
        return None
    from hpctrain.ranks.watchdog.comparison import compared  # registers a backend

    return compared


def _with_communicator(world: World, checked: CheckedJob) -> tuple[CheckedJob, int | None]:
    """The job with the communicator that all ranks take, and the index of this rank's accelerator. Collective."""
    parts, device = checked.parts, checked.job.communicator.device
    agreed = agree_on_communicator(world, parts.communicator, parts.communicators, device)
    if world.identity.rank == 0:
        for remark in agreed.remarks:
            tell(f"hpctrain: warning: {remark}")
    return replace(checked, parts=replace(parts, communicator=agreed.communicator)), agreed.accelerator


def _say_goodbye(session: Session, result: Mapping[str, Any], seconds: float) -> None:
    directory = session.job.output_dir
    if result["exit_code"] in (EXIT_STOPPED, EXIT_CANCELLED):
        cancelled = result["exit_code"] == EXIT_CANCELLED
        why = AS_CANCELLED if cancelled else ", as its time is nearly over" if session.deadline.is_near else ""
        session.report.say(
            f"{STOPPED}{result['step']} of {session.progress.steps}{why}, saved in {session.saved.newest}"
        )
        return
    if session.progress.step == session.progress.first_step:
        ended = (
            "no step was taken"
            if session.progress.ended
            else "nothing left to train: raise [job] steps or epochs to continue"
        )
        session.report.say(f"{DONE}{result['step']}, {ended}")
    else:
        session.report.say(f"{DONE}{result['step']}, loss {result['loss']:.4f}, {seconds:.0f} s")
    newest = session.saved.newest
    session.report.say(f"results      {directory / 'metrics.jsonl'}{'' if newest is None else f', {newest}'}")
