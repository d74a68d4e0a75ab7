"""The checkpoint format `hdf5`: an HDF5 file and a table of it per rank, and a manifest; see docs/checkpoint-format.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpctrain.api import CheckpointFormat, CheckpointWriter, Piece, State, StoredChunk, StoredTensor, hookimpl
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.snapshot import Snapshots

from . import manifest, write

if TYPE_CHECKING:
    from .read import HDF5Reader


class Hdf5Writer(CheckpointWriter):
    """Reuses the plan of the previous save, and the memory of its copy."""

    def __init__(self) -> None:
        self._writer = write.HDF5Writer()
        self._snapshots = Snapshots()

    def snapshot(self, state: State) -> State:
        """A copy in host memory. TypeError names a value that a checkpoint can't hold."""
        return self._snapshots.take(state)

    def write(self, snapshot: State, directory: Path, group: dist.ProcessGroup) -> None:
        """Write at most a shard and its table per rank, and then rank 0's manifest.json. Collective over `group`."""
        self._writer.write(snapshot, directory, group)


class Hdf5(CheckpointFormat):
    """Shards that any HDF5 tool reads, checksums over every byte, no pickle."""

    name = "hdf5"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)

    @cached_property
    def _reader(self) -> HDF5Reader:
        from .read import HDF5Reader  # here: a run that begins anew reads nothing

        return HDF5Reader()

    def writer(self) -> Hdf5Writer:
        """The writer of a run."""
        return Hdf5Writer()

    def read_values(self, directory: Path) -> dict[str, Any]:
        """The small values, checked."""
        return values.decode_all(self._reader.manifest(directory).values)

    def tensors(self, directory: Path) -> dict[str, StoredTensor]:
        """Every tensor with its dtype, its full shape and the places of its chunks."""
        content = self._reader.manifest(directory)
        chunks: dict[int, tuple[StoredChunk, ...]] = {}  # most tensors share their layout with others
        found = {}
        for name, (dtype, layout) in content.tensors.items():
            if id(layout) not in chunks:
                chunks[id(layout)] = tuple(StoredChunk(content.shards[file].name, *part) for file, part in layout.parts)
            found[name] = StoredTensor(dtype, layout.shape, chunks[id(layout)])
        return found

    def names(self, directory: Path) -> dict[str, tuple[int, ...]]:
        """Every tensor with its full shape."""
        return {name: entry.layout.shape for name, entry in self._reader.manifest(directory).tensors.items()}

    def load(self, directory: Path, pieces: list[Piece]) -> None:
        """Fill the pieces, reading and checking only the blocks that they need."""
        self._reader.load(directory, pieces)

    def verify(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read everything; return one sentence per fault."""
        from .verify import verify

        return verify(directory, progress)

    def recognizes(self, directory: Path) -> bool:
        """Whether there is a manifest or a shard. With only one of them, the checkpoint is in this format but damaged."""
        return (directory / manifest.FILE_NAME).is_file() or any(directory.glob("shard-*.h5"))


@hookimpl
def hpctrain_checkpoint() -> list[type[CheckpointFormat]]:
    return [Hdf5]
