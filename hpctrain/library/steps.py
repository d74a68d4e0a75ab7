"""The steps of a program's loop: those of training/step.py, whose gradients the program computes."""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from hpctrain.base.devices import seed_draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checkpoint.directory import step_of
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.model import Batch
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.refusals import STREAM, refuse_epochs
from hpctrain.library.agreement import END_OF_LOOP, END_OF_STEP, Agreement
from hpctrain.library.jobs import has_data
from hpctrain.library.trained import Trained
from hpctrain.ranks.signals import INTERRUPTED
from hpctrain.ranks.watchdog.position import BETWEEN, END
from hpctrain.training.assembly import complete
from hpctrain.training.figures import Figure
from hpctrain.training.guard.judging import StepFigures
from hpctrain.training.rank import say_goodbye
from hpctrain.training.saving import finish_saving, save_if_due
from hpctrain.training.start import Start
from hpctrain.training.step import Steps, Update, end_hooks, end_if_asked, start_hooks

LOG = logging.getLogger("hpctrain")


@dataclass(frozen=True)
class Step:
    """A step of the loop: iterate over it for this rank's micro batches, as often as you like. number: from 1."""

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
        self._start, self._agreement, self._trained, self._kept = start, agreement, trained, states
        first, *others = trained.values()
        _share_scaler([one.model for one in trained.values()])
        for one in trained.values():
            one.note_rates()
        rates = [one.rates_state() for one in trained.values() if not one.follows_schedule]
        further, reads = {one.name: one.model for one in others}, has_data(first.model.job)
        session = complete(start, first.model, further, [*states, *rates], reads, first.name)
        super().__init__(session, start.stop, reads)
        for one in trained.values():
            one.steps = self
            if reads and session.feed.samples is None:
                refuse_epochs(one.model.job, STREAM)
        self._restore_rates()
        self.dealt, self.is_last = 1, True
        """How many micro batches the step deals out, and whether the newest is the last one."""
        self.stopped = self.is_interrupted = self.saves = False
        """saves: whether the program on this rank has asked for a checkpoint of this step."""
        self._logged: dict[str, list[Figure]] = {}
        # whether the program is in a step
        self._goes_on = False
        nothing = StepFigures(0, math.nan, math.nan, [], False)
        # the newest update of the first model, which need not be of this step
        self._newest = Update(first.model, nothing, math.nan, True, None)

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
        return self.session.model.batch_group.size() * self.dealt

    def log(self, values: Mapping[str, Figure]) -> None:
        """Add numbers to the row of this step."""
        for name, value in values.items():
            self._logged.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def __iter__(self) -> Iterator[Step]:
        session = self.session
        start_hooks(session)
        session.hooks.position.move(BETWEEN)
        end_if_asked(session)
        if session.job.batch.packing:
            from hpctrain.training.packing_trial import try_packing

            try_packing(session)
        self.begin()
        while not session.progress.done and not self.stopped:
            for one in self._trained.values():
                one.begin_step()
            micro_batches = self.load()
            if self._loader is None:
                place = session.model.meshes.data_rank  # the others work on one sample
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
        """Let the ranks tell each other of the step, write its row, act, and save; whether the steps stop before the last one.
        Collective."""
        session, progress = self.session, self.session.progress
        self.dealt, self.is_last = 1, True
        logged = {name: sum(values[1:], values[0]) / len(values) for name, values in self._logged.items()}
        self._logged.clear()
        detail, done, is_first = zlib.crc32(json.dumps(list(logged)).encode()), progress.step + 1, self.is_first
        mine = replace(
            self.figures(done, has_known_forwards=False), saves=float(self.saves), named=list(logged.values())
        )
        ranks = mine.exchanged(partial(self._agreement.on, END_OF_STEP, progress.step, detail=detail))
        self.compare_replicas(done, ranks)
        updates = {name: one.update for name, one in self._trained.items() if one.update is not None}
        self._tell_of_no_update(bool(updates))
        session.model.scaler.update(all(one.is_finite for one in self._trained.values()))
        for one in session.models:
            one.sharded.adopt()
        first = next(iter(self._trained))
        self._newest = updates.get(first, replace(self._newest, verdict=None, taken=True))
        means = {name: sum(one.named[place] for one in ranks) / len(ranks) for place, name in enumerate(logged)}
        level = self.end(
            ranks, self._newest, int(sum(one.terms for one in ranks)),
            others={name: one for name, one in updates.items() if name != first}, logged=means,
        )  # fmt: skip
        self.is_interrupted, self.saves = level == INTERRUPTED, False
        if is_first:
            for state in self._kept:
                state.values()  # what the first save would refuse
        if self.act(updates.values()):
            self._restore_rates()
            return bool(level)
        end_if_asked(session)
        save_if_due(session, bool(level), asked=any(one.saves for one in ranks))
        return bool(level) and not progress.done

    def _tell_of_no_update(self, has_updates: bool) -> None:
        """Say after a first step that no optimizer has stepped. Raises TrainingError at the end of a training that had none."""
        progress = self.session.progress
        if has_updates or any(one.model.optimizer_begun for one in self._trained.values()):
            return
        expected = "expected optimizer.step() after loop.backward(loss), on the optimizer that setup returned"
        if progress.step + 1 >= progress.steps:
            raise TrainingError(f"no optimizer has stepped in {progress.steps} steps; {expected}")
        if self.is_first and self._start.world.identity.rank == 0:
            LOG.warning("step %d ends, and no optimizer has stepped; %s", progress.step + 1, expected)

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
        if not self._goes_on:
            return
        self._goes_on = False
        session, progress = self.session, self.session.progress
        # else others end the step, and this rank begins a save
        self._agreement.on(END_OF_LOOP, progress.step)
        progress.ended = True
        if any(one.update is not None for one in self._trained.values()):
            self._end_step()
            return
        finish_saving(session, excused=True)
        newest = session.newest
        if progress.step > progress.first_step and (newest is None or step_of(newest) != progress.step):
            save_if_due(session, stop_agreed=False)

    def finish(self, code: int) -> None:
        """The loop is over. code: the exit code. Collective."""
        session = self.session
        result = {
            "step": session.progress.step,
            "loss": session.progress.loss,
            "metrics": self.row,
            "checkpoint": session.newest,
            "exit_code": code,
        }
        end_hooks(session, result)
        session.hooks.position.move(END)
        say_goodbye(session, result, time.monotonic() - self._start.begin)


def _share_scaler(models: Sequence[Any]) -> None:
    """Give all models the scaler of the first that scales its loss: one backward may reach several."""
    scalers = [one.scaler for one in models if one.scaler.skips_nonfinite]
    for model in models if scalers else ():
        model.scaler = scalers[0]
