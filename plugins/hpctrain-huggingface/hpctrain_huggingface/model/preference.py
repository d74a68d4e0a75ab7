"""Direct preference optimization of a causal language model (Rafailov et al., "Direct Preference Optimization", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.api import Batch, Plan, Problem, UsageError
from hpctrain_huggingface.model.spec import TextModel
from hpctrain_huggingface.model.tasks import IGNORED

_SIDES = ("chosen", "rejected")


class PreferenceModel(TextModel):
    """A model that learns which of two answers is preferred, measured against itself without its adapter.

    A sample has `chosen_input_ids`, `chosen_labels`, `rejected_input_ids` and `rejected_labels`, (seq,) each. The loss of a pair is
    -log sigmoid(beta (m - m0)), where m is the log-probability of the chosen answer less that of the rejected one, m0 the same
    without the adapter. An answer's reward is beta times the log-probability that it has gained.
    """

    def problems(self, plan: Plan) -> list[Problem]:
        found = super().problems(plan)
        if self.task != "causal-lm":
            found.append(Problem(f"preference goes with the task causal-lm, found {self.task!r}", "model.preference"))
        return found

    @property
    def _beta(self) -> float:
        assert self.options.preference is not None
        return self.options.preference.beta

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """The log-probabilities (2, batch) of chosen and rejected answers: `policy`, and `reference` without the adapter. Both
        without dropout, whose draws would differ between the two."""
        if not isinstance(batch, Mapping) or not all(f"{side}_input_ids" in batch for side in _SIDES):
            raise UsageError(
                "[model] preference: found samples without chosen_input_ids and rejected_input_ids; name the columns chosen and "
                'rejected of [dataset] name = "huggingface"'
            )
        ids, labels = (
            _together(batch, entry, fill) for entry, fill in (("input_ids", self._pad or 0), ("labels", IGNORED))
        )
        peft: Any = module.eval()  # until backward is over, which may compute layers again
        # the model first: peft freezes an adapter while it is off, and fully_shard takes a unit as it is at its first forward
        policy = _answers(module, ids, labels)
        with torch.no_grad(), peft.disable_adapter():
            reference = _answers(module, ids, labels)
        return {"policy": policy, "reference": reference}

    def count(self, batch: Batch) -> int:
        return len(batch["chosen_labels"])

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        chosen, rejected = self._rewards(outputs)
        return -F.logsigmoid(chosen - rejected).sum()

    def figures(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """The rewards of both answers, their margin, and the share of pairs whose chosen answer has the higher one."""
        chosen, rejected = self._rewards(outputs)
        found = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).float(),
        }
        return {name: value.sum() for name, value in found.items()}

    def _rewards(self, outputs: Any) -> Tensor:
        return self._beta * (outputs["policy"] - outputs["reference"])  # type: ignore[no-any-return]

    def padding(self) -> Mapping[str, float]:
        of_entry = {"input_ids": self._pad or 0, "labels": IGNORED}
        return {f"{side}_{entry}": fill for side in _SIDES for entry, fill in of_entry.items()}


def _together(batch: Mapping[str, Tensor], entry: str, fill: int) -> Tensor:
    """Both sides in one batch, (2 batch, longest)."""
    sides = [batch[f"{side}_{entry}"] for side in _SIDES]
    longest = max(side.shape[1] for side in sides)
    return torch.cat([F.pad(side, (0, longest - side.shape[1]), value=fill) for side in sides])


def _answers(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of the labels of each row, (2, batch)."""
    logits = module(input_ids=ids).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    each = each.full_tensor() if isinstance(each, DTensor) else each  # of a vocabulary that is cut over ranks
    return -each.view(labels.shape).sum(1).view(2, -1)
