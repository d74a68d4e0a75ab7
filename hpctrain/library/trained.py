"""The gradients of one model of a program's loop: from its forwards over backwards to the optimizer's step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.base.torch_private import foreach_add_
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel


class Trained:
    """A model that is trained, as torch's `backward`, `zero_grad` and `step` have it: gradients add up until `zero_grad`.

    losses: the sum of the losses whose backwards have reached it since then, each over the number of micro batches.
    """

    def __init__(self, name: str, model: TrainedModel, follows_schedule: bool) -> None:
        """follows_schedule: whether the job sets the learning rate, not the program."""
        self.name, self.model, self.follows_schedule = name, model, follows_schedule
        parameters = dict(model.module.named_parameters())
        self._whole = {key: one for key, one in parameters.items() if key in model.shapes}
        """The trained parameters."""
        self._frozen = {key: one for key, one in parameters.items() if key not in model.shapes}
        self.session: Session | None = None
        self.losses = torch.zeros((), dtype=torch.float64, device=model.device)
        self._open = self._reached = self._pending = self._summed = False
        self._unused = False
        """Whether there are summed gradients that no update has used."""
        self._last, self._differentiates = True, False
        self.backward_runs = False
        """Whether the loop's own backward goes on."""
        self._kept: list[Tensor] = []
        """Gradients of earlier backwards, which a forward has put aside."""
        self._noted: list[dict[str, Any]] = []
        self._set_rates: list[float] = []

    def forwarding(self, step: int, last: bool) -> None:
        """A forward begins whose backward may follow. last: whether the ranks sum the gradients in that backward.

        Raises TrainingError if the model waits for the backward of a forward in another micro batch.
        """
        if self._open:
            if last != self._last:
                raise self._unused_forward()
            return
        if self._summed:  # the program goes on adding: the strategy would begin anew
            self._kept = [gradient.clone() for gradient in self._gradients()]
            self._summed = False
        if not (self._pending or self._unused):
            self.model.begin_sums(step, may_be_left_out=True)
        self.model.sharded.begin(last)
        self._open, self._last, self._differentiates = True, last, False

    def reached(self) -> None:
        """A backward has come to the model's outputs: the loop's, or one of the program's own inside of its forwards.

        Raises TrainingError without a forward of its own.
        """
        if not self.backward_runs:
            if not self._differentiates:
                self._differentiates = True
                self.model.sharded.keep_whole()
            return
        if not self._open:
            raise TrainingError(
                f"a backward has come to a forward of the model {self.name!r} whose gradients are summed already, by the "
                "backward before; add the losses before one backward, or call the model again after it"
            )
        self._reached = True

    def backwarded(self) -> bool:
        """A backward is over; whether it has reached the model. Then it is collective at the step's last micro batch."""
        if not self._reached:
            return False
        self._open = self._reached = self._differentiates = False
        self._pending = True
        if self._last:
            self._sum()
        return True

    def _sum(self) -> None:
        self.model.sharded.synchronize()
        gradients = self.model.take_gradients()
        if self._kept:
            foreach_add_(gradients, self._kept)
            self._kept = []
        self._pending, self._summed, self._unused = False, True, True

    def summed_gradients(self) -> list[Tensor]:
        """The gradients of this rank's pieces.

        Raises TrainingError if no backward has come here since `zero_grad`, and for a parameter that was frozen at the setup and
        is no more: no optimizer has it.
        """
        thawed = next((key for key, one in self._frozen.items() if one.requires_grad), None)
        if thawed is not None:
            raise TrainingError(
                f"{thawed} of the model {self.name!r} was frozen when it was set up, has requires_grad now, and is in no "
                "optimizer; set models up with all that is ever trained, and freeze it afterwards"
            )
        if self._pending:
            self._sum()
        if self._kept and not self._summed:
            raise self._unused_forward()
        if not self._summed:
            raise TrainingError(
                f"the optimizer of the model {self.name!r} steps without a gradient; expected a loop.backward(loss) of a loss that "
                "follows from this model's outputs, after zero_grad()"
            )
        return self._gradients()

    def _unused_forward(self) -> TrainingError:
        return TrainingError(
            f"a forward of the model {self.name!r} has no backward: the strategy waits for its gradients; call the model under "
            "torch.no_grad() where no loop.backward follows"
        )

    def leave_frozen(self) -> None:
        """Keep the optimizer from parameters that the program has frozen for a while, as torch does where there is no gradient."""
        frozen = {name for name, one in self._whole.items() if not one.requires_grad}
        for piece in self.model.pieces if frozen else ():
            if piece.name in frozen:
                piece.tensor.grad = None

    def updated(self) -> None:
        """The optimizer has used the gradients, or the ranks have left them out."""
        self._unused = False

    def zero_grad(self) -> None:
        """Drop the gradients. Collective where micro batches have left some that are not summed yet."""
        self._kept = []
        self.losses.zero_()
        if self._pending and self._open:
            self.model.sharded.restart(self._last)
            self._pending, self._unused = False, True
        elif self._pending:
            self._sum()
        if self._unused:  # compression has a part of them in its error feedback
            self.model.sums.leave_out()
        self._summed = self._unused = False

    @property
    def is_training(self) -> bool:
        """Whether any parameter takes part in the next backward."""
        return torch.is_grad_enabled() and any(one.requires_grad for one in self._whole.values())

    def note_rates(self) -> None:
        """Keep the groups' learning rates, and what the program or a scheduler of torch has set there: a start replaces the
        optimizer."""
        groups = self.model.optimizer.param_groups
        self._set_rates = [float(group["lr"]) for group in groups]
        self._noted = [
            {key: value for key, value in group.items() if key not in ("params", "lr") and made.get(key) != value}
            for group, made in zip(groups, self.model.group_options, strict=True)
        ]

    def rates_state(self) -> PluginState:
        """The learning rates, which the program sets, in checkpoints."""
        return PluginState(f"{self.name} rates", values=self._rates, restore=self._take_rates)

    def _rates(self) -> dict[str, Any]:
        return {"rates": [float(group["lr"]) for group in self.model.optimizer.param_groups]}

    def _take_rates(self, values: dict[str, Any]) -> None:
        self._set_rates = [float(one) for one in values["rates"]]

    def restore_rates(self) -> None:
        """Bring what `note_rates` or a checkpoint has kept into the optimizer that trains now."""
        for group, noted, rate in zip(self.model.optimizer.param_groups, self._noted, self._set_rates, strict=True):
            group.update(noted if self.follows_schedule else {**noted, "lr": rate})

    def _gradients(self) -> list[Tensor]:
        return [piece.tensor.grad for piece in self.model.pieces if piece.tensor.grad is not None]
