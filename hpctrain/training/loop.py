"""The training loop of every rank, from the first step to the last. Read it top to bottom."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.errors import EXIT_DONE, EXIT_STOPPED, TrainingError
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.signals import INTERRUPTED, STOPPED, StopRequest
from hpctrain.training.evaluation import Ask, Asking, evaluate, look, refuse_unmeasured
from hpctrain.training.figures import gather_row
from hpctrain.training.saving import finish_saving, save_if_due
from hpctrain.training.session import Session
from hpctrain.training.step import Steps, Update, end_hooks, end_if_asked, figures_of_update, moment, start_hooks


def train(session: Session, stop: StopRequest) -> dict[str, Any]:
    """Train from the session's step to the last step, or until a signal.

    The result is that of `hpctrain.run`, with `interrupted`: whether Ctrl-C ended the training.
    """
    progress, begun, asked = session.progress, session.progress.step, partial(level, session, stop)
    losses: list[float] = []
    steps = Steps(session, stop)
    start_hooks(session)
    look(session)
    if session.job.batch.packing:
        from hpctrain.training.packing_trial import try_packing

        try_packing(session)
    is_unevaluated = progress.step and progress.evaluation is None  # left out at a signal, to save first
    stops = evaluate_if_due(session, partial(urgent, stop)) if is_unevaluated else 0
    steps.begin()
    try:
        end_if_asked(session)
        # One that came while the model was built. Others let a step be taken, so that a job with too little time gets on.
        stops = stops or strongest(partial(urgent, stop))
        while not progress.done and not stops:
            with session.memory_explained(f"in step {progress.step + 1}"):
                stops, update = train_step(steps)
            losses.append(update.figures.loss)
            if steps.act([update]):
                del losses[max(0, progress.step - begun) :]
                continue  # nothing to save: the model is that of a checkpoint
            # a job that is asked to stop may be killed soon: save first
            stops = stops or evaluate_if_due(session, asked)
            end_if_asked(session)
            with session.memory_explained(f"while step {progress.step} was saved"):
                if save_if_due(session, bool(stops)) and not stops:
                    stops = strongest(asked)  # one that came meanwhile: no other step, which would be saved again
                    if stops:
                        finish_saving(session, excused=False)
    finally:
        steps.close()
    unevaluated = evaluation_is_due(session) and (progress.evaluation or (-1, {}))[0] != progress.step
    code = EXIT_STOPPED if stops and not progress.ended and (unevaluated or not progress.done) else EXIT_DONE
    result = {
        **steps.result(code),
        "losses": losses,
        "evaluation": None if progress.evaluation is None else dict(progress.evaluation[1]),
        "interrupted": code == EXIT_STOPPED and stops == INTERRUPTED,
    }
    end_hooks(session, result)
    return result


def train_step(steps: Steps) -> tuple[int, Update]:
    """Run one optimizer step; the strongest request to stop on any rank (0 is none), and the update. Collective."""
    session, model, step = steps.session, steps.session.model, steps.session.progress.step
    position = session.hooks.position
    micro_batches = steps.load()
    with position.inside("counting", step):
        # of the global batch on every layout; an accelerator has it in time, and the exchange below tells it
        terms = sum(micro.terms for micro in micro_batches)
        divisor = torch.full((), terms, dtype=torch.float64, device=session.device)
        if model.batch_group.size() > 1:
            dist.all_reduce(divisor, group=model.batch_group)
    model.begin_sums(step)
    with session.meters.flops.counting(micro_batches):
        # forward and backward; buckets are summed as they fill
        loss_sum = model.runner.train(micro_batches, divisor, step)
    with position.inside("sums of gradients", step):
        model.sharded.synchronize()
    if step == session.progress.first_step:
        for remark in {*gather_values(model.remark)} - {""}:  # a pipeline's first ranks have no loss
            session.report.say(f"loss         {remark}")

    # unscale -> norm -> guard -> clip -> step: the norm is finite only if every gradient is
    gradients = model.take_gradients()
    with position.inside("exchange of figures", step):  # here alone the loop waits for the device
        ranks = steps.figures(
            step,
            loss=loss_sum * model.loss_share,
            count=divisor,
            square=model.totals.square(gradients),
            route=model.route(),
            of_runner=model.runner.figures(),
            named=model.named_losses.figures(),
        ).exchanged(partial(gather_row, device=session.device))
    count = int(ranks[0].count)
    if count == 0:
        raise TrainingError(f"step {step + 1}: no token or sample of the global batch has a label")
    steps.compare_replicas(step, ranks)
    figures = figures_of_update(session, model, ranks, count)
    update = steps.update(model, gradients, figures)
    model.scaler.update(math.isfinite(figures.norm))  # a step that is left out counts, too: the scale has to sink
    named = model.named_losses.means([one.named for one in ranks], count)
    return steps.end(ranks, update, count, named), update


def strongest(ask: Ask) -> int:
    """The strongest request to stop on any rank, 0 for none. Collective."""
    levels: list[int] = gather_values(ask(0.0))
    return max(levels)


def level(session: Session, stop: StopRequest, seconds: float) -> int:
    """This rank's request to stop. seconds: that will pass before it is asked again."""
    return max(stop.level, STOPPED if session.deadline.leaves_no(seconds) else 0)


def urgent(stop: StopRequest, seconds: float) -> int:
    """This rank's request to stop, where nothing has been trained since the start."""
    return stop.level if stop.is_urgent else 0


def evaluation_is_due(session: Session) -> bool:
    """Whether the job asks for an evaluation of this step; the last one has one, too."""
    table, progress = session.job.evaluation, session.progress
    due = bool(table.every_steps) and progress.step % table.every_steps == 0
    due = due or progress.completes(session.feed.samples_of(table.every_epochs)) or progress.done
    return table.enabled and session.feed.data.validation is not None and due


def evaluate_if_due(session: Session, ask: Ask) -> int:
    """Evaluate when the job says so, and at the end, unless a rank has to stop. Return the strongest request to stop."""
    if not evaluation_is_due(session):
        return 0
    progress = session.progress
    session.model.consolidate()
    session.hooks.call("hpctrain_evaluation_start", model=session.model, step=progress.step)
    asking = Asking(ask, partial(session.hooks.position.move, "evaluation"))
    with (
        session.deadline.aside(),
        session.hooks.phase("evaluation", progress.step),
        session.memory_explained(f"in the evaluation of step {progress.step}"),
    ):
        outcome = evaluate(session.model, session.feed.validation_loader(), asking)
    session.hooks.call("hpctrain_evaluation_end", model=session.model, step=progress.step)
    if outcome is None:
        session.report.say(f"evaluation   of step {progress.step} left out: the job has to stop")
        return asking.level
    metrics, count = outcome
    refuse_unmeasured(session.job, metrics)
    progress.evaluation = progress.step, metrics
    counts = session.parts.model.counts
    measured = {f"evaluation_{name}": value for name, value in metrics.items()}
    row = {**moment(session), **measured, f"evaluation_{counts}": count}
    session.hooks.call(
        "hpctrain_evaluation", model=session.model, step=progress.step, metrics=row, control=session.control
    )
    session.report.row(row, progress.steps, counts)
    return strongest(ask)
