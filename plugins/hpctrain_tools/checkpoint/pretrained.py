"""Writes the model of a checkpoint as other libraries load it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import CheckpointError, UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checkpoint.directory import behind_name
from hpctrain.checkpoint.finding import memory_for, refuse_other_source
from hpctrain.checkpoint.weights import open_weights
from hpctrain.contracts.model import ExportableModel, MetaModel
from hpctrain.contracts.pieces import Piece
from hpctrain.model.build import build_on_meta, given_names, source_of
from hpctrain.training.loading import job_of, load
from hpctrain_tools.checkpoint.writing import new_directory, writing

__all__ = ["export_pretrained"]


def export_pretrained(checkpoint: Path, out: Path, weights_of: str | None = None, merged: bool = False) -> str:
    """Write the model of a checkpoint into the new directory `out`, as another library loads it; return a few words about it.

    weights_of: see `load`. merged: see `ExportableModel.export`. Raises UsageError for a model that nothing else loads.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already; expected a new directory: give another name")
    path = behind_name(checkpoint)
    with job_of(path, None) as checked:
        spec = checked.parts.model
        values = _values(path, checked, weights_of) if isinstance(spec, ExportableModel) else None
    with writing(out), new_directory(out) as temporary:
        if isinstance(spec, ExportableModel):
            assert values is not None
            return spec.export(values, temporary, merged)
        return _save_pretrained(checkpoint, load(checkpoint, weights_of=weights_of), temporary, merged)


def _values(path: Path, checked: CheckedJob, weights_of: str | None) -> Callable[[str], Tensor]:
    """The values by the names of the model's parameters and buffers: a checkpoint's, and those that it leaves out."""
    spec, formats, seed = checked.parts.model, checked.parts.formats, checked.job.job.seed
    given: dict[str, Tensor] = {}
    if isinstance(spec, MetaModel):
        module = build_on_meta(spec)
        given = {name: module.get_parameter(name) for name in given_names(spec, module)}
        refuse_other_source(path, formats, source_of(spec, seed, given))
    source = open_weights(path, formats, weights_of)

    def value(name: str) -> Tensor:
        if name in given and isinstance(spec, MetaModel):
            tensor = torch.empty_like(given[name], device="cpu", requires_grad=False)
            spec.initialize(name, tensor, (0, len(tensor) if tensor.dim() else 1), seed)
            return tensor
        stored = source.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{path} has no {name}; it is of another model")
        tensor = memory_for(name, stored.shape, stored.dtype)
        source.fill([Piece.whole(name, tensor)])
        return tensor

    return value


def _save_pretrained(checkpoint: Path, module: nn.Module, out: Path, merged: bool) -> str:
    """The same for a model of transformers that the user's own code builds."""
    found = [one for one in module.modules() if callable(getattr(one, "save_pretrained", None))]
    if not found:
        raise UsageError(
            f"{checkpoint}: its model, {type(module).__name__}, has no save_pretrained(); expected a model of transformers: export "
            "--to safetensors takes any"
        )
    if merged:
        raise UsageError(f'{checkpoint}: --merged goes with [model] name = "huggingface" and an adapter')
    save: Any = found[0]
    save.save_pretrained(out)
    return type(save).__name__
