"""Metrics of the training: the rows of steps and evaluations, and what they are made of.

The rows are filled in training/step.py and training/loop.py. The docstrings of their fields are the page docs/metrics.md
(tests/metrics_page.py); one that begins with "Key" names the keys of a field that is none itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.figures import Figure


class Moment(TypedDict):
    """The position of the training at which a row is made."""

    step: int
    """The optimizer step, from 1."""

    epoch: float
    """Passes over the training data, with fractions."""

    time: float
    """Seconds since 1970."""


class MeasuredRow(TypedDict, total=False):
    """The keys of a step's row that say how the machine did. Times, rates and loads are those of a step, not of the run."""

    seconds: Mapping[str, float]
    """The time since the row before by `data`, `forward`, `backward`, `communication`, `optimizer`, `checkpoint`, `evaluation` and
    `other`, as means over the ranks, which add up to it. A row's time ends where the ranks exchange figures, before the optimizer.
    `communication` is what computing does not hide. On accelerators it is the time of the step before, and communication inside of
    forward and backward counts there."""

    straggler: Mapping[str, Any]
    """The rank that the others wait for: `rank`, `node`, `cause` ("data", "compute", "save" or "host") and `excess_seconds`, by
    which it takes longer than the others in a step; absent if there is none."""

    model_flops_per_second: float
    """Floating-point operations per second of all ranks together, as the model needs them: `ModelSpec.flops`, else three times what
    torch counts in the forwards of the first step. What is computed again doesn't count. Absent if nobody has counted."""

    mfu: float
    """The same as a share of what the accelerators' vendor states for the dtype of products, for fp8 that of 16 bits (Chowdhery et
    al., "PaLM", 2022); absent on CPUs and unknown accelerators."""

    memory: Mapping[str, Mapping[str, float]]
    """Keys `memory_bytes`, `allocated_bytes`, `reserved_bytes`, `fragmented_bytes` and `host_bytes`, each with `rank_max` and
    `rank_mean`: of an accelerator the peak since the row before, what tensors take now, what torch holds, and of that what it can't
    use because tensors split it; the process's memory now. On CPUs `memory_bytes` is the process's peak so far."""


class StepRow(TypedDict, total=False):
    """The metrics of one optimizer step of all ranks."""

    loss: float
    """The mean over the tokens or samples of the global batch; `null` if it is not finite."""

    named_losses: Mapping[str, float]
    """Keys `loss_NAME`: the same mean of each loss by name, for a model whose loss is a dict; keys `NAME` for the others of a dict
    with "loss", and for each of `ModelSpec.figures`, such as the `reward_margin` of [preferences](fine-tune.md#preferences)."""

    lr: float
    """The learning rate of the step."""

    grad_norm: float
    """The 2-norm of the full gradient before it was clipped; `null` if it is not finite."""

    count: int
    """Key `tokens` or `samples`: the size of the global batch. Tokens without a label are not counted."""

    step_seconds: float
    """Duration of the step on rank 0."""

    per_second: float
    """Key `tokens_per_second` or `samples_per_second`: the throughput of all ranks together."""

    ranks: int
    """Key `tokens_per_second_per_rank` or `samples_per_second_per_rank`: the throughput divided by the number of ranks."""

    rank_loss: Mapping[str, float]
    """The smallest and the largest mean of a rank's own part of the batch, `rank_min` and `rank_max`; absent if one
    rank has all."""

    loss_scale: float
    """The factor on the loss of a precision that scales it; absent for others."""

    measured: MeasuredRow
    """Keys [measurements](#measurements): those of that table stand in the row itself."""

    of_runner: Mapping[str, float]
    """Keys `pipeline_bubble` and others: figures of an axis that runs the micro batches itself. A pipeline's bubble is the share of
    the step in which a rank has nothing to compute."""

    skipped: bool
    """`true` if the update was left out, by a guard or by the loss scale; absent otherwise."""

    of_guard: Mapping[str, Any]
    """Keys `guard`, `skipped_steps` and `rollbacks`: the guard that found something in the step, how many updates were left out in
    the run, and how often this process went back to a checkpoint. Absent until there is such an event."""


class OwnRow(TypedDict, total=False):
    """The keys of a step's row that rank 0 adds of its own. Hooks don't see them."""

    goodput: float
    """The share of the wall time since the first start of the run, over all restarts, that went into steps that count: their
    forward, backward, communication, optimizer and other seconds. Steps that a resume drops don't count."""

    drain_seconds: float
    """The time in which a background save that has ended since the row before wrote its copy beside the training. Making the copy
    is `checkpoint` in `seconds`. Absent without such a save."""

    exposed_seconds: Mapping[str, float]
    """Seconds that rank 0 waited for communication, by "AXIS.OPERATION", such as `tp.all_reduce`; "world" are all ranks,
    "other" groups of no axis, such as those of saves in the background. Known where ranks talk over MPI, gloo or Horovod on CPUs;
    the next two over MPI only. Of accelerators, `hpctrain profile RUN_DIR --now` tells all three."""

    hidden_seconds: Mapping[str, float]
    """Seconds of communication behind which rank 0 computed; without those that had none."""

    bytes_per_second: Mapping[str, float]
    """The bandwidth that rank 0's operations on an axis achieved: bytes of their input to their running time."""


class EvaluationRow(TypedDict):
    """The metrics of one evaluation of all ranks."""

    measured: Mapping[str, float]
    """Keys `evaluation_NAME`: `evaluation_loss`, `evaluation_loss_NAME` of a loss by name, each of `ModelSpec.figures`, and each
    `[[metric]]`."""

    count: int
    """Key `evaluation_tokens` or `evaluation_samples`: what the loss is a mean over."""


# keys that some rows have
_SOMETIMES = {*OwnRow.__annotations__, *MeasuredRow.__annotations__} - {"memory"} | {
    "rank_loss", "loss_scale", "skipped", "guard", "skipped_steps", "rollbacks"
}  # fmt: skip


def with_named_losses(row: dict[str, Any], losses: Mapping[str, float]) -> dict[str, Any]:
    """A step's row with the losses by name. Raises TrainingError for the name of a key of any row."""
    taken = [name for name in losses if name in row or name in _SOMETIMES]
    if taken:
        raise TrainingError(f"the loss reports {taken[0]!r}, which is a key of each row; expected another name")
    return {**row, **losses}


class NamedLosses:
    """Collects on this rank what the losses of a dict come to, until they are summed."""

    def __init__(self, share: float) -> None:
        """share: the weight of this rank's losses: 0 if another rank counts the same ones."""
        self._share = share
        self._mine: dict[str, Tensor] = {}
        self._names: list[str] | None = None

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """The losses of one micro batch, each a scalar."""
        for name, value in losses.items():
            self._mine[name] = self._mine.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.detach()

    def forget(self) -> None:
        """Begin anew, also with the names."""
        self._mine, self._names = {}, None

    def figures(self) -> list[Figure]:
        """This rank's sum for each name, and begin anew; as many on every rank, none for a model with one loss.

        The names are those of the first call, which is collective: only ranks with the model's outputs know them. Raises
        TrainingError for other names.
        """
        mine, self._mine = self._mine, {}
        if self._names is None:
            self._names = list(dict.fromkeys(name for names in gather_values(list(mine)) for name in names))
        new = [name for name in mine if name not in self._names]
        if new:
            raise TrainingError(
                f"the model reports {new[0]!r}, expected the names of the first step: {', '.join(self._names) or 'none'}"
            )
        return [mine[name] * self._share if name in mine else 0.0 for name in self._names]

    def means(self, figures: Sequence[Sequence[float]], count: float) -> dict[str, float]:
        """Each name's sum over all ranks' `figures` divided by `count`."""
        sums = [sum(column) for column in zip(*figures, strict=True)]
        return {name: value / count for name, value in zip(self._names or [], sums, strict=True)}
