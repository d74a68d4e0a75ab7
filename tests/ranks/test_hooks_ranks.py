"""What hooks see of the model under every kind of layout is the model of one process; so are the hooks that build on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import batches_of, gpt_loss, module_of, samples_of, stacked, train_gpt
from torch import Tensor
from training import SGD, job, nightly, session_of, train_here

from hpctrain.api import LiveModel, Piece, UsageError, hookimpl
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.mesh import build_meshes, layout_of
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train
from hpctrain.training.over_ranks import FullParameters

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

LAYOUTS: list[dict[str, Any]] = [
    {}, {"sharding": {"stage": 1}}, {"sharding": {"stage": 2}}, {"sharding": {"stage": 3}}, {"parallelism": {"tensor": 2}},
    {"parallelism": {"context": 2}}, {"parallelism": {"pipeline": 2}, "batch": {"micro_size": 3}},
    {"parallelism": {"tensor": 2}, "sharding": {"stage": 3}},
    {"parallelism": {"tensor": 2, "pipeline": 2}, "batch": {"micro_size": 3}},
]  # fmt: skip
everywhere = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
on_four = pytest.mark.parametrize(
    "layout", [one if n in (3, 5, 7, 8) else nightly(one) for n, one in enumerate(LAYOUTS)], ids=str
)


def tables_of(root: Any, layout: dict[str, Any], **tables: Any) -> dict[str, Any]:
    needed = 1
    for size in layout.get("parallelism", {}).values():
        needed *= size if isinstance(size, int) else size["size"]
    if dist.get_world_size() % needed:
        pytest.skip(f"needs a multiple of {needed} ranks")
    made = job(
        job={"output_dir": str(root), "steps": 4}, optimizer=SGD, precision={"mode": "fp64"},
        dataset={"validation_samples": 7}, **layout,
    )  # fmt: skip
    return {**made, **tables}


class Reference:
    """One process: after each step the parameters, and the clipped gradients."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self.module = module_of(tables, torch.float64)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=SGD["lr"], momentum=SGD["momentum"])
        self.values: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        for batch in batches_of(tables):
            optimizer.zero_grad()
            gpt_loss(self.module, *batch).backward()
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
            for gradient in gradients:
                gradient *= min(1.0, SGD["clip_norm"] / norm)
            optimizer.step()
            named = dict(self.module.named_parameters())
            self.values.append({name: p.detach().clone() for name, p in named.items()})
            self.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})


class Looks:
    """Asks for everything after each step, and counts what forwards give."""

    def __init__(self) -> None:
        self.values: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.samples = 0

    @hookimpl
    def hpctrain_outputs(self, outputs: Any, batch: Any) -> None:
        assert outputs.shape[:2] == batch["labels"].shape
        self.samples += len(outputs)

    @hookimpl
    def hpctrain_step_end(self, model: LiveModel) -> None:
        self.values.append({name: model.value(name).cpu() for name in model.shapes})
        self.gradients.append({name: model.gradient(name).cpu() for name in model.shapes})
        with pytest.raises(UsageError, match="no trained parameter"):
            model.value("nothing")


class NoOutputs(Looks):
    """For models that don't give logits of each token."""

    @hookimpl
    def hpctrain_outputs(self) -> None: ...


@pytest.mark.cases(
    default=["{}"],
    thorough=[
        "{'sharding': {'stage': 3}}",
        "{'parallelism': {'context': 2}}",
        "{'parallelism': {'pipeline': 2}, 'batch': {'micro_size': 3}}",
    ],
    rest="nightly",
)
@everywhere
def test_whole_parameters_and_gradients(root, layout: dict[str, Any]) -> None:
    tables, looks = tables_of(root, layout), Looks()
    with session_of(tables, looks) as session:
        train(session, StopRequest())
        share = session.model.loss_share
    expected = Reference(tables)
    torch.testing.assert_close(looks.values, expected.values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(looks.gradients, expected.gradients, rtol=1e-7, atol=1e-12)
    seen = torch.tensor([looks.samples * share])
    dist.all_reduce(seen)
    parts = layout.get("parallelism", {}).get("context", 1)  # each of its ranks forwards a part of each sample
    assert seen.item() == 4 * 24 * parts


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_without_elements(root, stage: int) -> None:
    made = job(
        job={"output_dir": str(root), "steps": 1}, optimizer=SGD, sharding={"stage": stage}, dataset={"name": "modules:samples"},
        model={"name": "modules:Hollow", "loss": "torch.nn.functional:cross_entropy"},
    )  # fmt: skip
    looks = NoOutputs()
    with session_of(made, looks) as session:
        train(session, StopRequest())
    assert looks.values[0]["hollow"].shape == looks.gradients[0]["hollow"].shape == (0, 3)


def test_values_that_each_rank_has_of_its_own(root) -> None:
    """As between the averages of local SGD: a parameter is the mean of the ranks' values, not their sum."""
    checked = check(RawJob(tables_of(root, {"sharding": {"stage": 1}}), {}, "job"), dist.get_world_size())
    meshes = build_meshes(layout_of(checked.job, checked.parts, dist.get_world_size()), torch.device("cpu"))
    values = torch.arange(6.0).view(2, 3) + dist.get_rank()
    own = [Piece("w", (2, 3), (0, 0), values, ("dp_shard",))]
    whole = FullParameters(own, {"w": (2, 3)}, meshes, torch.device("cpu"))
    mean = torch.arange(6.0).view(2, 3) + (dist.get_world_size() - 1) / 2
    torch.testing.assert_close(whole.of("w", lambda piece: piece.tensor), mean)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [nightly(0), nightly(1), 2])
@pytest.mark.ranks(4)
def test_gradients_that_ranks_make_in_an_order_of_their_own(root, stage: int) -> None:
    """Split backwards give the gradients of the norms, which sequence parallelism sums, in another order on each rank."""
    axes = {"tensor": {"size": 2, "sequence_parallel": True}, "pipeline": {"size": 2, "schedule": "dualpipe-v"}}
    tables = tables_of(
        root, {"parallelism": axes, "batch": {"micro_size": 3}, "model": {"layers": 4}, "sharding": {"stage": stage}}
    )
    looks = Looks()
    with session_of(tables, looks) as session:
        train(session, StopRequest())
    torch.testing.assert_close(looks.gradients, Reference(tables).gradients, rtol=1e-7, atol=1e-12)


@pytest.mark.cases(
    nightly=[
        "{'parallelism': {'tensor': 2}, 'sharding': {'stage': 3}}",
        "{'parallelism': {'tensor': 2, 'pipeline': 2}, 'batch': {'micro_size': 3}}",
    ],
    rest="thorough",
)
@on_four
def test_moving_average(root, layout: dict[str, Any]) -> None:
    """The evaluations are those of the averages, also after a resume on plain data parallelism; training is untouched."""
    hook = {"name": "ema", "decay": 0.75, "start_step": 1}
    tables = tables_of(root, layout, evaluation={"every_steps": 1}, hook=[hook])
    tables["checkpoint"] = {"every_steps": 2}
    half = {**tables, "job": {**tables["job"], "steps": 2}}
    rows = train_here(half)
    plain = {key: value for key, value in tables.items() if key not in LAYOUTS_KEYS}
    rest = train_here({**plain, "batch": {**plain["batch"], "micro_size": 1}})
    reference = Reference(tables)
    samples = samples_of(tables, "validation")
    average: dict[str, Tensor] = {}
    expected = []
    for step, values in enumerate(reference.values, 1):
        decay = 0.75 if step > 1 else 0.0
        average = {n: decay * average.get(n, torch.zeros_like(v)) + (1 - decay) * v for n, v in values.items()}
        reference.module.load_state_dict(average, strict=False)
        with torch.no_grad():
            expected.append(gpt_loss(reference.module, *stacked([samples[i] for i in range(7)])).item())
    found = [row["evaluation_loss"] for row in (*rows.evaluations, *rest.evaluations)]
    assert found == pytest.approx(expected, rel=1e-9)


class Swaps:
    """Evaluates the model with other weights, and puts its own back, as averages of weights do."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[float] = []

    @hookimpl
    def hpctrain_evaluation_start(self, model: LiveModel) -> None:
        self._own = [piece.tensor.detach().clone() for piece in model.pieces]
        self._put([0.5 * own for own in self._own], model)

    @hookimpl
    def hpctrain_evaluation_end(self, model: LiveModel) -> None:
        self._put(self._own, model)

    @hookimpl
    def hpctrain_evaluation(self, metrics: dict[str, Any]) -> None:
        self.evaluations.append(metrics["evaluation_loss"])

    @torch.no_grad()
    def _put(self, values: list[Tensor], model: LiveModel) -> None:
        for piece, value in zip(model.pieces, values, strict=True):
            piece.tensor.copy_(value)
        model.refresh()

    @hookimpl
    def hpctrain_step_end(self, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])


STRATEGIES: list[dict[str, Any]] = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard_after_forward": False},
    {"stage": 3, "wrap": "size", "min_parameters": 1000, "prefetch": 2},
]  # fmt: skip


@pytest.mark.cases(default=["{'stage': 0}"], thorough=["{'stage': 3}"], rest="nightly")
@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_weights_swapped_around_evaluations(root, strategy: dict[str, Any]) -> None:
    """Training goes on from its own weights, and evaluations see the others."""
    tables, swaps = tables_of(root, {"sharding": strategy}, evaluation={"every_steps": 2}), Swaps()
    tables["batch"]["micro_size"] = 24 // dist.get_world_size() // 2
    with session_of(tables, swaps) as session:
        train(session, StopRequest())
    reference, samples, evaluations = Reference(tables), samples_of(tables, "validation"), []
    for step in (2, 4):
        halves = {name: 0.5 * value for name, value in reference.values[step - 1].items()}
        reference.module.load_state_dict(halves, strict=False)
        with torch.no_grad():
            evaluations.append(gpt_loss(reference.module, *stacked([samples[i] for i in range(7)])).item())
    assert swaps.losses == pytest.approx([loss for loss, _ in train_gpt(tables, torch.float64)[1]], rel=1e-12)
    assert swaps.evaluations == pytest.approx(evaluations, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.ranks(1)
def test_weights_swapped_where_evaluations_leave_a_unit_out(root) -> None:
    """A unit of stage 3 that an evaluation gathered ahead and did not use has the values of the evaluation, too."""

    def swapped(sharding: dict[str, Any]) -> Swaps:
        made = job(
            job={"output_dir": f"{root}/{sharding['stage']}", "steps": 4}, optimizer=SGD, sharding=sharding,
            dataset={"name": "modules:samples_of_both"}, evaluation={"every_steps": 2}, precision={"mode": "fp64"},
            batch={"global_size": 12, "micro_size": 1},
            model={"name": "modules:Auxiliary", "loss": "torch.nn.functional:cross_entropy"},
        )  # fmt: skip
        swaps = Swaps()
        with session_of(made, swaps) as session:
            train(session, StopRequest())
        return swaps

    expected, found = swapped({"stage": 0}), swapped({"stage": 3, "wrap": "class:Sequential", "prefetch": 2})
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-12)


@pytest.mark.thorough
def test_before_its_first_step_the_average_is_the_weights(root) -> None:
    """Between its updates, too."""
    tables = tables_of(root, {"sharding": {"stage": 2}}, evaluation={"every_steps": 1})
    plain = train_here({**tables, "job": {**tables["job"], "output_dir": f"{root}/plain"}}).evaluations
    rows = train_here({**tables, "hook": [{"name": "ema", "start_step": 4, "every_steps": 3}]}).evaluations
    found, expected = ([row["evaluation_loss"] for row in one] for one in (rows, plain))
    assert found == pytest.approx(expected, rel=1e-12)


LAYOUTS_KEYS = ("parallelism", "sharding")
