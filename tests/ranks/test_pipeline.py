"""Pipelines: parameters that several ranks need, and measurements of the schedule."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.parallelism.pipeline.stages import PipelineStage
from modules import Half, built, foreign_steps, samples, sequence_of_halves
from plain import module_of
from test_stages import OPTIMIZERS, compare, reference
from torch import nn
from torch.nn.functional import cross_entropy
from training import Rows, job, session_of, train_here

from hpctrain.api import hookimpl
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.blame import retell_model_error
from hpctrain.training.loop import train

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]


def knotted(root, sharding: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {
        "job": {"name": "knotted", "steps": 6, "seed": 4, "output_dir": str(root)}, "plugins": {"load": ["knotted"]},
        "model": {"name": "knotted", **model}, "dataset": {"name": "modules:samples"}, "sharding": sharding,
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.1},
        "batch": {"global_size": 24, "micro_size": 3}, "precision": {"mode": "fp64"}, "parallelism": {"pipeline": 2},
    }  # fmt: skip


def knotted_alone(tables: dict[str, Any], frozen: str = "") -> list[Any]:
    module = module_of(tables, torch.float64)
    if frozen:
        module.get_parameter(frozen).requires_grad_(False)
    options = {key: value for key, value in tables["optimizer"].items() if key != "name"}
    return foreign_steps(module, tables, torch.optim.SGD, **options)


@pytest.mark.cases(nightly=["{'stage': 1}-"])
@pytest.mark.parametrize(
    ("sharding", "frozen"),
    [({"stage": 2}, "head.weight"), ({"stage": 1}, "")],
    ids=str,
)
def test_shared_parameters_of_every_kind(root, sharding: dict[str, Any], frozen: str) -> None:
    """Parameters owned by the last rank, by the first, and by no moved module; one of them is frozen."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    tables = knotted(root, sharding, **({"freeze": [frozen]} if frozen else {}))
    expected = knotted_alone({**tables, "job": {**tables["job"], "steps": 9}}, frozen)
    rows = train_here(tables).rows
    tables["job"]["steps"] = 8
    rows += train_here({**tables, "parallelism": {}}).rows  # names and values are those of the full model
    tables["job"]["steps"] = 9
    rows += train_here(tables).rows
    compare(rows, expected, losses=1e-10, norms=1e-10)


@pytest.mark.thorough
def test_tied_embeddings_are_one_parameter(root) -> None:
    """The parameter is sharded, updated and saved by one rank. A resume is exact, which needs both ends to be equal to the bit."""
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")

    def tables(output: str, steps: int) -> dict[str, Any]:
        return job(
            job={"output_dir": str(root / output), "steps": steps}, model={"tie_embeddings": True},
            optimizer=OPTIMIZERS["sgd"], sharding={"stage": 1}, batch={"micro_size": 3},
            parallelism={"pipeline": 2},
        )  # fmt: skip

    straight = train_here(tables("straight", 6)).rows
    compare(straight, reference(tables("", 6))[1], losses=2e-6, norms=1e-5)
    train_here(tables("halves", 3))
    resumed = train_here(tables("halves", 6)).rows
    assert [(row["loss"], row["grad_norm"]) for row in resumed] == [
        (row["loss"], row["grad_norm"]) for row in straight[3:]
    ]
    with session_of(tables("halves", 6)) as session:
        named = [name for name, _ in session.model.module.named_parameters()]
        first = "token_embedding.weight" in named
        assert "head.weight" not in named
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, first)
        assert everyone.count(True) == len(everyone) / 2
        assert {piece.name for piece in session.model.pieces} <= set(named)


@pytest.mark.cases(nightly=["zero-bubble"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.shown_on(2)
def test_nothing_is_trained_before_the_last_stage(root, schedule: str) -> None:
    """The last stage sends back no gradient, with which zero-bubble would begin."""

    def tables(output: str, parallelism: dict[str, Any]) -> dict[str, Any]:
        return job(
            job={"output_dir": str(root / output), "steps": 3}, model={"freeze": ["*embedding*", "layers.0.*"]},
            optimizer=OPTIMIZERS["sgd"], batch={"micro_size": 6}, parallelism=parallelism,
        )  # fmt: skip

    rows = train_here(tables("cut", {"pipeline": {"size": 2, "schedule": schedule}})).rows
    compare(rows, [(row["loss"], row["grad_norm"]) for row in train_here(tables("whole", {})).rows], 2e-6, 1e-5)


@pytest.mark.cases(default=["{'parallelism': {'pipeline': 2}}"], rest="thorough")
@pytest.mark.shown_on(2)
@pytest.mark.parametrize(
    "layout",
    [
        {"parallelism": {"pipeline": 2}},
        {
            "parallelism": {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}},
            "activation_checkpointing": {"mode": "full"},
        },
        {"sharding": {"stage": 3}, "activation_checkpointing": {"mode": "full", "every": 3}},
    ],
    ids=str,
)
def test_an_nn_sequential_of_ones_own_tells_its_blocks(root, layout: dict[str, Any], caplog) -> None:
    tables = {
        **knotted(root, {"stage": 0}), "model": {"name": "modules:sequence_of_halves", "loss": "torch.nn.functional:cross_entropy"},
        "precision": {"mode": "fp32"}, "parallelism": {}, **layout,
    }  # fmt: skip
    options = {key: value for key, value in tables["optimizer"].items() if key != "name"}
    expected = foreign_steps(built(tables, sequence_of_halves), tables, torch.optim.SGD, **options)
    compare(train_here(tables).rows, expected, losses=2e-6, norms=1e-5)
    assert "no blocks" not in caplog.text


class Outputs(NamedTuple):
    logits: torch.Tensor
    kind: str


class NamedHead(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Outputs(super().forward(x), "logits")


def named() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 5), Half(), Half(), nn.Flatten(), NamedHead(15, 7))


def both(split: str) -> Any:
    return samples("train")


def loss_of_named(outputs: Outputs, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.logits, target)


def crooked() -> nn.Sequential:
    blocks = [Half(), Half()]
    blocks[1].wide = nn.Linear(2, 5)
    return nn.Sequential(nn.Embedding(7, 5), *blocks, nn.Flatten(), nn.Linear(15, 7))


@pytest.mark.cases(nightly=["zero-bubble"])
@pytest.mark.shown_on(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_outputs_of_any_form_reach_the_loss(root, schedule: str) -> None:
    """In training and in evaluations, as without a pipeline."""
    tables = knotted(root, {"stage": 0}, name="test_pipeline:named", loss="test_pipeline:loss_of_named")
    tables |= {"plugins": {}, "evaluation": {"every_steps": 3}, "dataset": {"name": "test_pipeline:both"}}
    found = []
    for number, parallelism in enumerate(({"pipeline": {"size": 2, "schedule": schedule}}, {})):
        tables["job"] = {**tables["job"], "output_dir": str(root / str(number))}
        rows = train_here({**tables, "parallelism": parallelism})
        found.append(
            [(row["loss"], row["grad_norm"]) for row in rows.rows]
            + [(row["evaluation_loss"],) for row in rows.evaluations]
        )
    for pipelined, plain in zip(*found, strict=True):
        assert pipelined == pytest.approx(plain, rel=1e-10)


@pytest.mark.shown_on(2)
def test_an_error_of_shapes_in_a_stage_names_the_layer(root) -> None:
    tables = {
        **knotted(root, {"stage": 0}, name="test_pipeline:crooked", loss="torch.nn.functional:cross_entropy"),
        "plugins": {},
    }
    with session_of(tables) as session:
        stage = session.model.runner._stages.get(1)  # type: ignore[attr-defined]
        if stage is None:
            return
        with pytest.raises(
            TrainingError, match=r"in the layer wide of Half, Linear\(in_features=2, .*, on \(3, 3, 1\) float64"
        ):
            try:
                numbers, ids = torch.zeros(3, 3, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
                stage(numbers.to(session.device), ids.to(session.device))
            except RuntimeError as error:
                retell_model_error(error)


class Noisy(nn.Module):
    """A block with a changing buffer and random numbers, which returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(self.linear(x)), 0.3, self.training).view_as(x)


def noisy() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 5), Noisy(), Noisy(), nn.Flatten(), nn.Linear(15, 7))


@pytest.mark.shown_on(2)
def test_the_forward_that_shows_shapes_leaves_no_trace(root) -> None:
    """torch runs such a forward before the first step of each start, on noise after the first stage."""

    def rows(output: str, steps: int) -> list[tuple[float, float]]:
        tables = knotted(root, {"stage": 0}, name="test_pipeline:noisy", loss="torch.nn.functional:cross_entropy")
        tables["job"] |= {"steps": steps, "output_dir": str(root / output)}
        tables |= {"plugins": {}, "parallelism": {"pipeline": {"size": 2, "schedule": "zero-bubble"}}}
        with session_of(tables, found := Rows(None)) as session:
            train(session, StopRequest())
            seen = [int(one) for name, one in session.model.module.named_buffers() if "tracked" in name]
        assert seen == [8 * steps]
        return [(row["loss"], row["grad_norm"]) for row in found.rows]

    straight = rows("straight", 2)
    assert rows("halves", 1) + rows("halves", 2) == straight


def stage_of(*blocks: nn.Module) -> PipelineStage:
    spec: Any = SimpleNamespace(name="own", ends=lambda module: ([], []))
    precision: Any = SimpleNamespace(forward=lambda device: nullcontext())
    return PipelineStage(nn.Module(), spec, precision, torch.device("cpu"), blocks, first=False, last=False)


def test_a_block_that_gives_no_tensor_is_told() -> None:
    with pytest.raises(
        UsageError, match="a block of own for the next stage is tuple, expected a floating-point tensor"
    ):
        stage_of(nn.LSTM(2, 2))(torch.zeros(1, 3, 2), torch.zeros(1, dtype=torch.int64))


def test_a_stage_may_begin_in_place() -> None:
    """The input from the previous stage is a leaf here."""
    received = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    stage_of(nn.ReLU(inplace=True))(received, torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert received.tolist() == [[-1, 2]] and received.grad.tolist() == [[0, 1]]


@pytest.mark.shown_on(2)
def test_no_two_blocks_draw_alike(root) -> None:
    """Dropout at the same place of two pipeline stages would drop the same activations."""
    tables = job(
        job={"output_dir": str(root), "steps": 2},
        model={"layers": 4},
        parallelism={"pipeline": 2},
        batch={"micro_size": 8},
    )
    drawn: list[float] = []
    with session_of(tables) as session:
        for block in session.parts.model.blocks(session.model.module):
            block.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
        train(session, StopRequest())
    everyone: list[Any] = [None] * dist.get_world_size()
    # of the second step, because torch runs an extra forward before the first
    dist.all_gather_object(everyone, drawn[-2 * 3 :])
    assert len({number for of_rank in everyone for number in of_rank}) == 4 * 3, "blocks x micro batches"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pipeline", "layers", "micro_batches", "formula"),
    [
        ({"size": 2, "schedule": "1f1b"}, 2, 6, 1 / 7),
        ({"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}, 4, 2, 1 / 5),
    ],
    ids=str,
)
@pytest.mark.shown_on(2)
def test_the_bubble_is_measured(
    root, pipeline: dict[str, Any], layers: int, micro_batches: int, formula: float
) -> None:
    """The formula assumes equal blocks. Blocks that mostly sleep take equal time, however busy the cores are."""
    tables = job(
        job={"output_dir": str(root), "steps": 5}, model={"layers": layers}, parallelism={"pipeline": pipeline},
        batch={"micro_size": 24 // micro_batches},
    )  # fmt: skip
    rows = Rows(None)
    with session_of(tables, rows) as session:
        for block in session.parts.model.blocks(session.model.module):
            block.register_forward_hook(lambda *_: time.sleep(0.02))
            block.register_full_backward_hook(lambda *_: time.sleep(0.04))
        train(session, StopRequest())
        assert f"bubble {formula:.0%} of a step" in str(session.model.runner.describe(micro_batches))
    assert "pipeline_bubble" not in rows.rows[0]
    measured = [row["pipeline_bubble"] for row in rows.rows[1:]]
    # at least one of the steps is not delayed by the machine's other work
    assert min(measured) == pytest.approx(formula, abs=0.12), measured


class Phases:
    """Collects the phases of the second step on this rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @hookimpl
    def hpctrain_phase_begin(self, phase: str, step: int) -> None:
        self._see("begin", phase, step)

    @hookimpl
    def hpctrain_phase_end(self, phase: str, step: int) -> None:
        self._see("end", phase, step)

    def _see(self, which: str, phase: str, step: int) -> None:
        if step == 1 and phase in ("forward", "backward"):
            self.seen.append((which, phase))


@pytest.mark.shown_on(2)
def test_phases_come_in_the_order_of_the_schedule(root) -> None:
    """1F1B on two stages: the first stage is one forward ahead (Narayanan et al., 2021, fig. 4)."""
    tables = job(
        job={"output_dir": str(root), "steps": 2},
        batch={"micro_size": 8},
        parallelism={"pipeline": {"size": 2, "schedule": "1f1b"}},
    )
    with session_of(tables, phases := Phases()) as session:
        train(session, StopRequest())
    order = {0: "FFBFBB", 1: "FBFBFB"}[dist.get_rank()]
    names = ["forward" if letter == "F" else "backward" for letter in order]
    assert phases.seen == [(which, name) for name in names for which in ("begin", "end")]
