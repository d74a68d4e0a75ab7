"""Explains a device without memory: what was asked for, what there is, and which settings of this job help."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import ContextParallelModel, PipelineModel, TensorParallelModel, TokenModel
from hpctrain.devices import device_name, memory_left
from hpctrain.errors import TrainingError
from hpctrain.foreign import is_reference
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job

LOG = logging.getLogger("hpctrain")


@contextmanager
def memory_explained(job: Job, parts: Parts, identity: Identity, device: torch.device, doing: str) -> Iterator[None]:
    """An OutOfMemoryError becomes a TrainingError with a sentence. doing: what the rank is about, such as "in step 3"."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        LOG.info("out of memory", exc_info=error)
        found = f"rank {identity.rank} on {identity.node} ran out of memory {doing}: {shortage(error, device)}"
        raise TrainingError(f"{found}; {advice(job, parts, identity.size)}") from error


def shortage(error: torch.OutOfMemoryError, device: torch.device) -> str:
    """What was asked for, and what there is."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    told = f"asked for {asked[1]}" if asked else (str(error).splitlines() or ["torch gave no reason"])[0]
    left = memory_left(device)
    if left is None:
        return told
    free, total = (f"{one / 2**30:.2f} GiB" for one in left)
    return f"{told}, {free} of {total} are free on {device_name(device)} {device.index or 0}"


def advice(job: Job, parts: Parts, ranks: int) -> str:
    """The settings that would help, without those that are on, the cheapest first."""
    found = [
        *_activations(job),
        *_sharding(job, parts, ranks),
        *_batch(job),
        *_sequence(job, parts),
        *_layout(job, parts),
    ]
    return f"what helps, the cheapest first: {'; '.join(found)}" if found else "use more ranks, or a smaller model"


def _activations(job: Job) -> list[str]:
    return [] if job.activation_checkpointing.mode == "full" else ['[activation_checkpointing] mode = "full"']


def _sharding(job: Job, parts: Parts, ranks: int) -> list[str]:
    spread, options, found = 1, parts.sharding.options, []
    for name in parts.parallelism:
        spread *= job.parallelism[name].size
    stage = re.fullmatch(r"zero-([0-3])", parts.sharding.name)
    if stage and stage[1] != "3" and ranks > spread:
        found.append(f"[sharding] stage = 3, found {stage[1]}")
    found += [
        f"[sharding] {key} = true"
        for key in ("offload_optimizer", "offload_parameters")
        if getattr(options, key, None) is False
    ]
    return found


def _batch(job: Job) -> list[str]:
    size, tokens = job.batch.micro_size, job.batch.micro_tokens
    if tokens is not None:
        return [f"[batch] micro_tokens below {tokens}"]
    if size is None or size == 1:
        return []
    smaller = next(one for one in range(size // 2, 0, -1) if size % one == 0)
    return [f"[batch] micro_size = {smaller}, found {size}"]


def _sequence(job: Job, parts: Parts) -> list[str]:
    if not isinstance(parts.model, TokenModel):
        return []
    return [f"[dataset] seq_length below {job.dataset.seq_length or parts.model.max_seq_length}"]


def _layout(job: Job, parts: Parts) -> list[str]:
    kinds = {"tensor": TensorParallelModel, "context": ContextParallelModel, "pipeline": PipelineModel}
    if is_reference(job.model.name):
        del kinds["pipeline"]  # of these, only an nn.Sequential has pipeline stages
    axes = [name for name, kind in kinds.items() if isinstance(parts.model, kind) and name not in parts.parallelism]
    return [f"[parallelism] {' or '.join(f'{name} = 2' for name in axes)}"] if axes else []
