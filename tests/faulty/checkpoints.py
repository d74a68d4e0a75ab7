"""Checkpoint formats that break a promise."""

from __future__ import annotations

from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer

from faulty.fault import of_slot, planted
from hpctrain.api import State, hookimpl

checkpoint = lambda told, **table: planted("checkpoint", "format", told, checkpoint=table)  # noqa: E731


@checkpoint("goes on after a resume as if nothing had been|restores what a plugin has saved")
class ReadsZeros(Hdf5):
    def load(self, directory, pieces):
        super().load(directory, pieces)
        for piece in pieces:
            piece.tensor.zero_()


@checkpoint("goes on after a resume .* \\(it lacks samples_seen\\)")
class LosesAValue(Hdf5):
    def read_values(self, directory):
        return {key: value for key, value in super().read_values(directory).items() if key != "samples_seen"}


@checkpoint("recognizes its own checkpoints|goes on after a resume")
class RecognizesNothing(Hdf5):
    """Another format that reads its files may take them, and right ones: then only this promise is broken."""

    def recognizes(self, directory):
        return False


@checkpoint("goes on after a resume .* isn't there")
class ListsNoModel(Hdf5):
    def names(self, directory):
        return {name: shape for name, shape in super().names(directory).items() if not name.startswith("model/")}


@checkpoint("a snapshot is a copy")
class LiveSnapshot(Hdf5):
    class made(Hdf5Writer):  # noqa: N801
        def snapshot(self, state):
            return State(state.pieces, state.values)

    def writer(self):
        return self.made()


@hookimpl
def hpctrain_checkpoint():
    return of_slot("checkpoint")
