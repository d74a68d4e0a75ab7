"""`.metadata`: DCP's table of contents. It is a pickle, so it is read by an unpickler that can make nothing but a table."""

from __future__ import annotations

import collections
import io
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from hpctrain.api import CheckpointError, check_pickle, shown, storage_record

from ..common.collector import collector_waits
from ..common.files import read_file
from ..common.names import check_printable
from ..common.rectangles import Dims, Rectangle, Work, tiling_fault
from .names import METADATA_FILE

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_BYTES = 2**30
"""The largest file, in bytes; that of the largest checkpoints, with millions of parts, has some hundreds of megabytes."""
_MOST_DIMS = 64
"""As torch has it."""

_RECORDS = (
    dcp.Metadata, dcp.TensorStorageMetadata, dcp.ChunkStorageMetadata, dcp.BytesStorageMetadata,
    dcp.StorageMeta, storage_record(),
)  # fmt: skip
_UNUSED = (
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
)  # fmt: skip
"""Names that a table may have for values that nothing here reads, such as the checkpoint's place when it was written, or
the memory format. For the latter, Python 3.11.0 to 3.11.3 name getattr: they pickle an enum as a call of it."""


class _Properties:
    """The fields of TensorProperties that count."""

    dtype: object = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _Index(dcp.MetadataIndex):
    """A key, so its hash is asked for before anything is checked."""

    def __hash__(self) -> int:
        if type(self.fqn) is not str or not isinstance(self.offset, (torch.Size, type(None))):
            raise CheckpointError(
                f"a place is of {shown(self.fqn)} at {shown(self.offset)}, expected a name and numbers"
            )
        return hash((self.fqn, str(self.offset)))  # of text: nobody can choose it


def _stand_ins() -> dict[tuple[str, str], Any]:
    """All that a metadata file may name: DCP's records and plain containers. None of them does anything when it is made.

    New ones for each file: a pickle can set attributes of what it names, and those of the real classes are everybody's.
    """
    properties = dcp.TensorProperties
    return {
        **{(one.__module__, one.__qualname__): type(one.__name__, (one,), {}) for one in _RECORDS},
        (dcp.MetadataIndex.__module__, "MetadataIndex"): type(
            "MetadataIndex", (_Index,), {"__hash__": _Index.__hash__}
        ),
        (properties.__module__, properties.__qualname__): type(properties.__name__, (_Properties,), {}),
        **{name: lambda *_: None for name in _UNUSED},
        ("torch", "Size"): torch.Size,  # these two can't be changed
        ("collections", "OrderedDict"): collections.OrderedDict,
    }


@dataclass(frozen=True)
class Item:
    """A part of a tensor, as torch.save wrote it, in `length` bytes of a file from byte `at` on."""

    part: Rectangle
    file: str
    at: int
    length: int


@dataclass(frozen=True)
class Tensor:
    """A tensor whose items cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Contents:
    """`tensors` by name; `others` are the places of what isn't a tensor: pickles, which stay unread."""

    tensors: dict[str, Tensor]
    others: dict[str, Item]

    @property
    def files(self) -> set[str]:
        """The names of the files with data."""
        items = [item for tensor in self.tensors.values() for item in tensor.items]
        return {item.file for item in (*items, *self.others.values())}


class _TableUnpickler(pickle.Unpickler):
    """Refuses to look up anything but DCP's own records, so that no other code can be called."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._allowed = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(f"it names {module}.{name}, which has no place in it: the file is damaged or crafted")


def read_bytes(directory: Path) -> bytes:
    """The raw bytes of the file."""
    path = directory / METADATA_FILE
    try:
        return read_file(path, _MOST_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_contents(directory: Path, raw: bytes) -> Contents:
    """The checked table of contents, whose bytes are `raw`; CheckpointError says what is wrong with it."""
    try:
        return parse(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / METADATA_FILE}: {error}") from error


def parse(raw: bytes) -> Contents:
    """Check everything that the bytes of a metadata file claim."""
    try:
        check_pickle(raw)
        with collector_waits():
            return _contents(_TableUnpickler(raw).load(), Work(len(raw)))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def _contents(table: Any, work: Work) -> Contents:
    places = {(index.fqn, _dims(index.offset)): place for index, place in table.storage_data.items()}
    tensors, others = {}, {}
    for name, entry in table.state_dict_metadata.items():
        check_printable(name)
        if isinstance(entry, dcp.TensorStorageMetadata):
            tensors[name] = _tensor(name, entry, places, work)
        elif (name, ()) in places:
            others[name] = _item(Rectangle((), ()), places[name, ()])
    contents = Contents(tensors, others)
    _check_apart(contents)
    return contents


def _check_apart(contents: Contents) -> None:
    """No two items share bytes, or few bytes could be values of any number of tensors."""
    every = [*(item for tensor in contents.tensors.values() for item in tensor.items), *contents.others.values()]
    ends: dict[str, int] = {}
    for item in sorted(every, key=lambda one: one.at):
        if item.at < ends.get(item.file, 0):
            raise CheckpointError(f"two parts share bytes of {item.file}, from byte {item.at} on")
        ends[item.file] = item.at + item.length


def _tensor(name: str, entry: dcp.TensorStorageMetadata, places: dict[tuple[str, Dims], Any], work: Work) -> Tensor:
    shape, dtype = _dims(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"tensor {name}: {shown(dtype)} is no dtype")
    work.spend(len(entry.chunks))  # a list may be that of many tensors
    parts = [Rectangle(_dims(chunk.offsets), _dims(chunk.sizes)) for chunk in entry.chunks]
    if math.prod(shape):  # DCP lists empty parts, too
        parts = [part for part in parts if part.volume]
    fault = tiling_fault(shape, parts, work.spend)
    if fault is not None:
        raise CheckpointError(f"tensor {name}: {fault}")
    missing = [part for part in parts if (name, part.offsets) not in places]
    if missing:
        raise CheckpointError(f"tensor {name}: there is no place for its part at {list(missing[0].offsets)}")
    items = tuple(_item(part, places[name, part.offsets]) for part in parts)
    short = next((item for item in items if item.length < item.part.volume * dtype.itemsize), None)
    if short is not None:
        raise CheckpointError(f"tensor {name}: its part {list(short.part.shape)} doesn't fit into {short.length} bytes")
    return Tensor(dtype, shape, items)


def _item(part: Rectangle, place: Any) -> Item:
    if not isinstance(place.relative_path, str) or not _FILE.fullmatch(place.relative_path):
        raise CheckpointError(f"{shown(place.relative_path)} is no name of a file beside it")
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"{place.relative_path} went through {shown(place.transform_descriptors)}; this reader knows none"
        )
    at, length = _dims((place.offset, place.length))
    return Item(part, place.relative_path, at, length)


def _dims(numbers: Any) -> tuple[int, ...]:
    if numbers is None:
        return ()
    good = isinstance(numbers, (tuple, list)) and len(numbers) <= _MOST_DIMS
    if not good or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(f"found {shown(numbers)}, expected numbers that are zero or more, and less than 2^63")
    return tuple(numbers)
