"""A checkpoint format: a file of torch.save for each rank."""

from __future__ import annotations

import json
import os

import torch

from hpctrain.api import CheckpointError, CheckpointFormat, CheckpointWriter, State, StoredChunk, StoredTensor, hookimpl


class PerRankWriter(CheckpointWriter):
    def snapshot(self, state):
        return State(
            [type(one)(one.name, one.shape, one.offsets, one.tensor.clone()) for one in state.pieces], state.values
        )

    def write(self, snapshot, directory, group):
        content = {
            f"{number} {piece.name}": [list(piece.shape), list(piece.offsets), piece.tensor.detach().clone()]
            for number, piece in enumerate(snapshot.pieces)
        }
        with open(directory / f"rank-{group.rank()}.pt", "wb") as file:
            torch.save(content, file)
            os.fsync(file.fileno())
        if group.rank() == 0:
            (directory / "values.json").write_text(json.dumps(snapshot.values))


class PerRank(CheckpointFormat):
    """Whatever a rank holds, as it is."""

    name = "per-rank"

    def writer(self):
        return PerRankWriter()

    def _stored(self, directory):
        for path in sorted(directory.glob("rank-*.pt")):
            for key, (shape, offsets, tensor) in torch.load(path, weights_only=True).items():
                yield path.name, key.partition(" ")[2], tuple(shape), tuple(offsets), tensor

    def read_values(self, directory):
        return json.loads((directory / "values.json").read_text())

    def tensors(self, directory):
        found = {}
        for file, name, shape, offsets, tensor in self._stored(directory):
            chunks = found[name].chunks if name in found else ()
            found[name] = StoredTensor(tensor.dtype, shape, (*chunks, StoredChunk(file, offsets, tuple(tensor.shape))))
        return found

    def load(self, directory, pieces):
        wanted = {piece.name for piece in pieces}
        stored = [one for one in self._stored(directory) if one[1] in wanted]
        for piece in pieces:
            whole = None
            for _, name, shape, offsets, tensor in stored:
                if name == piece.name:
                    whole = torch.full(shape, float("nan"), dtype=tensor.dtype) if whole is None else whole
                    whole[tuple(slice(a, a + n) for a, n in zip(offsets, tensor.shape, strict=True))] = tensor
            if whole is None:
                raise CheckpointError(f"{directory} has no tensor {piece.name}")
            part = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            with torch.no_grad():
                piece.tensor.copy_(whole[part])

    def verify(self, directory, progress=None):
        return [] if list(self._stored(directory)) else [f"{directory}: no file of a rank"]

    def recognizes(self, directory):
        return (directory / "values.json").exists()


@hookimpl
def hpctrain_checkpoint():
    return [PerRank]
