"""A look at the evaluation before the first step: what would fail there after hours fails at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.base.torch_private import is_compiled_module
from hpctrain.model.trials import without_trace
from hpctrain.ranks.json_collectives import sum_of
from hpctrain.training.evaluation import measure, refuse_unmeasured
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
        loader = session.feed.validation_loader(micro_batches=1)
        try:
            micro = next(loader, None)
        finally:
            loader.close()
        if sum_of(
            micro is None or not micro.terms
        ):  # a short stream, or no label: some metrics need samples on each rank
            return
        assert micro is not None
        position.move("evaluation")
        failed: list[str] = []
        with kept_weights(session), without_trace(session.model.module, session.device):
            measured = measure(session.model, parts, [micro], failed=failed)
        session.model.named_losses.forget()
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
