"""Launches operations on accelerators on a stream beside the one that computes, after what made their tensors.

So backward computes on while gradients are summed, as in the original. The program waits for a result on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.base.side_stream import Done, SideStream
from hpctrain_horovod.engine.submission import Submission


class Beside:
    """The streams of a team, one for each of the accelerators that this process uses; in most jobs that is one."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        self._last: dict[torch.device, Done] = {}
        self._index: int | None = None
        """The accelerator that this rank's tensors were on last; a rank that has joined has no tensors."""

    @staticmethod
    def submitted(submissions: Sequence[Submission]) -> None:
        """Note when the inputs are there: after all that this thread has launched so far."""
        points: dict[torch.device, Done] = {}
        for one in submissions:
            if one.tensor is not None and one.request.device != "cpu":
                place = one.tensor.device
                points[place] = one.ready = points.get(place) or Done.here(place)

    def launch(
        self, kind: str, mine: Sequence[Submission | None], run: Callable[[], list[Any]]
    ) -> tuple[list[Any], Done]:
        """Launch one batch on this kind of accelerator: its results, and when they are there. mine: this rank's submissions."""
        given = [one for one in mine if one is not None]
        tensors = [tensor for one in given for tensor in (one.tensor, one.output) if tensor is not None]
        if tensors:
            self._index = tensors[0].device.index
        # this thread's own current accelerator may be another one, such as the first, which is torch's default
        with torch.accelerator.device_index(self._index):
            device = torch.device(kind, torch.accelerator.current_device_index())
            if device not in self._streams:
                self._streams[device] = SideStream(device)
            stream = self._streams[device]
            with stream.entered(after_computing=False, tensors=tensors):
                for one in given:
                    one.ready.before_computing()
                results = run()
            over = self._last[device] = stream.done()
        return results, over

    def is_over(self) -> bool:
        """Whether all that was launched has run."""
        return all(last.is_over() for last in self._last.values())
