"""Streams, weighted samples and batches of one's own train under every layout as in one process."""

from __future__ import annotations

import functools
import json
from typing import Any

import flowing
import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from modules import built
from plain import Step, gpt_loss, module_of, samples_of, stacked, train_plainly
from test_stages import compare
from torch.nn.functional import cross_entropy
from training import SGD, job, nightly, session_of, thorough, train_here

from hpctrain.base.errors import TrainingError
from hpctrain.checking.check import check
from hpctrain.contracts.dataset import Samples
from hpctrain.data.opening import open_data
from hpctrain.data.order import SampleOrder, WeightedOrder
from hpctrain.job.raw import RawJob
from hpctrain.ranks.json_collectives import gather_values

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

LAYOUTS: list[Any] = [
    nightly({}), {"sharding": {"stage": 3}}, {"parallelism": {"tensor": 2}}, {"parallelism": {"context": 2}},
    {"parallelism": {"pipeline": 2}, "batch": {"micro_size": 3}},
]  # fmt: skip


def tables_of(root, name: str, **tables: dict[str, Any]) -> dict[str, Any]:
    made = job(optimizer=SGD, job={"output_dir": str(root), "steps": 8}, **tables)
    return {**made, "dataset": {"name": f"flowing:{name}", **tables.get("dataset", {})}}


def skip_unless_even(layout: dict[str, Any]) -> None:
    if layout.get("parallelism") and dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")


@functools.lru_cache
def _plain(text: str) -> list[Step]:
    """The stream in one process: item after item, epoch after epoch."""
    tables = json.loads(text)
    module = module_of(tables, torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    items = [flowing.item(number, epoch) for epoch in range(5) for number in range(flowing.EPOCH)]
    batches = [stacked(items[24 * step : 24 * (step + 1)]) for step in range(8)]
    return train_plainly(module, optimizer, (lambda b=b: gpt_loss(module, *b) for b in batches), SGD["clip_norm"])


def reference() -> list[Step]:
    return _plain(json.dumps(tables_of(".", "flow")))


@pytest.mark.cases(
    default=["{'parallelism': {'pipeline': 2}, 'batch': {'micro_size': 3}}"],
    thorough=["{'parallelism': {'context': 2}}"],
    rest="nightly",
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_stream_trains_as_in_one_process(root, layout: dict[str, Any]) -> None:
    """192 items of epochs of 50, which no global batch divides; a step's batch spans two epochs."""
    skip_unless_even(layout)
    rows = train_here(tables_of(root, "flow", **layout)).rows
    compare(rows, reference(), *BOUNDS["fp32"])
    assert [row["epoch"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]], ids=str)
def test_a_stream_goes_on_under_another_layout(root, layout: dict[str, Any]) -> None:
    skip_unless_even(layout)
    tables = tables_of(root, "flow")
    rows = train_here({**tables, "job": {**tables["job"], "steps": 5}}).rows
    rows += train_here(tables_of(root, "flow", **layout)).rows
    assert [row["step"] for row in rows] == list(range(1, 9))
    compare(rows, reference(), *BOUNDS["fp32"])


@pytest.mark.cases(
    default=["1-{'parallelism': {'pipeline': 2}, 'batch': {'micro_size': 3}}"],
    nightly=["1-{'parallelism': {'tensor': 2}}"],
    rest="thorough",
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("batches", [nightly(None), 1])
def test_an_evaluation_of_a_stream_counts_each_item_once(root, layout: dict[str, Any], batches: int | None) -> None:
    skip_unless_even(layout)
    evaluation = {"every_steps": 2, **({} if batches is None else {"batches": batches})}
    more = {**layout, "batch": {"global_size": 12, "micro_size": 1, **layout.get("batch", {})}}
    if more["batch"]["micro_size"] == 3 and dist.get_world_size() == 4:
        more["batch"]["micro_size"] = 2
    found = [
        train_here({**tables_of(root / name, name, evaluation=evaluation, **more), "job": {
            "name": name, "steps": 2, "seed": 11, "output_dir": str(root / name)}}).evaluations[0]
        for name in ("flow", "both")
    ]  # fmt: skip
    assert found[0]["evaluation_tokens"] == found[1]["evaluation_tokens"] == 8 * (13 if batches is None else 12)
    assert found[0]["evaluation_loss"] == pytest.approx(found[1]["evaluation_loss"], rel=1e-6)


@pytest.mark.thorough
def test_shards_are_read_once_in_an_epoch_and_go_on(root) -> None:
    """Every reader has its own items, also where its shard ends earlier than others; a resume takes the next ones."""
    tables = tables_of(root, "sharded", batch={"micro_size": 2})
    straight = train_here({**tables, "job": {**tables["job"], "output_dir": str(root / "straight")}}).rows
    rows = train_here({**tables, "job": {**tables["job"], "steps": 3}}).rows
    rows += train_here(tables).rows
    assert [row["loss"] for row in rows] == [row["loss"] for row in straight]
    with session_of({**tables, "job": {**tables["job"], "output_dir": str(root / "fresh")}}) as session:
        loader = session.feed.training_loader(session.progress)
        micro_batches = [micro for _ in range(2) for micro in loader.step()[0]]
        loader.close()
    mine = {tuple(ids.tolist()) for micro in micro_batches for ids in micro.batch["input_ids"]}
    size, rank = dist.get_world_size(), dist.get_rank()
    own = [flowing.item(number)["input_ids"].tolist() for number in range(rank, flowing.EPOCH, size)]
    assert mine == {tuple(ids) for ids in own[: 48 // size]}


def test_a_stream_that_depends_on_the_rank_does_not_hang(root) -> None:
    tables = tables_of(root, "by_rank", evaluation={"every_steps": 2})
    with pytest.raises(TrainingError, match="the stream ended earlier on some ranks than on others"):
        train_here(tables)


MIXTURE: dict[str, Any] = {
    "name": "mixture",
    "sources": {
        "many": {"name": "synthetic", "samples": 90, "weight": 3.0}, "few": {"name": "flowing:repeated", "weight": 1.0},
    },
    "phases": [{"from_step": 3, "weights": {"few": 1.0}}, {"from_step": 5, "weights": {"many": 1.0, "few": 1.0}}],
}  # fmt: skip
UNEVEN = {**MIXTURE, "sources": {**MIXTURE["sources"], "few": {"name": "flowing:short", "weight": 1.0}}}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batch", "mixture"),
    [({"global_size": 24, "micro_size": 2}, MIXTURE), ({"tokens": 150, "micro_tokens": 40}, UNEVEN)],
    ids=["samples", "tokens"],
)
@pytest.mark.shown_on(1, 2, 3)
def test_a_mixture_has_the_same_samples_on_any_ranks_and_goes_on(
    root, batch: dict[str, Any], mixture: dict[str, Any]
) -> None:
    """The sources that each step draws from, the samples of each step, and the losses over a resume."""
    tables = {**tables_of(root, ""), "batch": batch, "dataset": mixture}
    straight = train_here({**tables, "job": {**tables["job"], "output_dir": str(root / "straight")}}).rows
    rows = train_here({**tables, "job": {**tables["job"], "steps": 4}}).rows + train_here(tables).rows
    assert [row["loss"] for row in rows] == [row["loss"] for row in straight]
    checked = check(RawJob(tables, {}, "j"), None)
    data = open_data(checked.job, checked.parts)
    assert isinstance(data.training, Samples)
    begin = 0
    with session_of({**tables, "job": {**tables["job"], "output_dir": str(root / "fresh")}}) as session:
        loader = session.feed.training_loader(session.progress)
        for step in range(8):
            micro_batches, end = loader.step()
            taken = zip(loader.indices, micro_batches, strict=True)
            mine = [int(index) for indices, micro in taken if micro.counts for index in indices]
            everyone: list[list[int]] = gather_values(mine)
            found = sorted(index for one in everyone for index in one)
            assert found == sorted(data.order(begin, end).tolist())
            assert {index < 90 for index in found} == ({False} if step in (3, 4) else {True, False})
            begin = end
        loader.close()
    if "global_size" in batch:
        module = module_of(tables, torch.float32)
        drawn = [[data.training[int(i)] for i in data.order(24 * step, 24 * step + 24)] for step in range(8)]
        optimizer = torch.optim.SGD(module.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
        plain = train_plainly(
            module, optimizer, (lambda b=b: gpt_loss(module, *stacked(b)) for b in drawn), SGD["clip_norm"]
        )
        compare(straight, plain, *BOUNDS["fp32"])


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("layout", [nightly({}), {"sharding": {"stage": 2}}], ids=str)
def test_weighted_sentences_of_several_lengths(root, layout: dict[str, Any]) -> None:
    tables: dict[str, Any] = {
        **layout, "job": {"name": "weighted", "steps": 8, "seed": 9, "output_dir": str(root)},
        "model": {"name": "flowing:Mean", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "flowing:sentences"}, "optimizer": {"name": "sgd", "lr": 0.5},
        "batch": {"global_size": 24, "micro_size": 2}, "precision": {"mode": "fp32"},
    }  # fmt: skip
    rows = train_here({**tables, "job": {**tables["job"], "steps": 3}}).rows + train_here(tables).rows
    checked = check(RawJob(tables, {}, "j"), None)
    data, words = open_data(checked.job, checked.parts), flowing.Sentences()
    assert isinstance(data.order.__self__, WeightedOrder)
    module = built(tables, flowing.Mean)
    drawn = [data.order(24 * step, 24 * (step + 1)).tolist() for step in range(8)]
    assert not {index for step in drawn for index in step if index % 5 == 0}

    def loss(indices: list[int]) -> torch.Tensor:
        chosen = [words[index] for index in indices]
        return torch.stack([cross_entropy(module(ids[None]), label[None]) for ids, label in chosen]).mean()

    plain = train_plainly(module, torch.optim.SGD(module.parameters(), lr=0.5), (lambda i=i: loss(i) for i in drawn))
    assert [row["loss"] for row in rows] == pytest.approx([value for value, _ in plain], rel=3e-6)


EPOCH = 55
"""Samples of which batches of 24 leave 7: fewer than two for each of four ranks."""


@functools.lru_cache
def _plain_epochs(text: str, smaller: bool, rates: tuple[float, ...]) -> list[Step]:
    """A plain loop over epochs, as torch's DataLoader cuts them."""
    tables = json.loads(text)
    module, samples = module_of(tables, torch.float32), samples_of(tables)
    order = SampleOrder(EPOCH, tables["job"]["seed"], samples.fingerprint())
    optimizer = torch.optim.SGD(module.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
    cuts = [(24 * n, min(24 * n + 24, EPOCH)) for n in range(3 if smaller else 2)]
    places = [(epoch, *cut) for epoch in range(4) for cut in cuts]

    def loss_of(rate: float, epoch: int, begin: int, end: int) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate
        indices = order.at(EPOCH * epoch + begin, EPOCH * epoch + end)
        return gpt_loss(module, *stacked([samples[int(i)] for i in indices]))

    return train_plainly(
        module,
        optimizer,
        (functools.partial(loss_of, rate, *one) for rate, one in zip(rates, places, strict=True)),
        SGD["clip_norm"],
    )


@pytest.mark.parametrize("drops", [False, thorough(True)])
@pytest.mark.parametrize("layout", [nightly({}), {"sharding": {"stage": 3}}, {"parallelism": {"tensor": 2}}], ids=str)
def test_epochs_that_end_with_their_samples(root, layout: dict[str, Any], drops: bool) -> None:
    """Batches and learning rates by epochs, over a resume within the second one."""
    skip_unless_even(layout)
    by_epoch = {"name": "linear", "unit": "epoch"}
    tables = job(
        optimizer=SGD,
        job={"output_dir": str(root)},
        dataset={"samples": EPOCH},
        batch={"drop_last": drops},
        schedule=by_epoch,
    )
    del tables["job"]["steps"]
    rows = train_here(
        {**tables, "job": {**tables["job"], "epochs": 1.5}, "schedule": {**by_epoch, "name": "constant"}}
    ).rows
    tables["job"]["epochs"] = 4
    rows += train_here({**tables, **layout}).rows
    per_epoch = 2 if drops else 3
    expected = [SGD["lr"] * (1 if step < per_epoch + 1 else 1 - step // per_epoch / 3) for step in range(4 * per_epoch)]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    assert [row["tokens"] for row in rows] == [8 * n for n in ([24] * 8 if drops else [24, 24, 7] * 4)]
    compare(rows, _plain_epochs(json.dumps(tables), not drops, tuple(expected)), *BOUNDS["fp32"])
