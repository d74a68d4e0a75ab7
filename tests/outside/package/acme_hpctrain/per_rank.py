"""A checkpoint format: a file of torch.save for each rank, with the copies, files and checksums of hpctrain.toolkit."""

from __future__ import annotations

import io

import torch

from hpctrain.api import CheckpointError, CheckpointFormat, CheckpointWriter, StoredChunk, StoredTensor, hookimpl
from hpctrain.toolkit.checkpoint import values
from hpctrain.toolkit.checkpoint.files import read_file, write_file
from hpctrain.toolkit.checkpoint.fitting import check_fits
from hpctrain.toolkit.checkpoint.rectangles import Rectangle
from hpctrain.toolkit.checkpoint.sealed import seal, unseal
from hpctrain.toolkit.checkpoint.snapshot import Snapshots


class PerRankWriter(CheckpointWriter):
    def __init__(self):
        self._snapshots = Snapshots()

    def snapshot(self, state):
        return self._snapshots.take(state)

    def write(self, snapshot, directory, group):
        content = {
            f"{number} {piece.name}": [list(piece.shape), list(piece.offsets), piece.tensor.clone()]
            for number, piece in enumerate(snapshot.pieces)
        }
        file = io.BytesIO()
        torch.save(content, file)
        write_file(directory / f"rank-{group.rank()}.pt", file.getvalue(), group.rank())
        if group.rank() == 0:
            write_file(directory / "values.json", seal({"values": values.encode(snapshot.values)}), 0)


class PerRank(CheckpointFormat):
    """Saves each rank's pieces unchanged."""

    name = "per-rank"

    def writer(self):
        return PerRankWriter()

    def _stored(self, directory):
        for path in sorted(directory.glob("rank-*.pt")):
            for key, (shape, offsets, tensor) in torch.load(path, weights_only=True).items():
                yield path, key.partition(" ")[2], tuple(shape), Rectangle(tuple(offsets), tuple(tensor.shape)), tensor

    def read_values(self, directory):
        return values.decode_all(unseal(read_file(directory / "values.json"))["values"])

    def tensors(self, directory):
        found = {}
        for path, name, shape, part, tensor in self._stored(directory):
            chunks = found[name].chunks if name in found else ()
            found[name] = StoredTensor(tensor.dtype, shape, (*chunks, StoredChunk(path.name, part.offsets, part.shape)))
        return found

    def load(self, directory, pieces):
        stored = list(self._stored(directory))
        for piece in pieces:
            wanted = Rectangle(tuple(piece.offsets), tuple(piece.tensor.shape))
            if piece.name not in {name for _, name, *_ in stored}:
                raise CheckpointError(f"{directory} has no tensor {piece.name}")
            for path, name, shape, part, tensor in stored:
                common = wanted.overlap(part) if name == piece.name else None
                if common is not None:
                    check_fits(path, piece, shape, tensor.dtype)
                    with torch.no_grad():
                        piece.tensor[wanted.slices(common)] = tensor[part.slices(common)]

    def verify(self, directory, progress=None):
        return [] if list(self._stored(directory)) else [f"{directory}: no file of a rank"]

    def recognizes(self, directory):
        return (directory / "values.json").exists()


@hookimpl
def hpctrain_checkpoint():
    return [PerRank]
