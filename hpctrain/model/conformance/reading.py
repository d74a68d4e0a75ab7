"""The first checkpoint of a run is read back, in part: what its format gives is what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh128_hexdigest

from hpctrain.base.errors import CheckpointError, reason
from hpctrain.base.json_values import encode
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece, State
from hpctrain.contracts.plugin import broken
from hpctrain.ranks.json_collectives import gather_values, share, together

_BYTES = 8 * 2**20
"""The most that a rank reads: the smallest pieces, as long as they fit."""
_READERS = 8
"""Ranks that read, spread over all, and the last one: each may open the files of every rank."""


def refuse_other_reading(format: CheckpointFormat, directory: Path, state: State, group: dist.ProcessGroup) -> None:
    """Raises ContractError on all ranks unless `directory` reads as `state` says. Collective over `group`.

    Rank 0 compares the values and the names; some ranks the bytes of their smallest pieces, at least of one.
    """
    try:
        share(group, lambda: _refuse_other_values(format, directory, state))
        _refuse_other_bytes(format, directory, state.pieces, group)
    except (CheckpointError, OSError) as error:
        raise broken(
            format, f"can't read the checkpoint that it has just written: {reason(error)}", "what was written"
        ) from error


def _refuse_other_values(format: CheckpointFormat, directory: Path, state: State) -> None:
    if not format.recognizes(directory):
        raise broken(format, f"does not recognize its own checkpoint {directory.name}", "True from recognizes")
    values = format.read_values(directory)
    # as text: nan is not nan
    other = [key for key, value in state.values.items() if key not in values or _text(values[key]) != _text(value)]
    if other:
        found = f"read the value {other[0]!r} of its first checkpoint as {values.get(other[0])!r}"
        raise broken(format, found, f"{state.values[other[0]]!r}, which was written")
    shapes, tensors = format.names(directory), format.tensors(directory)
    for piece in state.pieces:
        for found_shape in (shapes.get(piece.name), tensors[piece.name].shape if piece.name in tensors else None):
            if found_shape is None or tuple(found_shape) != tuple(piece.shape):
                found = f"lists {piece.name} of its first checkpoint with the shape {found_shape}"
                raise broken(format, found, f"{tuple(piece.shape)}, which was written")


def _refuse_other_bytes(
    format: CheckpointFormat, directory: Path, pieces: Sequence[Piece], group: dist.ProcessGroup
) -> None:
    chosen, taken = list[Piece](), 0
    between = -(-group.size() // _READERS)
    reads = group.rank() % between == 0 or group.rank() == group.size() - 1
    for piece in sorted(pieces if reads else (), key=lambda one: one.tensor.nbytes):
        taken += piece.tensor.nbytes
        if chosen and taken > _BYTES:
            break
        chosen.append(piece)
    read = [replace(one, tensor=torch.zeros_like(one.tensor, memory_format=torch.contiguous_format)) for one in chosen]
    together(group, lambda: format.load(directory, read))
    other = {
        _key(found): _digest(found)
        for written, found in zip(chosen, read, strict=True)
        if _digest(written) != _digest(found)
    }
    # a rank may offer what another one has written in its place: replicas of strategies whose ranks diverge
    doubted = {key for found in gather_values(list(other), group) for key in found}
    offered = gather_values(
        {_key(one): _digest(one) for one in pieces if _key(one) in doubted} if doubted else {}, group
    )
    wrong = [key for key, digest in other.items() if digest not in [of_rank.get(key) for of_rank in offered]]
    for found in gather_values(wrong, group):
        if found:
            told = f"read {found[0].partition(' ')[0]} of its first checkpoint with other values"
            raise broken(format, told, "those that were written")


def _text(value: Any) -> str:
    return json.dumps(encode(value))


def _key(piece: Piece) -> str:
    return f"{piece.name} {piece.offsets}"


def _digest(piece: Piece) -> str:
    return xxh128_hexdigest(piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def refuse_live_snapshot(format: CheckpointFormat, state: State, snapshot: State) -> None:
    """Raises ContractError if a snapshot shares memory with the tensors that training goes on to change."""
    live = {piece.tensor.untyped_storage().data_ptr() for piece in state.pieces if piece.tensor.nbytes}
    for piece in snapshot.pieces:
        if piece.tensor.nbytes and piece.tensor.untyped_storage().data_ptr() in live:
            raise broken(format, f"gave a snapshot whose {piece.name} is the live tensor", "a copy")
