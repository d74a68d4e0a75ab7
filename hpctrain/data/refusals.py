"""Refuses samples that don't fit a job, in `hpctrain check` and on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.contracts.dataset import Lengths, Mixture, Samples, Source, Stream, Weights
from hpctrain.contracts.model import TokenModel
from hpctrain.data.shapes import capacity, make_collation, sequence_multiple
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.registry.user_code.reference import is_reference

# the most epochs that one token batch may span; its samples are looked up all at once
_EPOCHS = 100
COUNTED_STEPS = 500_000
"""The most steps whose batches by tokens are counted at the start."""


STREAM = "is a stream without a length, so that epochs can't be counted before it ends"
"""The rest of a sentence about a data set."""


def refuse_epochs(job: Job, why: str) -> None:
    """UsageError for a key that counts epochs. why: the rest of a sentence about the data set."""
    for key, value, instead in (
        ("[job] epochs", job.job.epochs, "[job] steps"),
        ("[evaluation] every_epochs", job.evaluation.every_epochs, "every_steps"),
        ("[checkpoint] every_epochs", job.checkpoint.every_epochs, "every_steps"),
        ("[schedule] unit", job.schedule.unit == "epoch", 'unit = "step"'),
    ):
        if value:
            raise UsageError(f"{key}: {job.dataset.name!r} {why}; give {instead}, or the data set a __len__")


def refuse_last_batches(job: Job, samples: Samples | Stream) -> None:
    """UsageError for [batch] drop_last of data whose epochs batches can't end with."""
    if job.batch.drop_last is None:
        return
    why, remedy = "", "leave it out"
    if isinstance(samples, Stream):
        why = "is a stream, whose batches don't end with its epochs"
    elif samples.mixture() is not None:
        why = "is a mixture, whose batches don't end with its epochs"
    elif job.batch.drop_last and len(samples) < job.batch.size:
        why = f"has {len(samples)} samples, which do not fill one global batch of {job.batch.size}"
        remedy = "give a smaller global_size, or leave it out"
    if why:
        raise UsageError(f"[batch] drop_last: {job.dataset.name!r} {why}; {remedy}")


def refuse_unknown_ids(name: str, samples: Source, vocab_size: int | None) -> None:
    """UsageError for a data set with ids beyond the model's vocabulary."""
    if samples.vocab_size is not None and vocab_size is not None and samples.vocab_size > vocab_size:
        raise UsageError(
            f"[dataset] {name}: it holds ids up to {samples.vocab_size - 1}, but the model's vocab_size is {vocab_size}; "
            f"set [model] vocab_size = {samples.vocab_size} or larger"
        )


def refuse_other_kind(job: Job, parts: Parts, samples: Samples | Stream) -> None:
    """UsageError unless the model accepts the first sample as a batch of one."""
    is_own, collation = is_reference(job.dataset.name) or is_reference(job.model.name), samples.collation()
    if not is_own and (isinstance(samples, Stream) or collation is not None):
        return  # a plugin's stream may not begin anew, its function may need several samples
    sample = _first(job, samples)
    batch = None if collation is None else collation([sample])  # its errors say what they are about
    try:
        parts.model.count(make_collation(job, parts, samples)([sample]) if batch is None else batch)
    except Exception as error:  # the model's code on unexpected data may raise anything
        said = str(error) if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: the model {parts.model.name!r} does not take its samples, such as this "
            f"{type(sample).__name__}: {said}"
        ) from error


def _first(job: Job, samples: Samples | Stream) -> Any:
    if isinstance(samples, Samples):
        return samples[0]
    samples.set_epoch(0)
    for item in samples:
        return item
    raise UsageError(
        f"[dataset] name = {job.dataset.name!r} returned a stream that has no items; expected one at least"
    )


def refuse_uneven(job: Job, parts: Parts, lengths: Lengths) -> None:
    """UsageError for samples of several lengths, or of one that the model doesn't take or the axes cannot cut. Token batches are
    padded instead; a dataset without known lengths may fail in the first step."""
    shortest, longest, multiple = int(lengths.min()), int(lengths.max()), sequence_multiple(job, parts)
    most = parts.model.max_seq_length if isinstance(parts.model, TokenModel) else longest
    if longest > most:
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: a sample has {longest} tokens, but the model's max_seq_length is {most}; "
            "raise that, or set a smaller seq_length"
        )
    if shortest != longest:
        raise UsageError(
            f"[batch] global_size: the samples of {job.dataset.name!r} have {shortest} to {longest} tokens, but batches of a "
            "fixed number of samples need one length; use [batch] tokens and micro_tokens, or a function that pads "
            "([dataset] collate)"
        )
    if longest % multiple:
        sizes = ", ".join(f"{name} = {job.parallelism[name].size}" for name in parts.parallelism)
        raise UsageError(
            f"[dataset] seq_length: the samples of {job.dataset.name!r} have {longest} tokens, and [parallelism] {sizes} cuts "
            f"sequences into equal parts; expected a multiple of {multiple}, such as {max(multiple, longest - longest % multiple)}"
        )


def refuse_too_long(job: Job, parts: Parts, lengths: Lengths) -> None:
    """UsageError for a sample that fits no forward, or no step, and for steps of very many samples."""
    from hpctrain.data.tokens import padded  # here: only jobs with batches by tokens need it

    index = int(np.argmax(lengths))
    length, multiple = int(lengths[index]), sequence_multiple(job, parts)
    size = padded(length, multiple)
    with_filling = f" ({size} when padded to a multiple of {multiple})" if size > length else ""
    spec = parts.model
    limits = [
        (size, capacity(job, parts), "a forward takes (micro_tokens)"),
        (length, job.batch.tokens or 0, "a step takes (tokens)"),
        (size, spec.max_seq_length if isinstance(spec, TokenModel) else size, "the model takes (max_seq_length)"),
    ]
    for wanted, most, what in limits:
        if wanted > most:
            raise UsageError(
                f"[batch] tokens: sample {index} of {job.dataset.name!r} has {length} tokens{with_filling}, but {what} {most}; "
                "raise that, or cut samples with a smaller [dataset] seq_length"
            )
    tokens = int(lengths.sum())
    if (job.batch.tokens or 0) > _EPOCHS * tokens:
        raise UsageError(
            f"[batch] tokens: found {job.batch.tokens}, but all samples of {job.dataset.name!r} have {tokens}; expected at most "
            f"{_EPOCHS} times that"
        )


def refuse_late_phases(job: Job, mixture: Mixture) -> None:
    """UsageError for a mixture whose phases can't be counted."""
    last = mixture.phases[-1][0]
    if job.batch.tokens is not None and last > COUNTED_STEPS:
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: a phase begins at step {last:,}, and batches by tokens are counted up to "
            f"step {COUNTED_STEPS:,} at the start; use [batch] global_size"
        )


def refuse_weights(job: Job, weights: Weights, samples: int) -> None:
    """UsageError for weights that are not one finite number for each sample."""
    if weights.shape != (samples,) or not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        found = f"the shape {weights.shape}" if weights.shape != (samples,) else f"{weights.min()} to {weights.max()}"
        raise UsageError(
            f"[dataset] name = {job.dataset.name!r}: found weights of {found}, expected {samples} finite numbers, none "
            "below 0 and one above"
        )
