"""Carries out the guard's verdict on a step: warn, skip, roll back or stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training import restoring
from hpctrain.training.guard.first_nonfinite import first_nonfinite, nonfinite_samples
from hpctrain.training.guard.judging import Verdict, remedy_for
from hpctrain.training.saving import finish_saving
from hpctrain.training.session import Session


def act(session: Session, verdict: Verdict) -> bool:
    """Do on all ranks what the guard has decided, after the step was reported; whether the training went back to a checkpoint.

    Raises TrainingError where it stops.
    """
    guard, step, why = session.guard, verdict.figures.step, reasons(session, verdict)
    if verdict.action == "warn":
        session.report.say(f"guard        step {step}: {why}")
    elif verdict.action == "skip":
        session.report.say(f"guard        step {step} left out ({guard.counted()}): {why}")
    if verdict.action in ("warn", "skip"):
        return False
    finish_saving(session, excused=True)
    newest = session.saved.newest
    if verdict.action == "rollback" and newest is not None and guard.may_go_back_to(newest):
        roll_back(session)
        session.report.say(f"guard        step {step}: {why}; back to {newest}, on with the samples that follow")
        return True
    remedy = remedy_for(verdict, newest is not None)
    raise TrainingError(f"step {step}: {why}; {remedy} (newest checkpoint: {newest or 'none'})", everywhere=True)


def with_samples(session: Session, verdict: Verdict, micro_batches: Sequence[MicroBatch], loader: Loader) -> Verdict:
    """The verdict with what is wrong with the step's samples. Collective where the loss or a gradient is not finite."""
    if verdict.cause != "non_finite":
        return verdict
    kind = session.feed.sample_kind
    return replace(verdict, samples=nonfinite_samples(micro_batches, loader.indices, kind))


def reasons(session: Session, verdict: Verdict) -> str:
    """Clauses about what the guard has found. Collective."""
    if verdict.cause == "oom":
        told = gather_values((session.identity.node, session.model.runner.out_of_memory))
        return ", ".join(
            f"rank {rank} on {node} ran out of memory: {why}" for rank, (node, why) in enumerate(told) if why
        )
    if verdict.cause == "loss_spike":
        return verdict.said
    told = [verdict.said, *([verdict.samples] if verdict.samples else [])]
    return "; ".join([*told, first_nonfinite(session.model, verdict.figures.losses, session.identity)])


def roll_back(session: Session) -> None:
    """Make model, optimizer and state of plugins those of the newest checkpoint; the samples go on."""
    job, progress = session.job, session.progress
    restoring.roll_back(session)
    if job.job.epochs is not None:
        progress.steps = progress.step + session.feed.steps_from(progress.samples_seen)
    session.report.go_back(job.output_dir, session.parts.loggers, progress.step)
