"""The methods that the benchmark compares: a checkpoint format, plain files, and other libraries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import CheckpointFormat, Piece, State


class Method(ABC):
    """A way to write this rank's tensors and to read them back."""

    def __init__(self, name: str, pieces: list[Piece], root: Path) -> None:
        self.name, self.pieces, self.root = name, pieces, root
        self.rank = dist.get_rank()
        self.tensors = {piece.name: piece.tensor for piece in pieces}
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}

    @property
    def file(self) -> Path:
        """This rank's file, if the method has one."""
        return self.root / f"{self.rank}.file"

    @abstractmethod
    def write(self) -> None:
        """Write into the empty directory `root` and fsync."""

    @abstractmethod
    def read(self) -> None:
        """Read all of this rank's tensors, into existing memory if the method can."""


class PlainFile(Method):
    """The bytes alone in one file per rank."""

    def write(self) -> None:
        with open(self.file, "wb", buffering=0) as file:
            for tensor in self.tensors.values():
                view, done = _bytes(tensor), 0
                while done < len(view):
                    done += file.write(view[done:]) or 0
            os.fsync(file.fileno())

    def read(self) -> None:
        with open(self.file, "rb", buffering=0) as file:
            for tensor in self.target.values():
                view, done = _bytes(tensor), 0
                while done < len(view):
                    done += file.readinto(view[done:]) or 0


class Format(Method):
    """A checkpoint format of hpctrain."""

    def __init__(self, format: CheckpointFormat, name: str, pieces: list[Piece], root: Path) -> None:
        super().__init__(name, pieces, root)
        self.format, self.writer = format, format.writer()

    def write(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.writer.write(State(self.pieces, {"step": 1}), self.root, group)

    def read(self) -> None:
        wanted = [Piece(one.name, one.shape, one.offsets, self.target[one.name]) for one in self.pieces]
        self.format.load(self.root, wanted)


class TorchSave(Method):
    """torch.save of a state dict per rank."""

    def write(self) -> None:
        with open(self.file, "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> None:
        for name, tensor in torch.load(self.file, weights_only=True).items():
            self.target[name].copy_(tensor)


class FileSystemWriter(Method):
    """torch.distributed.checkpoint with a state dict of unreplicated tensors on each rank."""

    def _state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{self.rank}.{name}": tensor for name, tensor in tensors.items()}

    def write(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(self.tensors), storage_writer=FileSystemWriter(self.root))

    def read(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self._state(self.target), storage_reader=FileSystemReader(self.root))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
