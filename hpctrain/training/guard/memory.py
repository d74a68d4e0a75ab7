"""Explains a device without memory: what was asked for, what there is, and which settings of this job help."""

from __future__ import annotations

import re
import resource
from math import prod

import psutil  # type: ignore[import-untyped]
import torch

from hpctrain.base.devices import device_name, memory_left
from hpctrain.contracts.model import ContextParallelModel, PipelineModel, TensorParallelModel, TokenModel
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.registry.user_code import is_reference

_OF_THE_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

# in torch's sentences; that of the CPU has bytes
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")


def lack_of_memory(error: BaseException | None) -> BaseException | None:
    """The error, or one that caused it, which says that a device or the machine lacks memory. torch has no class for the CPU's."""
    while error is not None:
        said = str(error) if isinstance(error, RuntimeError) else ""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in said for words in _OF_THE_CPU):
            return error
        error = error.__cause__
    return None


def shortage(error: BaseException, device: torch.device) -> str:
    """A clause about the memory that was asked for, and that there is."""
    told = (str(error).splitlines() or ["no size is known"])[0]
    if asked := _ASKED.search(str(error)):
        size = f"{float(asked[1]) / 2**30:.2f} GiB" if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
        told = f"asked for {size}"
    if not isinstance(error, torch.OutOfMemoryError):
        memory, limit = psutil.virtual_memory(), resource.getrlimit(resource.RLIMIT_AS)[0]
        has_limit = limit != resource.RLIM_INFINITY
        limited = f"; this process may take {limit / 2**30:.2f} GiB (ulimit -v)" if has_limit else ""
        free, total = (f"{one / 2**30:.2f} GiB" for one in (memory.available, memory.total))
        return f"{told}, {free} of {total} are free on the machine{limited}"
    left = memory_left(device)
    if left is None:
        return told
    free, total = (f"{one / 2**30:.2f} GiB" for one in left)
    return f"{told}, {free} of {total} are free on {device_name(device)} {device.index or 0}"


def advice(job: Job, parts: Parts, ranks: int, device: torch.device, has_batch: bool = True) -> str:
    """The settings that would help, without those that are on, the cheapest first."""
    different = ranks // prod(job.parallelism[name].size for name in parts.parallelism)
    plugins = [*([parts.activation_checkpointing] if has_batch else []), parts.sharding, *parts.parallelism.values()]
    settings = [setting for plugin in plugins for setting in plugin.memory_advice(different, device)]
    size, tokens = job.batch.micro_size or 1, job.batch.micro_tokens
    if has_batch and tokens is not None:
        settings.append(f"[batch] micro_tokens below {tokens}")
    elif has_batch and size > 1:
        smaller = next(one for one in range(size // 2, 0, -1) if size % one == 0)
        settings.append(f"[batch] micro_size = {smaller}, found {size}")
    if has_batch and isinstance(parts.model, TokenModel):
        settings.append(f"[dataset] seq_length below {job.dataset.seq_length or parts.model.max_seq_length}")
    kinds = {"tensor": TensorParallelModel, "context": ContextParallelModel, "pipeline": PipelineModel}
    if is_reference(job.model.name):
        del kinds["pipeline"]  # of these, only an nn.Sequential has pipeline stages
    axes = [name for name, kind in kinds.items() if isinstance(parts.model, kind) and name not in parts.parallelism]
    if axes:
        settings.append(f"[parallelism] {' or '.join(f'{name} = 2' for name in axes)}")
    return (
        f"what helps, the cheapest first: {'; '.join(settings)}" if settings else "use more ranks, or a smaller model"
    )
