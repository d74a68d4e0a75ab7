"""The samples of a job, as this rank gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpctrain.contracts.dataset import Lengths, Samples
from hpctrain.contracts.model import Batch
from hpctrain.data.loader import Loader
from hpctrain.data.opening import make_padding, make_plan, open_data, steps_of_epochs
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tokens import TokenPlan
from hpctrain.errors import EnvironmentUnfitError
from hpctrain.exchange import gather_values
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.loop.progress import Progress


class Feed:
    """Opens the data, and loads this rank's part of each global batch.

    steps: of a run from the beginning. plan: how this rank takes part in the global batches.
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
        """`rank` of `ranks` see different samples; `node`: this rank's name of it; `split` gives this rank's part of a micro
        batch. Collective over the world."""
        self._job, self._parts, self._rank, self._ranks, self._device = job, parts, rank, ranks, device
        self._split = split
        data = open_data(job, parts)
        self._training, self._validation, self._order = data.training, data.validation, data.order
        self.samples, self.steps, self.fingerprint = len(data.training), data.steps, data.fingerprint
        self._refuse_differences(node)
        self.plan = self._make_plan(data.lengths)
        self._lengths, self._validation_lengths = data.lengths, data.validation_lengths
        self._padding = make_padding(job, parts)

    def _refuse_differences(self, node: str) -> None:
        everyone = gather_values((self.fingerprint, node))
        different = sorted({f"{node} ({found})" for found, node in everyone if found != everyone[0][0]})
        if different:
            raise EnvironmentUnfitError(
                f"the dataset {self._job.dataset.name!r} is not the same on all nodes: {everyone[0][1]} ({everyone[0][0]}), "
                f"but {', '.join(different)}; give all nodes the same files"
            )

    @property
    def validates(self) -> bool:
        """Whether there are samples to evaluate with."""
        return self._validation is not None

    def steps_from(self, samples_seen: int) -> int:
        """Steps of the job's epochs from this position in the order of the samples on."""
        return steps_of_epochs(self._job, self.samples, self._order, self._lengths, samples_seen)

    def training_loader(self, progress: Progress) -> Loader:
        """The micro batches from here to the last step."""
        plan = self.plan.training(self._order, progress.samples_seen, progress.steps - progress.step)
        return self._loader(self._training, plan)

    def validation_loader(self) -> Loader:
        """This rank's part of the evaluation."""
        assert self._validation is not None
        plan, samples = self._make_plan(self._validation_lengths), len(self._validation)
        return self._loader(self._validation, plan.evaluation(samples, self._job.evaluation.batches))

    def _make_plan(self, lengths: Lengths | None) -> BatchPlan | TokenPlan:
        return make_plan(self._job, self._parts, lengths, self._rank, self._ranks)

    def _loader(self, samples: Samples, plan: Iterator[Any]) -> Loader:
        table, dtype = self._job.dataset, self._parts.precision.parameter_dtype
        return Loader(samples, plan, self._split, table.workers, table.prefetch, self._device, dtype, self._padding)
