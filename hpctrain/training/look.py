"""A look at the evaluation before the first step: what would fail there after hours fails at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import ContractError, reason
from hpctrain.base.torch_private import is_compiled_module
from hpctrain.contracts.metric import RunningMetric
from hpctrain.contracts.model import Batch
from hpctrain.contracts.runner import MicroBatch
from hpctrain.model.trials import without_trace
from hpctrain.plugins.blame import is_communication
from hpctrain.ranks.json_collectives import gather_values, sum_of
from hpctrain.training.evaluation import add_measured, refuse_unmeasured, show
from hpctrain.training.guard.memory import memory_explained
from hpctrain.training.session import Session


def look(session: Session) -> None:
    """Run an evaluation's first micro batch through model, loss and metrics; the training is as without it. Collective.

    Not in training mode, whose forwards may leave state that nobody can put back, such as lists. Raises what the evaluation would
    raise, and UsageError where nothing measures what `[checkpoint] keep_best` goes by.
    """
    job, parts, position = session.job, session.parts, session.hooks.position
    if not (job.evaluation.enabled and session.feed.validates) or session.progress.done:
        return
    # a pipeline's ranks have other modules, and all must come to one answer
    if sum_of(job.compile.enabled or is_compiled(session.model.module)):
        session.report.say("look         left out: what the compiler makes of a step could depend on it")
        return
    doing = f"in a look at the evaluation before step {session.progress.step + 1}"
    with (
        position.inside("evaluation", session.progress.step),
        memory_explained(job, parts, session.identity, session.device, doing),
    ):
        micro = _first(session)
        if sum_of(micro is None):  # a stream that is too short: its evaluation says so
            return
        assert micro is not None
        position.move("evaluation")
        names = _measured(session, micro)
    if names is not None:
        refuse_unmeasured(job, names)
        session.hooks.call("hpctrain_measured", names=names)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has made a module or a forward of it."""
    return any(is_compiled_module(one) for one in module.modules())


def _first(session: Session) -> MicroBatch | None:
    loader = session.feed.validation_loader(micro_batches=1)
    try:
        return next(loader, None)
    finally:
        loader.close()


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


def _measured(session: Session, micro: MicroBatch) -> list[str] | None:
    """The names of what an evaluation measures; None where one micro batch does not tell. Collective."""
    model, parts = session.model, session.parts
    running = [metric.start() for metric in parts.metrics]
    shown: list[bool] = []

    def see(outputs: Any, batch: Batch) -> None:
        show(parts, running, outputs, batch)
        shown.append(True)

    with kept_weights(session), without_trace(model.module, session.device):
        model.runner.evaluate([micro], see)
    losses = model.named_losses.forget()
    if sum_of(not micro.counts):  # some metrics need samples on each rank
        return None
    everyone: list[tuple[bool, list[list[str]], list[str], list[str]]]
    everyone = gather_values((bool(shown), *_computed(session, running), losses))
    failed = dict.fromkeys(why for _, _, whys, _ in everyone for why in whys)
    for why in failed:
        session.report.say(f"look         {why}")
    if failed:
        return None
    found = {"loss": math.nan, **{name: math.nan for *_, names in everyone for name in names}}
    measured = next(names for has_outputs, names, *_ in everyone if has_outputs)
    add_measured(found, [dict.fromkeys(names, math.nan) for names in measured], parts.model.counts)
    return list(found)


def _computed(session: Session, running: list[RunningMetric]) -> tuple[list[list[str]], list[str]]:
    """Each metric's names, and sentences about those that fail: one that sees one class only may not be defined."""
    names: list[list[str]] = []
    failed: list[str] = []
    for metric, one in zip(session.parts.metrics, running, strict=True):
        try:
            names.append(list(one.compute(session.model.batch_group)))
        except ContractError:
            raise
        except Exception as error:
            if is_communication(error.__traceback__):
                raise
            why = reason(error).partition("\n")[0]
            failed.append(f"[[metric]] {metric.name} has no value after one micro batch: {why}")
    return names, failed
