"""A model of a program's loop: its gradients, from forwards over backwards to the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.base.torch_private import foreach_add_, version_of
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.own_loops.agreement import PARAMETERS, Agreement
from hpctrain.own_loops.gradients import Gradients
from hpctrain.training.figures import Figure, RankFigures
from hpctrain.training.guard.judging import StepFigures
from hpctrain.training.step import Steps, Update, figures_of_update
from hpctrain.training.trained_model import TrainedModel, clip

_ACTIONS = ("warn", "skip", "rollback", "stop")  # of verdicts, the mildest first
_BITS = 48  # of the parameters that one number stands for; float64 is exact up to 53


class _Used:
    """The parameters to whose gradients backwards have added. It refers to no model: parameters refer to it by their hooks."""

    def __init__(self) -> None:
        self.names, self.strays = set[str](), set[str]()
        self.is_expected = False
        """Whether a backward of the loop goes through a forward of the model."""

    def __call__(self, name: str, in_forward: bool) -> None:
        if not self.is_expected:  # a backward of the program's own, or a loss of parameters alone
            self.strays.add(name)
        elif in_forward:
            self.names.add(name)


class Trained:
    """A model in training under torch's rules of `backward`, `zero_grad` and `step`: gradients add up until `zero_grad`."""

    def __init__(self, name: str, model: TrainedModel, follows_schedule: bool, agreement: Agreement) -> None:
        """follows_schedule: whether the job sets the learning rate, not the program."""
        self.name, self.model, self.follows_schedule = name, model, follows_schedule
        self._agreement, self._number = agreement, agreement.name(name)
        self.steps: Steps | None = None
        """The loop's, once they have begun."""
        self.begin_step()
        parameters = dict(model.module.named_parameters())
        # the trained parameters as they are between steps; forwards may have others, which the strategy gathers
        self._whole = {key: parameter for key, parameter in parameters.items() if key in model.shapes}
        self._frozen = {key: parameter for key, parameter in parameters.items() if key not in model.shapes}
        self._gradients = Gradients(name, self._whole, model.pieces, model.meshes)
        # uses since `zero_grad`
        self._used = _Used()
        # parameters that no rank has used since then, by the ranks' last exchange
        self._idle: set[str] = set()
        # a strategy that gathers puts other tensors in the parameters' places from each forward to its backward
        self._gathers, self._gathered = True, list[tuple[str, Tensor, int]]()
        model.sharded.watch(self._used)
        # the sum of the losses whose backwards have reached the model since `zero_grad`, each over the number of micro batches
        self._losses = torch.zeros((), dtype=torch.float64, device=model.device)
        # open: a forward waits for its backward; reached: that has come to the model; pending: gradients wait for the ranks' sum;
        # summed: they have it; unused: no update has used it
        self._open = self._reached = self._pending = self._summed = self._unused = False
        # last: the open micro batch's backward sums; differentiates: the program has computed gradients of its own in it
        self._last, self._differentiates = True, False
        # whether the loop's own backward goes on
        self._backward_runs = False
        # gradients of earlier backwards that a forward has put aside: a strategy's sum would overwrite them
        self._set_aside: list[Tensor] = []
        self._noted: list[dict[str, Any]] = []
        self._set_rates: list[float] = []

    def begin_step(self) -> None:
        """A step of the loop begins."""
        self.update: Update | None = None
        """The step's update so far."""
        self.is_finite = True
        """Whether its gradients were finite so far."""
        # figures of gradients that the program has had clipped
        self._clipped: StepFigures | None = None

    def forwarding(self, step: int, last: bool) -> None:
        """Prepare for a forward whose backward may follow. last: whether the ranks sum the gradients in that backward.

        Raises TrainingError if the model waits for the backward of a forward in another micro batch.
        """
        if self._open:  # a second forward of this micro batch
            if last != self._last:
                raise self._unused_forward()
            return
        if self._gradients.are_dropped:  # the program sets `grad` to None in place of zero_grad
            self.zero_grad()
        if self._summed:  # the program goes on adding, and the strategy begins anew
            self._used.names -= self._gradients.take()
            self._set_aside = [gradient.clone() for gradient in self._gradients.all()]
            self._gradients.drop()
            self._summed = False
        self._gradients.resume()
        if not (self._pending or self._unused):  # once for each update: it keeps what `leave_out` brings back
            self.model.begin_sums(step, may_be_left_out=True)
        self.model.sharded.begin(last)
        self._open, self._last, self._differentiates = True, last, False

    def forwarded(self, trains: bool) -> None:
        """A forward is over. trains: whether `forwarding` was called before it."""
        if trains and self._gathers:
            parameters = self.model.module.named_parameters()
            gathered = [(name, tensor) for name, tensor in parameters if tensor is not self._whole.get(name, tensor)]
            self._gathered = [(name, tensor, version_of(tensor)) for name, tensor in gathered]
            self._gathers = bool(gathered)
        elif not (trains or self._open):
            self.model.sharded.rest()

    def backwarding(self) -> None:
        """The loop's backward begins. Raises TrainingError where the program has changed what the strategy frees after it."""
        self._backward_runs, self._used.is_expected = True, self._open
        for name, parameter, version in self._gathered if self._open else ():
            if version_of(parameter) != version:
                raise TrainingError(
                    f"{name} of the model {self.name!r} was changed in place between a forward and its backward: the sharding "
                    "strategy has gathered it for these, and the change would be lost; change it after the backward"
                )

    def reached(self, _: Tensor) -> None:
        """A backward has come to the model's outputs: the loop's, or one of the program's own between its forwards.

        Raises TrainingError for a forward whose gradients are summed already.
        """
        if not self._backward_runs:
            if not self._differentiates:  # once for each micro batch
                self._differentiates = self._gathers = True
                self.model.sharded.keep_whole()
            return
        if not self._open:
            raise TrainingError(
                f"a backward has come to a forward of the model {self.name!r} whose gradients are summed already, by the "
                "backward before; add the losses before one backward, or call the model again after it"
            )
        self._reached = True

    def backwarded(self, loss: Tensor) -> None:
        """A backward of `loss` is over. Collective at the step's last micro batch, if it has reached the model."""
        self._backward_runs = self._used.is_expected = False
        if not self._reached:
            return  # the loss was of other models
        self._open = self._reached = self._differentiates = False
        self._pending = True
        if self._last:
            self._sum()
        else:
            self._gradients.show_pending(self._used.names)
        self._losses += loss  # on the device: a number would be waited for
        self._clipped = None

    def _sum(self) -> None:
        self._gradients.resume()  # takes stand-ins away, which the strategy would take for gradients
        self.model.sharded.synchronize()
        gradients = self.model.take_gradients()
        if self._set_aside:
            foreach_add_(gradients, self._set_aside)
            self._set_aside = []
        self._pending, self._summed, self._unused = False, True, True
        self._gradients.show()

    def summed_gradients(self) -> list[Tensor]:
        """The gradients of this rank's pieces, with what the program has written into them.

        Raises TrainingError if no backward has come here since `zero_grad`, for a parameter that was frozen at the setup and is not
        any more, since no optimizer has it, and for gradients that no rank would sum.
        """
        self.refuse_strays()
        thawed = next((key for key, parameter in self._frozen.items() if parameter.requires_grad), None)
        if thawed is not None:
            raise TrainingError(
                f"{thawed} of the model {self.name!r} was frozen when it was set up, has requires_grad now, and is in no "
                "optimizer; set models up with all that is ever trained, and freeze it afterwards"
            )
        if self._pending:  # the program steps before the step's last micro batch
            self._sum()
        if self._set_aside and not self._summed:
            raise self._unused_forward()
        if not self._summed:
            raise TrainingError(
                f"the optimizer of the model {self.name!r} steps without a gradient; expected a loop.backward(loss) of a loss that "
                "follows from this model's outputs, after zero_grad()"
            )
        self._used.names -= self._gradients.take()
        return self._gradients.all()

    def refuse_strays(self) -> None:
        """Raises TrainingError for gradients that have not come from the model's outputs in the loop's backward."""
        if self._used.strays:
            raise TrainingError(
                f"a backward has added to the gradient of {min(self._used.strays)} of the model {self.name!r} without a forward "
                "of the model: no rank would sum it; call loop.backward, with one loss of the model's outputs and of what is "
                "computed from its parameters"
            )

    def _unused_forward(self) -> TrainingError:
        return TrainingError(
            f"a forward of the model {self.name!r} has no backward: the strategy waits for its gradients; call the model under "
            "torch.no_grad() where no loop.backward follows"
        )

    def _used_bits(self) -> list[float]:
        """The parameters that this rank's backwards have used since `zero_grad`, one bit each, for `_note_used`."""
        names = list(self.model.shapes)
        parts = [names[at : at + _BITS] for at in range(0, len(names), _BITS)]
        return [float(sum(1 << bit for bit, name in enumerate(part) if name in self._used.names)) for part in parts]

    def _note_used(self, ranks: Sequence[Sequence[float]]) -> None:
        """Note the parameters that no rank has used. ranks: the `_used_bits` of each."""
        # a parameter that one rank has used is used: gradients are sums
        words = [reduce(or_, map(int, bits)) for bits in zip(*ranks, strict=True)]
        self._idle = {
            name for place, name in enumerate(self.model.shapes) if not words[place // _BITS] >> place % _BITS & 1
        }

    def open_gradients(self, step: int, detail: int) -> set[str]:
        """The program is about to read and change gradients and parameters; returns the parameters whose gradients are summed.
        Collective. step, detail: as for `Agreement.on`.

        Raises TrainingError where a backward follows that needs the parameters as they are.
        """
        if self._open:
            raise TrainingError(
                f"parameters: a forward of the model {self.name!r} has had no backward yet, which needs the parameters as they "
                "are; open them after it, or call the model under torch.no_grad()"
            )
        if self._pending:
            self._sum()
        if self._summed:
            self._used.names -= self._gradients.take()
        self._note_used(self._agreement.on(PARAMETERS, step, self._used_bits(), detail))
        return set(self._whole) - self._idle if self._summed else set()

    def show_gradients(self) -> None:
        """The gradients have changed."""
        if self._summed:
            self._gradients.show()

    def _leave_idle(self) -> None:
        """Keep the optimizer from parameters that the program has frozen for a while, and from those that no rank has used."""
        left = {name for name, parameter in self._whole.items() if not parameter.requires_grad} | self._idle
        for piece in self.model.pieces if left else ():
            if piece.name in left:
                piece.tensor.grad = None  # optimizers of torch skip it: no decay, no momentum

    def clip(self, limit: float) -> float:
        """Clip the gradients; returns their norm before. Collective."""
        gradients = self.summed_gradients()
        self._clipped = self._figures(gradients)  # `step` judges these: one exchange for both
        clip(gradients, self._clipped.norm, limit)
        return self._clipped.norm

    def step(self) -> None:
        """Judge, clip and update, on all ranks or on none. Collective."""
        if self.steps is None:
            raise TrainingError("step: the loop has no step yet; expected it inside of `for step in loop.steps()`")
        gradients = self.summed_gradients()
        self.model.sharded.adopt()  # the program may have changed parameters, such as by clamp_
        clipped, self._clipped = self._clipped, None
        figures = clipped or self._figures(gradients)
        self._leave_idle()
        update = self.steps.update(
            self.model, gradients, figures, clips=clipped is None, sets_rate=self.follows_schedule
        )
        self._unused = False  # the gradients stay: a second step without zero_grad uses them again, as in torch
        self.is_finite = self.is_finite and math.isfinite(figures.norm)
        if self.update is not None:  # the step's verdict is the strictest one
            verdicts = [one.verdict for one in (self.update, update) if one.verdict is not None]
            strictest = max(verdicts, key=lambda one: _ACTIONS.index(one.action), default=None)
            update = replace(update, verdict=strictest, taken=update.taken and self.update.taken)
        self.update = update

    def _figures(self, gradients: list[Tensor]) -> StepFigures:
        """Exchange losses and norms. Collective."""
        assert self.steps is not None
        session, model = self.steps.session, self.model
        mine = RankFigures[Figure](
            loss=self._losses * model.loss_share,
            terms=model.loss_share,
            square=model.totals.square(gradients),
            route=model.route(),
            used=self._used_bits(),
        )
        ranks = mine.exchanged(partial(self._agreement.on, self._number, session.progress.step))
        self._note_used([figures.used for figures in ranks])
        return figures_of_update(session, model, ranks, sum(figures.terms for figures in ranks))

    def zero_grad(self) -> None:
        """Drop the gradients. Collective where micro batches have left some that are not summed yet."""
        self._set_aside = []
        self._used.names.clear()
        self._gradients.forget()
        self._losses.zero_()
        if self._pending and self._open:
            self.model.sharded.restart(self._last)
            self._pending, self._unused = False, True
        elif self._pending:
            self._sum()  # a strategy has no other way to end its micro batches
        if self._unused:  # compression has a part of them in its error feedback
            self.model.sums.leave_out()
        if not self._open:
            self._gradients.drop()
        self._summed = self._unused = False

    @property
    def is_training(self) -> bool:
        """Whether a forward now is one that a backward may follow."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._whole.values())

    def note_rates(self) -> None:
        """Keep the groups' learning rates, and what the program or a scheduler of torch has set in the groups: the start of the
        steps replaces the optimizer."""
        self._set_rates = self._rates()
        self._noted = [
            {key: value for key, value in group.items() if key not in ("params", "lr") and original.get(key) != value}
            for group, original in zip(self.model.optimizer.param_groups, self.model.group_options, strict=True)
        ]

    def rates_state(self) -> PluginState:
        """The learning rates, which the program sets, in checkpoints."""

        def restore(values: dict[str, Any]) -> None:
            self._set_rates = [float(rate) for rate in values["rates"]]

        return PluginState(f"{self.name} rates", values=lambda: {"rates": self._rates()}, restore=restore)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.model.optimizer.param_groups]

    def restore_rates(self) -> None:
        """Give the optimizer that trains now what `note_rates` or a checkpoint has kept."""
        for group, noted, rate in zip(self.model.optimizer.param_groups, self._noted, self._set_rates, strict=True):
            group.update(noted if self.follows_schedule else {**noted, "lr": rate})
