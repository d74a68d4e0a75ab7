"""From a job to a trained model, on this rank: what `hpctrain run` and `hpctrain.run` do."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.resolved import refuse_other_run, resolved_tables, write_resolved
from hpctrain.checkpoint.directory import behind_latest
from hpctrain.contracts.identity import Identity
from hpctrain.errors import EXIT_STOPPED, HpctrainError, UsageError, escaped, reason
from hpctrain.files import make_directory, open_to_change
from hpctrain.foreign.calling import retell_model_error
from hpctrain.foreign.model import CALLS
from hpctrain.job.output_lock import OutputLock, set_aside
from hpctrain.job.reading import RawJob
from hpctrain.job.tables import Job
from hpctrain.loop.assembly import assemble
from hpctrain.loop.session import Session
from hpctrain.loop.signals import StopRequest
from hpctrain.loop.training import train
from hpctrain.plugins.blame import retell_plugin_error
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.torch_private import clear_sharding_cache
from hpctrain.world.detection import detect, fallback_notice
from hpctrain.world.failure import leave
from hpctrain.world.launcher_channel import LauncherChannel
from hpctrain.world.meeting import World, compare_ranks, meet, start_communication
from hpctrain.world.objects import allow_objects

LOG = logging.getLogger("hpctrain")


def run(job: Job | Mapping[str, Any], resume: str = "auto") -> dict[str, Any]:
    """Train `job` on this process's rank: one of many under mpiexec, srun or torchrun, else the only one.

    The result has `step`, `loss` and `exit_code`: 0, or 75 when a signal stopped training after a save. Errors that a
    user can mend are HpctrainError. With several ranks an error on one ends the processes of all.
    """
    if dist.is_initialized():
        raise UsageError(
            "hpctrain.run sets torch.distributed up itself, and found it set up; call destroy_process_group() before"
        )
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    return run_rank(detect(), lambda: RawJob(tables, {}, "job").refuse_values(), resume, LauncherChannel())


def run_rank(identity: Identity, read: Callable[[], RawJob], resume: str, channel: LauncherChannel) -> dict[str, Any]:
    """Meet the other ranks, agree on the job that rank 0 reads, and train it."""
    if resume not in ("auto", "never"):
        resume = str(behind_latest(Path(resume)))
    world = meet(identity, channel)
    lock = OutputLock()
    try:
        with StopRequest() as stop:  # from here on: a signal while the model is built must not end one rank alone
            channel.answers_signals()
            result = _run_in(world, read, resume, stop, lock)
        channel.report_exit(result["exit_code"])
        return result
    except BaseException as error:
        if identity.size == 1:
            raise
        leave(world, error)
    finally:
        lock.release()
        if dist.is_initialized():
            dist.destroy_process_group()
            clear_sharding_cache()
        allow_objects()
        world.close()


def _run_in(
    world: World, read: Callable[[], RawJob], resume: str, stop: StopRequest, lock: OutputLock
) -> dict[str, Any]:
    begin, identity = time.monotonic(), world.identity
    checked = agree_on_job(world, read)
    notice = fallback_notice(identity)
    if notice and identity.rank == 0:
        print(f"hpctrain: {notice}", file=sys.stderr, flush=True)

    def take_output_dir() -> None:
        if resume == "never":
            _set_aside(checked.job.output_dir)
        elif resume != "auto":
            refuse_other_run(Path(resume), resolved_tables(checked))
        write_resolved(checked, identity.size, lock)

    world.share("output", take_output_dir)  # by rank 0, before anything is built
    with _logged_to_file(checked.job.output_dir, identity):
        for sentence in world.strangers:  # before there was a log
            LOG.info("%s", sentence)
        return _train(world, checked, resume, stop, begin)


def _train(world: World, checked: CheckedJob, resume: str, stop: StopRequest, begin: float) -> dict[str, Any]:
    """Build the model and train it; what a plugin or a model of the user's own raises is retold in a sentence."""
    identity, hooks = world.identity, None
    try:
        checked = _with_communicator(checked, identity)
        device = start_communication(world, checked.parts.communicator, checked.job.communicator.timeout_seconds)
        hooks = LifeCycle(checked.registry, identity, checked.parts.hooks)
        session = assemble(checked, world, device, resume, hooks)
        try:
            result = train(session, stop)
        finally:
            session.close()
            if checked.job.compile.enabled:
                torch.compiler.reset()  # else this job's shapes and the next one's are compiled as one
    except Exception as error:
        if hooks is not None:
            with suppress(HpctrainError):  # it is in the log, and what failed first is to be told
                hooks.call("hpctrain_exception", exception=error, identity=identity)
        retell_plugin_error(error, checked.registry, identity)
        retell_model_error(error, CALLS)
        raise
    finally:
        if hooks is not None:
            hooks.close()
    _say_goodbye(session, result, time.monotonic() - begin)
    return result


def _set_aside(directory: Path) -> None:
    """A run that begins anew deletes nothing of the one before."""
    try:
        aside = set_aside(directory)
    except OSError as error:
        raise UsageError(
            f"[job] output_dir: {directory} holds an earlier run and can't be renamed ({reason(error)}); use another output_dir"
        ) from None
    if aside is not None:
        print(f"hpctrain: --resume never: the earlier run is in {aside} now", file=sys.stderr, flush=True)


def agree_on_job(world: World, read: Callable[[], RawJob]) -> CheckedJob:
    """Rank 0 reads the job; every rank checks it against its own plugins; a difference ends all."""
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
                print(f"hpctrain: warning: plugin {fault.source} is not used: {fault.why}", file=sys.stderr, flush=True)
    return checked


def _with_communicator(checked: CheckedJob, identity: Identity) -> CheckedJob:
    """The same with the communicator that takes these ranks: `auto` stands for another."""
    chosen = checked.parts.communicator.choose(identity, checked.parts.communicators)
    return replace(checked, parts=replace(checked.parts, communicator=chosen))


class _LogFile(logging.StreamHandler[TextIO]):
    """A line that finds no room is left out; logging would tell of each with a traceback on the screen."""

    def __init__(self, path: Path) -> None:
        make_directory(path.parent)
        fd = open_to_change(path, os.O_WRONLY | os.O_APPEND)
        super().__init__(open(fd, "a", encoding="utf-8"))  # noqa: SIM115 - open while the handler is

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        return

    def close(self) -> None:
        with suppress(OSError):
            self.stream.close()
        super().close()


class _Escaped(logging.Formatter):
    """A line may have words of a file that others made."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


@contextmanager
def _logged_to_file(output_dir: Path, identity: Identity) -> Iterator[None]:
    """Every rank's own log; warnings of rank 0 on the screen, too."""
    path = output_dir / "log" / f"rank-{identity.rank:05d}.log"
    try:
        file = _LogFile(path)
    except OSError as error:
        raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None
    file.setFormatter(_Escaped("%(asctime)s %(levelname)s %(message)s"))
    handlers: list[logging.Handler] = [file]
    if identity.rank == 0:
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(_Escaped("hpctrain: warning: %(message)s"))
        handlers.append(screen)
    LOG.setLevel(logging.INFO)
    for handler in handlers:
        LOG.addHandler(handler)
    LOG.info("rank %d of %d on %s (%s)", identity.rank, identity.size, identity.node, identity.source)
    try:
        yield
    finally:  # a program may run another job after this one
        for handler in handlers:
            LOG.removeHandler(handler)
            handler.close()


def _say_goodbye(session: Session, result: Mapping[str, Any], seconds: float) -> None:
    directory = session.job.output_dir
    if result["exit_code"] == EXIT_STOPPED:
        session.report.say(
            f"stopped at step {result['step']} of {session.progress.steps}, saved in {session.saving.newest}"
        )
        return
    if session.progress.step == session.progress.first_step:
        ended = (
            "no step was taken"
            if session.progress.ended
            else "nothing left to train: raise [job] steps or epochs to go on"
        )
        session.report.say(f"done         step {result['step']}, {ended}")
    else:
        session.report.say(f"done         step {result['step']}, loss {result['loss']:.4f}, {seconds:.0f} s")
    session.report.say(f"results      {directory / 'metrics.jsonl'}, {session.saving.newest}")
