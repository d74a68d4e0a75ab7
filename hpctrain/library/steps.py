"""The steps of a program's loop, and what happens between two of them."""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from hpctrain.base.devices import seed_draws
from hpctrain.base.errors import EXIT_DONE, EXIT_STOPPED, TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checking.check import CheckedJob
from hpctrain.checkpoint.directory import step_of
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.model import Batch
from hpctrain.contracts.precision import LossScaler
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.data.refusals import STREAM, refuse_epochs
from hpctrain.library.agreement import END_OF_LOOP, END_OF_STEP, Agreement
from hpctrain.library.jobs import has_data
from hpctrain.library.trained import Trained
from hpctrain.library.updates import Update, Updates
from hpctrain.ranks.json_collectives import together, world_group
from hpctrain.ranks.signals import INTERRUPTED, STOPPED
from hpctrain.ranks.watchdog.position import BETWEEN, END
from hpctrain.training.assembly import complete
from hpctrain.training.figures import records_of_ranks
from hpctrain.training.guard.judging import Guard
from hpctrain.training.guard.replicas import Replicas
from hpctrain.training.guard_actions import act
from hpctrain.training.loop import drained, end_if_asked, moment, show_model, start_hooks
from hpctrain.training.metrics import Figure, OwnRow, StepRow
from hpctrain.training.packing_trial import try_packing
from hpctrain.training.rank import say_goodbye
from hpctrain.training.requests import take_request
from hpctrain.training.saving import finish_saving, save_if_due
from hpctrain.training.start import Start

LOG = logging.getLogger("hpctrain")

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A step of the loop: iterate over it for this rank's micro batches, as often as you like. number: from 1."""

    number: int
    _deal: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self._deal()


@dataclass(frozen=True)
class EndFigures(Generic[T]):
    """Figures that ranks tell each other at the end of a step; those that RankFigures has, too, as there.

    saves: 1 if the program has asked for a checkpoint. replicas: of each model. logged: the program's numbers, by name.
    """

    stop: T
    request: T
    saves: T
    terms: T
    replicas: Sequence[T]
    logged: Sequence[T]
    of_meters: Sequence[T]


class Steps:
    """Yields the steps from the newest checkpoint to the last one. Collective."""

    def __init__(
        self,
        start: Start,
        of: Mapping[str, CheckedJob],
        trained: Mapping[str, Trained],
        states: Sequence[PluginState],
        agreement: Agreement,
        updates: Updates,
    ) -> None:
        """of: the job of each model. states: what the program keeps in checkpoints."""
        self._start, self._agreement, self._updates, self._trained = start, agreement, updates, trained
        self._kept = states
        first, *others = trained
        further = {name: trained[name].model for name in others}
        _share_scaler([one.model for one in trained.values()])
        for one in trained.values():
            one.note_rates()
        rates = [one.rates_state() for one in trained.values() if not one.follows_schedule]
        self._reads = has_data(of[first].job)
        self.session = complete(start, of[first], trained[first].model, further, [*states, *rates], self._reads, first)
        for name, one in trained.items():
            job, parts = of[name].job, of[name].parts
            guard = self.session.guard if name == first else Guard(job.guard)
            one.session = replace(self.session, job=job, parts=parts, model=one.model, guard=guard)
        if self._reads and self.session.feed.samples is None:
            for checked in of.values():
                refuse_epochs(checked.job, STREAM)
        self._restore_rates()
        self._replicas = [] if self.session.replicas is None else [self.session.replicas]
        for name, model in further.items():
            if not of[name].parts.sharding.ranks_diverge:
                every, identity = of[name].job.guard.replica_check_every, start.world.identity
                self._replicas.append(Replicas(model.module, model.meshes, identity, every, name))
                self._replicas[-1].exist()
        updates.name(trained.values())
        self.micro_batches, self.is_last = 1, True
        self.stopped = self.is_interrupted = False
        self.saves = False
        """Whether the program on this rank has asked for a checkpoint of this step."""
        self._logged: dict[str, list[Figure]] = {}
        self._loader: Loader | None = None
        self._row_before: dict[str, Any] = {}
        self._finish: Callable[[], int] | None = None
        """Ends the step that goes on."""
        self._newest = Update(math.nan, math.nan, math.nan, True, None)
        """The newest update of the first model, which need not be of this step."""

    def _restore_rates(self) -> None:
        for one in self._trained.values():
            one.restore_rates()

    @property
    def is_first(self) -> bool:
        """Whether no step of this run is complete."""
        return self.session.progress.step == self.session.progress.first_step

    @property
    def parts_of_batch(self) -> int:
        """The parts of a global batch: micro batches of all ranks with different samples, or different parts of them."""
        return self.session.model.batch_group.size() * self.micro_batches

    def log(self, values: Mapping[str, Figure]) -> None:
        """Add numbers to the row of this step."""
        for name, value in values.items():
            self._logged.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def __iter__(self) -> Iterator[Step]:
        session, position = self.session, self._start.hooks.position
        start_hooks(session)
        session.meters.clock.restart()
        position.entered = session.meters.clock.enter
        position.move(BETWEEN)
        end_if_asked(session)
        if self._reads:
            try_packing(session)
            session.model.split_counts = []
        self._loader = session.feed.training_loader(session.progress) if self._reads else None
        code = EXIT_DONE
        while not session.progress.done and code == EXIT_DONE:
            begin = time.perf_counter()
            micro_batches, seen = self._load()
            self._updates.begin_step()
            self._finish = partial(self._end_step, micro_batches, seen, begin)
            yield Step(session.progress.step + 1, partial(self._dealt, micro_batches))
            self._finish = None
            code = self._end_step(micro_batches, seen, begin)
        self.stopped = code == EXIT_STOPPED

    def _load(self) -> tuple[list[MicroBatch], int]:
        session = self.session
        if self._loader is None:
            place = session.model.meshes.data_rank  # the others work on one sample
            seed_draws(derive_seed(session.job.job.seed, session.progress.step, place), session.device)
            return [], 0
        with session.hooks.phase("data", session.progress.step):
            return self._loader.step()

    def _dealt(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yield the batches; random numbers depend on the place of each in the global batch."""
        if self._loader is None:
            raise UsageError(
                "the step has no batches: the job has no [dataset]; give own_loop(..., dataset={'name': data})"
            )
        seed, step = self.session.job.job.seed, self.session.progress.step
        self.micro_batches = len(micro_batches)
        for number, micro in enumerate(micro_batches):
            self.is_last = number == len(micro_batches) - 1
            seed_draws(derive_seed(seed, step, micro.place, 0), self.session.device)
            yield micro.batch

    def _end_step(self, micro_batches: Sequence[MicroBatch], seen: int, begin: float) -> int:
        """Write the step's row, let hooks, guard and requests act, and save; the exit code so far. Collective."""
        session, updates = self.session, self._updates
        self.micro_batches, self.is_last = 1, True
        logged = {name: sum(values[1:], values[0]) / len(values) for name, values in self._logged.items()}
        self._logged.clear()
        done = session.progress.step + 1
        mine: EndFigures[Figure] = EndFigures(
            stop=float(max(self._start.stop.level, STOPPED if session.deadline.turn() else 0)),
            request=float(session.queries is not None and session.queries.has_request),
            saves=float(self.saves),
            terms=session.model.loss_share * sum(micro.terms for micro in micro_batches),
            replicas=[one.glance(done) for one in self._replicas],
            logged=list(logged.values()),
            of_meters=session.meters.figures(micro_batches, has_known_forwards=False),
        )
        names = zlib.crc32(json.dumps(list(logged)).encode())
        ranks: list[Any] = records_of_ranks(
            mine, partial(self._agreement.on, END_OF_STEP, session.progress.step, detail=names)
        )
        for place, replicas in enumerate(self._replicas):
            replicas.compare(done, [one.replicas[place] for one in ranks])
        self._tell_of_no_update()
        session.model.scaler.update(updates.finite)
        is_first = self.is_first
        session.progress.advance(seen)
        for one in session.models:
            one.sharded.adopt()
        row = self._row(list(logged), ranks, time.perf_counter() - begin)
        show_model(session, "hpctrain_step_end", step=session.progress.step, metrics=row, control=session.control)
        session.hooks.step_done()
        if any(one.request for one in ranks):
            take_request(session)
        own: OwnRow = {**session.meters.traffic(), **drained(session)}
        session.report.row({**row, **own}, session.progress.steps, session.parts.model.counts)
        self._row_before = row
        level, self.saves = int(max(one.stop for one in ranks)), False
        self.is_interrupted = level == INTERRUPTED
        if is_first:
            for state in self._kept:
                state.values()  # what the first save would refuse
        if self._acted():
            return EXIT_STOPPED if level else EXIT_DONE
        end_if_asked(session)
        save_if_due(session, bool(level), asked=any(one.saves for one in ranks))
        return EXIT_STOPPED if level and not session.progress.done else EXIT_DONE

    def _tell_of_no_update(self) -> None:
        """Say after a first step that no optimizer has stepped. Raises TrainingError at the end of a training that had none."""
        progress, trained = self.session.progress, self._trained.values()
        if any(one.model.optimizer_begun for one in trained) or self._updates.done:
            return
        expected = "expected optimizer.step() after loop.backward(loss), on the optimizer that setup returned"
        if progress.step + 1 >= progress.steps:
            raise TrainingError(f"no optimizer has stepped in {progress.steps} steps; {expected}", everywhere=True)
        if self.is_first and self._start.world.identity.rank == 0:
            LOG.warning("step %d ends, and no optimizer has stepped; %s", progress.step + 1, expected)

    def _row(self, logged: Sequence[str], ranks: Sequence[EndFigures[float]], seconds: float) -> dict[str, Any]:
        session, done = self.session, self._updates.done
        first = next(iter(self._trained))
        mine = self._newest = done.get(first, replace(self._newest, verdict=None, taken=True))
        others = {name: one for name, one in done.items() if name != first}
        session.progress.loss = mine.loss
        count = int(sum(one.terms for one in ranks))
        measured = [one.of_meters for one in ranks]
        row = StepRow(
            loss=mine.loss,
            named_losses={f"loss_{name}": one.loss for name, one in others.items()},
            lr=mine.lr,
            grad_norm=mine.norm,
            count=count,
            step_seconds=seconds,
            per_second=count / seconds,
            ranks=len(ranks),
            rank_loss={},
            loss_scale=None if type(session.model.scaler) is LossScaler else session.model.scaler.scale,
            measured=session.meters.row(measured, seconds, partial(LOG.warning, "%s")),
            of_runner={},
            skipped=not all(one.taken for one in done.values()),
            of_guard=session.guard.metrics(mine.verdict),
        )
        found = row.as_dict(moment(session), session.parts.model.counts)
        found |= {f"lr_{name}": one.lr for name, one in others.items()}
        found |= {f"grad_norm_{name}": one.norm for name, one in others.items()}
        taken = [name for name in logged if name in found]
        if taken:
            raise TrainingError(f"log: {taken[0]!r} is a key of the row itself; expected another name", everywhere=True)
        means = {name: sum(one.logged[place] for one in ranks) / len(ranks) for place, name in enumerate(logged)}
        return {**found, **means}

    def _acted(self) -> bool:
        """Do what guards have decided; whether the training went back to a checkpoint."""
        for name, one in self._updates.done.items():
            session = self._trained[name].session
            if one.verdict is None or session is None:
                continue
            if act(self.session if one.verdict.action == "rollback" else session, one.verdict):
                self._restore_rates()
                if self._loader is not None:
                    self._loader.close()
                    self._loader = self.session.feed.training_loader(self.session.progress)
                return True
        return False

    def validation(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro batches of the validation data, as many on every rank. Collective."""
        if not self.session.feed.validates:
            raise UsageError(
                "validation: the job has no validation data; give it [evaluation] and data with that split"
            )
        for model in self.session.models:
            model.consolidate()
        loader = self.session.feed.validation_loader()
        try:
            yield from loader
        finally:
            loader.close()

    def leave(self) -> None:
        """End the step that the program has left by a `break`, and save: no other one follows. A step without an update does not
        count. Collective."""
        if self._finish is None:
            return
        self._agreement.on(
            END_OF_LOOP, self.session.progress.step
        )  # else others end the step, and this rank begins a save
        finish, self._finish = self._finish, None
        session, progress = self.session, self.session.progress
        progress.ended = True
        if self._updates.done:
            finish()
            return
        finish_saving(session, excused=True)
        newest = session.saved.newest
        if progress.step > progress.first_step and (newest is None or step_of(newest) != progress.step):
            save_if_due(session, stop_agreed=False)

    def end(self, code: int) -> None:
        """The loop is over. Collective."""
        session, position = self.session, self._start.hooks.position
        result = {
            "step": session.progress.step,
            "loss": session.progress.loss,
            "metrics": self._row_before,
            "checkpoint": session.saved.newest,
            "exit_code": code,
        }
        together(world_group(), lambda: session.hooks.call("hpctrain_job_end", result=result))
        position.move(END)
        say_goodbye(session, result, time.monotonic() - self._start.begin)

    def close(self) -> None:
        """End background work."""
        if self._loader is not None:
            self._loader.close()
        self.session.close()


def _share_scaler(models: Sequence[Any]) -> None:
    """Give all models the scaler of the first that scales its loss: one backward may reach several."""
    scalers = [one.scaler for one in models if one.scaler.skips_nonfinite]
    for model in models if scalers else ():
        model.scaler = scalers[0]
