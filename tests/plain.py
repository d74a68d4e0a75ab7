"""A plain torch loop, independent of hpctrain's loop, ranks and sharding: the expected results of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.checking.check import check
from hpctrain.contracts.dataset import DatasetContext, Samples, Split
from hpctrain.contracts.model import TokenModel
from hpctrain.data.order import SampleOrder
from hpctrain.job.raw import RawJob
from hpctrain.model.parameters import named_tensors

Step = tuple[float, float]
"""Loss, and gradient norm before clipping."""


def module_of(tables: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model with its initial values, in `dtype`."""
    spec = check(RawJob(tables, {}, "j"), None).parts.model
    torch.set_default_dtype(dtype)
    try:
        module = spec.build()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            spec.initialize(name, tensor, (0, len(tensor)), tables["job"]["seed"])
    return module


def samples_of(tables: dict[str, Any], split: Split = "train") -> Samples:
    """The dataset of a job."""
    parts, model = check(RawJob(tables, {}, "j"), None).parts, tables["model"]
    seq_length = tables["dataset"].get("seq_length", model.get("max_seq_length"))
    vocabulary = parts.model.vocab_size if isinstance(parts.model, TokenModel) else model.get("vocab_size")
    context = DatasetContext(seq_length, vocabulary, tables["job"]["seed"])
    samples = parts.dataset.open(split, context)
    assert samples is not None
    return samples


def batches_of(tables: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches of ids and labels, in order."""
    samples = samples_of(tables)
    order = SampleOrder(len(samples), tables["job"]["seed"], samples.fingerprint())
    size = tables["batch"]["global_size"]
    for step in range(tables["job"]["steps"]):
        yield stacked([samples[int(i)] for i in order.at(step * size, (step + 1) * size)])


def stacked(samples: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """ids and labels: (batch, seq) each."""
    return torch.stack([s["input_ids"] for s in samples]), torch.stack([s["labels"] for s in samples])


def train_plainly(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Iterator[Callable[[], Tensor]],
    clip_norm: float | None = None,
) -> list[Step]:
    """One optimizer step for each function of `losses`, which computes the loss of a global batch."""
    steps = []
    for make_loss in losses:
        loss = make_loss()
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norm = float(torch.stack([g.abs().double().square().sum() for g in gradients]).sum().sqrt())
        if clip_norm is not None and norm > clip_norm:
            for gradient in gradients:
                gradient *= clip_norm / norm
        optimizer.step()
        steps.append((loss.item(), norm))
    return steps


def train_gpt(tables: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, list[Step]]:
    """The job of `tables`, a GPT with AdamW or SGD, in one process."""
    module = module_of(tables, dtype)
    options = {k: v for k, v in tables["optimizer"].items() if k not in ("name", "clip_norm")}
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[tables["optimizer"]["name"]](
        module.parameters(), **options
    )
    losses = (partial(gpt_loss, module, *batch) for batch in batches_of(tables))
    return module, train_plainly(module, optimizer, losses, tables["optimizer"].get("clip_norm"))


def gpt_loss(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens."""
    return cross_entropy(module(ids).flatten(0, 1), labels.flatten())
