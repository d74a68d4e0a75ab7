"""How long a rank computes while a pipeline's schedule runs; the rest of the time it waits for its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpctrain.api import mark, seconds_between


class Stopwatch:
    """Adds up spans of computation. On an accelerator it is the stream's time, and nothing waits until `seconds` is asked for."""

    def __init__(self, device: torch.device, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        """phase: to be entered around a stage's forwards and backwards."""
        self._device, self._phase = device, phase
        self.restart()

    def restart(self) -> None:
        """A schedule begins."""
        self._begin = self._end = self._mark()
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def computing(self, phase: str | None = None) -> Iterator[None]:
        """Around what counts as computation; `phase` is its name, if it is one."""
        begin = self._mark()
        with nullcontext() if phase is None else self._phase(phase):
            yield
        self._spans.append((begin, self._mark()))

    def stop(self) -> None:
        """The schedule is over."""
        self._end = self._mark()

    def seconds(self) -> tuple[float, float]:
        """In which this rank computed, and from `restart` to `stop`."""
        return sum(seconds_between(*span) for span in self._spans), seconds_between(self._begin, self._end)

    def _mark(self) -> Any:
        return mark(self._device)


class TimedStage(PipelineStage):
    """torch's, whose computation `watch` times."""

    watch: Stopwatch

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole: set[int] = set()
        """Micro batches whose backward is not to be taken apart."""
        self._input_is_trained: dict[int, bool] = {}
        """Of the micro batches under way, whether anything before this stage gets a gradient."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self.submod.in_step = True  # type: ignore[assignment]
        with self.watch.computing("forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        self.submod.in_step = False  # type: ignore[assignment]
        self._input_is_trained[fwd_chunk_id] = bool(self.submod.input_is_trained)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        input_is_trained = self._input_is_trained.pop(bwd_chunk_id)
        if not (full_backward or self.is_first or input_is_trained):
            # torch's backward for the parameters begins where that for the input passed by: here it passes by none
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
