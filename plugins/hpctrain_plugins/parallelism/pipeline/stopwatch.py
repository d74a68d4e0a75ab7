"""Measures the time that a rank computes while a pipeline's schedule runs. The rest is waiting for its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpctrain.api import mark, seconds_between


class Stopwatch:
    """Adds up spans of computation. On an accelerator it measures the stream's time, and only `seconds` synchronizes."""

    def __init__(self, device: torch.device, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """phase: a context for each forward and backward of a stage."""
        self._device, self._phase = device, phase
        self.restart()

    def restart(self) -> None:
        """A schedule begins."""
        self._begin = self._end = self._mark()
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def computing(self, phase: str | None = None) -> Iterator[None]:
        """A context that counts as computation. phase: its name, if it is a phase."""
        begin = self._mark()
        with nullcontext() if phase is None else self._phase(phase):
            yield
        self._spans.append((begin, self._mark()))

    def stop(self) -> None:
        """The schedule ends."""
        self._end = self._mark()

    def seconds(self) -> tuple[float, float]:
        """Seconds of computation, and seconds from `restart` to `stop`."""
        return sum(seconds_between(*span) for span in self._spans), seconds_between(self._begin, self._end)

    def _mark(self) -> Any:
        return mark(self._device)


class TimedStage(PipelineStage):
    """torch's PipelineStage, with `watch` timing its computation."""

    watch: Stopwatch
    forwarded: Callable[[int], None]
    """Is told the number of each micro batch that leaves the last stage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # micro batches whose backward must not be split
        self._whole: set[int] = set()
        # whether anything before this stage gets a gradient, for each running micro batch
        self._input_is_trained: dict[int, bool] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self.submod.in_step = True  # type: ignore[assignment]
        with self.watch.computing("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self.submod.in_step = False  # type: ignore[assignment]
        if self.is_last:
            self.forwarded(fwd_chunk_id)
        self._input_is_trained[fwd_chunk_id] = bool(self.submod.input_is_trained)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        input_is_trained = self._input_is_trained.pop(bwd_chunk_id)
        if not (full_backward or self.is_first or input_is_trained):
            # torch starts the parameters' backward at places recorded by the input's backward; here it would record none
            self._whole.add(bwd_chunk_id)
            full_backward = True
        with self.watch.computing("backward"):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return None
        with self.watch.computing("backward"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
