"""The slot `checkpoint`: the format of the files. Directories, their renaming, and which of them are kept are up to the core."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.contracts.pieces import Piece, State
from hpctrain.contracts.plugin import Plugin


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor in a file. file: its path, relative to the checkpoint's directory."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. shape: of the whole tensor, which the chunks cover."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointWriter(ABC):
    """Writes the checkpoints of one run; it may keep memory and plans from one save for the next.

    Both methods may raise CheckpointError or OSError.
    """

    @abstractmethod
    def snapshot(self, state: State) -> State:
        """A copy of `state` in host memory that later training steps do not change, valid until the next call.

        Training waits for it. The previous save has ended by then, so the copy's memory may be used again.
        """

    @abstractmethod
    def write(self, snapshot: State, directory: Path, group: dist.ProcessGroup) -> None:
        """Write all ranks' pieces into the existing, empty `directory` and fsync them; collective over `group`.

        `snapshot` is a result of the method `snapshot`, or the live state itself, on any device, while nothing changes it:
        a save that the training waits for needs no second copy in memory. Several ranks may offer the same rectangle of a
        name (replicas): one of them is written. The rectangles of a name must tile its shape, else CheckpointError.
        `snapshot.values` is taken from rank 0. The core raises one rank's error on all ranks; no rank may wait for a rank
        that has failed.
        """


class CheckpointFormat(Plugin):
    """Reads a checkpoint directory, and makes the writers of a run. Every method but `writer` and `recognizes` may raise
    CheckpointError or OSError.

    Reading is local: each rank reads what it needs, so a checkpoint can be read at any world size. The commands
    `hpctrain checkpoint ...` use only these methods, so they work with every format.
    """

    @abstractmethod
    def writer(self) -> CheckpointWriter:
        """The writer of a run's checkpoints."""

    @abstractmethod
    def read_values(self, directory: Path) -> dict[str, Any]:
        """The small values, read and checked against their checksum."""

    @abstractmethod
    def tensors(self, directory: Path) -> dict[str, StoredTensor]:
        """Every tensor in the checkpoint by name, without its values."""

    def names(self, directory: Path) -> dict[str, tuple[int, ...]]:
        """The whole shape of every tensor in the checkpoint, by name; override it where that costs less than `tensors`."""
        return {name: tensor.shape for name, tensor in self.tensors(directory).items()}

    @abstractmethod
    def load(self, directory: Path, pieces: list[Piece]) -> None:
        """Fill each piece's tensor from the checkpoint, whatever layout wrote it, and check what was read.

        Raises CheckpointError that names the file and the tensor for a missing name, another shape, a hole,
        or a chunk whose checksum is wrong. Values are converted to the piece's dtype.
        """

    @abstractmethod
    def verify(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> list[str]:
        """Read everything; returns a sentence for each fault, none for a whole checkpoint.

        A sentence names the file, and the tensor and its part where the fault lies in one. A file that doesn't belong to
        the checkpoint is a fault, too. `progress(done, total)` is called with bytes as the reading goes on.
        """

    @abstractmethod
    def recognizes(self, directory: Path) -> bool:
        """Whether `directory` looks like a checkpoint of this format (a quick look, no verification)."""
