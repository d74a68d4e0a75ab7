"""The order of the samples, and how ranks share a global batch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import TINY

import hpctrain
from hpctrain.base.errors import HpctrainError
from hpctrain.contracts.dataset import Part
from hpctrain.data.mixture import MixtureOrder
from hpctrain.data.order import SampleOrder, WeightedOrder
from hpctrain.data.plan import BatchPlan


@given(st.integers(1, 700), st.integers(0, 2**40), st.text(max_size=5))
def test_an_epoch_is_a_permutation(samples: int, seed: int, fingerprint: str) -> None:
    order = SampleOrder(samples, seed, fingerprint)
    for epoch in (0, 1, 5):
        assert sorted(order.at(epoch * samples, (epoch + 1) * samples).tolist()) == list(range(samples))


@given(st.integers(1, 300), st.data())
def test_any_slice_is_the_slice_of_the_whole(samples: int, data: st.DataObject) -> None:
    order = SampleOrder(samples, 7, "f")
    whole = order.at(0, 3 * samples).tolist()
    begin = data.draw(st.integers(0, 3 * samples))
    end = data.draw(st.integers(begin, 3 * samples))
    assert order.at(begin, end).tolist() == whole[begin:end]


def test_epochs_seeds_and_data_differ() -> None:
    first = SampleOrder(1000, 1, "f")
    assert first.at(0, 1000).tolist() != first.at(1000, 2000).tolist()
    assert first.at(0, 1000).tolist() != SampleOrder(1000, 2, "f").at(0, 1000).tolist()
    assert first.at(0, 1000).tolist() != SampleOrder(1000, 1, "g").at(0, 1000).tolist()


def test_a_permutation_of_a_terabyte_costs_nothing() -> None:
    order = SampleOrder(10**12, 1, "f")
    drawn = order.at(10**11, 10**11 + 1000)
    assert len(set(drawn.tolist())) == 1000 and (drawn >= 0).all() and (drawn < 10**12).all()


def test_positions_look_random() -> None:
    """Neighbours in the order are no neighbours in the data, and halves are mixed."""
    drawn = SampleOrder(10_000, 3, "f").at(0, 10_000)
    assert abs((drawn[:5000] < 5000).mean() - 0.5) < 0.03
    assert (abs(drawn[1:] - drawn[:-1]) < 10).mean() < 0.01


def test_weighted_positions_are_independent_draws_in_proportion() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.5, 6.5, 0.0])
    order = WeightedOrder(weights, 5, "f")
    drawn = order.at(0, 200_000)
    assert np.bincount(drawn, minlength=6) / 200_000 == pytest.approx(weights / 10, abs=0.005)  # 4 standard deviations
    follows = np.bincount(drawn[1:][drawn[:-1] == 3], minlength=6) / (drawn[:-1] == 3).sum()
    assert follows == pytest.approx(weights / 10, abs=0.01), "whatever came before"
    assert order.at(100, 7000).tolist() == drawn[100:7000].tolist()
    assert WeightedOrder(weights, 6, "f").at(0, 99).tolist() != drawn[:99].tolist()
    assert WeightedOrder(np.ones(3), 1, "f").at(2**40, 2**40 + 50).max() == 2


def mixture_order(parts: list[Part], phases: list[tuple[int, list[float]]]) -> MixtureOrder:
    order = MixtureOrder(parts, 5, "f")
    for begin, shares in phases:
        order.add_phase(begin, shares)
    return order


COUNTS = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@pytest.mark.nightly
@settings(max_examples=20, deadline=None)
@given(COUNTS, st.data())
def test_a_mixture_draws_by_shares_and_each_part_in_epochs(counts: list[int], data: st.DataObject) -> None:
    shares = st.lists(st.sampled_from([0.0, 0.3, 1.0, 7.0]), min_size=len(counts), max_size=len(counts)).filter(any)
    begins = [0, *sorted(data.draw(st.sets(st.integers(1, 9000) | st.just(8192), max_size=2)))]
    phases = [(begin, data.draw(shares)) for begin in begins]
    order = mixture_order([Part(count) for count in counts], phases)
    end = 12_000
    whole = order.at(0, end)
    cuts = sorted(data.draw(st.sets(st.integers(0, end), max_size=8)) | {0, end})
    assert np.concatenate([order.at(*pair) for pair in pairwise(cuts)]).tolist() == whole.tolist()
    bounds = np.cumsum([0, *counts])
    for (begin, wanted), until in zip(phases, [*begins[1:], end], strict=True):
        found = np.histogram(whole[begin:until], bounds)[0]
        # in a run of 32, the order is random
        room = 1 + len(counts) / 2 + ((until - begin) % 32 and 16)
        assert found == pytest.approx(np.array(wanted) / sum(wanted) * (until - begin), abs=room)
        assert not found[np.array(wanted) == 0].any()
    for low, high in pairwise(bounds):  # each sample as often as the others of its part, or once more
        times = np.bincount(whole[(whole >= low) & (whole < high)] - low, minlength=high - low)
        assert times.max() - times.min() <= 1
    shorter = mixture_order([Part(count) for count in counts], phases[:-1] or phases)
    assert shorter.at(0, begins[-1]).tolist() == whole[: begins[-1]].tolist(), "what comes later changes nothing"


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        (
            {"a": {"name": "synthetic", "samples": 9, "seq_length": 64}},
            "a sample has 64 tokens, but the model's max_seq_length is 8",
        ),
        (
            {"a": {"name": "mixture", "sources": {"b": {"name": "synthetic", "samples": 9}}}},
            r"\[dataset.sources.a\]: found a mixture in a mixture",
        ),
        (
            {"a": {"name": "text", "files": ["x"], "end_of_text": "y"}},
            "dataset. sources.a.end_of_text: it is a token of a tokenizer",
        ),
    ],
)
def test_sources_that_do_not_fit_are_told(sources: dict[str, Any], told: str, tmp_path: Path) -> None:
    tables = {**TINY, "job": {"name": "m", "steps": 2, "output_dir": str(tmp_path)}}
    with pytest.raises(HpctrainError, match=told):
        hpctrain.run({**tables, "dataset": {"name": "mixture", "sources": sources}})


def test_a_mixture_at_a_far_position_and_by_weights() -> None:
    order = mixture_order([Part(5, np.array([0, 1, 0, 0, 3.0])), Part(10**9)], [(0, [1.0, 2.0])])
    drawn = order.at(2**45, 2**45 + 4096 * 3)
    assert (drawn < 5).mean() == pytest.approx(1 / 3, abs=1e-3) and set(drawn[drawn < 5]) == {1, 4}
    assert len(set(drawn[drawn >= 5])) == (drawn >= 5).sum()
    parts = (drawn < 5).astype(int)
    assert abs(np.corrcoef(parts[:-1], parts[1:])[0, 1] + 1 / 4096) < 0.05, "no pattern that a rank could always meet"


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 50))
def test_every_layout_takes_the_same_samples(ranks: int, micro: int, accumulation: int, seen: int) -> None:
    order = SampleOrder(37, 5, "f")
    size = ranks * micro * accumulation
    taken: dict[int, int] = {}
    for rank in range(ranks):
        plan = BatchPlan(size, micro, rank, ranks)
        batches = list(plan.training(order.at, seen, steps=2))
        assert len(batches) == 2 * plan.micro_batches == 2 * accumulation
        for number, planned in enumerate(batches):
            assert len(planned.indices) == micro and planned.counts
            for i, index in enumerate(planned.indices):
                position = seen + (number // accumulation) * size + planned.place + i
                assert position not in taken
                taken[position] = index
    assert [taken[p] for p in sorted(taken)] == order.at(seen, seen + 2 * size).tolist()


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40))
def test_evaluation_takes_every_sample_once_in_as_many_forwards_on_all_ranks(
    ranks: int, micro: int, samples: int
) -> None:
    plans = [list(BatchPlan(ranks, micro, rank, ranks).evaluation(samples)) for rank in range(ranks)]
    assert sorted(i for plan in plans for one in plan if one.counts for i in one.indices) == list(range(samples))
    assert len({len(plan) for plan in plans}) == 1
    assert all(0 <= i < samples for plan in plans for one in plan for i in one.indices) and all(
        len(one.indices) for plan in plans for one in plan
    )


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.booleans(), st.data())
def test_batches_that_end_with_the_epoch(
    ranks: int, micro: int, accumulation: int, samples: int, drops: bool, data: st.DataObject
) -> None:
    """Each epoch's batches are a DataLoader's, cut over the ranks, from any batch of it on; and they are counted."""
    size = ranks * micro * accumulation
    samples += size if drops else 0  # else there is no batch
    firsts = range(0, samples - size + 1, size) if drops else range(0, samples, size)
    expected = [
        range(epoch * samples + first, epoch * samples + min(first + size, samples))
        for epoch in range(3)
        for first in firsts
    ]
    skipped = data.draw(st.integers(0, len(firsts)))
    seen = expected[skipped].start
    order, found = SampleOrder(samples, 5, "f"), [dict[int, int]() for _ in expected[skipped:]]
    for rank in range(ranks):
        step, ends = 0, []
        for planned in BatchPlan(size, micro, rank, ranks, samples, drops).training(order.at, seen, len(found)):
            assert 0 < len(planned.indices) <= micro and list(planned.indices) == [
                order.at(one, one + 1)[0] for one in planned.positions
            ]
            if planned.counts:
                assert planned.place == planned.positions[0] - expected[skipped + step].start
                found[step].update(dict.fromkeys(planned.positions, rank))
            ends.append(planned.after)
            step += planned.after is not None
        assert step == len(found) and ends[-1] == 3 * samples
    assert [sorted(batch) for batch in found] == [list(batch) for batch in expected[skipped:]]
    assert BatchPlan(size, micro, 0, ranks, samples, drops).steps_between(seen, 3 * samples) == len(found)


def test_the_batch_as_a_person_reads_it() -> None:
    assert str(BatchPlan(4, 2, 0, 1)) == "4 samples = 1 data-parallel rank x 2 micro batches x 2"
    assert str(BatchPlan(4, 2, 0, 2)) == "4 samples = 2 data-parallel ranks x 1 micro batch x 2"
    assert str(BatchPlan(4, 2, 0, 2, 7)).endswith(" x 2, an epoch's last batch smaller")
    assert str(BatchPlan(4, 2, 0, 2, 7, True)).endswith(" x 2, an epoch's rest dropped")
