"""`.metadata`: DCP's table of contents. It is a pickle, so the unpickler here can create nothing but a table."""

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

from hpctrain.api import CheckpointError, shown, storage_record
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import read_file
from hpctrain.toolkit.checkpoint.rectangles import Dims, Rectangle, tiling_fault
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

from . import METADATA_FILE

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# the size limit, in bytes. The largest checkpoints, with millions of parts, have some hundreds of megabytes.
_MOST_BYTES = 2**30
# torch's own limit
_MOST_DIMS = 64

_RECORDS = (
    dcp.Metadata, dcp.TensorStorageMetadata, dcp.ChunkStorageMetadata, dcp.BytesStorageMetadata,
    dcp.StorageMeta, storage_record(),
)  # fmt: skip
# names in a table for values that hpctrain never reads, such as the checkpoint's original path or the memory format.
# For the memory format, Python 3.11.0 to 3.11.3 name getattr, because they pickle an enum as a call of getattr.
_UNUSED = (
    ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
)  # fmt: skip


class _Properties:
    """The fields of TensorProperties that are used."""

    dtype: object = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class _Index(dcp.MetadataIndex):
    """A dict key, so its hash is taken before the content is checked."""

    def __hash__(self) -> int:
        if type(self.fqn) is not str or not isinstance(self.offset, (torch.Size, type(None))):
            raise CheckpointError(
                f"found a place of {shown(self.fqn)} at {shown(self.offset)}, expected a name and numbers"
            )
        return hash((self.fqn, str(self.offset)))  # hashes text: a crafted file can't choose the hash


def _stand_ins() -> dict[tuple[str, str], Any]:
    """All classes that a metadata file may name: DCP's records and plain containers, whose creation has no side effects.

    They are new for each file: a pickle can set attributes of the classes it names, and the real classes are shared.
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
class SavedContents:
    """`tensors` by name; `others` are the places of other values: pickles, which are never unpickled."""

    tensors: dict[str, Tensor]
    others: dict[str, Item]

    @property
    def files(self) -> set[str]:
        """The names of the files with data."""
        items = [item for tensor in self.tensors.values() for item in tensor.items]
        return {item.file for item in (*items, *self.others.values())}


class _TableUnpickler(pickle.Unpickler):
    """Looks up nothing but DCP's own records, so that no other code can be called."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._allowed = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(f"it names {module}.{name}, which does not belong in it: the file is damaged or crafted")


def read_bytes(directory: Path) -> bytes:
    """The raw bytes of the file."""
    path = directory / METADATA_FILE
    try:
        return read_file(path, _MOST_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_contents(directory: Path, raw: bytes) -> SavedContents:
    """The checked table of contents of the bytes `raw`. Raises CheckpointError for any fault."""
    try:
        return parse(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / METADATA_FILE}: {error}") from error


def parse(raw: bytes) -> SavedContents:
    """Check all claims of a metadata file."""
    try:
        with collector_waits():
            return _contents(_TableUnpickler(raw).load())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise almost any error
        raise CheckpointError(f"malformed content: {type(error).__name__}: {error}") from error


def _contents(table: Any) -> SavedContents:
    places = {(index.fqn, _dims(index.offset)): place for index, place in table.storage_data.items()}
    tensors, others = {}, {}
    for name, entry in table.state_dict_metadata.items():
        values.check_printable(name)
        if isinstance(entry, dcp.TensorStorageMetadata):
            tensors[name] = _tensor(name, entry, places)
        elif (name, ()) in places:
            others[name] = _item(Rectangle((), ()), places[name, ()])
    contents = SavedContents(tensors, others)
    _check_apart(contents)
    return contents


def _check_apart(contents: SavedContents) -> None:
    """Refuse items that share bytes: a small file could claim any number of tensors."""
    every = [*(item for tensor in contents.tensors.values() for item in tensor.items), *contents.others.values()]
    ends: dict[str, int] = {}
    for item in sorted(every, key=lambda one: one.at):
        if item.at < ends.get(item.file, 0):
            raise CheckpointError(f"two parts share bytes of {item.file}, from byte {item.at} on")
        ends[item.file] = item.at + item.length


def _tensor(name: str, entry: dcp.TensorStorageMetadata, places: dict[tuple[str, Dims], Any]) -> Tensor:
    shape, dtype = _dims(entry.size), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"tensor {name}: {shown(dtype)} is not a dtype")
    parts = [Rectangle(_dims(chunk.offsets), _dims(chunk.sizes)) for chunk in entry.chunks]
    if math.prod(shape):  # DCP lists empty parts, too
        parts = [part for part in parts if part.volume]
    fault = tiling_fault(shape, parts)
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
        raise CheckpointError(f"{shown(place.relative_path)} is not the name of a file beside it")
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
