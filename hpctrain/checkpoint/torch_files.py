"""Reads the state dict in a file of torch.save, without running code in it."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from hpctrain.base.errors import CheckpointError, shown
from hpctrain.checkpoint.sources import WeightsSource, check_name, fill_pieces, slices_of
from hpctrain.contracts.checkpoint import StoredTensor

# how many times a file's size its tensors may add up to: the names of a tied parameter share its values
_MOST_SHARED = 4
# names under which training programs save a model's parameters
_STATE_DICTS = frozenset(("state_dict", "model_state_dict", "model", "module", "net", "network", "weights"))
# how many dicts deep a state dict is looked for
_DEEPEST = 3


def open_torch(path: Path) -> WeightsSource:
    """The state dict of a torch file. Raises CheckpointError for a file without one, whatever it holds besides."""
    foreign: list[str] = []
    try:
        if is_zip := zipfile.is_zipfile(path):
            foreign = get_unsafe_globals_in_checkpoint(path)
        stand_ins: list[Any] = [(_OfNumpy if name.startswith("numpy.") else _LeftOut, name) for name in foreign]
        with safe_globals(stand_ins):  # harmless classes in place of all that torch.load would refuse
            # Memory-mapped, so that a rank reads only its part. Files of the oldest layout are no zip and can't be mapped.
            content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:  # torch raises nearly anything here
        # Its first lines advise to turn the safety off; the reason follows a marker, before another advice.
        why = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0].partition(" Please use ")[0]
        raise CheckpointError(
            f"{path} isn't a file of tensors that torch.load accepts: {why or type(error).__name__}"
        ) from error
    if foreign and content == {}:  # a stand-in is all that is left of the object
        raise CheckpointError(
            f"{path} holds an object with classes of a program's ({', '.join(sorted(foreign)[:3])}), expected a state dict: save "
            "the module's `state_dict()`"
        )
    content, remarks = _state_dict(path, content)
    for name, tensor in content.items():
        check_name(path, name)
        if tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{path}: {name} is nested, meta, quantized or sparse, expected a dense tensor with its values"
            )
    tensors = {name: StoredTensor(tensor.dtype, tuple(tensor.shape), ()) for name, tensor in content.items()}
    claimed, size = sum(tensor.nbytes for tensor in tensors.values()), path.stat().st_size
    if claimed > _MOST_SHARED * size + 2**20:  # a small file must not fill the memory
        raise CheckpointError(
            f"{path}: its tensors claim {claimed} bytes, but the file has {size}: they repeat values (Tensor.expand); "
            "save them with Tensor.contiguous()"
        )
    return WeightsSource(
        tensors,
        lambda pieces: fill_pieces(path, pieces, lambda piece: content[piece.name][slices_of(piece)]),
        lambda: _check_records(path),
        remarks,
    )


class _LeftOut:
    """Stands for a class or a function that a file names beside its tensors: nothing of a file's is called."""

    def __new__(cls, *_: object) -> Any:
        return OrderedDict()  # the unpickler fills these alone, as it would a dict of the class


class _OfNumpy:
    """Stands for numbers and arrays of NumPy, whose pickles set a state that no dict takes."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _state_dict(path: Path, content: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in a result of torch.load, and remarks for the user: training programs save it beside other things."""
    candidates = list(_state_dicts(content, (), True)) or list(_state_dicts(content, (), False))
    usual = [(state, place) for state, place in candidates if set(place) <= _STATE_DICTS]
    if len(candidates) == 1 or len(usual) == 1:
        state, place = (usual or candidates)[0]
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        skipped = ", ".join([name for name in state if name not in tensors][:5])
        remarks = [f"the state dict is at {shown('.'.join(place))}"] if place else []
        return tensors, (*remarks, *([f"no tensors, and left out: {skipped}"] if skipped else ()))
    if candidates:
        places = ", ".join(shown(".".join(place)) for _, place in candidates[:5])
        raise CheckpointError(f"{path} holds several state dicts, {places}; torch.save the one that you mean alone")
    what = shown(list(content)[:3]) if isinstance(content, dict) else type(content).__name__
    raise CheckpointError(f"{path} holds {what}, expected a state dict: parameter names with their tensors")


def _state_dicts(
    content: Any, place: tuple[str, ...], strict: bool
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The state dicts in dicts of dicts, with their places. strict: only those of nothing but tensors. An optimizer's state has
    integers for names, so it doesn't count."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content) or len(place) > _DEEPEST:
        return
    # beside other values, a number alone is a best accuracy or the like
    are_tensors = [isinstance(value, Tensor) and (strict or value.dim() > 0) for value in content.values()]
    if (are_tensors and (all if strict else any)(are_tensors)) or (not place and not content):
        yield content, place
        return
    for name, value in content.items():
        yield from _state_dicts(value, (*place, name), strict)


def _check_records(path: Path) -> None:
    """Check the CRC-32 of each record; a file of the oldest layout is no zip and has none."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as records:  # torch.load doesn't compare them
            damaged = records.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile raises several things for a damaged structure
        raise CheckpointError(f"{path} is corrupt: {error}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is corrupt: the CRC of {damaged} is wrong; it was damaged, or saved without CRCs "
            "(torch.serialization.set_crc32_options(False)): copy it anew, or save it with them"
        )
