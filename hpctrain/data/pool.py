"""Loads micro batches in the rank's process, or in worker processes that outlive a pass over the data."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import pickle
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.torch_private import end_workers
from hpctrain.data.batches import Batches, Loaded
from hpctrain.data.plan import Planned
from hpctrain.ranks.prints import label_prints, labels_of_prints
from hpctrain.ranks.signals import STOPPING, keep_from_children
from hpctrain.ranks.watchdog.stacks import be_watched, forget_lines, share_lines

if TYPE_CHECKING:
    from hpctrain.data.streams import EvaluatedStream, TrainedStream

LOG = logging.getLogger("hpctrain")

StartMethod = Literal["spawn", "forkserver", "fork"]

# imports torch, and what a worker needs of hpctrain
_PRELOADED = "hpctrain.data.pool"


class _PassSampler:
    """The plan of the current pass, as torch's DataLoader asks for it."""

    plan: Iterator[Planned] = iter(())

    def __iter__(self) -> Iterator[Planned]:
        return self.plan


class _Timed:
    """Batches with the time that each took."""

    def __init__(self, batches: Batches | TrainedStream | EvaluatedStream) -> None:
        self._batches = batches

    def __getitem__(self, planned: Planned) -> Loaded | None:
        begin = time.perf_counter()
        loaded = self._batches[planned]
        return loaded and replace(loaded, seconds=time.perf_counter() - begin)


class Pool:
    """Worker processes start with the first pass, each with a copy of the data, and serve every pass until `close`."""

    def __init__(
        self,
        batches: Batches | TrainedStream | EvaluatedStream,
        workers: int = 0,
        prefetch: int = 2,
        start_method: StartMethod = "forkserver",
    ) -> None:
        """workers: 0 loads in this process. prefetch: micro batches that each worker loads in advance.

        draws_here: whether code that may draw random numbers runs in this process.
        """
        self.prefetch, self._workers = prefetch, workers
        self.ends_unplanned = batches.ends_unplanned
        self.draws_here = batches.draws and workers == 0
        self._requests = _PassSampler()
        self._processes: list[BaseProcess] = []
        self._lines: Sequence[Any] = ()
        self._method = start_method
        self._here = _Timed(batches)
        self._loader = self._new_loader() if workers else None

    def _new_loader(self) -> DataLoader[Any]:
        """A loader whose workers have not started."""
        # no fork by default: to fork a process with MPI and threads is undefined, although it works on most machines
        method: Any = multiprocessing.get_context(self._method)
        if self._method == "forkserver":
            method.set_forkserver_preload([_PRELOADED])  # torch is imported once
        return DataLoader(
            self._here,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._requests,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            multiprocessing_context=method,
            prefetch_factor=self.prefetch,
            persistent_workers=True,
        )

    def load(self, plan: Iterator[Planned]) -> Iterator[Loaded]:
        """Load the micro batches of `plan` in one pass. A pass that is left early does not disturb the next one."""
        try:
            for loaded in self._started(plan) if self._workers else map(self._here.__getitem__, plan):
                if loaded is None:  # the end of a stream
                    return
                yield loaded if self._workers < 2 else replace(loaded, seconds=loaded.seconds / self._workers)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise TrainingError(
                f"[dataset] workers = {self._workers}: a worker process ended, by itself or for lack of memory; what it printed is "
                "above. A script that calls hpctrain.run has to do so under if __name__ == '__main__':, and data that is defined "
                'in a notebook needs workers = 0 or start_method = "fork"'
            ) from error

    def _started(self, plan: Iterator[Planned]) -> Iterator[Loaded | None]:
        assert self._loader is not None
        self._requests.plan = plan
        keep_from_children()
        self._lines = self._lines or share_lines(self._loader.multiprocessing_context, self._workers)
        self._loader.worker_init_fn = partial(_begin, self._lines, labels_of_prints())
        others = multiprocessing.active_children()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the sentence below says it
                warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # the user has chosen fork
                iterator = iter(self._loader)
        except (ValueError, OSError) as error:
            # a fork server is sent a descriptor for each tensor of a worker's data
            too_many = str(error) == "too many fds" or getattr(error, "errno", None) in (
                errno.EINVAL,
                errno.ETOOMANYREFS,
            )
            if self._method != "forkserver" or not too_many:
                raise
            LOG.info("the data has more tensors than a fork server takes: %d workers start anew", self._workers)
            self._method = "spawn"
            self._loader = self._new_loader()
            return self._started(plan)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"[dataset] workers = {self._workers}: the data can't be sent to worker processes ({type(error).__name__}: "
                f"{error}); define its classes and functions at the top of a module, open files where a sample is read, or "
                'use workers = 0 or start_method = "fork"'
            ) from error
        self._processes += [process for process in multiprocessing.active_children() if process not in others]
        return iterator

    def close(self) -> None:
        """End the workers; no pass may be running."""
        if self._loader is not None:
            end_workers(self._loader)
        for process in self._processes:  # one that is still reading; it has SIGTERM blocked
            process.kill()
        if self._lines:
            forget_lines(self._lines)


def _begin(lines: Sequence[Any], labels: tuple[str, str], number: int) -> None:
    """Prepare a worker before its first sample. labels: of the rank's prints."""
    # a fork server may be one that other code of the program has started
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    be_watched(lines[number])
    if not any(labels_of_prints()):  # a forked process has its rank's
        label_prints(*labels)


def _as_it_is(loaded: Any) -> Any:
    return loaded
