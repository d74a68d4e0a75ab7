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
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hpctrain.api import CheckpointError

from ..common.files import opened, read_at
from ..common.names import check_printable
from ..common.rectangles import Rectangle, tiling_fault
from . import METADATA_FILE
from .opcodes import check_sizes

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

_RECORDS = (
    dcp.Metadata, dcp.MetadataIndex, dcp.TensorStorageMetadata, dcp.ChunkStorageMetadata, dcp.BytesStorageMetadata,
    dcp.StorageMeta, _StorageInfo,
)  # fmt: skip
_UNUSED = (
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
)  # fmt: skip
"""Names that a table may have for what nothing here looks at, such as where the checkpoint lay when it was written, or
the memory format, for which Python 3.11.0 to 3.11.3 name getattr: they pickle an enum as a call of it."""


class _Properties:
    """Of TensorProperties what counts."""

    dtype: object = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


def _stand_ins() -> dict[tuple[str, str], Any]:
    """All that a metadata file may name: DCP's records and plain containers. None of them does anything when it is made.

    New ones for each file: a pickle can set attributes of what it names, and those of the real classes are everybody's.
    """
    properties = dcp.TensorProperties
    return {
        **{(one.__module__, one.__qualname__): type(one.__name__, (one,), {}) for one in _RECORDS},
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
        with opened(path) as fd:
            return read_at(fd, path.stat().st_size, 0).numpy().tobytes()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_contents(directory: Path) -> Contents:
    """The checked table of contents; CheckpointError says what is wrong with it."""
    path = directory / METADATA_FILE
    try:
        return parse(read_bytes(directory))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def parse(raw: bytes) -> Contents:
    """Check everything that the bytes of a metadata file claim."""
    try:
        check_sizes(raw)
        table = _TableUnpickler(raw).load()
        places = {(index.fqn, _dims(index.offset)): place for index, place in table.storage_data.items()}
        tensors, others = {}, {}
        for name, entry in table.state_dict_metadata.items():
            check_printable(name)
            if isinstance(entry, dcp.TensorStorageMetadata):
                tensors[name] = _tensor(name, entry, places)
            elif (name, ()) in places:
                others[name] = _item(Rectangle((), ()), places[name, ()])
        return Contents(tensors, others)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def _tensor(name: str, entry: dcp.TensorStorageMetadata, places: dict[tuple[str, tuple[int, ...]], Any]) -> Tensor:
    shape, dtype = _dims(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"tensor {name}: {dtype!r} is no dtype")
    parts = [Rectangle(_dims(chunk.offsets), _dims(chunk.sizes)) for chunk in entry.chunks]
    if math.prod(shape):  # DCP lists empty parts, too
        parts = [part for part in parts if part.volume]
    fault = tiling_fault(shape, parts)
    if fault is not None:
        raise CheckpointError(f"tensor {name}: {fault}")
    missing = [part for part in parts if (name, part.offsets) not in places]
    if missing:
        raise CheckpointError(f"tensor {name}: there is no place for its part at {list(missing[0].offsets)}")
    return Tensor(dtype, shape, tuple(_item(part, places[name, part.offsets]) for part in parts))


def _item(part: Rectangle, place: Any) -> Item:
    if not isinstance(place.relative_path, str) or not _FILE.fullmatch(place.relative_path):
        raise CheckpointError(f"{place.relative_path!r} is no name of a file beside it")
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"{place.relative_path} went through {place.transform_descriptors}; this reader knows none"
        )
    at, length = _dims((place.offset, place.length))
    return Item(part, place.relative_path, at, length)


def _dims(numbers: Any) -> tuple[int, ...]:
    dims = () if numbers is None else tuple(numbers)
    if not all(type(number) is int and number >= 0 for number in dims):
        raise CheckpointError(f"found {dims!r}, expected numbers that are zero or more")
    return dims
