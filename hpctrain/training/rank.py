"""Turns a job into a trained model on this rank, for `hpctrain run` and `hpctrain.run`."""

from __future__ import annotations

import gc
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from hpctrain.base.errors import EXIT_CANCELLED, EXIT_STOPPED, TrainingError, UsageError
from hpctrain.contracts.identity import Identity
from hpctrain.job.environment import exported
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import Job
from hpctrain.ranks.detection import detect
from hpctrain.ranks.rank_channel import RankChannel, own_channel
from hpctrain.ranks.watchdog.position import BETWEEN, END
from hpctrain.registry.blame import retell_model_error
from hpctrain.training.assembly import assemble
from hpctrain.training.log_file import AS_CANCELLED, DONE, STOPPED
from hpctrain.training.loop import train
from hpctrain.training.session import Session
from hpctrain.training.start import TRAINING, started

__all__ = ["run"]


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
    with job_of_python(job, "hpctrain.run") as raw:
        result = run_rank(detect(), lambda: raw, resume, own_channel())
    if result.pop("interrupted"):
        raise KeyboardInterrupt
    return result


@contextmanager
def job_of_python(job: Job | Mapping[str, Any], caller: str) -> Iterator[RawJob]:
    """The job of a Python program, whose objects and variables are in effect in this context. caller: for messages.

    Raises UsageError in a process that loads samples, and where torch.distributed is set up.
    """
    if any(  # multiprocessing runs the program's script anew under this name, in a process that loads samples
        one.frame.f_code.co_name == "<module>" and one.frame.f_globals.get("__name__") == "__mp_main__"
        for one in inspect.stack(context=0)
    ):
        raise UsageError(
            "a process that loads samples imports the script that started the training and would start another one; call "
            "hpctrain.run under if __name__ == '__main__':"
        )
    if dist.is_initialized():
        raise UsageError(
            f"{caller} sets torch.distributed up itself, but it is set up already; call destroy_process_group() before"
        )
    from hpctrain.registry.user_code.python_objects import given_objects  # here: a job file has none

    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else job
    if not isinstance(tables, Mapping):
        raise UsageError(f"{caller}: found {job!r}, expected tables, or what hpctrain.load_job has read from a file")
    with given_objects(tables) as plain:
        raw = RawJob(plain, {}, "job").refuse_values()
        hook, frozen = sys.excepthook, gc.get_freeze_count()
        try:
            with exported(plain):
                yield raw
        finally:
            sys.excepthook = hook  # torch puts the rank before tracebacks, once more with each job
            if not frozen:  # but by the steps
                gc.unfreeze()
    # The job's groups end with its last object. A thread of gloo that lived until Python ends would abort the process.
    gc.collect()


def run_rank(
    identity: Identity, read: Callable[[], RawJob], resume: str, channel: RankChannel, begun: float | None = None
) -> dict[str, Any]:
    """Meet the other ranks, agree on the job that rank 0 reads, and train it. begun: as of `started`."""
    with started(identity, read, channel, TRAINING, resume, begun) as start, exits_refused():
        with start.alarmed():
            session = assemble(start)
        try:
            position = start.hooks.position
            with start.alarmed():
                position.move(BETWEEN)
                result = train(session, start.stop)
                if result["exit_code"] == EXIT_STOPPED and start.is_cancelled():
                    result["exit_code"] = EXIT_CANCELLED
            position.move(END)
        finally:
            session.close()
        say_goodbye(session, result, time.monotonic() - start.begin)
        start.exit_code = result["exit_code"]
    return result


@contextmanager
def exits_refused() -> Iterator[None]:
    """Turn a sys.exit() in users' code into a TrainingError: it would end a job half-way, and of one rank alone only that rank."""
    try:
        yield
    except (SystemExit, GeneratorExit) as leave:
        retell_model_error(leave)
        frame = traceback.extract_tb(leave.__traceback__)[-1]
        raise TrainingError(
            f"{frame.filename}:{frame.lineno} raised {type(leave).__name__}: {leave}; expected an error, or in a hook "
            "`control.stop(reason)`, which ends a job in order"
        ) from leave


def say_goodbye(session: Session, result: Mapping[str, Any], seconds: float) -> None:
    """Say on the screen how the run ended. seconds: that it took."""
    say, newest, progress = session.report.say, session.newest_checkpoint, session.progress
    if result["exit_code"] in (EXIT_STOPPED, EXIT_CANCELLED):
        cancelled = result["exit_code"] == EXIT_CANCELLED
        why = AS_CANCELLED if cancelled else ", as its time is nearly over" if session.deadline.is_near else ""
        where = "before anything was trained" if newest is None else f"saved in {newest}"
        say(f"{STOPPED}{result['step']} of {progress.steps}{why}, {where}")
        return
    end = f"loss {result['loss']:.4f}, {seconds:.0f} s"
    if progress.step == progress.first_step:
        left = "nothing left to train: raise [job] steps or epochs to continue"
        end = "no step was taken" if progress.ended else left
    say(f"{DONE}{result['step']}, {end}")
    say(f"results      {session.job.output_dir / 'metrics.jsonl'}{'' if newest is None else f', {newest}'}")
