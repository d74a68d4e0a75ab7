"""The steps of a training, whether a runner computes their gradients (`hpctrain run`) or a program's own loop: what is loaded,
exchanged, judged, updated, written and asked in each of them is here once."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.life_cycle import Request
from hpctrain.contracts.precision import LossScaler
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.model.refusals import refuse_different_norms
from hpctrain.ranks.json_collectives import broadcast_value, gather_values, sum_of, together, world_group
from hpctrain.ranks.signals import STOPPED, StopRequest
from hpctrain.training.figures import Figure, RankFigures
from hpctrain.training.guard.judging import StepFigures, Verdict, remedy_for
from hpctrain.training.restoring import roll_back
from hpctrain.training.saving import finish_saving
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel

# what rank 0 measures of itself and adds to the row of metrics.jsonl
_OF_RANK_0 = ("goodput", "drain_seconds", "exposed_seconds", "hidden_seconds", "bytes_per_second")
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Update:
    """An optimizer's step, equal on all ranks. lr: of its first group. taken: whether it has changed the model."""

    model: TrainedModel
    figures: StepFigures
    lr: float
    taken: bool
    verdict: Verdict | None


def figures_of_update(
    session: Session, model: TrainedModel, ranks: Sequence[RankFigures[float]], divisor: float
) -> StepFigures:
    """The loss and the norm that all ranks go by. divisor: of the sum of all losses. Raises TrainingError if the ranks ran
    different blocks."""
    model.refuse_other_routes([one.route for one in ranks])
    losses = [one.loss for one in ranks]
    squares = [one.square for one in ranks]
    norm = model.totals.norm(squares, session.identity.rank)
    if math.isfinite(norm) and not (model.totals.cut or model.parts.sharding.ranks_diverge):
        refuse_different_norms(model.parts, [math.sqrt(square) for square in squares], model.scaler.scale)
    overflow = not math.isfinite(norm) and model.scaler.skips_nonfinite
    return StepFigures(session.progress.step + 1, sum(losses) / divisor, norm, losses, overflow)


class Steps:
    """The steps from a session's position on. Its methods are collective, in the order of a step.

    row: the newest step's row of metrics.
    """

    def __init__(self, session: Session, stop: StopRequest, reads: bool = True) -> None:
        """stop: asks this rank to stop. reads: whether the steps take the job's data."""
        self.session, self.row = session, dict[str, Any]()
        self._stop, self._reads = stop, reads
        self._loader: Loader | None = None
        self._micro_batches: list[MicroBatch] = []
        self._samples_seen, self._begin = 0, 0.0

    def begin(self) -> None:
        """Begin to load, and to measure."""
        self.session.meters.clock.restart()
        self.session.hooks.position.entered = self.session.meters.clock.enter
        self._load_from_here()

    def _load_from_here(self) -> None:
        self.close()
        if self._reads:
            self._loader = self.session.feed.training_loader(self.session.progress)

    def close(self) -> None:
        """Load no more."""
        if self._loader is not None:
            self._loader.close()

    def load(self) -> list[MicroBatch]:
        """This rank's micro batches of the next step; none where the steps take no data."""
        self._begin, self._micro_batches = time.perf_counter(), []  # a device need not hold two steps' batches
        if self._loader is not None:
            with self.session.hooks.phase("data", self.session.progress.step):
                self._micro_batches, self._samples_seen = self._loader.step()
        return self._micro_batches

    def figures(self, trained: int, has_known_forwards: bool = True, **further: Any) -> RankFigures[Figure]:
        """This rank's figures that every step exchanges, and further ones. trained: steps that the parameters have had.
        has_known_forwards: each micro batch has exactly one."""
        session = self.session
        return RankFigures(
            terms=session.model.loss_share * sum(micro.terms for micro in self._micro_batches),
            stop=float(max(self._stop.level, STOPPED if session.deadline.turn() else 0)),
            request=float(session.queries is not None and session.queries.has_request),
            replicas=[one.glance(trained) for one in session.replicas],
            **session.meters.figures(self._micro_batches, has_known_forwards),
            **further,
        )

    def compare_replicas(self, trained: int, ranks: Sequence[RankFigures[float]]) -> None:
        """Raises TrainingError on all ranks if replicas differ. trained: as for `figures`."""
        for place, replicas in enumerate(self.session.replicas):
            replicas.compare(trained, [one.replicas[place] for one in ranks])

    def update(
        self,
        model: TrainedModel,
        gradients: list[Tensor],
        figures: StepFigures,
        clips: bool = True,
        sets_rate: bool = True,
    ) -> Update:
        """Judge the figures, and update the model or leave it out: all ranks or none, since all have these figures.

        clips: whether the gradients are not clipped yet. sets_rate: whether the schedule does.
        """
        session, step = self.session, self.session.progress.step
        verdict = model.guard.judge(figures)
        if sets_rate:
            model.set_learning_rate(*session.schedule_place(model))
        lr = float(model.optimizer.param_groups[0]["lr"])
        taken = math.isfinite(figures.norm) and (verdict is None or verdict.action == "warn")
        with session.hooks.phase("optimizer", step):
            if taken:
                model.update(step, gradients, figures.norm if clips else 0.0)
            else:
                model.sums.leave_out()
        return Update(model, figures, lr, taken, verdict)

    def end(
        self,
        ranks: Sequence[RankFigures[float]],
        update: Update,
        count: int,
        named: Mapping[str, float] = _NOTHING,
        others: Mapping[str, Update] = _NOTHING,
        logged: Mapping[str, float] = _NOTHING,
    ) -> int:
        """Write the step's row, and let hooks and requests act; the strongest request to stop on any rank, 0 for none.

        update: of the first model. count: tokens or samples of the global batch. named: losses by name. others: updates of further
        models, by their names. logged: the program's own numbers.
        """
        session, progress = self.session, self.session.progress
        progress.advance(self._samples_seen)  # hooks and the row see the step as done
        progress.loss = update.figures.loss
        if progress.step == progress.first_step + 10 and not gc.get_freeze_count():  # a shorter run does without
            gc.collect()
            gc.freeze()  # else a collection of all that was imported, 0.1 s, falls into a step, of each rank into another one
        self.row, remark = self._row(ranks, update, count, named, others)
        taken = [name for name in logged if name in self.row]
        if taken:
            raise TrainingError(f"log: {taken[0]!r} is a key of the row itself; expected another name")
        self.row |= logged
        session.hooks.call(
            "hpctrain_step_end", model=session.model, step=progress.step, metrics=self.row, control=session.control
        )
        session.hooks.step_done()
        if any(one.request for one in ranks):
            take_request(session)
        own: dict[str, Any] = session.meters.traffic.take()
        if session.store.drain_seconds:
            own["drain_seconds"], session.store.drain_seconds = session.store.drain_seconds, 0.0
        session.report.row({**self.row, **own}, progress.steps, session.parts.model.counts, remark)
        return int(max(one.stop for one in ranks))

    def _row(
        self,
        ranks: Sequence[RankFigures[float]],
        update: Update,
        count: int,
        named: Mapping[str, float],
        others: Mapping[str, Update],
    ) -> tuple[dict[str, Any], str]:
        """The row, and the runner's remark for the screen. docs/metrics.md says what each key is. Arguments as for `end`."""
        session, model, figures = self.session, self.session.model, update.figures
        seconds = time.perf_counter() - self._begin
        means = [one.loss / one.terms for one in ranks if one.terms and one.loss]  # a pipeline's first ranks have none
        of_runner, remark = model.runner.metrics(torch.tensor([one.of_runner for one in ranks], dtype=torch.float64))
        counts = session.parts.model.counts
        row: dict[str, Any] = {
            **moment(session),
            "loss": figures.loss,
            "lr": update.lr,
            "grad_norm": figures.norm,
            counts: count,
            "step_seconds": seconds,
            f"{counts}_per_second": count / seconds,
            f"{counts}_per_second_per_rank": count / seconds / len(ranks),
            "rank_loss": {"rank_min": min(means), "rank_max": max(means)} if len(means) > 1 else None,
            "loss_scale": None if type(model.scaler) is LossScaler else model.scaler.scale,
            **session.meters.row(ranks, seconds),
            **of_runner,
            "skipped": None if all(one.taken for one in (update, *others.values())) else True,
            **model.guard.metrics(update.verdict),
        }
        losses = {**named, **{f"loss_{name}": one.figures.loss for name, one in others.items()}}
        taken = [name for name in losses if name in row or name in _OF_RANK_0]
        if taken:
            raise TrainingError(f"the loss reports {taken[0]!r}, which is a key of each row; expected another name")
        row = {key: value for key, value in row.items() if value is not None} | losses
        row |= {f"lr_{name}": one.lr for name, one in others.items()}
        row |= {f"grad_norm_{name}": one.figures.norm for name, one in others.items()}
        return row, remark

    def act(self, updates: Iterable[Update]) -> bool:
        """Warn, skip, roll back or stop as the guards have decided on these updates, after the step was reported; whether the
        training went back to a checkpoint. Raises TrainingError where it stops."""
        for update in updates:
            if update.verdict is not None and self._act(update.model, update.verdict):
                self._load_from_here()  # what was loaded ahead comes behind other samples now
                return True
        self._micro_batches = []  # an evaluation needs the memory
        return False

    def result(self, code: int) -> dict[str, Any]:
        """The result of a training that is over, for hooks and for the caller. code: its exit code."""
        session = self.session
        return {
            "step": session.progress.step,
            "loss": session.progress.loss,
            "metrics": self.row,
            "checkpoint": session.newest_checkpoint,
            "exit_code": code,
        }

    def _act(self, model: TrainedModel, verdict: Verdict) -> bool:
        session, step, samples, why = self.session, verdict.figures.step, None, verdict.said
        if verdict.cause == "non_finite":
            from hpctrain.training.guard.first_nonfinite import first_nonfinite, nonfinite_samples  # few runs need it

            if self._loader is not None:
                kind = "item" if session.feed.is_stream else "sample"
                samples = nonfinite_samples(self._micro_batches, self._loader.indices, kind)
            first = first_nonfinite(model, verdict.figures.losses, session.identity)
            why = "; ".join(part for part in (why, samples, first) if part)
        if verdict.action in ("warn", "skip"):
            left_out = f" left out ({model.guard.counted()})" if verdict.action == "skip" else ""
            session.report.say(f"guard        step {step}{left_out}: {why}")
            return False
        finish_saving(session, excused=True)  # one in the background may be the newest
        newest = session.newest_checkpoint
        if verdict.action == "rollback" and newest is not None and model.guard.may_go_back_to(newest):
            roll_back(session)
            session.report.say(f"guard        step {step}: {why}; back to {newest}, on with the samples that follow")
            return True
        remedy = remedy_for(verdict, newest is not None, samples is not None)
        raise TrainingError(f"step {step}: {why}; {remedy} (newest checkpoint: {newest or 'none'})")


def start_hooks(session: Session) -> None:
    """Tell the hooks that the training begins. Collective."""
    start = {
        "job": session.job, "identity": session.identity, "control": session.control, "membership": session.hooks,
        "step": session.progress.step,
    }  # fmt: skip
    together(world_group(), lambda: session.hooks.call("hpctrain_job_start", model=session.model, **start))


def end_hooks(session: Session, result: dict[str, Any]) -> None:
    """Tell the hooks that the training is over; they may change its result. Collective."""
    together(world_group(), lambda: session.hooks.call("hpctrain_job_end", result=result))


def moment(session: Session) -> dict[str, Any]:
    """The keys of each row that say where the training is now."""
    epoch = session.feed.epochs(session.progress.samples_seen)
    return {"step": session.progress.step, "epoch": epoch, "time": time.time()}


def take_request(session: Session) -> None:
    """Show the plugins the oldest request of another terminal at rank 0. Collective."""
    queries, hooks = session.queries, session.hooks
    question = None if queries is None else queries.take()
    asked = broadcast_value(None if question is None else [question.name, dict(question.values)])  # rank 0's, for all
    if asked is None:  # it was withdrawn meanwhile
        return

    def answer(values: dict[str, Any]) -> None:
        if queries is not None and question is not None:
            queries.tell(question, values)

    name, values = asked
    request, step = Request(name, values, answer), session.progress.step
    taken = hooks.call("hpctrain_request", request=request, step=step, model=session.model)
    if not any(taken):
        answer({"state": "refused", "why": f"no plugin of this job takes a request for {name!r}"})


def end_if_asked(session: Session) -> None:
    """End the run here if a plugin on any rank asks for it. Collective if a plugin can ask."""
    if not session.hooks.can_end:  # else each step would have one more exchange
        return
    if sum_of(len(session.control.reasons)):
        session.progress.ended = True
        ranks: list[tuple[list[str], bool]] = gather_values((session.control.reasons, session.control.saves))
        session.control.saves = all(saves for _, saves in ranks)
        for why in dict.fromkeys(why for reasons, _ in ranks for why in reasons):
            session.report.say(f"ended        after step {session.progress.step}: {why}")
