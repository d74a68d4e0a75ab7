"""Carries out the guard's verdict on an update: warn, skip, roll back or stop."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.guard.first_nonfinite import first_nonfinite, nonfinite_samples
from hpctrain.training.guard.judging import Verdict, remedy_for
from hpctrain.training.restoring import roll_back
from hpctrain.training.saving import finish_saving
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel


def act(
    session: Session,
    model: TrainedModel,
    verdict: Verdict,
    micro_batches: Sequence[MicroBatch],
    loader: Loader | None,
) -> bool:
    """Do on all ranks what the guard has decided on an update of `model`, after the step was reported; whether the training went
    back to a checkpoint.

    micro_batches, loader: of the step. Raises TrainingError where it stops. Collective.
    """
    step, samples = verdict.figures.step, None
    if verdict.cause == "non_finite" and loader is not None:
        samples = nonfinite_samples(micro_batches, loader.indices, session.feed.sample_kind)
    why = _reasons(session, model, verdict, samples)
    if verdict.action == "warn":
        session.report.say(f"guard        step {step}: {why}")
        return False
    if verdict.action == "skip":
        session.report.say(f"guard        step {step} left out ({model.guard.counted()}): {why}")
        return False
    finish_saving(session, excused=True)
    newest = session.saved.newest
    if verdict.action == "rollback" and newest is not None and session.model.guard.may_go_back_to(newest):
        roll_back(session)
        session.report.say(f"guard        step {step}: {why}; back to {newest}, on with the samples that follow")
        return True
    remedy = remedy_for(verdict, newest is not None, samples is not None)
    raise TrainingError(f"step {step}: {why}; {remedy} (newest checkpoint: {newest or 'none'})", everywhere=True)


def _reasons(session: Session, model: TrainedModel, verdict: Verdict, samples: str | None) -> str:
    """Clauses about what the guard has found. samples: one about the step's samples. Collective."""
    if verdict.cause == "oom":
        lacks = gather_values((session.identity.node, model.runner.out_of_memory))
        return ", ".join(
            f"rank {rank} on {node} ran out of memory: {why}" for rank, (node, why) in enumerate(lacks) if why
        )
    if verdict.cause == "loss_spike":
        return verdict.said
    clauses = [verdict.said, *([samples] if samples else [])]
    return "; ".join([*clauses, first_nonfinite(model, verdict.figures.losses, session.identity)])
