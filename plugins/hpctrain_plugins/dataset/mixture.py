"""`mixture`: several data sets, drawn by shares that may change at given steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

from hpctrain.api import (
    Dataset,
    DatasetContext,
    Field,
    Lengths,
    Mixture,
    Options,
    Part,
    Samples,
    Split,
    UsageError,
    hookimpl,
)


class SourceOptions(BaseModel):
    """A data set of a mixture; the other keys are its own."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(description='a dataset plugin, or "package.module:callable"')
    weight: float | None = Field(
        default=None,
        ge=0,
        description="share of the samples that are drawn, relative to the others (default: its size)",
    )
    seq_length: int | None = Field(
        default=None, ge=1, description="tokens per sample, where they differ ([dataset] seq_length by default)"
    )


class PhaseOptions(Options):
    from_step: int = Field(ge=1, description="the first step of the phase is the one after this many")
    weights: dict[str, float] = Field(description="shares of the data sets by their names; those left out have none")


class MixtureOptions(Options):
    sources: dict[str, SourceOptions] = Field(min_length=1, description="the data sets, by names of your own")
    phases: list[PhaseOptions] = Field(
        default=[], description="other shares from given steps on, in order: a curriculum"
    )

    @model_validator(mode="after")
    def _shares(self) -> MixtureOptions:
        given = [name for name, source in self.sources.items() if source.weight is not None]
        if given and len(given) < len(self.sources):
            lacking = next(name for name in self.sources if name not in given)
            raise ValueError(f"expected a weight for each source or for none, found none for {lacking}")
        for phase in self.phases:
            strange = next((name for name in phase.weights if name not in self.sources), None)
            if strange is not None:
                raise ValueError(f"phases: there is no source {strange}; expected {', '.join(self.sources)}")
        shares = [[source.weight or 0.0 for source in self.sources.values()]] if given else []
        for weights in (*shares, *(list(phase.weights.values()) for phase in self.phases)):
            if min(weights, default=0.0) < 0 or not sum(weights) > 0:
                raise ValueError(f"expected weights of at least 0 and one above, found {weights}")
        steps = [phase.from_step for phase in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError(f"phases: expected from_step to rise from one to the next, found {steps}")
        return self


class MixtureDataset(Dataset):
    """Several data sets, drawn by shares."""

    name = "mixture"
    Options = MixtureOptions
    options: MixtureOptions
    holds: ClassVar[Mapping[str, str]] = {"sources": "dataset"}

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        """The sources' samples behind one another; of validation and test those that have such a split."""
        opened: dict[str, Samples] = {}
        for name, source in self.options.sources.items():
            own = replace(
                context,
                seq_length=source.seq_length or context.seq_length,
                once_per_node=partial(_apart, context.once_per_node, name),
            )
            samples = self.held["sources"][name].open(split, own)
            if samples is None and split != "train":
                continue
            if not isinstance(samples, Samples) or not len(samples):
                found = "no training samples" if samples is None or isinstance(samples, Samples) else "a stream"
                raise UsageError(f"[dataset.sources.{name}]: found {found}; a mixture takes samples by index")
            if samples.mixture() is not None:
                raise UsageError(
                    f"[dataset.sources.{name}]: found a mixture in a mixture, whose shares would be lost; name its sources here"
                )
            if samples.collation() is not None:
                raise UsageError(
                    f"[dataset.sources.{name}]: its samples are made into batches by a function of their own, which those of "
                    "other sources don't fit; let the data set pad its samples"
                )
            opened[name] = samples
        if not opened:
            return None
        return Mixed(opened, self._phases(opened) if split == "train" else None)

    def _phases(self, opened: Mapping[str, Samples]) -> list[tuple[int, Sequence[float]]]:
        sources = self.options.sources
        first = [float(len(opened[name])) if one.weight is None else one.weight for name, one in sources.items()]
        later = [(phase.from_step, [phase.weights.get(name, 0.0) for name in sources]) for phase in self.options.phases]
        return [(0, first), *later]


def _apart(once_per_node: Callable[[str, Callable[[], Any]], Any], source: str, name: str, action: Any) -> Any:
    """Sources of one kind give their work the same name."""
    return once_per_node(f"{source}: {name}", action)


class Mixed(Samples):
    """Samples of several data sets, one set behind the other."""

    def __init__(self, sources: Mapping[str, Samples], phases: list[tuple[int, Sequence[float]]] | None) -> None:
        """phases: of the training; None for samples that are taken in order."""
        self._names, self._phases = list(sources), phases
        self._parts = parts = list(sources.values())
        self._ends = np.cumsum([len(one) for one in parts])
        self.draws = any(one.draws for one in parts)  # type: ignore[misc]
        self.vocab_size = max((one.vocab_size for one in parts if one.vocab_size is not None), default=None)
        self.workers = max(one.workers for one in parts)
        self.is_estimate = any(one.is_estimate for one in parts)
        self.remark = "; ".join(f"{name}: {one.remark}" for name, one in sources.items() if one.remark)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        place = int(np.searchsorted(self._ends, index, side="right"))
        source = self._parts[place]
        return source[index - (int(self._ends[place]) - len(source))]

    def set_epoch(self, epoch: int) -> None:
        for one in self._parts:
            one.set_epoch(epoch)

    def lengths(self) -> Lengths | None:
        found = [one.lengths() for one in self._parts]
        known = [one for one in found if one is not None]
        return np.concatenate(known) if len(known) == len(found) else None

    def mixture(self) -> Mixture | None:
        if self._phases is None:
            return None
        return Mixture([Part(len(one), one.weights()) for one in self._parts], self._phases)

    def fingerprint(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for name, one in zip(self._names, self._parts, strict=True):
            found.update(repr((name, len(one), one.fingerprint())).encode())
        return found.hexdigest()


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [MixtureDataset]
