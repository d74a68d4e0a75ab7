"""Models and data sets that break a promise."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hpctrain_plugins.dataset.synthetic import Synthetic
from hpctrain_plugins.model.gpt import GPT
from torch import nn

from faulty.fault import NAMES, of_slot, planted
from hpctrain.api import (
    Samples,
    Stream,
    hookimpl,
)

# model

model = lambda told, ranks=1: planted("model", "name", told, ranks)  # noqa: E731


@model("trains as one process does: on one micro batch of all samples|the run ended: step 8: loss nan")
class MeanLoss(GPT):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / self.count(batch)


@model("its loss has the shape .*, expected a scalar: the sum over what `count` counts")
class LossOfEachToken(GPT):
    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")


@model("its loss has no gradient")
class LossWithoutGraph(GPT):
    def loss(self, outputs, batch):
        return super().loss(outputs.detach(), batch)


@model("trains as one process does: on one micro batch of all samples")
class HalfCount(GPT):
    def count(self, batch):
        return super().count(batch) / 2 + 0.25


@model("trains the kit's job: .*more than one")
class CountOfOneSample(GPT):
    def count(self, batch):
        if len(batch["labels"]) > 1:
            raise RuntimeError("more than one")
        return super().count(batch)


@model("trains as one process does: on 3 ranks .* before the first step")
class ValuesByCall(GPT):
    def initialize(self, name, tensor, rows, seed):
        tensor.normal_(std=0.02)


@model("gives blocks of the module")
class OtherBlocks(GPT):
    def blocks(self, module):
        return [nn.Linear(2, 2)]


@model("built another model on rank 1: .*, where rank 0 has ", 2)
class ModelByRank(GPT):
    def build(self):
        module = super().build()
        if dist.is_initialized() and dist.get_rank() == 1:
            module.extra = nn.Linear(2, 2)
        return module


@model("trains packed samples as padded ones")
class OneForAll(GPT):
    def forward(self, module, batch):
        return module(batch["input_ids"], batch.get("positions"))


@model("trains packed samples as padded ones")
class PlacesInTheRow(GPT):
    def forward(self, module, batch):
        of_the_row = torch.arange(batch["input_ids"].shape[1]) // 2 % 8
        return module(batch["input_ids"], of_the_row, batch.get("documents"))


@model("leaves the target of its batch.*in place in `forward`")
class MasksTheTarget(GPT):
    def forward(self, module, batch):
        batch["labels"][:, ::2] = -100
        return super().forward(module, batch)


@model("leaves the target of its batch.*in place in `loss`")
class ShiftsTheTarget(GPT):
    def loss(self, outputs, batch):
        batch["labels"].clamp_(min=1)
        return super().loss(outputs, batch)


# dataset


class _Changed(Samples):
    def __init__(self, samples):
        self.samples, self.vocab_size = samples, samples.vocab_size

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def fingerprint(self):
        return self.samples.fingerprint()


class _Altered(Synthetic):
    samples: type = _Changed

    def open(self, split, context):
        found = super().open(split, context)
        return None if found is None else self.samples(found)


dataset = lambda told: planted("dataset", "name", told)  # noqa: E731


@dataset("gave another item .* when it was read again, .*`draws = True`")
class NoisyItems(_Altered):
    class samples(_Changed):  # noqa: N801
        def __getitem__(self, index):
            return {"input_ids": torch.randint(7, (8,)), "labels": torch.randint(7, (8,))}


@dataset("trains as it does alone|stack expects a non-empty")
class DroppedRows(_Altered):
    class samples(_Changed):  # noqa: N801
        def collation(self):
            return lambda items: {key: torch.stack([one[key] for one in items[1:]]) for key in items[0]}


@dataset("gave the fingerprint .*, and another one when it was asked again")
class FingerprintOfTheMoment(_Altered):
    class samples(_Changed):  # noqa: N801
        def fingerprint(self):
            return str(next(NAMES))


@dataset("gave an item whose values change when the next one is read")
class OneBuffer(_Altered):
    class samples(_Changed):  # noqa: N801
        kept = torch.zeros(9, dtype=torch.int64)

        def __getitem__(self, index):
            self.kept.fill_(index % 7)
            return {"input_ids": self.kept[:-1], "labels": self.kept[1:]}


@dataset("gave an item whose values change when the next one is read")
class OneBufferStreamed(_Altered):
    class samples(Stream):  # noqa: N801
        def __init__(self, samples):
            self.vocab_size = samples.vocab_size

        def __iter__(self):
            kept = torch.zeros(9, dtype=torch.int64)
            for number in range(99):
                kept.fill_(number % 7)
                yield {"input_ids": kept[:-1], "labels": kept[1:]}

        def fingerprint(self):
            return "one buffer"


@hookimpl
def hpctrain_model():
    return of_slot("model")


@hookimpl
def hpctrain_dataset():
    return of_slot("dataset")
