"""Dilated attention with whole matrices of scores, written from the definition, and models with it in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hpctrain_dilated_attention.network import Attention
from hpctrain_dilated_attention.pattern import Pattern
from hypothesis import strategies as st
from plain import Step, batches_of, module_of, train_plainly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def times_seen(pattern: Pattern, tokens: int, heads: int) -> Tensor:
    """The number of groups that let a token (rows) see another one (columns): `(heads, tokens, tokens)`."""
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        for head in range(heads):
            for start in range(0, tokens, length):
                selected = [t for t in range(start, min(start + length, tokens)) if (t - start) % rate == head % rate]
                _see(seen[head], selected, pattern, -(-length // rate))
    return seen


def _see(seen: Tensor, selected: Sequence[int], pattern: Pattern, of_whole: int) -> None:
    """of_whole: tokens that a group selects of a whole segment."""
    size = pattern.block or of_whole
    blocks = -(-of_whole // size)
    left_out = int(pattern.sparsity_ratio * blocks)
    kept = max(1, blocks - left_out)
    distances = {int(number * blocks / kept) for number in range(kept)}
    for one, query in enumerate(selected):
        for other, key in enumerate(selected):
            if abs(one // size - other // size) in distances and (key <= query or not pattern.causal):
                seen[query, key] += 1


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Softmax over all keys, each as often as it is seen; zeros where none is."""
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = seen.to(query) * (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ value / torch.where(total > 0, total, 1)


def train_densely(tables: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Step]:
    """Loss and norm of each step of the job in a plain loop in one process, with dense attention."""
    module = module_of(tables, dtype)
    for one in module.modules():
        if isinstance(one, Attention):
            one.dilated = SimpleNamespace(group=None, attend=partial(_attend, one.dilated.pattern))  # type: ignore[assignment]
    optimizer = torch.optim.SGD(module.parameters(), lr=tables["optimizer"]["lr"], momentum=0.9)
    return train_plainly(module, optimizer, _losses(module, tables), tables["optimizer"].get("clip_norm"))


def _attend(pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, first_head: int) -> Tensor:
    return dense(query, key, value, times_seen(pattern, query.shape[2], query.shape[1]))


def _losses(module: nn.Module, tables: dict[str, Any]) -> Iterator[Callable[[], Tensor]]:
    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(module(ids).flatten(0, 1), labels.flatten())

    for ids, labels in batches_of(tables):
        yield partial(loss, ids, labels)


@st.composite
def patterns(draw: st.DrawFn, longest: int) -> Pattern:
    """Patterns whose lengths, rates and blocks divide nothing."""
    groups = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, 7)), min_size=1, max_size=3))
    block = draw(st.sampled_from([None, 1, 2, 3, 5]))
    ratio = draw(st.floats(0, 0.99)) if block else 0.0
    lengths, rates = zip(*groups, strict=True)
    return Pattern(lengths, rates, draw(st.booleans()), block, ratio)
