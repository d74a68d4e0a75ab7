"""Opens a job's samples and works out how many steps they make."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.contracts.dataset import DatasetContext, Samples
from hpctrain.errors import UsageError
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job


@dataclass(frozen=True)
class Data:
    """The samples of a job; `validation` is None where the job does not evaluate."""

    training: Samples
    validation: Samples | None
    fingerprint: str
    steps: int


def open_data(job: Job, parts: Parts) -> Data:
    """Raises UsageError for missing files, too few samples, or ids that the model does not have."""
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
    return Data(training, validation, training.fingerprint(), _steps(job, len(training)))


def _refuse_unknown_ids(name: str, samples: Samples, vocab_size: int | None) -> None:
    if samples.vocab_size is not None and vocab_size is not None and samples.vocab_size > vocab_size:
        raise UsageError(
            f"[dataset] {name}: it holds ids up to {samples.vocab_size - 1}, and the model's vocab_size is {vocab_size}; "
            f"set [model] vocab_size = {samples.vocab_size} or larger"
        )


def _steps(job: Job, samples: int) -> int:
    """Steps as the job says, or the whole global batches of its epochs."""
    if job.job.steps is not None:
        return job.job.steps
    epochs = job.job.epochs or 0
    steps = int(epochs * samples) // job.batch.global_size
    if steps == 0:
        raise UsageError(
            f"[job] epochs: {epochs:g} x {samples} samples do not fill one global batch of {job.batch.global_size}; "
            "give more epochs or a smaller [batch] global_size"
        )
    return steps
