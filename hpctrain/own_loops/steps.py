"""The steps of a program's loop: those of training/step.py with gradients that the program computes."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hpctrain.base.devices import seed_draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checkpoint.directory import step_of
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.model import Batch
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.refusals import STREAM, refuse_epochs
from hpctrain.own_loops.agreement import END_OF_LOOP, END_OF_STEP, Agreement
from hpctrain.own_loops.jobs import has_data
from hpctrain.own_loops.trained import Trained
from hpctrain.ranks.signals import INTERRUPTED
from hpctrain.ranks.watchdog.position import BETWEEN, END
from hpctrain.training.assembly import complete
from hpctrain.training.figures import Figure
from hpctrain.training.guard.judging import StepFigures
from hpctrain.training.rank import say_goodbye
from hpctrain.training.saving import finish_saving, plain_values, save_if_due
from hpctrain.training.start import Start
from hpctrain.training.step import Steps, Update, end_hooks, end_if_asked, start_hooks

LOG = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Step:
    """A step of the loop: iterate over it, as often as you like, for this rank's micro batches. number: from 1."""

    number: int
    _deal: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self._deal()


class OwnSteps(Steps):
    """Yields the steps from the newest checkpoint to the last one. Collective."""

    def __init__(
        self, start: Start, trained: Mapping[str, Trained], states: Sequence[PluginState], agreement: Agreement
    ) -> None:
        """states: what the program keeps in checkpoints."""
        self._start, self._agreement, self._trained, self._states = start, agreement, trained, states
        first, *others = trained.values()
        scalers = [each.model.scaler for each in trained.values() if each.model.scaler.skips_nonfinite]
        for each in trained.values():
            each.note_rates()  # before `complete`, which replaces the optimizers
            each.model.scaler = (scalers or [each.model.scaler])[0]  # one backward may reach several models
        rates = [each.rates_state() for each in trained.values() if not each.follows_schedule]
        further, reads = {other.name: other.model for other in others}, has_data(first.model.job)
        session = complete(start, first.model, further, [*states, *rates], reads, first.name)
        super().__init__(session, start.stop, reads)
        for each in trained.values():
            each.steps = self
            if reads and session.feed.data.samples is None:
                refuse_epochs(each.model.job, STREAM)
        self._restore_rates()
        self.dealt, self.is_last = 1, True
        """The number of micro batches that the step deals out, and whether the one dealt last is the step's last."""
        self.stopped = self.is_interrupted = self.saves = False
        """saves: whether the program on this rank has asked for a checkpoint of this step."""
        self._logged: dict[str, list[Figure]] = {}
        # whether the program is in a step
        self._goes_on = False
        # the last update of the first model, which may be of an earlier step: its figures stand in a row without an update
        self._last_update = Update(first.model, StepFigures(0, math.nan, math.nan, [], False), math.nan, True, None)

    def _restore_rates(self) -> None:
        for trained in self._trained.values():
            trained.restore_rates()

    @property
    def is_first(self) -> bool:
        """Whether no step of this run is complete."""
        return self.session.progress.step == self.session.progress.first_step

    def log(self, values: Mapping[str, Figure]) -> None:
        """Add numbers to the row of this step."""
        for name, value in values.items():
            self._logged.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def __iter__(self) -> Iterator[Step]:
        session = self.session
        start_hooks(session)
        session.hooks.position.move(BETWEEN)
        end_if_asked(session)  # a hook may have asked at the start
        if session.job.batch.packing:
            from hpctrain.training.packing_trial import try_packing

            try_packing(session)
        self.begin()
        while not session.progress.done and not self.stopped:
            for trained in self._trained.values():
                trained.begin_step()
            micro_batches = self.load()
            if self._loader is None:
                place = session.model.meshes.data_rank  # ranks that share a copy of the model draw the same numbers
                seed_draws(derive_seed(session.job.job.seed, session.progress.step, place), session.device)
            self._goes_on = True
            yield Step(session.progress.step + 1, partial(self._deal, micro_batches))
            self._goes_on = False
            self.stopped = self._end_step()

    def _deal(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yield the batches; random numbers depend on the place of each in the global batch."""
        if self._loader is None:
            raise UsageError(
                "the step has no batches: the job has no [dataset]; give own_loop(..., dataset={'name': data})"
            )
        seed, step = self.session.job.job.seed, self.session.progress.step
        self.dealt = len(micro_batches)
        for number, micro in enumerate(micro_batches):
            self.is_last = number == len(micro_batches) - 1
            seed_draws(derive_seed(seed, step, micro.place, 0), self.session.device)
            yield micro.batch

    def _end_step(self) -> bool:
        """Exchange the step's figures, write its row, act, and save; whether the steps stop before the last one. Collective."""
        session, progress = self.session, self.session.progress
        self.dealt, self.is_last = 1, True  # a backward between two steps counts as a micro batch of its own
        logged = {name: sum(values[1:], values[0]) / len(values) for name, values in self._logged.items()}
        self._logged.clear()
        # the ranks compare a checksum of the names: numbers of other names would be added
        detail, done, is_first = zlib.crc32(repr(list(logged)).encode()), progress.step + 1, self.is_first
        mine = self.figures(done, has_known_forwards=False, saves=float(self.saves), named=list(logged.values()))
        ranks = mine.exchanged(partial(self._agreement.on, END_OF_STEP, progress.step, detail=detail))
        self.compare_replicas(done, ranks)
        updates = {name: trained.update for name, trained in self._trained.items() if trained.update is not None}
        self._refuse_no_update(bool(updates))
        session.model.scaler.update(all(trained.is_finite for trained in self._trained.values()))  # all models share it
        for model in session.models:
            model.sharded.adopt()  # a save below reads the pieces
        first = next(iter(self._trained))
        self._last_update = updates[first] if first in updates else replace(self._last_update, verdict=None, taken=True)
        means = {name: sum(rank.named[place] for rank in ranks) / len(ranks) for place, name in enumerate(logged)}
        level = self.end(
            ranks, self._last_update, int(sum(rank.terms for rank in ranks)),
            others={name: update for name, update in updates.items() if name != first}, logged=means,
        )  # fmt: skip
        self.is_interrupted, self.saves = level == INTERRUPTED, False
        if is_first:
            for state in self._states:
                plain_values(state)  # raises now what the first save would raise, perhaps after hours
        if self.act(updates.values()):  # the training has gone back to a checkpoint
            self._restore_rates()
            return bool(level)
        end_if_asked(session)
        save_if_due(session, bool(level), asked=any(rank.saves for rank in ranks))
        return bool(level) and not progress.done

    def _refuse_no_update(self, has_updates: bool) -> None:
        """Raises TrainingError at the end of a training in which no optimizer has stepped; the first step warns of it."""
        progress = self.session.progress
        if has_updates or any(trained.model.optimizer_begun for trained in self._trained.values()):
            return
        expected = "expected optimizer.step() after loop.backward(loss), on the optimizer that setup returned"
        if progress.step + 1 >= progress.steps:
            raise TrainingError(f"no optimizer has stepped in {progress.steps} steps; {expected}")
        if self.is_first and self._start.world.identity.rank == 0:
            LOG.warning("step %d ends, and no optimizer has stepped; %s", progress.step + 1, expected)

    def validation(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro batches of the validation data, the same number on every rank. Collective."""
        if self.session.feed.data.validation is None:
            raise UsageError(
                "validation: the job has no validation data; give it [evaluation] and data with that split"
            )
        for model in self.session.models:
            model.consolidate()  # all ranks evaluate one model
        with closing(self.session.feed.validation_loader()) as loader:
            yield from loader

    def leave(self) -> None:
        """End and save the step that the program has left by a `break`: it is the last one. A step without an update does not
        count. Collective."""
        if not self._goes_on:
            return
        self._goes_on = False
        session, progress = self.session, self.session.progress
        # first of all: a rank that breaks alone would save while others end the step
        self._agreement.on(END_OF_LOOP, progress.step)
        progress.ended = True
        if any(trained.update is not None for trained in self._trained.values()):
            self._end_step()
            return
        finish_saving(session, excused=True)
        newest = session.newest_checkpoint
        if progress.step > progress.first_step and (newest is None or step_of(newest) != progress.step):
            save_if_due(session, stop_agreed=False)

    def finish(self, code: int) -> None:
        """Tell the hooks and the user that the loop is over. code: the exit code. Collective."""
        session, result = self.session, self.result(code)
        end_hooks(session, result)
        session.hooks.position.move(END)
        say_goodbye(session, result, time.monotonic() - self._start.begin)
