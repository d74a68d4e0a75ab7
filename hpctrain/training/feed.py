"""This rank's samples of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.base.errors import EnvironmentUnfitError, UsageError
from hpctrain.contracts.dataset import Lengths, Samples, Split, Stream
from hpctrain.contracts.model import Batch
from hpctrain.contracts.plugin import named
from hpctrain.data.batches import Batches, Place
from hpctrain.data.loader import Loader
from hpctrain.data.opening import make_plan, open_data, steps_of_epochs
from hpctrain.data.plan import BatchPlan, Planned
from hpctrain.data.pool import Pool
from hpctrain.data.shapes import OneShape, axis_of_one_shape, make_collation
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.progress import Progress

if TYPE_CHECKING:
    from hpctrain.data.streams import StreamPlaces
    from hpctrain.data.tokens import TokenPlan

# the most ranks that a message about different data names
_SHOWN = 4


class Feed:
    """Opens the data and loads this rank's part of each global batch.

    plan: this rank's part in the global batches.
    """

    def __init__(
        self,
        job: Job,
        parts: Parts,
        rank: int,
        ranks: int,
        node: str,
        device: torch.device,
        split: Callable[[Batch], Batch],
    ) -> None:
        """Collective over the world. rank, ranks: among the data-parallel ranks. node: this rank's node.
        split: cuts this rank's part from a micro batch."""
        self._job, self._parts, self._rank, self._ranks, self._device = job, parts, rank, ranks, device
        self._split = split
        self.data = data = open_data(job, parts, node)
        self._refuse_differences(node)
        self.plan = self._make_plan(data.lengths)
        # workers live from the first loader of their data to the end of the run: to start them takes seconds
        self._pools: dict[Split, Pool] = {}
        self._loader: Loader | None = None
        self._places: StreamPlaces | None = None
        if isinstance(data.training, Stream):
            from hpctrain.data.streams import StreamPlaces  # here and below: most data is no stream

            self._places = StreamPlaces(data.training, rank, ranks, workers_of(job, data.training))

    def _refuse_differences(self, node: str) -> None:
        everyone: list[tuple[int | None, str, str]] = gather_values((self.data.samples, self.data.fingerprint, node))
        others = [rank for rank, one in enumerate(everyone) if one[:2] != everyone[0][:2]]
        if others:
            differences = [
                f"rank {rank} on {node} has {samples or 'a stream of'} samples ({fingerprint})"
                for rank, (samples, fingerprint, node) in enumerate(everyone)
                if rank in (0, *others[:_SHOWN])
            ]
            raise EnvironmentUnfitError(
                f"the dataset {self._job.dataset.name!r} is not the same on all ranks: {', '.join(differences)}"
                f"{', ...' if len(others) > _SHOWN else ''}; give all nodes the same files. Items must not depend on the rank: "
                "hpctrain deals them out. A dataset can say which samples it has with a method fingerprint()"
            )

    def refuse_stream(self) -> None:
        """Raises UsageError if the samples can't be taken up at any position, as after a rollback."""
        if self._places is not None:
            raise UsageError(
                f"[guard]: a rollback goes on with the samples after the failing ones, but [dataset] {self._job.dataset.name!r} "
                'is a stream, which can only be read on from a checkpoint; expected "skip" or "stop", or data with __getitem__'
            )

    def steps_from(self, samples_seen: int) -> int:
        """The number of steps of the job's epochs from this position in the order of the samples."""
        return steps_of_epochs(self._job, self.data.samples or 0, self.data.order, self.data.lengths, samples_seen)

    def samples_of(self, epochs: float) -> float:
        """The samples of so many epochs; 0 if epochs can't be counted."""
        return epochs * (self.data.samples or 0)

    def epochs(self, samples_seen: float) -> float:
        """The passes over the data; of a stream of unknown length the completed ones."""
        if self.data.samples:
            return samples_seen / self.data.samples
        self._note_places()
        return 0.0 if self._places is None else float(self._places.epoch)

    def describe(self, epochs: float) -> str:
        """The data in a line. epochs: at the end of the run."""
        samples = (
            f"{self.data.samples:,} samples, {epochs:.2f} epochs" if self.data.samples else "unknown number of samples"
        )
        if self._places is None:
            return samples
        whole = "read whole by each data-parallel rank" if self._ranks > 1 else "read by one reader"
        return f"a stream, {f'in {self._places.shards} shards' if self._places.shards > 1 else whole}, {samples}"

    @property
    def is_stream(self) -> bool:
        """Whether the training data is a stream."""
        return self._places is not None

    def training_loader(self, progress: Progress) -> Loader:
        """The micro batches from here to the last step."""
        plan = self.plan.training(self.data.order, progress.samples_seen, progress.steps - progress.step)
        axis = axis_of_one_shape(self._job, self._parts)
        split = self._split if axis is None else OneShape(self._split, axis)
        if "train" not in self._pools:
            self._pools["train"] = self._training_pool(progress)
        self._loader = make_loader(self._pools["train"], plan, split, self._job, self._parts, self._device)
        return self._loader

    def _training_pool(self, progress: Progress) -> Pool:
        if self._places is None:
            return make_pool(self._job, self._parts, self.data.training)
        collate, table = make_collation(self._job, self._parts, self.data.training), self._job.dataset
        seed, name = self._job.job.seed, named(self._parts.dataset, with_version=False)
        done = progress.step * self.plan.micro_batches
        batches = self._places.batches(collate, seed, name, progress.samples_seen, done)
        return Pool(batches, self._places.workers, table.prefetch, table.start_method)

    def validation_loader(self, micro_batches: int | None = None) -> Loader:
        """This rank's part of the evaluation, or its first `micro_batches`."""
        source, batches = self.data.validation, self._job.evaluation.batches
        assert source is not None
        whole = evaluation_plan(self._make_plan(self.data.validation_lengths), source, batches)
        plan = islice(whole, micro_batches)  # only as many are computed
        if "validation" not in self._pools:
            self._pools["validation"] = make_pool(self._job, self._parts, source)
        return make_loader(self._pools["validation"], plan, self._split, self._job, self._parts, self._device)

    def stream_values(self) -> dict[str, Any] | None:
        """The values with which a checkpoint continues a stream; None for samples. Collective."""
        self._note_places()
        return None if self._places is None else self._places.values()

    def restore_stream(self, shards: int, places: Sequence[Place]) -> str:
        """Continue a stream from a checkpoint's places of its readers; return a sentence for the screen, or ""."""
        return "" if self._places is None else self._places.restore(shards, places)

    def _note_places(self) -> None:
        if self._places is not None and self._loader is not None:
            self._places.update(self._loader.places)

    def close(self) -> None:
        """End the worker processes."""
        for pool in self._pools.values():
            pool.close()

    def _make_plan(self, lengths: Lengths | None) -> BatchPlan | TokenPlan:
        return make_plan(self._job, self._parts, lengths, self._rank, self._ranks, self.data.samples)


def make_loader(
    pool: Pool, plan: Iterator[Planned], split: Callable[[Batch], Batch], job: Job, parts: Parts, device: torch.device
) -> Loader:
    """Loads the micro batches of a plan for the job's model. split: cuts this rank's part out of each."""
    spec, dtype = parts.model, parts.precision.parameter_dtype
    return Loader(pool, plan, split, spec.count, device, dtype, job.batch.channels_last, spec.flops)


def make_pool(job: Job, parts: Parts, source: Samples | Stream) -> Pool:
    """Loads samples as the job says; of a stream the evaluations, each from its beginning."""
    collate, table, workers = make_collation(job, parts, source), job.dataset, workers_of(job, source)
    if isinstance(source, Stream):
        from hpctrain.data.streams import EvaluatedStream

        return Pool(EvaluatedStream(source, collate, job.job.seed), min(workers, 1), table.prefetch, table.start_method)
    batches = Batches(source, collate, job.job.seed, named(parts.dataset, with_version=False))
    return Pool(batches, workers, table.prefetch, table.start_method)


def workers_of(job: Job, source: Samples | Stream) -> int:
    """Worker processes of each rank: the job's, else the data's own."""
    return source.workers if job.dataset.workers is None else job.dataset.workers


def evaluation_plan(
    plan: BatchPlan | TokenPlan, source: Samples | Stream, batches: int | None = None
) -> Iterator[Planned]:
    """Each micro batch of an evaluation on so many global batches (None: all of the split)."""
    if isinstance(source, Samples):
        return plan.evaluation(len(source), batches)
    assert isinstance(plan, BatchPlan)  # streams have no batches by tokens
    return plan.evaluation_of_stream(batches)
