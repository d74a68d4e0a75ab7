"""Sharding stages on 1 to 8 ranks: the losses and gradient norms are those of a plain loop in one process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from live_bytes import LiveBytes
from modules import Langevin, Normed, Switched, both_splits, built, foreign_steps, odd_steps
from plain import Step, batches_of, gpt_loss, module_of, samples_of, stacked, train_gpt, train_plainly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import SGD, TINY, job, nightly, own_device, session_of, thorough, train_here

from hpctrain.base.errors import ContractError, UsageError
from hpctrain.contracts.dataset import Samples
from hpctrain.data.order import SampleOrder
from hpctrain.model.batch_norm import synchronize_batch_norms
from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.user_code.dataset import UserDataset
from hpctrain.training.loop import train

pytestmark = pytest.mark.usefixtures("world")

STAGES = [0, 1, 2, 3]
SHARDED = [1, 2, 3]
VARIANTS = [
    # optimizer, accumulated, activation checkpointing
    ("adamw", False, "none"),
    ("sgd", True, "none"),
    ("sgd", False, "full"),
    ("adamw", True, "full"),
]
OPTIMIZERS = {"adamw": TINY["optimizer"], "sgd": SGD}


@functools.lru_cache
def _trained(text: str, dtype: torch.dtype) -> tuple[torch.nn.Module, list[Step]]:
    return train_gpt(json.loads(text), dtype)


def reference(tables: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, list[Step]]:
    """The result of the job in one process, without layout, sharding and precision."""
    kept = {key: tables[key] for key in ("job", "model", "dataset", "optimizer", "batch")}
    kept["job"] = {key: value for key, value in kept["job"].items() if key != "output_dir"}
    kept["batch"] = {**kept["batch"], "micro_size": 1}
    return _trained(json.dumps(kept), dtype)


def micro_size(accumulated: bool) -> int:
    """For 24 samples per step: all at once, or in two micro batches (three if a rank's share is odd)."""
    share = 24 // dist.get_world_size()
    return (share // 2 if share % 2 == 0 else 1) if accumulated else share


def compare(rows: Sequence[dict[str, Any]], steps: Sequence[Step], losses: float, norms: float) -> dict[str, float]:
    """Check relative bounds on losses and gradient norms; return the largest deviations."""
    expected_losses, expected_norms = zip(*steps, strict=True)
    got_losses, got_norms = [row["loss"] for row in rows], [row["grad_norm"] for row in rows]
    assert got_losses == pytest.approx(expected_losses, rel=losses)
    assert got_norms == pytest.approx(expected_norms, rel=norms)
    return {"loss": deviation(got_losses, expected_losses), "norm": deviation(got_norms, expected_norms)}


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def layout(stage: int, replicate: int = 1) -> str:
    shard = dist.get_world_size() // replicate
    return f"stage {stage}, " + (
        "replicated" if stage == 0 else f"{replicate} x {shard}" if replicate > 1 else f"{shard}"
    )


@pytest.mark.cases(
    default=[
        "1-1-('sgd', True, 'none')",
        "1-1-('sgd', False, 'full')",
        "2-1-('adamw', False, 'none')",
        "2-1-('sgd', True, 'none')",
        "2-1-('sgd', False, 'full')",
    ],
    thorough=["3-2-('adamw', False, 'none')"],
    rest="nightly",
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("stage", "replicate"),
    [
        *((stage, 1) for stage in STAGES),
        *(pytest.param(stage, 2, marks=pytest.mark.ranks(4)) for stage in SHARDED),
    ],
)
def test_fp32(root, record, stage: int, replicate: int, variant: tuple[str, bool, str]) -> None:
    if dist.get_world_size() % replicate:
        pytest.skip("the replicas need an even number of ranks")
    optimizer, accumulated, checkpointing = variant
    tables = job(
        job={"output_dir": str(root)}, optimizer=OPTIMIZERS[optimizer], sharding={"stage": stage},
        batch={"micro_size": micro_size(accumulated)}, activation_checkpointing={"mode": checkpointing},
        parallelism={"replicate": replicate},
    )  # fmt: skip
    rows = train_here(tables).rows
    _, steps = reference(tables)
    found = compare(rows, steps, *BOUNDS["fp32"])
    if optimizer == "sgd":
        assert sum(norm > SGD["clip_norm"] for _, norm in steps) >= 3, "the clip must bind"
    record("fp32", layout(stage, replicate), found, optimizer, accumulated, checkpointing)


@pytest.mark.cases(thorough=["3-1"], nightly=["1-2", "2-2", "3-2"])
@pytest.mark.parametrize(
    ("stage", "replicate"),
    [
        *(pytest.param(stage, 1, marks=pytest.mark.shown_on(2)) for stage in STAGES),
        *(pytest.param(stage, 2, marks=pytest.mark.ranks(4)) for stage in SHARDED),
    ],
)
def test_fp64(root, record, stage: int, replicate: int) -> None:
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, sharding={"stage": stage}, precision={"mode": "fp64"},
        batch={"micro_size": micro_size(True)}, parallelism={"replicate": replicate},
    )  # fmt: skip
    rows = train_here(tables).rows
    found = compare(rows, reference(tables, torch.float64)[1], *BOUNDS["fp64"])
    record("fp64", layout(stage, replicate), found, "sgd", True, "none")


@pytest.mark.cases(nightly=["bf16-3-False"])
@pytest.mark.parametrize(("stage", "gathers"), [*((stage, stage == 3) for stage in STAGES), (3, False)])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.shown_on(2)
def test_16_bits_stay_near_the_fp32_curve(root, record, mode: str, stage: int, gathers: bool) -> None:
    gathers = gathers and own_device().type != "cpu"
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, precision={"mode": mode},
        sharding={"stage": stage, **({"gather_dtype": "parameters"} if stage == 3 and not gathers else {})},
        batch={"micro_size": micro_size(True)},
    )  # fmt: skip
    rows = train_here(tables).rows
    found = compare(rows, reference(tables)[1], *BOUNDS[mode])
    assert found["loss"] > 1e-7, "16 bits cannot give the same numbers"
    record(mode, layout(stage) + (", gathered in 16 bits" if gathers else ""), found, "sgd", True, "none")


@pytest.mark.shown_on(2)
def test_a_forward_of_stage_3_leaves_no_weights_in_16_bits(root) -> None:
    tables = job(
        job={"output_dir": str(root)}, precision={"mode": "bf16"}, sharding={"stage": 3, "gather_dtype": "parameters"},
        model={"hidden_size": 128, "layers": 12},
    )  # fmt: skip
    with session_of(tables) as session, torch.no_grad():
        ids = torch.zeros(1, 4, dtype=torch.long, device=own_device())
        session.model.module(ids)  # makes buffers for what is gathered, which stay
        with LiveBytes() as live, session.parts.precision.forward(own_device()):
            session.model.module(ids)
            kept = live.bytes
        blocks = 12 * 12 * 128**2
        assert kept < 0.25 * 2 * blocks


@pytest.mark.cases(thorough=["3"], nightly=["0"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.shown_on(2)
def test_fp16_leaves_out_an_overflow_on_all_ranks(root, stage: int) -> None:
    """The scale is too high at first. From the first taken step on, the curve is the reference's."""
    precision = {"mode": "fp16", "initial_scale": 2.0**24, "hysteresis": 1}
    tables = job(
        job={"output_dir": str(root)},
        optimizer={"name": "sgd", "lr": 1e-9},
        sharding={"stage": stage},
        precision=precision,
    )
    rows = train_here(tables).rows
    skipped = [row.get("skipped", False) for row in rows]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    steps = reference(tables)[1]  # at this rate a step changes nothing, skipped or not
    taken = skipped.index(False)
    compare(rows[taken:], steps[taken:], losses=5e-4, norms=5e-3)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, skipped)
    assert all(one == skipped for one in everyone)


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (0, {"reduce_bucket_size": 1000}),
    (0, {"reduce_bucket_size": "1KB", "overlap_communication": False}),
    (1, {"reduce_bucket_size": 1000, "overlap_communication": True}),
    (1, {"allgather_bucket_size": 4000}),
    (2, {"reduce_bucket_size": 1000}),
    (2, {"reduce_bucket_size": 3000, "overlap_communication": False}),
    (2, {"offload_optimizer": True, "pin_memory": False}),
    (3, {"prefetch": 0, "reshard_after_forward": False}),
    (3, {"prefetch": 2, "wrap": "class:Attention", "offload_parameters": True}),
    (3, {"wrap": "size", "min_parameters": 1000, "offload_optimizer": True}),
]


@pytest.mark.cases(
    default=["2-{'offload_optimizer': True, 'pin_memory': False}"],
    thorough=["3-{'prefetch': 0, 'reshard_after_forward': False}"],
    rest="nightly",
)
@pytest.mark.parametrize(("stage", "options"), OPTIONS, ids=str)
@pytest.mark.shown_on(3)
def test_options_change_no_number(root, stage: int, options: dict[str, Any]) -> None:
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, sharding={"stage": stage, **options},
        batch={"micro_size": micro_size(True)},
    )  # fmt: skip
    compare(train_here(tables).rows, reference(tables)[1], losses=2e-6, norms=1e-5)


@pytest.mark.cases(thorough=["3"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.shown_on(2)
def test_inputs_of_blocks_in_host_memory_change_no_number(root, stage: int) -> None:
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, sharding={"stage": stage}, batch={"micro_size": micro_size(True)},
        activation_checkpointing={"mode": "full", "offload": True},
    )  # fmt: skip
    compare(train_here(tables).rows, reference(tables)[1], losses=2e-6, norms=1e-5)


@pytest.mark.cases(thorough=["bf16-3"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["bf16", nightly("fp16")])
@pytest.mark.shown_on(3)
def test_gradients_travel_in_16_bits(root, name: str, stage: int) -> None:
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, sharding={"stage": stage}, compression={"name": name},
        batch={"micro_size": micro_size(True)}, model={"layers": 4},  # as many gathers and sums at a time as can be
    )  # fmt: skip
    rows = train_here(tables).rows
    found = compare(rows, reference(tables)[1], losses=2e-3, norms=5e-2)
    assert found["norm"] > 1e-7 or dist.get_world_size() == 1


@pytest.mark.cases(default=["{'stage': 3, 'wrap': 'class:Twin'}-SGD"], rest="nightly")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, nightly(torch.optim.AdamW)])
@pytest.mark.parametrize(
    "sharding",
    [*({"stage": stage} for stage in STAGES), *({"stage": 3, "wrap": f"class:{one}"} for one in ("Half", "Twin"))],
    ids=str,
)
@pytest.mark.shown_on(3)
def test_tied_unused_frozen_and_tiny_parameters(root, sharding: dict[str, Any], optimizer: Any) -> None:
    """A parameter that a rank did not use, or does not hold, must not block other ranks. Stage 3 refuses scalars."""
    options = {"lr": 0.1}
    tables: dict[str, Any] = {
        "job": {"name": "odd", "steps": 6, "seed": 4, "output_dir": str(root)},
        "model": {
            "name": "modules:Odd", "loss": "torch.nn.functional:cross_entropy", "freeze": ["frozen"],
            **({"scalar": True} if sharding["stage"] < 3 else {}),
        },
        "dataset": {"name": "modules:samples"}, "optimizer": {"name": f"torch.optim:{optimizer.__name__}", **options},
        "batch": {"global_size": 24, "micro_size": 1}, "precision": {"mode": "fp64"}, "sharding": sharding,
    }  # fmt: skip
    torch.set_default_dtype(torch.float64)
    try:
        expected = odd_steps(tables, optimizer, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    compare(train_here(tables).rows, expected, losses=1e-10, norms=1e-10)


@pytest.mark.cases(default=["1"], rest="nightly")
@pytest.mark.parametrize(
    "stage", [0, 1, 2]
)  # stage 3 gathers a unit where it is used: ranks must use them in one order
@pytest.mark.shown_on(2)
def test_ranks_that_use_parameters_in_another_order(root, stage: int) -> None:
    tables: dict[str, Any] = {
        "job": {"name": "switched", "steps": 4, "seed": 1, "output_dir": str(root)},
        "model": {"name": "modules:Switched", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "modules:samples"}, "optimizer": {"name": "torch.optim:AdamW", "lr": 0.1},
        "batch": {"global_size": 24, "micro_size": 1}, "precision": {"mode": "fp64"},
        "sharding": {"stage": stage, "reduce_bucket_size": 1},
    }  # fmt: skip
    torch.set_default_dtype(torch.float64)
    try:
        expected = foreign_steps(built(tables, Switched), tables, torch.optim.AdamW, lr=0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    compare(train_here(tables).rows, expected, losses=1e-10, norms=1e-10)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.shown_on(2)
def test_what_forwards_write_into_buffers_is_one_rank_s_when_it_is_saved(root, stage: int) -> None:
    tables: dict[str, Any] = {
        "job": {"name": "averaging", "steps": 2, "output_dir": str(root)},
        "model": {"name": "modules:Averaging", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "modules:samples"}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 12, "micro_size": 3}, "sharding": {"stage": stage},
    }  # fmt: skip
    with session_of(tables) as session:
        train(session, StopRequest())
        mine = torch.cat([buffer.double().reshape(-1) for buffer in session.model.module.buffers()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(one, mine) for one in everyone)
    assert mine[:7].abs().max() > 0


@pytest.mark.cases(default=["layout1"], rest="nightly")
@pytest.mark.parametrize("layout", [{"sharding": {"stage": 3}}, {"activation_checkpointing": {"mode": "full"}}, {}])
@pytest.mark.shown_on(2, 3)
def test_batch_norms_over_the_ranks(root, layout: dict[str, Any]) -> None:
    """The losses, and the evaluations by running means, of one process with the whole batch in a micro batch."""
    tables: dict[str, Any] = {
        "job": {"name": "normed", "steps": 4, "seed": 3, "output_dir": str(root)},
        "model": {"name": "modules:Normed", "loss": "torch.nn.functional:cross_entropy", "sync_batch_norm": True},
        "dataset": {"name": "modules:both_splits"}, "optimizer": {"name": "torch.optim:AdamW", "lr": 0.1},
        "batch": {"global_size": 24, "micro_size": 24 // dist.get_world_size()}, "precision": {"mode": "fp64"},
        "evaluation": {"every_steps": 2}, **layout,
    }  # fmt: skip
    found = train_here(tables)
    torch.set_default_dtype(torch.float64)
    try:
        module = built(tables, Normed)
    finally:
        torch.set_default_dtype(torch.float32)
    opened = UserDataset("modules:both_splits", {}).open("train", None)  # type: ignore[arg-type]
    assert isinstance(opened, Samples)
    order = SampleOrder(len(opened), 3, opened.fingerprint())
    evaluated = []

    def losses() -> Iterator[Callable[[], Tensor]]:
        for step in range(4):
            if step == 2:
                evaluated.append(evaluation(module))
            chosen = (opened[int(index)] for index in order.at(24 * step, 24 * step + 24))
            ids, labels = (torch.stack(one) for one in zip(*chosen, strict=True))
            yield lambda ids=ids, labels=labels: cross_entropy(module.train()(ids), labels)

    expected = train_plainly(module, torch.optim.AdamW(module.parameters(), lr=0.1), losses())
    compare(found.rows, expected, losses=1e-10, norms=1e-10)
    evaluated.append(evaluation(module))
    assert [row["evaluation_loss"] for row in found.evaluations] == pytest.approx(evaluated, rel=1e-10)


def test_a_batch_norm_with_code_of_its_own_is_refused(root) -> None:
    tables: dict[str, Any] = {
        "job": {"name": "normed", "steps": 4, "seed": 3, "output_dir": str(root)},
        "model": {"name": "modules:OwnNorm", "loss": "torch.nn.functional:cross_entropy", "sync_batch_norm": True},
        "dataset": {"name": "modules:samples"}, "optimizer": {"name": "torch.optim:AdamW", "lr": 0.1},
        "batch": {"global_size": 24, "micro_size": 1},
    }  # fmt: skip
    with pytest.raises(UsageError, match="has a _Scaled, a BatchNorm with code of its own"):
        train_here(tables)


def test_second_gradients_of_a_batch_norm_over_ranks_are_refused() -> None:
    norm = nn.BatchNorm1d(3)
    synchronize_batch_norms(norm, "norm", dist.group.WORLD)  # type: ignore[arg-type]
    inputs = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(inputs).square().sum(), inputs, create_graph=True)
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()  # type: ignore[no-untyped-call]


def evaluation(module: nn.Module) -> float:
    ids, labels = (torch.stack(one) for one in zip(*both_splits("validation"), strict=True))
    with torch.no_grad():
        return cross_entropy(module.eval()(ids), labels).item()


@pytest.mark.cases(thorough=["3"])
@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.shown_on(3)
def test_evaluation_where_the_ranks_get_different_numbers_of_samples(root, stage: int) -> None:
    tables = job(
        job={"output_dir": str(root), "steps": 4}, dataset={"validation_samples": 7}, sharding={"stage": stage},
        evaluation={"every_steps": 2},
    )  # fmt: skip
    rows = train_here(tables)
    module, steps = reference(tables)
    compare(rows.rows, steps, losses=2e-6, norms=1e-5)
    samples = samples_of(tables, "validation")
    with torch.no_grad():
        expected = gpt_loss(module, *stacked([samples[i] for i in range(7)])).item()
    assert [row["step"] for row in rows.evaluations] == [2, 4]
    assert rows.evaluations[-1]["evaluation_loss"] == pytest.approx(expected, rel=2e-6)
    assert rows.evaluations[-1]["evaluation_tokens"] == 7 * 8


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.shown_on(3)), nightly("sgd")])
def test_resume_from_every_stage_in_another(root, optimizer: str) -> None:
    """Each stage resumes from the previous one, and the curve is that of an uninterrupted run."""
    stages = [1, 3, 2, 1, 2, 0, 3, 1, 0, 2, 2, 3, 3, 0]
    rows = []
    for number, stage in enumerate(stages, 1):
        tables = job(
            job={"output_dir": str(root), "steps": number}, optimizer=OPTIMIZERS[optimizer],
            sharding={"stage": stage}, batch={"micro_size": micro_size(True)},
        )  # fmt: skip
        rows += train_here(tables).rows
    assert [row["step"] for row in rows] == list(range(1, len(stages) + 1))
    compare(rows, reference(tables)[1], losses=4e-6, norms=2e-5)


@pytest.mark.cases(nightly=["3"], rest="thorough")
@pytest.mark.parametrize("stage", [0, nightly(1), nightly(2), 3])
@pytest.mark.shown_on(3)
def test_numbers_in_an_optimizer_s_state_come_back(root, stage: int) -> None:
    """Each rank has only the numbers of its own pieces."""

    def with_counting(output: str, steps: int) -> dict[str, Any]:
        return job(
            job={"output_dir": str(root / output), "steps": steps}, sharding={"stage": stage},
            optimizer={"name": "modules:Counting", "lr": 0.1},
        )  # fmt: skip

    straight = train_here(with_counting("straight", 6)).rows
    train_here(with_counting("halves", 3))
    resumed = train_here(with_counting("halves", 6)).rows
    assert [row["loss"] for row in resumed] == [row["loss"] for row in straight[3:]]


@pytest.mark.shown_on(3)
def test_parameter_groups(root) -> None:
    """A rank without parameters of a group still has the group; all ranks report the first group's rate."""
    groups = [{"pattern": "position_embedding.*", "lr": 0.5}, {"max_dims": 1, "weight_decay": 0.0}]
    curves = []
    for stage in STAGES:
        tables = job(
            job={"output_dir": str(root / str(stage)), "steps": 4},
            sharding={"stage": stage},
            optimizer={"groups": groups},
        )
        rows = train_here(tables).rows
        assert {row["lr"] for row in rows} == {0.5}
        curves.append([row["loss"] for row in rows])
    assert curves[0][0] != curves[0][-1]
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=2e-6)


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.shown_on(2, 3, 4)
def test_an_axis_whose_ranks_compute_the_same(root) -> None:
    """A third party's axis (own_axis.py): the loss is counted once, in training and in evaluation."""
    size = dist.get_world_size() if dist.get_world_size() < 4 else 2
    tables = job(
        job={"output_dir": str(root)}, optimizer=SGD, precision={"mode": "fp64"}, parallelism={"repeat": size},
        plugins={"load": ["own_axis"]}, evaluation={"every_steps": 10}, batch={"micro_size": 2},
    )  # fmt: skip
    found = train_here(tables)
    compare(found.rows, reference(tables, torch.float64)[1], *BOUNDS["fp64"])
    del tables["parallelism"]
    tables["job"]["output_dir"] = str(root / "alone")
    alone = train_here(tables)
    assert found.evaluations[0]["evaluation_tokens"] == alone.evaluations[0]["evaluation_tokens"]
    assert found.evaluations[0]["evaluation_loss"] == pytest.approx(alone.evaluations[0]["evaluation_loss"], rel=1e-9)


def drawing(root, **tables: Any) -> dict[str, Any]:
    optimizer = {"name": "modules:Langevin", "lr": 0.05}
    return job(**{"job": {"output_dir": str(root)}, "optimizer": optimizer, "precision": {"mode": "fp64"}, **tables})


@pytest.mark.parametrize("stage", [thorough(0), 1, nightly(2), thorough(3)])
def test_an_optimizer_that_draws(root, stage: int) -> None:
    """Replicas draw alike, at stage 0 as one process, and a resume goes on with the same numbers."""
    whole = train_here(drawing(root / "whole", sharding={"stage": stage})).rows
    if stage == 0:
        tables = drawing(root)
        module = module_of(tables, torch.float64)
        optimizer = Langevin(module.parameters(), lr=0.05, seed=11)
        losses = (functools.partial(gpt_loss, module, *batch) for batch in batches_of(tables))
        compare(whole, train_plainly(module, optimizer, losses), *BOUNDS["fp64"])
    halves = drawing(root / "halves", sharding={"stage": stage}, job={"output_dir": str(root / "halves"), "steps": 4})
    first = train_here(halves).rows
    halves["job"]["steps"] = 6
    again = [*first, *train_here(halves).rows]
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]


@pytest.mark.ranks(2)
def test_an_optimizer_that_draws_is_refused_where_ranks_share_some_values_only(root) -> None:
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    with pytest.raises(
        ContractError, match="'modules:Langevin' draws random numbers in its step, expected none in a layout with"
    ):
        train_here(drawing(root, parallelism={"tensor": 2}))
