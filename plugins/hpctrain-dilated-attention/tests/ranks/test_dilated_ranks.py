"""Dilated attention over ranks: losses and norms of a plain loop with whole matrices of scores in one process."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_attention import dense, patterns, times_seen, train_densely
from hpctrain_dilated_attention.attention import DilatedAttention
from hpctrain_dilated_attention.pattern import Pattern
from hypothesis import HealthCheck, Phase, given, seed, settings
from test_stages import compare
from training import nightly, train_here

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

CONTEXT, TENSOR = {"context": 0}, {"tensor": 2}
"""0: all ranks."""


def job(root: Path, parallelism: dict[str, Any], stage: int, mode: str, **model: Any) -> dict[str, Any]:
    ranks = dist.get_world_size()
    sizes = {name: size or ranks for name, size in parallelism.items()}
    needed = prod(sizes.values())
    if ranks % needed:
        pytest.skip(f"needs a multiple of {needed} ranks")
    return {
        "job": {"name": "long", "steps": 4, "seed": 7, "output_dir": str(root)},
        "model": {
            "name": "longnet", "hidden_size": 24, "layers": 2, "attention_heads": 4, "vocab_size": 61, "max_seq_length": 60,
            "segment_lengths": [7, 24, 60], "dilation_rates": [1, 3, 2], **model,
        },
        "dataset": {"name": "synthetic", "samples": 40, "validation_samples": 6, "seq_length": 60},
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 1.0},
        "batch": {"global_size": 12, "micro_size": 6 * needed // ranks},
        "evaluation": {"every_steps": 2}, "sharding": {"stage": stage}, "parallelism": sizes, "precision": {"mode": mode},
    }  # fmt: skip


@pytest.mark.cases(thorough=["{'context': 0}-0-fp32-{}", "{'tensor': 2}-0-fp64-{}"], rest="nightly")
@pytest.mark.parametrize(
    ("parallelism", "stage", "mode", "model"),
    [
        (CONTEXT, 0, "fp32", {}),
        (CONTEXT, 3, "fp64", {}),
        ({**CONTEXT, "context": 2, **TENSOR}, 3, "fp32", {}),
        pytest.param(TENSOR, 0, "fp64", {}, marks=pytest.mark.shown_on(2)),
        pytest.param({"context": 2, "pipeline": 2}, 0, "fp64", {"tie_embeddings": True}, marks=pytest.mark.shown_on(4)),
        pytest.param(CONTEXT, 0, "fp64", {"sparsity_ratio": 0.5, "block_size": 3}, marks=pytest.mark.shown_on(3)),
        nightly(CONTEXT, 1, "fp32", {}),
        nightly(CONTEXT, 2, "fp32", {}),
        nightly(CONTEXT, 3, "fp32", {}),
        nightly({"context": 2, **TENSOR}, 2, "fp64", {"sparsity_ratio": 0.6, "block_size": 2}),
    ],
    ids=str,
)
def test_layouts(
    root: Path,
    record_property: pytest.RecordProperty,
    parallelism: dict[str, Any],
    stage: int,
    mode: str,
    model: dict[str, Any],
) -> None:
    tables = job(root, parallelism, stage, mode, **model)
    rows = train_here(tables).rows
    found = compare(rows, train_densely(tables), *((1e-10, 1e-8) if mode == "fp64" else (2e-6, 2e-4)))
    record_property("loss", found["loss"])  # for README.md


@pytest.mark.nightly
@pytest.mark.shown_on(2)
def test_compiled_blocks_behind_a_cut_embedding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block gets the embedding's output itself, whose sum over the ranks may still be on its way."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tables = {**job(root, TENSOR, 0, "fp32"), "compile": {"enabled": True}}
    compare(train_here(tables).rows, train_densely(tables), 2e-6, 2e-4)
    torch._dynamo.reset()


@pytest.mark.thorough
@seed(20)
@settings(
    max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(patterns(50))
def test_any_pattern_over_any_cut(pattern: Pattern) -> None:
    """Forward and gradients of each rank's part. All ranks draw the same patterns."""
    ranks, rank, each, heads = dist.get_world_size(), dist.get_rank(), 12, 3
    generator = torch.Generator().manual_seed(0)
    shape = (2, heads, ranks * each, 4)
    *whole, gradient = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))
    whole = [one.requires_grad_() for one in whole]
    expected = dense(*whole, times_seen(pattern, ranks * each, heads))
    expected.backward(gradient)

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[:, :, rank * each : (rank + 1) * each].clone()

    attention = DilatedAttention(pattern)
    attention.group = dist.group.WORLD
    parts = [mine(one).requires_grad_() for one in whole]
    output = attention.attend(*parts)
    output.backward(mine(gradient))
    for found, one in zip((output, *(p.grad for p in parts)), (expected, *(w.grad for w in whole)), strict=True):
        torch.testing.assert_close(found.detach(), mine(one), rtol=0, atol=1e-10)


def test_bytes_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment over all ranks: each gets the keys and values before its own, a rate-th of them, and gradients go back."""
    ranks, rank, each, heads, size, rate = dist.get_world_size(), dist.get_rank(), 12, 4, 8, 4
    calls: list[tuple[int, int]] = []
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((given.numel() * given.element_size(), output.numel() * output.element_size()))
        return exchange(output, given, *args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    attention = DilatedAttention(Pattern((4, ranks * each), (1, rate)))
    attention.group = dist.group.WORLD
    query = torch.randn(3, heads, each, size, requires_grad=True)
    attention.attend(query, query, query).sum().backward()
    key = 2 * 3 * size * 4  # key and value, batch, numbers of a head, bytes of each
    before, after = rank * each // rate * heads * key, (ranks - 1 - rank) * each // rate * heads * key
    assert calls == [(after, before), (before, after)]
