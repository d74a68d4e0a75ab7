"""The loop, readable top to bottom: what every rank does from the first step to the last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.data.loader import Loader
from hpctrain.errors import EXIT_DONE, EXIT_STOPPED, CheckpointError, TrainingError, reason
from hpctrain.exchange import gather_values, sum_of, together
from hpctrain.loop.metrics import StepTimes, gather_row, memory_bytes
from hpctrain.loop.session import Session
from hpctrain.loop.signals import StopRequest
from hpctrain.torch_private import foreach_mul_


def train(session: Session, stop: StopRequest) -> dict[str, Any]:
    """Train from the session's step to its last one, or until a signal. The result has step, loss and exit_code."""
    hooks, progress, last_loss, code = session.hooks, session.progress, math.nan, EXIT_DONE
    world = dist.group.WORLD
    assert world is not None
    start: dict[str, Any] = {"step": progress.step, "control": session.control}
    together(world, lambda: hooks.call("hpctrain_job_start", job=session.job, identity=session.identity, **start))
    if progress.step and progress.evaluation is None:
        evaluate_if_due(session)  # a signal left no time for it
    loader = session.feed.training_loader(progress)
    try:
        end_if_asked(session)
        while not progress.done and code == EXIT_DONE:
            row, stop_agreed = train_step(session, loader, stop)
            last_loss = row["loss"]
            if not stop_agreed:  # who stops a job may kill it soon: save first
                evaluate_if_due(session)
            end_if_asked(session)
            code = save_if_due(session, stop_agreed)
    finally:
        loader.close()
    result = {"step": progress.step, "loss": last_loss, "exit_code": code}
    together(world, lambda: hooks.call("hpctrain_job_end", result=result))
    return result


def train_step(session: Session, loader: Loader, stop: StopRequest) -> tuple[dict[str, Any], bool]:
    """One optimizer step; its row, and whether any rank was asked to stop."""
    parts, model, progress, times = session.parts, session.model, session.progress, StepTimes()
    step, phase = progress.step, session.hooks.phase
    with times.waiting_for_data(), phase("data", step):
        micro_batches, samples_seen = loader.step()
    with times.communicating():
        count = model.sum_over_batch(sum(parts.model.count(micro.batch) for micro in micro_batches))
    if count == 0:
        raise TrainingError(f"step {step + 1}: no token or sample of the global batch has a label", everywhere=True)
    model.begin_sums(step)
    loss_sum = model.runner.train(micro_batches, count, step)
    with times.communicating():
        model.sharded.synchronize()

    # without the loss scale -> finite? -> norm -> clip -> step -> update: the norm is finite only if every gradient is
    gradients = model.take_gradients()
    norm = model.gradient_norm(gradients)
    lr = model.set_learning_rate(step, progress.steps)
    apply = math.isfinite(norm)
    with phase("optimizer", step):
        if apply:
            clip(gradients, norm, session.job.optimizer.clip_norm)
            model.optimizer.step()
            model.optimizer_begun = True
            model.sharded.refresh()
            model.sharded.stepped(step + 1)
        else:
            model.sums.leave_out()
    excused = not apply and model.scaler.skips_nonfinite
    model.scaler.update(apply)
    progress.advance(samples_seen)

    loss_part = loss_sum.item() * model.loss_share
    local = [loss_part, times.data, times.communication, memory_bytes(session.device), float(stop.requested)]
    figures = gather_row([*local, *model.runner.figures()])
    losses, data, communication, memory, stops = figures[:, : len(local)].T
    brought, remark = model.runner.metrics(figures[:, len(local) :])
    loss = losses.sum().item() / count
    row = {
        "step": progress.step,
        "loss": loss,
        "lr": lr,
        "grad_norm": norm,
        session.parts.model.counts: count,
        "step_seconds": times.seconds,
        f"{session.parts.model.counts}_per_second": count / times.seconds,
        "data_seconds": data.max().item(),
        "communication_seconds": communication.max().item(),
        "memory_bytes": {"rank_max": int(memory.max()), "rank_mean": int(memory.mean())},
        **brought,
        **({} if apply else {"skipped": True}),
    }
    session.hooks.call("hpctrain_step_end", step=progress.step, metrics=row, control=session.control)
    session.report.row(row, progress.steps, parts.model.counts, remark)
    if not excused and not (math.isfinite(loss) and apply):
        refuse_nonfinite(session, row)
    return row, bool(stops.any())


def clip(gradients: list[torch.Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients so that their global norm is at most `limit` (Pascanu et al., 2013)."""
    if gradients and limit is not None and norm > limit:
        foreach_mul_(gradients, limit / norm)


def refuse_nonfinite(session: Session, row: Mapping[str, Any]) -> None:
    """NaN or infinity: stop with the step's number, unless the job says to go on."""
    if session.job.job.on_nonfinite == "stop":
        finish_saving(session, excused=True)
        newest = session.saving.newest or "none"
        raise TrainingError(
            f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}, expected finite numbers; "
            f"try a smaller lr, [optimizer] clip_norm or another precision (newest checkpoint: {newest}; "
            'job.on_nonfinite = "continue" leaves such steps out)',
            everywhere=True,
        )


def evaluate_if_due(session: Session) -> None:
    """Every `every_steps` steps and at the end."""
    every, progress, model = session.job.evaluation.every_steps, session.progress, session.model
    if not every or not session.feed.validates or (progress.step % every and not progress.done):
        return
    model.consolidate()
    loader = session.feed.validation_loader()
    try:
        with session.hooks.phase("evaluation", progress.step):
            loss_sum, count = model.runner.evaluate(loader)
    finally:
        loader.close()
    share = model.loss_share
    sums = gather_row([loss_sum.item() * share, count * share]).sum(0)
    counted = f"evaluation_{session.parts.model.counts}"
    row = {"step": progress.step, "evaluation_loss": (sums[0] / sums[1]).item(), counted: int(sums[1])}
    progress.evaluation = (progress.step, float(row["evaluation_loss"]))
    session.hooks.call("hpctrain_evaluation", step=progress.step, metrics=row, control=session.control)
    session.report.row(row, progress.steps, session.parts.model.counts)


def end_if_asked(session: Session) -> None:
    """Let the run end here if a plugin of any rank wants it; collective where plugins can."""
    if not session.hooks.can_end:
        return
    if sum_of(len(session.control.reasons)):
        session.progress.ended = True
        for why in dict.fromkeys(why for rank in gather_values(session.control.reasons) for why in rank):
            session.report.say(f"ended        after step {session.progress.step}: {why}")


def save_if_due(session: Session, stop_agreed: bool) -> int:
    """Save when the job says so, at the end and when asked to stop; the exit code that training should end with so far.

    What became of a save in the background is told at the first step after it has ended.
    """
    last = session.progress.done
    final = stop_agreed or last
    due = final or session.saving.is_due()
    excused = session.job.checkpoint.on_error == "continue"
    if due or session.saving.is_over():
        finish_saving(session, excused or final)  # a failure of the one before doesn't keep the final one away
    if due:
        try:
            with session.hooks.phase("save", session.progress.step):
                session.saving.save(final)
        except (OSError, CheckpointError) as error:
            save_failed(session, session.progress.step, error, excused and not final)
    return EXIT_STOPPED if stop_agreed and not last else EXIT_DONE


def finish_saving(session: Session, excused: bool) -> None:
    """Wait for a save in the background; its failure is said if `excused`, else it ends the training."""
    try:
        session.saving.finish()
    except (OSError, CheckpointError) as error:
        save_failed(session, session.saving.step, error, excused)


def save_failed(session: Session, step: int, error: Exception, excused: bool) -> None:
    """Say it and go on, or stop with exit 4; the older checkpoints are as they were."""
    if not excused:
        newest = session.saving.newest or "there is none"
        message = f"step {step} could not be saved: {reason(error)} (newest checkpoint: {newest})"
        raise TrainingError(message, everywhere=True) from error
    session.report.say(f"step {step} could not be saved, training goes on: {reason(error)}")
