"""Loads micro batches ahead of the step, on a thread or in worker processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpctrain.contracts.dataset import Samples
from hpctrain.contracts.model import Batch
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.padding import Padding
from hpctrain.data.plan import Planned
from hpctrain.devices import is_accelerator, use_device
from hpctrain.errors import HpctrainError, TrainingError
from hpctrain.world.stopping import keep_from_children


class _Listed:
    """Samples as torch's DataLoader takes them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class Loader:
    """Iterates over the batches of `plan`; up to `prefetch` of them are loaded and moved before they are asked for."""

    def __init__(
        self,
        samples: Samples,
        plan: Iterator[Planned],
        split: Callable[[Batch], Batch],
        workers: int,
        prefetch: int,
        device: torch.device,
        dtype: torch.dtype,
        padding: Padding | None = None,
    ) -> None:
        """`split`: cuts this rank's part out of a micro batch. `dtype`: of floating point inputs. `padding`: of samples of
        different lengths."""
        self._split, self._padding = split, padding
        self._device, self._dtype = device, dtype
        self._after: int | None = None
        self._ready: queue.Queue[tuple[MicroBatch, int | None] | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._closed = threading.Event()
        self._planned: queue.SimpleQueue[Planned] = queue.SimpleQueue()
        # spawned, not forked: a fork of a process that has MPI and threads is undefined
        context: dict[str, Any] = {"multiprocessing_context": "spawn", "prefetch_factor": prefetch} if workers else {}
        self._loader: DataLoader[Any] = DataLoader(
            _Listed(samples),  # type: ignore[arg-type]
            batch_sampler=self._indices(plan),
            num_workers=workers,
            collate_fn=padding,
            **context,
        )
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> MicroBatch:
        item = self._ready.get()
        if item is None:
            raise StopIteration
        if isinstance(item, HpctrainError):
            _, traceback, said = str(item).partition(f"\n{type(item).__module__}.{type(item).__name__}: ")
            raise type(item)(said) if traceback else item  # which a worker process puts before it
        if isinstance(item, BaseException):
            raise TrainingError(f"loading a sample failed: {type(item).__name__}: {item}") from item
        micro, self._after = item
        return micro

    def step(self) -> tuple[list[MicroBatch], int]:
        """The micro batches of one training step, and the position in the order that the next one begins with."""
        micro_batches = [next(self)]
        while self._after is None:
            micro_batches.append(next(self))
        return micro_batches, self._after

    def close(self) -> None:
        """Stop loading and drop the micro batches that were loaded ahead."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _indices(self, plan: Iterator[Planned]) -> Iterator[list[int]]:
        for planned in plan:
            self._planned.put(planned)
            yield [int(i) for i in planned.indices]

    def _run(self) -> None:
        try:
            use_device(self._device)  # pinned memory makes a context on the current one
            if self._loader.num_workers:
                keep_from_children()
            for batch in self._loader:
                planned = self._planned.get()
                if self._padding is not None and not planned.counts:
                    batch = self._padding.blank(batch)
                self._put((MicroBatch(self._move(self._split(batch)), planned.place, planned.counts), planned.after))
                if self._closed.is_set():
                    return
            self._put(None)
        except BaseException as error:  # raised where the batch is asked for
            self._put(error)

    def _put(self, item: tuple[MicroBatch, int | None] | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _move(self, value: Any) -> Any:
        """Tensors to the device, through pinned memory on accelerators; floating point ones to the parameters' dtype."""
        if isinstance(value, Tensor):
            dtype = self._dtype if value.is_floating_point() else value.dtype
            if is_accelerator(self._device):
                return value.to(dtype).pin_memory().to(self._device, non_blocking=True)
            return value.to(dtype)
        if isinstance(value, dict):
            return {key: self._move(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._move(inner) for inner in value]
        return value
