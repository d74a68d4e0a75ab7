"""Opens a job's samples and works out how many steps they make."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

import numpy as np
from torch.utils.data import default_collate

from hpctrain.contracts.dataset import DatasetContext, Lengths, Samples
from hpctrain.data.order import SampleOrder
from hpctrain.data.padding import Padding
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tokens import TokenPlan, padded, whole_batches
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.foreign.reference import is_reference
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job

_COUNTED_STEPS = 500_000
"""The most steps of a job with epochs and batches by tokens: only the lengths of its samples tell their number."""
_EPOCHS = 100
"""A batch by tokens has at most the samples of so many epochs; all of them are looked up at once."""


@dataclass(frozen=True)
class Data:
    """The samples of a job; `validation` is None where the job does not evaluate.

    lengths, validation_lengths: where the batches are cut by tokens.
    """

    training: Samples
    validation: Samples | None
    lengths: Lengths | None
    validation_lengths: Lengths | None
    fingerprint: str
    order: SampleOrder
    steps: int


def open_data(job: Job, parts: Parts) -> Data:
    """Raises UsageError for missing files, too few samples, ids that the model does not have, or samples that don't fit."""
    spec = parts.model
    context = DatasetContext(job.dataset.seq_length or spec.max_seq_length, spec.vocab_size, job.job.seed)
    if context.seq_length and spec.max_seq_length and context.seq_length > spec.max_seq_length:
        raise UsageError(
            f"[dataset] seq_length: {context.seq_length} is longer than the model's max_seq_length {spec.max_seq_length}"
        )
    training = parts.dataset.open("train", context)
    if training is None or len(training) == 0:
        raise UsageError(f"[dataset] {job.dataset.name}: it has no training samples")
    validation = parts.dataset.open("validation", context) if job.evaluation.every_steps else None
    if job.evaluation.every_steps and not validation:
        raise UsageError(
            f"[evaluation] every_steps: the dataset {job.dataset.name!r} has no validation split; "
            "give it one (such as validation_fraction) or leave [evaluation] out"
        )
    for samples in (training, validation):
        if samples is not None:
            _refuse_unknown_ids(job.dataset.name, samples, spec.vocab_size)
    lengths, validation_lengths = (
        _lengths(job, parts, samples) if samples else None for samples in (training, validation)
    )
    if is_reference(job.dataset.name) or is_reference(job.model.name):
        _refuse_other_kind(job, parts, training)
    fingerprint = training.fingerprint()
    order = SampleOrder(len(training), job.job.seed, fingerprint)
    steps = _steps(job, len(training), order, lengths)
    return Data(training, validation, lengths, validation_lengths, fingerprint, order, steps)


def make_plan(job: Job, parts: Parts, lengths: Lengths | None, rank: int, ranks: int) -> BatchPlan | TokenPlan:
    """How this data-parallel rank takes part in the global batches; `lengths`: of the samples that are planned."""
    batch = job.batch
    if lengths is None:
        assert batch.global_size is not None and batch.micro_size is not None
        return BatchPlan(batch.global_size, batch.micro_size, rank, ranks)
    assert batch.tokens is not None
    return TokenPlan(lengths, batch.tokens, capacity(job, parts), sequence_multiple(job, parts), rank, ranks)


def make_padding(job: Job, parts: Parts) -> Padding | None:
    """How samples become a batch; None where all have one shape."""
    return None if job.batch.tokens is None else Padding(parts.model.padding(), sequence_multiple(job, parts))


def capacity(job: Job, parts: Parts) -> int:
    """Tokens of a micro batch: those of all ranks that have a part of the same samples."""
    return (job.batch.micro_tokens or 0) * prod(
        job.parallelism[name].size for name, plugin in parts.parallelism.items() if plugin.traits.cuts_samples
    )


def sequence_multiple(job: Job, parts: Parts) -> int:
    """The number that must divide the length of a batch, so that each axis can cut the part that outer axes leave."""
    multiple, ranks = 1, 1  # that have parts of a sample
    for name, plugin in sorted(parts.parallelism.items(), key=lambda item: item[1].traits.order):
        size = job.parallelism[name].size
        multiple = lcm(multiple, ranks * plugin.sequence_multiple(size))
        ranks *= size if plugin.traits.cuts_samples else 1
    return multiple


def _lengths(job: Job, parts: Parts, samples: Samples) -> Lengths | None:
    """The length of each sample, where the job needs it; UsageError where lengths are unknown or do not fit."""
    lengths = samples.lengths()
    if lengths is not None and (lengths.shape != (len(samples),) or lengths.min() < 1):
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: its lengths have shape {lengths.shape}, the smallest is "
            f"{lengths.min(initial=1)}; expected {len(samples)} numbers of at least 1"
        )
    if job.batch.tokens is None:
        if lengths is not None and lengths.min() != lengths.max():
            raise UsageError(
                f"[batch] global_size: the samples of {job.dataset.name!r} have {lengths.min()} to {lengths.max()} tokens, and "
                "batches of so many samples need one length; use [batch] tokens and micro_tokens"
            )
        if lengths is not None:
            _refuse_uneven(job, parts, int(lengths[0]))
        return None
    if lengths is None:
        raise UsageError(
            f"[batch] tokens: the dataset {job.dataset.name!r} does not say how many tokens its samples have (lengths); use "
            "global_size and micro_size, or another dataset"
        )
    _refuse_too_long(job, parts, lengths)
    tokens = int(lengths.sum())
    if (job.batch.tokens or 0) > _EPOCHS * tokens:
        raise UsageError(
            f"[batch] tokens: found {job.batch.tokens}, and all samples of {job.dataset.name!r} have {tokens}; expected at most "
            f"{_EPOCHS} times that"
        )
    return lengths


def _refuse_uneven(job: Job, parts: Parts, length: int) -> None:
    """UsageError for a length that the axes cannot cut. Batches by tokens are padded instead; a dataset that does not know its
    lengths may fail in the first step."""
    multiple = sequence_multiple(job, parts)
    if length % multiple:
        sizes = {name: job.parallelism[name].size for name in parts.parallelism}
        cutting = [f"{name} = {n}" for name, n in sizes.items() if parts.parallelism[name].sequence_multiple(n) > 1]
        raise UsageError(
            f"[dataset] seq_length: the samples of {job.dataset.name!r} have {length} tokens, and [parallelism] "
            f"{' with '.join(cutting)} cuts sequences into equal parts; expected a multiple of {multiple}, such as "
            f"{max(multiple, length - length % multiple)}"
        )


def _refuse_too_long(job: Job, parts: Parts, lengths: Lengths) -> None:
    index = int(np.argmax(lengths))
    length, multiple = int(lengths[index]), sequence_multiple(job, parts)
    size = padded(length, multiple)
    with_filling = f" ({size} when padded to a multiple of {multiple})" if size > length else ""
    found = f"sample {index} of {job.dataset.name!r} has {length} tokens{with_filling}"
    room, longest = capacity(job, parts), parts.model.max_seq_length
    if longest is not None and size > longest:
        raise UsageError(
            f"[batch] tokens: {found}, and the model's max_seq_length is {longest}; raise that, or cut samples with a smaller "
            "[dataset] seq_length"
        )
    if size > room or length > (job.batch.tokens or 0):
        what = (
            f"micro_tokens: {found}, and a forward takes {room}"
            if size > room
            else f"tokens: {found}, a step takes fewer"
        )
        raise UsageError(f"[batch] {what}; raise it, or cut samples with a smaller [dataset] seq_length")


def _refuse_unknown_ids(name: str, samples: Samples, vocab_size: int | None) -> None:
    if samples.vocab_size is not None and vocab_size is not None and samples.vocab_size > vocab_size:
        raise UsageError(
            f"[dataset] {name}: it holds ids up to {samples.vocab_size - 1}, and the model's vocab_size is {vocab_size}; "
            f"set [model] vocab_size = {samples.vocab_size} or larger"
        )


def _refuse_other_kind(job: Job, parts: Parts, samples: Samples) -> None:
    """The first sample, as a batch of one, must be of the kind that the model takes."""
    sample, padding = samples[0], make_padding(job, parts)
    try:
        parts.model.count(default_collate([sample]) if padding is None else padding([sample]))
    except Exception as error:  # the model's code, on what it was not written for
        said = str(error) if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: the model {parts.model.name!r} does not take its samples, such as this "
            f"{type(sample).__name__}: {said}"
        ) from error


def _steps(job: Job, samples: int, order: SampleOrder, lengths: Lengths | None) -> int:
    """Steps as the job says, or the whole global batches of its epochs."""
    if job.job.steps is not None:
        return job.job.steps
    epochs, batch = job.job.epochs or 0, job.batch
    if lengths is not None and epochs * float(lengths.sum()) / batch.size > _COUNTED_STEPS:
        raise UsageError(
            f"[job] epochs: {epochs:g} x {samples} samples in batches of {batch.size} tokens are more than {_COUNTED_STEPS:,} "
            "steps, each of which would be counted; give [job] steps instead"
        )
    steps = steps_of_epochs(job, samples, order, lengths)
    if steps == 0:
        unit, key = ("samples", "global_size") if lengths is None else ("tokens", "tokens")
        raise UsageError(
            f"[job] epochs: {epochs:g} x {samples} samples do not fill one global batch of {batch.size} {unit}; "
            f"give more epochs or a smaller [batch] {key}"
        )
    return steps


def steps_of_epochs(job: Job, samples: int, order: SampleOrder, lengths: Lengths | None, begin: int = 0) -> int:
    """The whole global batches from position `begin` of the order to the end of the job's epochs."""
    end, size = int((job.job.epochs or 0) * samples), job.batch.size
    return max(0, end - begin) // size if lengths is None else whole_batches(order, lengths, size, end, begin)
