"""Opens a job's samples and computes its number of steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.base.errors import ContractError, UsageError
from hpctrain.base.safe_files import cache_directory
from hpctrain.contracts.dataset import DatasetContext, Lengths, Mixture, Samples, Split, Stream
from hpctrain.contracts.model import TokenModel
from hpctrain.data.order import Order, order_of
from hpctrain.data.plan import BatchPlan
from hpctrain.data.refusals import (
    COUNTED_STEPS,
    STREAM,
    refuse_epochs,
    refuse_last_batches,
    refuse_late_phases,
    refuse_other_kind,
    refuse_too_long,
    refuse_uneven,
    refuse_unknown_ids,
    refuse_weights,
)
from hpctrain.data.shapes import capacity, sequence_multiple
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job

if TYPE_CHECKING:
    from hpctrain.data.tokens import TokenPlan


@dataclass(frozen=True)
class Data:
    """The data that a job trains and evaluates on; `validation` is None if the job does not evaluate.

    samples: of an epoch; None for a stream that does not know. lengths, validation_lengths: for token batches, else None.
    """

    training: Samples | Stream
    validation: Samples | Stream | None
    samples: int | None
    lengths: Lengths | None
    validation_lengths: Lengths | None
    fingerprint: str
    order: Order
    steps: int


def open_data(job: Job, parts: Parts, node: str | None = None) -> Data:
    """Raises UsageError for missing files, too few samples, ids beyond the model's vocabulary, or samples that don't fit.

    node: of this rank; then it is collective over the world. None only checks the job, for which estimates are enough.
    """
    context = _context(job, parts, node)
    training, lengths = _opened(job, parts, "train", context)
    refuse_other_kind(job, parts, training)
    validation, validation_lengths = (
        _opened(job, parts, "validation", context) if job.evaluation.enabled else (None, None)
    )
    samples = len(training) if isinstance(training, Samples) else training.length()
    if samples is None:
        refuse_epochs(job, STREAM)
    refuse_last_batches(job, training)
    fingerprint, order = _order(job, training, lengths)
    steps = _steps(job, samples or 0, order, lengths, training.is_estimate)
    return Data(training, validation, samples, lengths, validation_lengths, fingerprint, order, steps)


def open_split(job: Job, parts: Parts, split: Split, node: str) -> tuple[Samples | Stream, Lengths | None]:
    """The samples of one split, and their lengths if batches are cut by tokens. Collective; raises as `open_data` does."""
    source, lengths = _opened(job, parts, split, _context(job, parts, node))
    refuse_other_kind(job, parts, source)
    return source, lengths


def _opened(job: Job, parts: Parts, split: Split, context: DatasetContext) -> tuple[Samples | Stream, Lengths | None]:
    source = parts.dataset.open(split, context)
    if not source:
        remedy = "" if split == "train" else " (such as by validation_fraction), or leave [evaluation] out"
        raise UsageError(
            f"[dataset] {job.dataset.name}: it has no samples of the split {split!r}; expected some{remedy}"
        )
    refuse_unknown_ids(job.dataset.name, source, context.vocab_size)
    return source, _lengths(job, parts, source)


def _lengths(job: Job, parts: Parts, source: Samples | Stream) -> Lengths | None:
    """The length of each sample for batches by tokens, else None; UsageError if lengths are unknown or do not fit."""
    lengths = None if isinstance(source, Stream) else source.lengths()
    if isinstance(source, Samples) and lengths is not None and (lengths.shape != (len(source),) or lengths.min() < 1):
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: its lengths have shape {lengths.shape}, the smallest is "
            f"{lengths.min(initial=1)}; expected {len(source)} numbers of at least 1"
        )
    collates = source.collation() is not None  # it may pad as it likes
    if job.batch.tokens is None:
        if lengths is not None and not collates:
            refuse_uneven(job, parts, lengths)
        return None
    if lengths is None or collates:
        why = "are made into batches by a function of your own" if collates else "are of unknown length"
        raise UsageError(
            f"[batch] tokens: the samples of {job.dataset.name!r} {why}, but hpctrain pads batches by tokens; use global_size and "
            "micro_size, or samples by index with lengths() and without a collate function"
        )
    refuse_too_long(job, parts, lengths)
    return lengths


def _order(job: Job, samples: Samples | Stream, counted: Lengths | None) -> tuple[str, Order]:
    """The fingerprint of samples and weights, and the order that they give. counted: lengths, for batches by tokens."""
    if isinstance(samples, Stream):
        return samples.fingerprint(), np.arange  # position p is item p
    fingerprint, weights, seed = samples.fingerprint(), samples.weights(), job.job.seed
    if samples.fingerprint() != fingerprint:  # one that changes would refuse each resume
        told = f"gave the fingerprint {fingerprint!r}, and another one when it was asked again"
        raise ContractError(f"[dataset] name = {job.dataset.name!r} {told}, expected one text for the same samples")
    mixture = samples.mixture()
    if mixture is not None:
        refuse_late_phases(job, mixture)
        for part in mixture.parts:
            if part.weights is not None:
                refuse_weights(job, part.weights, part.count)
        sources = [(part.count, None if part.weights is None else part.weights.tobytes()) for part in mixture.parts]
        phases = [(step, list(of_parts)) for step, of_parts in mixture.phases]
        digest = hashlib.blake2b(repr((sources, phases)).encode(), digest_size=8).hexdigest()
        fingerprint = f"{fingerprint} mixture {digest}"
        if len(mixture.phases) > 1:  # they are counted in batches of this size
            fingerprint = f"{fingerprint} in batches of {job.batch.size}"
        return fingerprint, _mixed(job, mixture, fingerprint, counted)
    if weights is not None:
        refuse_weights(job, weights, len(samples))
        fingerprint = f"{fingerprint} weights {hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()}"
    return fingerprint, order_of(len(samples), weights, seed, fingerprint).at


def _mixed(job: Job, mixture: Mixture, fingerprint: str, lengths: Lengths | None) -> Order:
    """The order of a mixture, whose phases begin where the batches of their first steps do.

    Phases behind the last step count, too: the order up to there must be that of a longer job.
    """
    from hpctrain.data.mixture import MixtureOrder  # here, as the other parts that few jobs need
    from hpctrain.data.tokens import global_batches

    order, begin, before = MixtureOrder(mixture.parts, job.job.seed, fingerprint), 0, 0
    for step, shares in mixture.phases:
        if lengths is None:
            begin = step * job.batch.size
        elif step:
            batches = global_batches(order.at, lengths, job.batch.size, begin)
            begin, before = next(islice(batches, step - before - 1, None))[0], step
        order.add_phase(begin, shares)
    return order.at


def _context(job: Job, parts: Parts, node: str | None) -> DatasetContext:
    spec = parts.model
    vocab_size, longest = (spec.vocab_size, spec.max_seq_length) if isinstance(spec, TokenModel) else (None, None)
    seq_length, cache = job.dataset.seq_length or longest, job.dataset.cache or cache_directory()
    if longest and seq_length and seq_length > longest:
        raise UsageError(f"[dataset] seq_length: {seq_length} is longer than the model's max_seq_length {longest}")
    context = DatasetContext(seq_length, vocab_size, job.job.seed, cache, by_tokens=job.batch.tokens is not None)
    if node is None:
        return replace(context, may_estimate=True)
    return replace(context, once_per_node=partial(once_per_node, node, {}))


def once_per_node(node: str, values: dict[str, Any], name: str, action: Callable[[], Any]) -> Any:
    """`DatasetContext.once_per_node` of a rank on `node`. values: of earlier calls, by their names."""
    if name not in values:
        from hpctrain.data.node_work import shared_on_node

        values[name] = shared_on_node(node, action)  # collective: each rank comes here for the same names
    return values[name]


def make_plan(
    job: Job, parts: Parts, lengths: Lengths | None, rank: int, ranks: int, samples: int | None = None
) -> BatchPlan | TokenPlan:
    """This data-parallel rank's share of the global batches. lengths: those of the planned samples. samples: of an epoch."""
    batch = job.batch
    if lengths is None:
        return _plan_by_samples(job, samples, rank, ranks)
    from hpctrain.data.tokens import TokenPlan

    assert batch.tokens is not None
    room, multiple = capacity(job, parts), sequence_multiple(job, parts)
    return TokenPlan(lengths, batch.tokens, room, multiple, rank, ranks, batch.packing)


def _plan_by_samples(job: Job, samples: int | None, rank: int, ranks: int) -> BatchPlan:
    batch = job.batch
    assert batch.global_size is not None and batch.micro_size is not None
    epoch = None if batch.drop_last is None else samples
    return BatchPlan(batch.global_size, batch.micro_size, rank, ranks, epoch, bool(batch.drop_last))


def _steps(job: Job, samples: int, order: Order, lengths: Lengths | None, is_estimate: bool) -> int:
    """The job's number of steps, or the number of whole global batches in its epochs. An estimate may be 0."""
    if job.job.steps is not None:
        return job.job.steps
    epochs, batch = job.job.epochs or 0, job.batch
    if lengths is not None and epochs * float(lengths.sum()) / batch.size > COUNTED_STEPS:
        raise UsageError(
            f"[job] epochs: {epochs:g} x {samples} samples in batches of {batch.size} tokens are more than {COUNTED_STEPS:,} "
            "steps, too many to count at the start; give [job] steps instead"
        )
    steps = steps_of_epochs(job, samples, order, lengths)
    if steps == 0 and not is_estimate:
        unit, key = ("samples", "global_size") if lengths is None else ("tokens", "tokens")
        raise UsageError(
            f"[job] epochs: {epochs:g} x {samples} samples do not fill one global batch of {batch.size} {unit}; "
            f"give more epochs or a smaller [batch] {key}"
        )
    return steps


def steps_of_epochs(job: Job, samples: int, order: Order, lengths: Lengths | None, begin: int = 0) -> int:
    """The number of whole global batches from position `begin` of the order to the end of the job's epochs."""
    end = int((job.job.epochs or 0) * samples)  # epochs may be a fraction
    if lengths is None:
        return _plan_by_samples(job, samples, 0, 1).steps_between(begin, end)
    from hpctrain.data.tokens import whole_batches

    return whole_batches(order, lengths, job.batch.size, end, begin)
