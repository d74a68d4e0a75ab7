"""The checkpoint format `dcp`: the files of torch.distributed.checkpoint, for exchange with other programs.

Importing torch.distributed.checkpoint takes most of a second, so it is imported only where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hpctrain.api import (
    CheckpointError,
    CheckpointFormat,
    CheckpointWriter,
    Piece,
    State,
    StoredChunk,
    StoredTensor,
    hookimpl,
)
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import read_file
from hpctrain.toolkit.checkpoint.sealed import malformed, unseal
from hpctrain.toolkit.checkpoint.snapshot import Snapshots

if TYPE_CHECKING:
    from .metadata import SavedContents

METADATA_FILE = ".metadata"
"""torch's own table of contents."""
VALUES_FILE = "hpctrain.json"
PREFIX = "hpctrain"
"""The begin of the names of hpctrain's own files of tensors, which other programs call as torch does."""
"""The values of a checkpoint, and the checksum of the table."""
MOST_KEPT = 32 * 2**20
"""The largest table of contents that is cached, in bytes: training needs the memory."""


class _Sealed(TypedDict):
    """hpctrain.json."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]
    metadata_xxh3: str
    values: Any


_SEALED = TypeAdapter(_Sealed)


class DcpWriter(CheckpointWriter):
    """Reuses the memory of its copy."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()

    def snapshot(self, state: State) -> State:
        """A copy in host memory. TypeError names a value that a checkpoint can't hold."""
        return self._snapshots.take(state)

    def write(self, snapshot: State, directory: Path, group: dist.ProcessGroup) -> None:
        """Collective over `group`; a file per rank, `.metadata`, and the values in hpctrain.json last."""
        from . import write

        write.write(snapshot, directory, group)


class Dcp(CheckpointFormat):
    """Files that torch.distributed.checkpoint.load reads. Reads the files of its save, too, without unpickling them."""

    name = "dcp"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        # the last table of contents, unless it is large, with the identity of its file
        self._known: dict[tuple[object, ...], SavedContents] = {}

    def writer(self) -> DcpWriter:
        """The writer of a run."""
        return DcpWriter()

    def read_values(self, directory: Path) -> dict[str, Any]:
        """The small values; empty for a checkpoint of another program."""
        sealed = self._sealed(directory)
        return {} if sealed is None else values.decode_all(sealed["values"])

    def tensors(self, directory: Path) -> dict[str, StoredTensor]:
        """Every tensor with its dtype, its full shape and the places of its parts."""
        return {
            name: StoredTensor(
                tensor.dtype, tensor.shape, tuple(StoredChunk(item.file, *item.part) for item in tensor.items)
            )
            for name, tensor in self._contents(directory).tensors.items()
        }

    def load(self, directory: Path, pieces: list[Piece]) -> None:
        """Fill the pieces, reading only the items that they need."""
        from . import read

        read.load(directory, self._contents(directory), pieces)

    def verify(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read everything; one sentence per fault."""
        from . import read

        try:
            contents = self._contents(directory)
        except (CheckpointError, OSError) as error:
            return [str(error)]
        known = {METADATA_FILE, VALUES_FILE, *contents.files}
        lacks_values = (
            any(name.startswith(PREFIX) for name in contents.files) and not (directory / VALUES_FILE).exists()
        )
        unknown = [path for path in sorted(directory.iterdir()) if path.name not in known]
        faults = read.verify(directory, contents, progress)
        faults += [f"{directory / VALUES_FILE}: the file is missing"] * lacks_values
        return faults + [f"{path}: {METADATA_FILE} doesn't know this file" for path in unknown]

    def recognizes(self, directory: Path) -> bool:
        """Whether the directory has a `.metadata`."""
        return os.path.lexists(directory / METADATA_FILE)

    def _contents(self, directory: Path) -> SavedContents:
        """The table of contents, checked against its checksum if there is one. The last directory's table is cached."""
        from . import metadata

        sealed, raw = self._sealed(directory), metadata.read_bytes(directory)
        checksum = xxhash.xxh3_64_hexdigest(raw)
        if sealed is not None and sealed["metadata_xxh3"] != checksum:
            raise CheckpointError(f"{directory / METADATA_FILE}: its checksum is wrong: the file is corrupt")
        identity = (directory, len(raw), checksum)
        if identity in self._known:
            return self._known[identity]
        contents = metadata.read_contents(directory, raw)
        self._known.clear()
        if len(raw) <= MOST_KEPT:
            self._known[identity] = contents
        return contents

    def _sealed(self, directory: Path) -> _Sealed | None:
        path = directory / VALUES_FILE
        if not os.path.lexists(path):
            return None
        try:
            content = _SEALED.validate_python(unseal(read_file(path)))
            values.decode_all(content["values"])
        except ValidationError as error:
            raise CheckpointError(f"{path}: {malformed(error)}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return content


@hookimpl
def hpctrain_checkpoint() -> list[type[CheckpointFormat]]:
    return [Dcp]
