"""Dilated attention against whole matrices of scores, and what ranks exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_attention import dense, patterns, times_seen
from hpctrain_dilated_attention.attention import DilatedAttention
from hpctrain_dilated_attention.layout import layout
from hpctrain_dilated_attention.pattern import Pattern, Place
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.api import UsageError

CPU = torch.device("cpu")


def with_gradients(attend, drawn: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    *inputs, gradient = drawn
    inputs = [one.clone().requires_grad_() for one in inputs]
    output = attend(*inputs)
    output.backward(gradient)
    return [output.detach(), *(one.grad for one in inputs)]


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(patterns(40), st.integers(1, 50), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_it_is_attention_to_the_keys_of_all_groups(
    pattern: Pattern, tokens: int, heads: int, first_head: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(2, heads, tokens, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    seen = times_seen(pattern, tokens, first_head + heads)[first_head:]
    found = with_gradients(lambda q, k, v: DilatedAttention(pattern).attend(q, k, v, first_head), drawn)
    expected = with_gradients(lambda q, k, v: dense(q, k, v, seen), drawn)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(patterns(40), st.integers(1, 40), st.integers(0, 12))
def test_a_causal_token_does_not_depend_on_how_many_come_after_it(pattern: Pattern, tokens: int, more: int) -> None:
    causal = replace(pattern, causal=True)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, tokens + more, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    whole = DilatedAttention(causal).attend(*drawn)[:, :, :tokens]
    cut = DilatedAttention(causal).attend(*(one[:, :, :tokens].contiguous() for one in drawn))
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_16_bits_are_summed_in_32() -> None:
    """Five groups add up: the output is as far from float64 as one rounding of it is."""
    pattern = Pattern((16, 32, 64, 128, 128), (1, 1, 1, 2, 1))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, 128, 16, generator=generator).bfloat16() for _ in range(4)]
    found = with_gradients(DilatedAttention(pattern).attend, drawn)
    seen = times_seen(pattern, 128, 2)
    expected = with_gradients(lambda q, k, v: dense(q, k, v, seen), [one.double() for one in drawn])
    for mine, other in zip(found, expected, strict=True):
        assert (mine.double() - other).abs().max() < 0.01 * other.abs().max()


def test_a_second_derivative_is_refused() -> None:
    query = torch.randn(1, 1, 8, 4, requires_grad=True)
    output = DilatedAttention(Pattern((4,), (1,))).attend(query, query, query)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


@settings(max_examples=100, deadline=None)
@given(patterns(60), st.integers(1, 5), st.integers(1, 20), st.integers(1, 4))
def test_ranks_get_the_keys_that_their_queries_see(pattern: Pattern, ranks: int, each: int, heads: int) -> None:
    """Keys carry their own number, and travel as the layouts of all ranks say."""
    tokens = ranks * each
    places = [Place(tokens, rank * each, (rank + 1) * each, 0, heads) for rank in range(ranks)]
    found = [layout(pattern, places, rank, CPU) for rank in range(ranks)]
    numbers = torch.arange(heads * tokens).view(heads, tokens)
    if found[0].traffic is None:
        assert all(one.traffic is None for one in found)
        return
    leaving = []
    for rank, one in enumerate(found):
        head, token = one.traffic.places
        leaving.append(numbers[head, token + rank * each].split(one.traffic.sent))
    for rank, one in enumerate(found):
        assert one.traffic.received == [len(leaving[other][rank]) for other in range(ranks)]
        arriving = torch.cat([leaving[other][rank] for other in range(ranks)])
        for work in one.works:
            span = work.span
            for (begin, end), where in work.others:
                selected = torch.arange(begin, end) * span.rate + span.starts[0]
                for head, phase, row in zip(span.heads, span.phases, where[:, 0], strict=True):
                    assert torch.equal(arriving[row], numbers[head, selected + phase])


def received(pattern: Pattern, ranks: int, each: int, heads: int) -> list[int]:
    """Keys that each rank receives."""
    places = [Place(ranks * each, rank * each, (rank + 1) * each, 0, heads) for rank in range(ranks)]
    traffic = [layout(pattern, places, rank, CPU).traffic for rank in range(ranks)]
    return [0 if one is None else sum(one.received) for one in traffic]


def test_what_a_rank_receives_does_not_grow_with_the_sequence() -> None:
    """(segment - own part) / rate keys of each head at most; none where segments lie inside the ranks."""
    heads, rate = 4, 4
    for each in (64, 128, 256, 512):
        for segment in (128, 256):
            spanned = max(0, segment - each) // rate * heads
            assert received(Pattern((segment,), (rate,), causal=False), 8, each, heads) == [spanned] * 8
            # a causal rank needs what its segment has before it: the last one of each segment as much as above
            of_segment = [place * each // rate * heads for place in range(max(1, segment // each))]
            assert received(Pattern((segment,), (rate,)), 8, each, heads) == of_segment * (8 // len(of_segment))
