"""The training loop of every rank, from the first step to the last. Read it top to bottom."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import EXIT_DONE, EXIT_STOPPED, TrainingError
from hpctrain.base.torch_private import foreach_mul_
from hpctrain.contracts.precision import LossScaler
from hpctrain.data.loader import Loader
from hpctrain.model.conformance.first_step import FirstStep
from hpctrain.model.conformance.hooks import weights_kept
from hpctrain.ranks.json_collectives import gather_values, sum_of, together, world_group
from hpctrain.ranks.signals import INTERRUPTED, STOPPED, StopRequest
from hpctrain.training.evaluation import Ask, Asking, evaluate, refuse_unmeasured
from hpctrain.training.figures import RankFigures, exchange_figures, step_figures
from hpctrain.training.guard.judging import StepFigures, Verdict
from hpctrain.training.guard.memory import memory_explained
from hpctrain.training.guard_actions import act, with_samples
from hpctrain.training.look import is_compiled, look
from hpctrain.training.metrics import (
    EvaluationRow,
    Moment,
    OwnRow,
    StepRow,
)
from hpctrain.training.packing_trial import try_packing
from hpctrain.training.requests import take_request
from hpctrain.training.saving import finish_saving, save_before_evaluation, save_if_due
from hpctrain.training.session import Session
from hpctrain.training.starts import first_step_seconds, note_first_step

LOG = logging.getLogger("hpctrain")


def train(session: Session, stop: StopRequest) -> dict[str, Any]:
    """Train from the session's step to the last step, or until a signal.

    The result has `step`, `loss` (of the last step), `losses` (of the steps of this call), `metrics` (the newest step's row),
    `evaluation` (the metrics of the newest evaluation, or None), `checkpoint`, `exit_code`, and `interrupted`: whether Ctrl-C
    ended the training.
    """
    hooks, progress = session.hooks, session.progress
    losses: list[float] = []
    row: dict[str, Any] = {}
    stops, begun, asked = 0, progress.step, partial(level, session, stop)
    world = world_group()
    start_hooks(session)
    look(session)
    try_packing(session)
    compiles = bool(sum_of(session.job.compile.enabled or is_compiled(session.model.module)))
    if compiles:
        stops = strongest(partial(too_late_to_compile, session))
    if progress.step and progress.evaluation is None and not stops:
        stops = evaluate_if_due(session, partial(urgent, stop))  # left out at a signal, to save first
    session.model.split_counts = []  # the look's are over
    session.meters.clock.restart()
    hooks.position.entered = session.meters.clock.enter
    loader = session.feed.training_loader(progress)
    try:
        end_if_asked(session)
        # One that came while the model was built. Others let a step be taken, so that a job with too little time gets on.
        stops = stops or strongest(partial(urgent, stop))
        while not progress.done and not stops:
            with explained(session, f"in step {progress.step + 1}"):
                row, stops, verdict = train_step(session, loader, stop)
            losses.append(row["loss"])
            if compiles and progress.step == begun + 1:
                session.deadline.unseen = row["step_seconds"]
                if session.identity.rank == 0:
                    note_first_step(session.job.output_dir, row["step_seconds"])
            if verdict is not None and act(session, verdict):
                del losses[max(0, progress.step - begun) :]
                loader.close()
                loader = session.feed.training_loader(progress)
                continue  # nothing to save: the model is that of a checkpoint
            # a job that is asked to stop may be killed soon: save first
            stops = stops or evaluate_if_due(session, asked)
            end_if_asked(session)
            with explained(session, f"while step {progress.step} was saved"):
                if save_if_due(session, bool(stops)) and not stops:
                    stops = strongest(asked)  # one that came meanwhile: no other step, which would be saved again
                    if stops:
                        finish_saving(session, excused=False)
    finally:
        loader.close()
    unevaluated = evaluation_is_due(session) and (
        progress.evaluation is None or progress.evaluation[0] != progress.step
    )
    code = EXIT_STOPPED if stops and not progress.ended and (unevaluated or not progress.done) else EXIT_DONE
    result = {
        "step": progress.step,
        "loss": progress.loss,
        "losses": losses,
        "metrics": row,
        "evaluation": None if progress.evaluation is None else dict(progress.evaluation[1]),
        "checkpoint": session.saved.newest,
        "exit_code": code,
        "interrupted": code == EXIT_STOPPED and stops == INTERRUPTED,
    }
    together(world, lambda: hooks.call("hpctrain_job_end", result=result))
    return result


def start_hooks(session: Session) -> None:
    """Tell the hooks that the training begins. Collective."""
    start: dict[str, Any] = {
        "job": session.job,
        "identity": session.identity,
        "control": session.control,
        "membership": session.hooks,
    }
    step = session.progress.step
    together(world_group(), lambda: show_model(session, "hpctrain_job_start", step=step, **start))


def train_step(session: Session, loader: Loader, stop: StopRequest) -> tuple[dict[str, Any], int, Verdict | None]:
    """Run one optimizer step; return its row, the strongest request to stop on any rank (0 is none), and the guard's verdict."""
    parts, model, progress, begin = session.parts, session.model, session.progress, time.perf_counter()
    step, phase, position = progress.step, session.hooks.phase, session.hooks.position
    with phase("data", step):
        micro_batches, samples_seen = loader.step()
    with position.inside("counting", step):
        # the divisor is known before the first backward, and is the same on every layout
        count = model.sum_over_batch(sum(micro.terms for micro in micro_batches))
    if count == 0:
        raise TrainingError(f"step {step + 1}: no token or sample of the global batch has a label", everywhere=True)

    model.begin_sums(step)
    trial = model.first_step()
    with session.meters.counting(micro_batches):
        # forward and backward; buckets are summed as they fill
        loss_sum = model.runner.train(micro_batches, count, step)
    if model.runner.out_of_memory is not None:
        session.meters.count_again()
    if trial is not None:
        trial.forwarded(loss_sum.item())
    with position.inside("sums of gradients", step):
        model.sharded.synchronize()
    for remark in (
        () if trial is None else {*gather_values(model.remark)} - {""}
    ):  # a pipeline's first ranks have no loss
        session.report.say(f"loss         {remark}")
    model.remark = ""

    # unscale -> norm -> guard -> clip -> step: the norm is finite only if every gradient is
    gradients = model.take_gradients()
    ranks = exchange_figures(session, micro_batches, loss_sum, gradients, stop)
    if session.replicas is not None:
        session.replicas.compare(step, [one.replica for one in ranks])
    found = step_figures(session, ranks, count, trial)
    verdict = session.guard.judge(found)
    if verdict is not None:
        verdict = with_samples(session, verdict, micro_batches, loader)
    lr = model.set_learning_rate(*session.schedule_place)
    # all ranks update or none: the verdict comes from figures that all have
    with phase("optimizer", step):
        if is_taken(found, verdict):
            update(session, gradients, found.norm, trial)
        else:
            model.sums.leave_out()
    model.scaler.update(math.isfinite(found.norm))  # a step that is left out counts, too: the scale has to sink
    progress.advance(samples_seen)
    progress.loss = found.loss

    row, remark = step_row(session, ranks, found, verdict, lr, count, time.perf_counter() - begin)
    show_model(session, "hpctrain_step_end", step=progress.step, metrics=row, control=session.control)
    session.hooks.step_done()
    if any(one.request for one in ranks):
        take_request(session)
    own: OwnRow = {**session.meters.traffic(), **drained(session)}
    session.report.row({**row, **own}, progress.steps, parts.model.counts, remark)
    return row, int(max(one.stop for one in ranks)), verdict


def is_taken(found: StepFigures, verdict: Verdict | None) -> bool:
    """Whether the step updates the model."""
    return math.isfinite(found.norm) and (verdict is None or verdict.updates)


def step_row(
    session: Session,
    ranks: Sequence[RankFigures[float]],
    found: StepFigures,
    verdict: Verdict | None,
    lr: float,
    count: int,
    seconds: float,
) -> tuple[dict[str, Any], str]:
    """The row of the step, and the runner's remark for the screen."""
    model = session.model
    means = [one.loss / one.terms for one in ranks if one.terms and one.loss]  # a pipeline's first ranks have none
    of_runner, remark = model.runner.metrics(torch.tensor([one.of_runner for one in ranks], dtype=torch.float64))
    named = model.named_losses.means([one.named_losses for one in ranks], count)
    row = StepRow(
        loss=found.loss,
        named_losses={} if found.out_of_memory else named,  # they lack what some micro batches would have added
        lr=lr,
        grad_norm=math.nan if found.out_of_memory else found.norm,
        count=count,
        step_seconds=seconds,
        per_second=count / seconds,
        ranks=len(ranks),
        rank_loss={"rank_min": min(means), "rank_max": max(means)}
        if len(means) > 1 and not found.out_of_memory
        else {},
        loss_scale=None if type(model.scaler) is LossScaler else model.scaler.scale,
        measured=session.meters.row([one.of_meters for one in ranks], seconds, partial(LOG.warning, "%s")),
        of_runner=of_runner,
        skipped=not is_taken(found, verdict),
        of_guard=session.guard.metrics(verdict),
    )
    return row.as_dict(moment(session), session.parts.model.counts), remark


def drained(session: Session) -> OwnRow:
    """The key of a row for background saves that have ended since the row before."""
    seconds, session.store.drain_seconds = session.store.drain_seconds, 0.0
    return {"drain_seconds": seconds} if seconds else {}


def update(session: Session, gradients: list[Tensor], norm: float, trial: FirstStep | None) -> None:
    """Clip, let the optimizer step, and give the ranks the new parameters."""
    model = session.model
    clip(gradients, norm, session.job.optimizer.clip_norm)
    model.update(session.progress.step)
    model.sharded.refresh()
    if trial is not None:
        trial.updated()
        model.is_tried = True
    model.sharded.stepped(session.progress.step + 1)


def show_model(session: Session, hook: str, **arguments: Any) -> None:
    """Call a hook that gets the model. Raises ContractError if a plugin changes its weights and doesn't say so."""
    who = session.hooks.who(hook)
    with weights_kept(session.model, hook, who) if who else nullcontext():
        session.hooks.call(hook, model=session.model, **arguments)


def moment(session: Session) -> Moment:
    """The position of the training now."""
    return Moment(session.progress.step, session.feed.epochs(session.progress.samples_seen), time.time())


def clip(gradients: list[Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients so that their global norm is at most `limit` (Pascanu et al., 2013)."""
    if gradients and limit is not None and norm > limit:
        foreach_mul_(gradients, limit / norm)


def explained(session: Session, doing: str) -> AbstractContextManager[None]:
    """A context in which a lack of memory becomes a sentence. doing: what the rank is about."""
    return memory_explained(session.job, session.parts, session.identity, session.device, doing)


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


def too_late_to_compile(session: Session, _: float) -> int:
    """This rank's request to stop at the start, where the first step of the last start took longer than what is left."""
    if (left := session.deadline.left) == math.inf:
        return 0
    if (known := first_step_seconds(session.job.output_dir)) is None:
        session.report.say(f"compile      takes a time not known yet, nor counted in the {left:.0f} s that are left")
        return 0
    session.report.say(f"compile      took {known:.0f} s in the last start's first step, and {left:.0f} s are left")
    # without reserve: some kernels are kept, and a job with too little time has to get on
    return STOPPED if session.deadline.leaves_no(known, reserve=1.0) else 0


def evaluation_is_due(session: Session) -> bool:
    """Whether the job asks for an evaluation of this step; the last one has one, too."""
    table, progress = session.job.evaluation, session.progress
    due = bool(table.every_steps) and progress.step % table.every_steps == 0
    due = due or progress.completes(session.feed.samples_of(table.every_epochs)) or progress.done
    return table.enabled and session.feed.validates and due


def evaluate_if_due(session: Session, ask: Ask) -> int:
    """Evaluate when the job says so, and at the end, unless a rank has to stop. Return the strongest request to stop."""
    if not evaluation_is_due(session):
        return 0
    progress = session.progress
    save_before_evaluation(session)
    session.model.consolidate()
    show_model(session, "hpctrain_evaluation_start", step=progress.step)
    moved = partial(session.hooks.position.move, "evaluation")
    asking = Asking(ask)
    with (
        session.deadline.aside(),
        session.hooks.phase("evaluation", progress.step),
        explained(session, f"in the evaluation of step {progress.step}"),
    ):
        if session.deadline.unseen:
            asking.level = strongest(lambda _: ask(session.deadline.unseen))
            session.deadline.unseen = 0.0
        loader = session.feed.validation_loader
        found = None if asking.level else evaluate(session.model, session.parts, loader(), moved, asking)
    show_model(session, "hpctrain_evaluation_end", step=progress.step)
    if found is None:
        session.report.say(f"evaluation   of step {progress.step} left out: the job has to stop")
        return asking.level
    metrics, count = found
    refuse_unmeasured(session.job, metrics)
    progress.evaluation = progress.step, metrics
    row = EvaluationRow(metrics, count).as_dict(moment(session), session.parts.model.counts)
    show_model(session, "hpctrain_evaluation", step=progress.step, metrics=row, control=session.control)
    session.report.row(row, progress.steps, session.parts.model.counts)
    return strongest(ask)


def end_if_asked(session: Session) -> None:
    """End the run here if a plugin on any rank asks for it. Collective if a plugin can ask."""
    if not session.hooks.can_end:
        return
    if sum_of(len(session.control.reasons)):
        session.progress.ended = True
        ranks: list[tuple[list[str], bool]] = gather_values((session.control.reasons, session.control.saves))
        session.control.saves = all(saves for _, saves in ranks)
        for why in dict.fromkeys(why for reasons, _ in ranks for why in reasons):
            session.report.say(f"ended        after step {session.progress.step}: {why}")
