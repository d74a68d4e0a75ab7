"""Assigns each rectangle to one of its holders, the least loaded one, so that together they tile every tensor.

Replicas are found by comparing rectangles, never from a mesh: with FSDP + TP, a parameter outside the TP plan is replicated on
a submesh that its DTensor doesn't name. It would be written twice.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.api import CheckpointError, Piece
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.rectangles import Dims, Rectangle, tiling_fault
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

from . import dtypes

MAX_DIMS = 32  # HDF5's H5S_MAX_RANK


class OfferForm(NamedTuple):
    """The common part of the offers of many tensors."""

    dtype: str
    shape: Dims
    part: Rectangle

    @property
    def counts(self) -> bool:
        """Whether it has elements, or belongs to an empty tensor."""
        return self.part.volume > 0 or math.prod(self.shape) == 0

    @property
    def nbytes(self) -> int:
        return self.part.volume * dtypes.by_name(self.dtype).itemsize


class OfferedPiece(NamedTuple):
    """The description of a piece for the other ranks."""

    name: str
    dtype: str
    shape: Dims
    part: Rectangle

    @property
    def dataset(self) -> str:
        """The path in the HDF5 file: the tensor's name, and the offsets if it is only a part of the tensor."""
        if self.part.shape == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.part.offsets))}"

    @property
    def nbytes(self) -> int:
        return self.part.volume * dtypes.by_name(self.dtype).itemsize


@dataclass(frozen=True)
class SavePlan:
    """The work of all ranks. `tensors` maps a name to its dtype and full shape. `offers[rank]` are the offers that the rank
    writes, and `indices[rank]` their indices in the rank's list of pieces."""

    tensors: dict[str, tuple[str, Dims]]
    offers: list[list[OfferedPiece]]
    indices: list[list[int]]


def describe(pieces: Sequence[Piece]) -> list[OfferedPiece]:
    """This rank's offers, one per piece, in the same order."""
    offers = []
    for piece in pieces:
        try:
            dtype = dtypes.name_of(piece.tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{piece.name}: {error}") from None
        part = Rectangle(tuple(piece.offsets), tuple(piece.tensor.shape))
        if math.prod(piece.shape) == 0:  # any part of an empty tensor is the full tensor: one dataset, not one per part
            part = Rectangle((0,) * len(piece.shape), tuple(piece.shape))
        offers.append(OfferedPiece(piece.name, dtype, tuple(piece.shape), part))
    return offers


def pack(offers: list[OfferedPiece]) -> bytes:
    """Offers in compact form. Most tensors of a model share their form with others, so each form is sent once."""
    forms: dict[OfferForm, int] = {}
    which = [forms.setdefault(OfferForm(offer.dtype, offer.shape, offer.part), len(forms)) for offer in offers]
    return zlib.compress(json.dumps([list(forms), which, [offer.name for offer in offers]]).encode(), level=1)


def unpack(packed: bytes) -> list[OfferedPiece]:
    """The inverse of `pack`."""
    forms, which, names = _unpack(packed)
    return [OfferedPiece(name, *forms[number]) for name, number in zip(names, which, strict=True)]


def _unpack(packed: bytes) -> tuple[list[OfferForm], list[int], list[str]]:
    forms, which, names = json.loads(zlib.decompress(packed))
    return (
        [
            OfferForm(dtype, tuple(shape), Rectangle(tuple(offsets), tuple(extent)))
            for dtype, shape, (offsets, extent) in forms
        ],
        which,
        names,
    )


def make_plan(packed: list[bytes]) -> SavePlan:
    """The plan for all ranks' packed offers. Raises CheckpointError for holes, overlaps and contradictions."""
    with collector_waits():
        forms: dict[OfferForm, int] = {}
        held: dict[str, list[tuple[int, int, int]]] = {}
        for rank, one in enumerate(packed):
            own_forms, which, names = _unpack(one)
            numbers = [forms.setdefault(form, len(forms)) for form in own_forms]
            for index, (name, number) in enumerate(zip(names, which, strict=True)):
                held.setdefault(name, []).append((numbers[number], rank, index))
        known = list(forms)
        tensors = _tensors(held, known)
        _check_names(tensors)
        return _assign(tensors, held, known, len(packed))


def _tensors(held: dict[str, list[tuple[int, int, int]]], forms: list[OfferForm]) -> dict[str, tuple[str, Dims]]:
    """Each tensor's dtype and full shape. Tensors with equal cuts are checked once."""
    good: set[tuple[int, ...]] = set()
    for name, holders in held.items():
        numbers = tuple(number for number, _, _ in holders)
        if numbers in good:
            continue
        first = forms[numbers[0]]
        for number, rank, _ in holders:
            form = forms[number]
            if form[:2] != first[:2]:
                raise CheckpointError(
                    f"{name} is {form.dtype} {list(form.shape)} on rank {rank} and {first.dtype} {list(first.shape)} on a "
                    "lower rank; a tensor has one dtype and one full shape"
                )
        fault = tiling_fault(
            first.shape, [forms[number].part for number in dict.fromkeys(numbers) if forms[number].counts]
        )
        if fault is not None:
            raise CheckpointError(f"{name} can't be saved: {fault}")
        good.add(numbers)
    return {name: forms[holders[0][0]][:2] for name, holders in held.items()}


def _assign(
    tensors: dict[str, tuple[str, Dims]],
    held: dict[str, list[tuple[int, int, int]]],
    forms: list[OfferForm],
    ranks: int,
) -> SavePlan:
    """Assign the rectangles with the fewest holders first, then by size: replicated ones can fill the gaps at the end."""
    loads = [0] * ranks
    work: list[list[tuple[int, OfferedPiece]]] = [[] for _ in range(ranks)]
    sizes = [form.nbytes for form in forms]
    shared: list[tuple[int, int, str, int, list[tuple[int, int]]]] = []
    for name, holders in held.items():
        by_form: dict[int, list[tuple[int, int]]] = {}
        for number, rank, index in holders:
            if forms[number].counts:
                by_form.setdefault(number, []).append((rank, index))
        for number, places in by_form.items():
            if len(places) > 1:
                shared.append((len(places), -sizes[number], name, number, places))
                continue
            rank, index = places[0]
            loads[rank] += sizes[number]
            work[rank].append((index, OfferedPiece(name, *forms[number])))
    for _, _, name, number, places in sorted(shared, key=lambda one: one[:2]):
        rank, index = min(places, key=lambda place: loads[place[0]])
        loads[rank] += sizes[number]
        work[rank].append((index, OfferedPiece(name, *forms[number])))
    for mine in work:
        mine.sort(key=lambda one: one[0])
    return SavePlan(
        tensors, [[offer for _, offer in mine] for mine in work], [[index for index, _ in mine] for mine in work]
    )


def _check_names(tensors: dict[str, tuple[str, Dims]]) -> None:
    """Refuse names that are not a path in an HDF5 file, or that need a group where another name has its dataset."""
    for name, (_, shape) in tensors.items():
        parts = name.split("/")
        values.check_printable(name)
        if not all(parts) or "." in parts or "@" in name:
            raise CheckpointError(f"{name!r} can't name a saved tensor: expected words joined by '/', without '@'")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in tensors:
                raise CheckpointError(f"{name} can't be saved beside {'/'.join(parts[:depth])}: one lies in the other")
        if len(shape) > MAX_DIMS:
            raise CheckpointError(f"{name} has {len(shape)} dims; HDF5 allows {MAX_DIMS}")
