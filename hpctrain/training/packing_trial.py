"""A trial of a packed row before the first step: no sample in it may see another one, or its own place in the row. Many a model of
other libraries would train on, and learn worse."""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed as dist

from hpctrain.base.devices import to_device
from hpctrain.contracts.dataset import Samples
from hpctrain.contracts.model import Batch, PaddedModel, map_tensors
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.shapes import Packing, Padding, make_collation, ranks_of_a_sample
from hpctrain.model.trials import without_trace
from hpctrain.ranks.json_collectives import sum_of
from hpctrain.registry.blame import users_code
from hpctrain.training.evaluation import kept_weights
from hpctrain.training.session import Session

LOG = logging.getLogger("hpctrain")

_LOOKED_AT = 64
# tokens of a sample that shows something
_LONG = 32
# the most that two losses may differ by, of rows of one shape and of two, which kernels round in different ways: relative, or
# for each label where that is more. Experts get other tokens, too, and scales of 8 bits belong to a whole row.
_IN_32_BITS, _IN_16_BITS, _IN_8_BITS = (1e-5, 2e-3), (2e-3, 2e-2), (2e-2, 2e-2)


def try_packing(session: Session) -> None:
    """Compare the loss of a sample, forwarded as it is without packing, with its losses behind two others in a row. Collective.

    Raises ContractError for a model in which they differ. The training is as without the trial.
    """
    model, precision, device = session.model, session.parts.precision, session.device
    if session.progress.done or not isinstance(model.spec, PaddedModel):
        return
    rows = _rows(session)
    if rows is None:
        why = "no sample with a label fits into a row with another one"
        LOG.warning("[batch] packing: it was not tried on this model: %s", why)
        return
    with (
        session.memory_explained("in a trial of packed rows"),
        kept_weights(session),
        without_trace(model.module, device),
        torch.compiler.set_stance("force_eager"),  # the compiler would take the shapes of these rows for usual ones
    ):
        beside, beside_another, alone = (_loss(session, row) for row in rows)
    model.named_losses.forget()
    size = max(abs(alone), model.spec.count(rows[-1]))
    is_wide = precision.product_dtype(device).itemsize > 2
    alike, close = _IN_32_BITS if is_wide else _IN_16_BITS
    if type(precision).convert is not Precision.convert:
        alike, close = _IN_8_BITS
    if sum_of(not abs(beside - beside_another) <= alike * size):
        found = f"gave a sample of a packed row the loss {beside:.6g} behind one sample and {beside_another:.6g} behind another"
        raise broken(model.spec, found, "attention of each of the batch's `documents` to itself alone")
    if sum_of(not abs(beside - alone) <= close * size):
        found = f"gave a sample the loss {alone:.6g} alone in a row and {beside:.6g} behind another one"
        raise broken(model.spec, found, "tokens that stand where the batch's `positions` say")


def _rows(session: Session) -> tuple[Batch, Batch, Batch] | None:
    """A sample behind two others of one shape, which have no label, and alone in a row. Of the shortest ones that are long enough;
    None where no two share a row, or none has a label."""
    samples, lengths = session.feed.data.training, session.feed.data.lengths
    assert isinstance(samples, Samples) and lengths is not None  # as batches by tokens need them
    lengths = lengths[:_LOOKED_AT]
    packing, spec = make_collation(session.job, session.parts, samples), session.model.spec
    assert isinstance(packing, Packing)
    order = np.argsort(np.where(lengths < _LONG, lengths.max() + _LONG - lengths, lengths), kind="stable").tolist()
    with users_code(f"[dataset] name = {session.job.dataset.name!r}:"):
        index = next((one for one in order if spec.count(packing([samples[one]]))), None)
        if index is None:
            return None
        own, other = samples[index], samples[next((one for one in order if one != index), index)]
    batch = packing([other])
    target = spec.target(batch)
    label = next((name for name in packing.values if batch.get(name) is target), None)
    room = (session.job.batch.micro_tokens or 0) - int(lengths[index])
    if label is None or room < 1:
        return None
    first = {name: value[:room] for name, value in other.items()}
    first[label] = torch.full_like(first[label], int(packing.values[label]))
    second = {name: value if name == label else value.flip(0) for name, value in first.items()}
    alone = Padding(packing.values, packing.multiple, packing.optional)
    return packing([first, own]), packing([second, own]), alone([own])


def _loss(session: Session, row: Batch) -> float:
    """The loss of a micro batch, summed over the ranks that have parts of it."""
    model = session.model
    here = map_tensors(lambda one: to_device(one, session.device), model.split(row))
    total, _ = model.runner.evaluate([MicroBatch(here, place=0)], lambda outputs, batch: None)
    dist.all_reduce(total, group=model.batch_group)
    return float(total) * ranks_of_a_sample(session.job, session.parts) / model.batch_group.size()
