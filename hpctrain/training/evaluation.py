"""An evaluation: the loss and the job's metrics over the samples of a split; and a look at it before the first step, so that what
would fail there after hours fails at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import ContractError, TrainingError, UsageError, reason
from hpctrain.base.torch_private import is_compiled_module
from hpctrain.contracts.metric import Metric, RunningMetric, as_number
from hpctrain.contracts.model import Batch
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.trials import without_trace
from hpctrain.ranks.json_collectives import gather_values, sum_of
from hpctrain.registry.blame import is_communication
from hpctrain.training.figures import Figure, RankFigures, gather_row
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel

_TAKEN = ("exit_code", "tokens", "samples")
# seconds between two questions to the ranks whether an evaluation goes on
_ASKED_EVERY = 1.0


Ask = Callable[[float], int]
"""A rank's request to stop, 0 for none, given the seconds until it is asked again."""


class Asking:
    """Asks the ranks about once a second whether they have to stop. level: the strongest request of any rank, 0 for none."""

    def __init__(self, ask: Ask, moved: Callable[[], None]) -> None:
        """moved: called before each micro batch."""
        self.level, self._ask, self._moved = 0, ask, moved

    def until_stopped(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro batches, as many on all ranks, until a rank has to stop. Collective."""
        begin, question = time.monotonic(), 1
        for number, micro in enumerate(micro_batches, 1):
            self._moved()
            yield micro
            if number == question:
                each = (time.monotonic() - begin) / number
                # ranks wait for each other at the same micro batch, so that they come to one answer
                levels, seconds = zip(*gather_values((self._ask(max(each, _ASKED_EVERY)), each)), strict=True)
                self.level = max(levels)
                if self.level:
                    return
                question += max(1, int(_ASKED_EVERY / max(*seconds, 1e-9)))  # by the slowest rank, equal on all


def evaluate(model: TrainedModel, loader: Loader, asking: Asking | None = None) -> tuple[dict[str, float], int] | None:
    """The metrics by name, first of all "loss", and how many tokens or samples were counted; closes the loader. Collective.

    None if `asking` has found that a rank has to stop.
    """
    with closing(loader):
        micro_batches: Iterable[MicroBatch] = _in_step(loader) if loader.pool.ends_unplanned else loader
        if asking is not None:
            micro_batches = asking.until_stopped(micro_batches)
        return measure(model, micro_batches, asking)


def measure(
    model: TrainedModel,
    micro_batches: Iterable[MicroBatch],
    asking: Asking | None = None,
    failed: list[str] | None = None,
) -> tuple[dict[str, float], int] | None:
    """The result of `evaluate`, for these micro batches. Collective.

    failed: given for a single one, of which some metrics have no value: then the result is None, and it has all ranks' sentences.
    """
    parts = model.parts
    running = [metric.start() for metric in parts.metrics]
    loss_sum, count = model.runner.evaluate(micro_batches, partial(_show, parts, running))
    if asking is not None and asking.level:
        model.named_losses.forget()
        return None
    ranks = RankFigures[Figure](
        loss=loss_sum * model.loss_share, terms=count * model.loss_share, named=model.named_losses.figures()
    ).exchanged(partial(gather_row, device=model.device))
    total, terms = sum(rank.loss for rank in ranks), sum(rank.terms for rank in ranks)
    if not terms:  # equal on all ranks, so that none waits below
        raise TrainingError("no token or sample of the evaluated split has a label")
    measured = {"loss": total / terms, **model.named_losses.means([rank.named for rank in ranks], terms)}
    if running:
        mine = [
            _computed(metric, sums, model.batch_group, failed)
            for metric, sums in zip(parts.metrics, running, strict=True)
        ]
        everyone: list[tuple[int, list[dict[str, float]], list[str]]] = gather_values((count, mine, failed or []))
        if failed is not None:
            failed[:] = dict.fromkeys(why for _, _, whys in everyone for why in whys)
            if failed:
                return None
        having = [values for counted, values, _ in everyone if counted]  # a pipeline's first ranks have no outputs
        for metric, of_ranks in zip(parts.metrics, zip(*having, strict=True), strict=True):
            _refuse_different_values(metric, of_ranks)
        for name, value in (item for values in having[0] for item in values.items()):
            if name in measured or name in (*_TAKEN, parts.model.counts):
                why = f"[[metric]]: found two values called {name!r}; leave a metric out, or give its function another name"
                raise UsageError(why)
            measured[name] = value
    return measured, int(terms)


def _computed(
    metric: Metric, running: RunningMetric, group: dist.ProcessGroup, failed: list[str] | None
) -> dict[str, float]:
    """The metric's values; none with a sentence for `failed`, if that is given: an area under a curve needs two classes, say."""
    try:
        values = running.compute(group)
    except Exception as error:
        if failed is None or isinstance(error, ContractError) or is_communication(error.__traceback__):
            raise
        failed.append(f"[[metric]] {metric.name} has no value after one micro batch: {reason(error).splitlines()[0]}")
        return {}
    return {name: as_number(f"[[metric]]: {name!r}", value) for name, value in values.items()}


def _refuse_different_values(metric: Metric, values: Sequence[dict[str, float]]) -> None:
    """Raises ContractError on all ranks unless a metric is equal on all ranks that had outputs. values: by rank."""
    first = values[0]
    for others in values[1:]:
        pair = [*others.values()], [first.get(name, 0.0) for name in others]
        if others.keys() != first.keys() or not np.allclose(*pair, rtol=1e-6, atol=0.0, equal_nan=True):
            raise broken(
                metric,
                f"computed {first} on one rank and {others} on another",
                "equal values: sum over the group",
            )


def _show(parts: Parts, running: Sequence[RunningMetric], outputs: Any, batch: Batch) -> None:
    """Give each of the job's metrics the outputs of a micro batch, or their logits."""
    if not running:
        return
    whole, target = _whole(outputs), parts.model.target(batch)
    for metric, sums in zip(parts.metrics, running, strict=True):
        sums.update(_whole(parts.model.logits(outputs)) if metric.takes_logits else whole, target)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def refuse_unmeasured(job: Job, names: Iterable[str]) -> None:
    """Raises UsageError if `[checkpoint] keep_best` goes by something that is not among the `names` of what is measured."""
    best = job.checkpoint.keep_best
    if best is not None and best.metric not in names:
        raise UsageError(f"[checkpoint] keep_best: evaluations measure {', '.join(names)}, and not {best.metric!r}")


def _in_step(loader: Loader) -> Iterator[MicroBatch]:
    """The micro batches of a stream. Raises TrainingError if ranks have more of them than others, which would wait forever."""
    while True:
        micro = next(loader, None)
        going_on = sum_of(micro is not None)
        if going_on not in (0, dist.get_world_size()):
            raise TrainingError(
                "[evaluation]: the stream ended earlier on some ranks than on others, expected the same items on all; it must not "
                "depend on the rank"
            )
        if micro is None:
            return
        yield micro


def look(session: Session) -> None:
    """Run an evaluation's first micro batch through model, loss and metrics; the training is as without it. Collective.

    Not in training mode, whose forwards may leave state that nobody can put back, such as lists. Raises what the evaluation would
    raise, and UsageError where nothing measures what `[checkpoint] keep_best` goes by.
    """
    job, position = session.job, session.hooks.position
    if not (job.evaluation.enabled and session.feed.data.validation is not None) or session.progress.done:
        return
    # a pipeline's ranks have other modules, and all must come to one answer
    if sum_of(job.compile.enabled or is_compiled(session.model.module)):
        session.report.say("look         left out: what the compiler makes of a step could depend on it")
        return
    with (
        position.inside("evaluation", session.progress.step),
        session.memory_explained(f"in a look at the evaluation before step {session.progress.step + 1}"),
    ):
        with closing(session.feed.validation_loader(micro_batches=1)) as loader:
            micro = next(loader, None)
        # a short stream, or no label: some metrics need samples on each rank
        if sum_of(micro is None or not micro.terms):
            return
        assert micro is not None
        position.move("evaluation")
        failed: list[str] = []
        with kept_weights(session), without_trace(session.model.module, session.device):
            measured = measure(session.model, [micro], failed=failed)
        session.model.named_losses.forget()  # a training may report other losses than an evaluation
    for why in failed:
        session.report.say(f"look         {why}")
    if measured is not None:
        names = list(measured[0])
        refuse_unmeasured(job, names)
        session.hooks.call("hpctrain_measured", names=names)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has made a module or a forward of it."""
    return any(is_compiled_module(one) for one in module.modules())


@contextmanager
def kept_weights(session: Session) -> Iterator[None]:
    """A forward may change weights: an embedding with max_norm, a layer that takes its first values from its first batch."""
    tensors = [piece.tensor.detach() for piece in session.model.pieces]
    before = [tensor.clone() for tensor in tensors]
    yield
    changed = [not torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True)]
    if sum_of(any(changed)):
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        session.model.refresh()
