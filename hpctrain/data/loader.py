"""Loads micro batches on a thread, ahead of the step; but in the step itself if the data may draw random numbers in this process:
torch, NumPy and Python have one generator for all threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hpctrain.base.devices import is_accelerator, to_device, use_device
from hpctrain.base.errors import HpctrainError, TrainingError
from hpctrain.base.side_stream import Done, SideStream
from hpctrain.base.torch_private import DisableTorchDispatch
from hpctrain.contracts.model import Batch, tensors_in
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.batches import Place
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.ranks.watchdog.position import LOADER

StepEnd: TypeAlias = tuple[int, Mapping[int, Place]]
"""The end of a step, with its last micro batch: the position at which the next step begins, and the places of this rank's
readers."""
Item: TypeAlias = tuple[MicroBatch, Done, Sequence[int], StepEnd | None] | BaseException | None
"""A micro batch, the end of its copy to the device, and the indices of its samples."""


class Loader:
    """Iterates over the micro batches of `plan`; a thread, if there is one, loads and moves up to `prefetch` of them in advance."""

    def __init__(
        self,
        pool: Pool,
        plan: Iterator[Planned],
        split: Callable[[Batch], Batch],
        count: Callable[[Batch], int],
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool = False,
        flops: Callable[[Batch], int | None] = lambda _: None,
    ) -> None:
        """split: cuts this rank's part out of a micro batch. count: the terms of its loss. flops: the model's operations on a
        whole one. dtype: of floating point inputs. channels_last: how those of four dims are laid out."""
        self.pool, self._plan, self._split, self._count, self._flops = pool, plan, split, count, flops
        self._device, self._dtype, self._channels_last = device, dtype, channels_last
        self.places: Mapping[int, Place] = {}
        """How far this rank's readers of a stream were at the end of the step that `step` returned last, by their shards."""
        self.indices: list[Sequence[int]] = []
        """The samples of each micro batch that `step` returned last."""
        self._step_end: StepEnd | None = None
        self._ready: queue.Queue[Item] = queue.Queue(pool.prefetch)  # a full queue holds the thread back
        self._closed = threading.Event()
        self._items = self._loaded()
        self._thread = None if pool.draws_here else threading.Thread(target=self._run, name=LOADER, daemon=True)
        if self._thread is not None:
            self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> MicroBatch:
        item = self._load() if self._thread is None else self._ready.get()
        if item is None:
            raise StopIteration
        if isinstance(item, HpctrainError):
            _, traceback, said = str(item).partition(f"\n{type(item).__module__}.{type(item).__name__}: ")
            raise type(item)(said.rstrip()) if traceback else item  # a worker process puts a traceback in front
        if isinstance(item, MemoryError):
            raise item  # the caller has a sentence for it
        if isinstance(item, BaseException):
            raise TrainingError(f"loading a sample failed: {type(item).__name__}: {item}") from item
        micro, copied, indices, self._step_end = item
        copied.before_computing(tensors_in(micro.batch))  # the device waits for the copy, not this thread
        self.indices.append(indices)
        return micro

    def step(self) -> tuple[list[MicroBatch], int]:
        """The micro batches of one training step, and the position in the sample order at which the next step begins."""
        self.indices = []
        micro_batches = [next(self)]
        while self._step_end is None:
            micro_batches.append(next(self))
        after, self.places = self._step_end
        return micro_batches, after

    def close(self) -> None:
        """Stop loading and drop the micro batches loaded ahead."""
        self._closed.set()
        while self._thread is not None and self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get(timeout=0.05)  # the thread may wait for room

    def _run(self) -> None:
        while not self._closed.is_set():
            item = self._load()
            self._ready.put(item)  # `close` makes room
            if not isinstance(item, tuple):
                return

    def _load(self) -> Item:
        try:
            # users' data makes its tensors as on a thread of its own, whatever modes the step is in
            with DisableTorchDispatch(), torch.enable_grad():
                return next(self._items, None)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # __next__ raises it
            return error

    def _loaded(self) -> Iterator[Item]:
        use_device(self._device)  # pinning memory creates a context on the current device
        copies = SideStream(self._device)
        places: dict[int, Place] = {}
        for loaded in self.pool.load(self._plan):
            planned = loaded.planned
            places.update([loaded.place] if loaded.place else [])
            batch = self._split(loaded.batch)
            terms, flops = self._count(batch) if planned.counts else 0, self._flops(loaded.batch)
            given = list(tensors_in(batch))
            # a dataset may compute on the device: then the copy waits for all that is to be computed
            with copies.entered(any(is_accelerator(one.device) for one in given), given):
                micro = MicroBatch(self._move(batch), planned.place, planned.counts, terms, flops, loaded.seconds)
            end = None if planned.after is None else (planned.after, dict(places))
            yield micro, copies.done(), planned.indices, end

    def _move(self, value: Any) -> Any:
        """Move tensors to the device, on accelerators through pinned memory; floating point ones get the parameters' dtype."""
        if isinstance(value, Tensor):
            if value.is_floating_point():
                value = value.to(self._dtype)
                if self._channels_last and value.dim() == 4:
                    value = value.contiguous(memory_format=torch.channels_last)
            return to_device(value, self._device)
        if isinstance(value, dict):
            return {key: self._move(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._move(inner) for inner in value]
        return value
