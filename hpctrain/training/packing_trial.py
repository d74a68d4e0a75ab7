"""A trial of a packed row before the first step: no sample in it may see another one, or its own place in the row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.contracts.dataset import Lengths, Samples
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.precision import Precision
from hpctrain.data.batches import Batches
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.data.shapes import Packing, make_collation
from hpctrain.model.traceless import without_trace
from hpctrain.ranks.json_collectives import sum_of
from hpctrain.training.feed import make_loader
from hpctrain.training.session import Session

LOG = logging.getLogger("hpctrain")

_LOOKED_AT = 64
_LONG = 32
"""Tokens of a sample that shows something."""
_ALIKE, _CLOSE = 1e-5, 1e-3
_ALIKE_IN_16_BITS, _CLOSE_IN_16_BITS = 2e-3, 2e-2
"""Relative, of the losses of rows of one shape and of two, which kernels round in different ways. Experts get other tokens, too."""
_IN_8_BITS = 2e-2
"""Scales of 8 bits belong to a whole row."""


class _Prepared(Samples):
    """Samples that are in memory."""

    def __init__(self, samples: Sequence[dict[str, Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]

    def fingerprint(self) -> str:
        return ""


def try_packing(session: Session) -> None:
    """Compare the loss of a sample alone in a row with its losses behind two other ones, which have none. Collective.

    Raises ContractError for a model in which they differ. The training is as without the trial.
    """
    job, model = session.job, session.model
    if not job.batch.packing or session.progress.done:
        return
    prepared = _prepared(session, *session.feed.first_samples(_LOOKED_AT))
    if prepared is None:
        return
    rows = [Planned(indices, 0) for indices in ([0, 2], [1, 2], [2])]
    # the compiler would take the shapes of these rows for usual ones
    with without_trace(model.module, session.device), torch.compiler.set_stance("force_eager"):
        beside, beside_another, alone = (_loss(session, _Prepared(prepared), row) for row in rows)
    model.named_losses.forget()
    alike, close = _tolerances(session.parts.precision)
    sees = abs(beside - beside_another) > alike * abs(beside)
    stands = abs(beside - alone) > close * abs(alone)
    if not sees and abs(beside - beside_another) > _ALIKE * abs(beside):
        LOG.warning(
            "[batch] packing: a sample has the loss %.6g behind one sample and %.6g behind another; in 16 bits this may be "
            'rounding, as by experts, or attention to other samples: a few steps with [precision] mode = "fp32" tell',
            beside,
            beside_another,
        )
    if sum_of(sees):
        found = f"gave a sample of a packed row the loss {beside:.6g} behind one sample and {beside_another:.6g} behind another"
        raise broken(model.spec, found, "attention of each of the batch's `documents` to itself alone", everywhere=True)
    if sum_of(stands):
        found = f"gave a sample the loss {alone:.6g} alone in a row and {beside:.6g} behind another one"
        raise broken(model.spec, found, "tokens that stand where the batch's `positions` say", everywhere=True)


def _tolerances(precision: Precision) -> tuple[float, float]:
    if type(precision).convert is not Precision.convert:
        return _IN_8_BITS, _IN_8_BITS
    is_wide = precision.product_dtype is None and precision.parameter_dtype.itemsize > 2
    return (_ALIKE, _CLOSE) if is_wide else (_ALIKE_IN_16_BITS, _CLOSE_IN_16_BITS)


def _prepared(session: Session, samples: Samples, lengths: Lengths) -> list[dict[str, Tensor]] | None:
    """A sample without loss, another one of its shape, and a sample with a loss; None where no two samples share a row."""
    packing = make_collation(session.job, session.parts, samples)
    assert isinstance(packing, Packing)
    order = np.argsort(np.where(lengths < _LONG, lengths.max() + _LONG - lengths, lengths), kind="stable").tolist()
    own, other = (samples[int(index)] for index in (order[0], order[-1 if len(order) < 3 else 1]))
    batch = packing([other])
    target = session.model.spec.target(batch)
    label = next((name for name in packing.values if batch.get(name) is target), None)
    room = (session.job.batch.micro_tokens or 0) - int(lengths[order[0]])
    if label is None or room < 1 or session.model.spec.count(packing([own])) == 0:
        return None
    first = {name: one[:room] for name, one in other.items()}
    first[label] = torch.full_like(first[label], int(packing.values[label]))
    second = {name: one if name == label else one.flip(0) for name, one in first.items()}
    return [first, second, own]


def _loss(session: Session, samples: Samples, row: Planned) -> float:
    """The loss of a row, summed over the ranks that have parts of it."""
    job, parts, model = session.job, session.parts, session.model
    pool = Pool(Batches(samples, make_collation(job, parts, samples)), 0, 1, job.dataset.start_method)
    loader = make_loader(pool, iter([row]), model.split, job, parts, session.device)
    try:
        total, _ = model.runner.evaluate(loader, lambda outputs, batch: None)
    finally:
        loader.close()
        pool.close()
    dist.all_reduce(total, group=model.batch_group)
    return float(total)
