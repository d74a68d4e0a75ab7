"""A run in one process against a plain torch loop that knows nothing of hpctrain's loop."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import TINY
from plain import batches_of, module_of
from torch import nn
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats

import hpctrain
from hpctrain.base.errors import ContractError, EnvironmentUnfitError, TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checking.check import check
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.pieces import Piece
from hpctrain.job.raw import RawJob
from hpctrain.model.parameters import build_optimizer
from hpctrain.model.refusals import refuse_embeddings
from hpctrain.model.trials import updates_parts_alike
from hpctrain.registry.registry import build_registry
from hpctrain.training import starts
from hpctrain.training.over_ranks import _sum_of_squares


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def job(**changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in changes.items():
        tables.setdefault(name, {}).update(table)
    return tables


def rows(directory: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def test_clipped_sgd_with_momentum_and_a_schedule_in_fp64() -> None:
    tables = job(
        job={"seed": 5, "steps": 8}, precision={"mode": "fp64"}, schedule={"name": "linear", "warmup_steps": 3},
        optimizer={"name": "sgd", "lr": 0.8, "momentum": 0.9, "clip_norm": 0.3},
    )  # fmt: skip
    hpctrain.run(tables)
    module = module_of(tables, torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    rates = [0.8 * f for f in (1 / 3, 2 / 3, 1, 1, 0.75, 0.5, 0.25, 0)]
    for (ids, labels), rate, row in zip(batches_of(tables), rates, rows(), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = torch.nn.functional.cross_entropy(module(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        # by hand: torch's clip_grad_norm_ divides by norm + 1e-6
        norm = sum(p.grad.square().sum() for p in module.parameters()).sqrt()
        for parameter in module.parameters():
            parameter.grad *= min(1.0, 0.3 / norm)
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-10)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
        assert row["lr"] == pytest.approx(rate, abs=1e-15)


@pytest.mark.parametrize("chosen", [{"pattern": ["*.bias", "*norm*"]}, {"max_dims": 1}])
def test_adamw_with_groups_in_fp32(chosen: dict[str, Any]) -> None:
    groups = [{**chosen, "weight_decay": 0.0}]
    tables = job(
        job={"seed": 9, "steps": 6}, optimizer={"weight_decay": 0.5, "groups": groups}, precision={"mode": "fp32"}
    )
    hpctrain.run(tables)
    module = module_of(tables, torch.float32)
    named = list(module.named_parameters())
    plain = [p for n, p in named if n.endswith(".bias") or "norm" in n]
    decayed = [p for n, p in named if not (n.endswith(".bias") or "norm" in n)]
    assert len(plain) > 8 and len(decayed) > 8
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed}], lr=0.01, weight_decay=0.5
    )
    for (ids, labels), row in zip(batches_of(tables), rows(), strict=True):
        loss = torch.nn.functional.cross_entropy(module(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), rel=2e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("sizes", [(7, 0, 1), (3, 16384, 16385), (300_001,)], ids=str)
def test_the_norm_is_exact_in_every_dtype(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    gradients = [torch.randn(n).to(dtype) for n in sizes]
    exact = sum(float(torch.view_as_real(one.to(torch.complex128)).square().sum()) for one in gradients)
    assert float(_sum_of_squares(gradients)) == pytest.approx(exact, rel=1e-6)


def test_a_step_without_a_label_ends_the_run() -> None:
    data = [{"input_ids": torch.arange(8), "labels": torch.full((8,), -100)} for _ in range(24)]
    with pytest.raises(TrainingError, match="step 1: no token or sample of the global batch has a label"):
        hpctrain.run({**job(), "dataset": {"name": data}})
    assert not rows()


@pytest.mark.cases(thorough=["changes0"])
@pytest.mark.parametrize("changes", [{"activation_checkpointing": {"mode": "full"}}, {"batch": {"micro_size": 4}}])
def test_what_must_not_change_the_curve(changes: dict[str, Any]) -> None:
    hpctrain.run(job(job={"output_dir": "plain"}))
    before = Path("plain/log/rank-00000.log").read_text()
    hpctrain.run(job(**changes))
    assert [r["loss"] for r in rows()] == pytest.approx([r["loss"] for r in rows("plain")], rel=2e-6)
    assert before == Path("plain/log/rank-00000.log").read_text(), "a run logs into its own directory only"


def test_a_start_looks_through_no_installed_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes a third of a second on each rank."""
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: pytest.fail("it has looked"))
    assert len(hpctrain.run(job())["losses"]) > 0


@pytest.mark.thorough
def test_fp16_skips_an_overflow_and_the_row_says_so() -> None:
    hpctrain.run(job(job={"steps": 12}, precision={"mode": "fp16", "initial_scale": 2.0**24, "hysteresis": 1}))
    done = rows()
    assert [row["step"] for row in done] == list(range(1, 13))
    skipped = [row for row in done if row.get("skipped")]
    assert skipped and not done[-1].get("skipped")
    assert done[0]["grad_norm"] is None and done[0]["loss"] is not None, "non-finite numbers are null"


@pytest.mark.thorough
def test_the_scaler_and_the_dropout_come_back_after_a_resume() -> None:
    precision = {"mode": "fp16", "initial_scale": 2.0**20, "window": 3, "hysteresis": 1}
    hpctrain.run(job(job={"steps": 12, "output_dir": "straight"}, precision=precision))
    hpctrain.run(job(job={"steps": 5}, precision=precision))
    hpctrain.run(job(job={"steps": 12}, precision=precision))
    assert [r["loss"] for r in rows()] == [r["loss"] for r in rows("straight")]


@pytest.mark.cases(nightly=["{'name': 'adamw'}"], rest="thorough")
@pytest.mark.parametrize("optimizer", [{"name": "adamw"}, {"name": "sgd", "momentum": 0.9, "dampening": 0.5}], ids=str)
def test_a_resume_before_the_optimizer_s_first_step(optimizer: dict[str, Any]) -> None:
    """fp16 has left out every step, as it does when a run begins with too large a scale."""
    precision = {"mode": "fp16", "initial_scale": 2.0**30, "hysteresis": 1}
    hpctrain.run(job(job={"steps": 14, "output_dir": "straight"}, precision=precision, optimizer=optimizer))
    hpctrain.run(job(job={"steps": 2}, precision=precision, optimizer=optimizer))
    assert [row["skipped"] for row in rows()] == [True, True]
    hpctrain.run(job(job={"steps": 14}, precision=precision, optimizer=optimizer))
    assert [r["loss"] for r in rows()] == [r["loss"] for r in rows("straight")]
    assert "skipped" not in rows()[-2], "momentum shows in the last loss"


@pytest.mark.cases(default=["sgd"], rest="thorough")
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        {"name": "torch.optim:Adagrad", "lr": 0.1, "initial_accumulator_value": 0.3},
        {"name": "torch.optim:Adafactor", "lr": 0.1},
        {"name": "counting:Counting", "lr": 0.1},
        {"name": "counting:CountingInGroups", "lr": 0.1, "groups": [{"pattern": "*.bias", "lr": 0.2}]},
    ],
    ids=lambda optimizer: optimizer["name"],
)
def test_every_optimizer_resumes_where_it_was(
    optimizer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with state from the first step on, from the constructor on, of another shape, and in plain numbers, which some
    keep in their groups."""
    (tmp_path / "counting.py").write_text(
        "import torch\n"
        "class Counting(torch.optim.Optimizer):\n"
        "    def __init__(self, groups, lr): super().__init__(groups, {'lr': lr})\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                count = self.state[p]['count'] = self.state[p].get('count', 0) + 1\n"
        "                p.data.sub_(p.grad, alpha=group['lr'] / count)\n"
        "class CountingInGroups(torch.optim.Optimizer):\n"
        "    def __init__(self, groups, lr): super().__init__(groups, {'lr': lr, 'count': 0})\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            group['count'] += 1\n"
        "            for p in group['params']: p.data.sub_(p.grad, alpha=group['lr'] / group['count'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def with_optimizer(**table: Any) -> dict[str, Any]:
        return {**job(job=table, checkpoint={"every_steps": 3}), "optimizer": optimizer}

    hpctrain.run(with_optimizer(steps=6, output_dir="straight"))
    hpctrain.run(with_optimizer(steps=3))
    hpctrain.run(with_optimizer(steps=6))
    assert [r["loss"] for r in rows()] == [r["loss"] for r in rows("straight")]


@pytest.mark.parametrize(
    ("name", "alike"),
    [("adamw", True), ("sgd", True), ("adamw-8bit", True), ("torch.optim:Rprop", True), ("torch.optim:Muon", False)],
)
def test_optimizers_that_look_at_a_whole_matrix_are_told_apart(name: str, alike: bool) -> None:
    tables = {**job(), "optimizer": {"name": name, "lr": 1e-6}}
    assert updates_parts_alike(partial(build_optimizer, check(RawJob(tables), 1).parts.optimizer)) is alike


def test_an_optimizer_that_has_modes_evaluates_and_saves_the_weights_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two schedule-free steps train as two of SGD, and leave the mean of their weights; a resume in between is no difference."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "outside" / "package" / "acme_hpctrain"))
    free = {"name": "schedule-free", "lr": 0.1, "beta": 0.9}

    def train(optimizer: dict[str, Any], directory: str, *stops: int) -> dict[str, Any]:
        plugins = {"load": ["schedule_free"]}
        for steps in stops:
            changes = {
                "job": {"steps": steps, "output_dir": directory},
                "evaluation": {"every_steps": 2},
                "plugins": plugins,
            }
            found = hpctrain.run({**job(**changes), "optimizer": optimizer})
        return found

    sgd = {"name": "sgd", "lr": 0.1}
    one, two = (hpctrain.load(train(sgd, f"sgd{steps}", steps)["checkpoint"]).state_dict() for steps in (1, 2))
    results = [train(free, "whole", 2), train(free, "parts", 1, 2)]
    for found in results:
        weights = hpctrain.load(found["checkpoint"]).state_dict()
        for name, value in weights.items():
            torch.testing.assert_close(value, (one[name] + two[name]) / 2, rtol=1e-5, atol=1e-6)
    assert results[0]["evaluation"]["loss"] == results[1]["evaluation"]["loss"]
    mean = job(job={"steps": 1, "output_dir": "mean"}, optimizer={"lr": 1e-30}, evaluation={"every_steps": 1})
    mean["model"]["weights"] = results[0]["checkpoint"]
    again = hpctrain.run(mean)["evaluation"]["loss"]
    assert again == pytest.approx(results[0]["evaluation"]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        ("Lion(groups)", None),
        ("Lion([{'params': group['params']} for group in groups])", "lr is 0.0001 where its group says 0.001"),
        ("Lion([{**group, 'lr': self.options.other_lr} for group in groups])", None),
        ("Lion(groups[:-1])", "built an optimizer of 10 tensors, expected each of the 37 in `groups` once"),
    ],
)
def test_an_optimizer_has_the_options_of_its_groups(
    build: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a group doesn't override, too; a default of the optimizer's own would train silently."""
    (tmp_path / "lions.py").write_text(
        f"""
import torch
from hpctrain.api import Optimizer, OptimizerOptions, hookimpl

class Options(OptimizerOptions):
    momentum: float = 0.9
    other_lr: float = 0.3

class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr=1e-4, momentum=0.5):
        super().__init__(groups, dict(lr=lr, momentum=momentum))
    @torch.no_grad()
    def step(self, closure=None):
        seen.append([(group['lr'], group['momentum']) for group in self.param_groups])
        for group in self.param_groups:
            for p in group['params']:
                p -= group['lr'] * p.grad.sign()

class Plugin(Optimizer):
    name, Options = 'lion', Options
    def build(self, groups):
        return {build}

seen = []

@hookimpl
def hpctrain_optimizer():
    return [Plugin]
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {"name": "lion", "lr": 1e-3, "momentum": 0.8, "groups": [{"pattern": "*norm*", "momentum": 0.7}]}
    tables = {**job(), "optimizer": table, "plugins": {"load": ["lions"]}}
    if told is not None:
        with pytest.raises(ContractError, match=told):
            hpctrain.run(tables)
        return
    hpctrain.run(tables)
    rate = 0.3 if "other_lr" in build else 1e-3
    assert sys.modules["lions"].seen[-1] == [(rate, 0.7), (rate, 0.8)]


def test_state_that_no_checkpoint_holds_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listing.py").write_text(
        "import torch\n"
        "class InState(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']: self.state[p]['seen'] = [1]\n"
        "class InGroups(torch.optim.SGD):\n"
        "    def step(self): self.param_groups[0]['seen'] = [1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, says in (("InState", "its state 'seen' of .* list"), ("InGroups", "changes 'seen' of .* list")):
        with pytest.raises(UsageError, match=says):
            hpctrain.run({**job(), "optimizer": {"name": f"listing:{name}", "lr": 0.1}})
    assert not Path("out/metrics.jsonl").exists()


DIGITS = """
import torch
import torch.distributed as dist
from torch import nn

def build(width):
    hidden = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))

def samples(split):
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    labels = torch.randint(0, 10, (200,), generator=generator)
    images = torch.zeros(200, 8, 8)
    images[torch.arange(200), labels % 8, labels // 8] = 3.0
    images += 0.3 * torch.randn(images.shape, generator=generator)
    return list(zip(images, labels))
"""


def digits(**changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "job": {"name": "digits", "steps": 30, "output_dir": "out"},
        "model": {"name": "digits_job:build", "width": 32, "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "digits_job:samples"}, "optimizer": {"name": "sgd", "lr": 0.2},
        "batch": {"global_size": 40, "micro_size": 20}, "evaluation": {"every_steps": 30},
    }  # fmt: skip
    for name, table in changes.items():
        tables.setdefault(name, {}).update(table)
    return tables


@pytest.fixture
def digits_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits_job.py").write_text(DIGITS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "digits_job", raising=False)


@pytest.mark.thorough
@pytest.mark.usefixtures("digits_module")
def test_any_module_learns_and_resumes_with_buffers_and_dropout() -> None:
    hpctrain.run(digits(job={"output_dir": "straight"}))
    losses = [r["loss"] for r in rows("straight") if "loss" in r]
    assert losses[0] > 1.8 and losses[-1] < 0.5
    assert rows("straight")[-1]["evaluation_loss"] < 0.5
    hpctrain.run(digits(job={"steps": 11}))
    hpctrain.run(digits())
    assert [r["loss"] for r in rows() if "loss" in r] == losses
    assert rows()[-1]["evaluation_loss"] == rows("straight")[-1]["evaluation_loss"], (
        "BatchNorm's averages were restored"
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("digits_module")
def test_a_model_plugin_of_four_methods_is_that_callable(tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(
        """
from digits_job import build
from torch.nn.functional import cross_entropy
from hpctrain.api import ModelSpec, Options, hookimpl


class Width(Options):
    width: int


class Four(ModelSpec):
    name, counts, Options = "four", "samples", Width

    def build(self):
        return build(self.options.width)

    def forward(self, module, batch):
        return module(batch[0])

    def count(self, batch):
        return len(batch[1])

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch[1], reduction="sum")


@hookimpl
def hpctrain_model():
    return [Four]
"""
    )
    hpctrain.run(digits())
    model = {"name": "four", "width": digits()["model"]["width"]}
    hpctrain.run({**digits(job={"output_dir": "as-plugin"}), "model": model, "plugins": {"load": ["four"]}})
    losses, same = ([row["loss"] for row in rows(run) if "loss" in row] for run in ("out", "as-plugin"))
    assert same == pytest.approx(losses, rel=1e-6) and len(losses) == 30
    (tmp_path / "half.py").write_text(
        "from four import Four\nfrom hpctrain.api import PipelineModel, hookimpl\n\n"
        "class Half(Four, PipelineModel):\n    name = 'half'\n    def embed(self, module, batch): ...\n\n"
        "@hookimpl\ndef hpctrain_model(): return [Half]\n"
    )
    with pytest.raises(EnvironmentUnfitError, match=r"Half \(half\) lacks ends, head"):
        hpctrain.run({**digits(), "plugins": {"load": ["half"]}})


def test_buffers_in_a_dtype_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floating point ones only; a resume has them again."""
    (tmp_path / "buffered.py").write_text(
        "import torch\n"
        "seen = []\n"
        "class Buffered(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 1)\n"
        "        self.register_buffer('scale', torch.tensor([1.0, 1 / 3]))\n"
        "        self.register_buffer('calls', torch.tensor(0))\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        seen.append((self.scale.dtype, self.scale.tolist(), self.calls.item()))\n"
        "        return super().forward(x * self.scale)\n"
        "def data(split): return [(torch.ones(2), torch.zeros(1))] * 8 if split == 'train' else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {
        "job": {"name": "buffered", "steps": 1, "output_dir": "out"},
        "model": {"name": "buffered:Buffered", "loss": "torch.nn.functional:mse_loss"}, "dataset": {"name": "buffered:data"},
        "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4},
        "precision": {"mode": "fp32"},
    }  # fmt: skip
    hpctrain.run(tables)
    tables["job"]["steps"] = 2
    hpctrain.run(tables)
    third = torch.tensor(1 / 3).item()
    assert __import__("buffered").seen == [(torch.float32, [1.0, third], 1), (torch.float32, [1.0, third], 2)]


def test_embeddings_that_ranks_cannot_share_are_refused() -> None:
    """Sparse gradients, and a weight that each rank would change in forward, at the rows of its samples."""
    tables: dict[str, Any] = {
        "job": {"name": "sparse", "steps": 1},
        "model": {"name": "torch.nn:Embedding", "num_embeddings": 2, "embedding_dim": 1, "sparse": True, "loss": "torch:sub"},
        "dataset": {"name": "synthetic", "seq_length": 4}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 4, "micro_size": 4},
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"Embedding makes sparse gradients, .* build it with sparse = False"):
        hpctrain.run(tables)
    del tables["model"]["sparse"]
    spec, bounded = check(RawJob(tables, {}, "j"), None).parts.model, nn.Sequential(nn.Embedding(2, 1, max_norm=1.0))
    refuse_embeddings(bounded, spec, 1)
    with pytest.raises(
        UsageError, match=r"0 with max_norm changes its weight in forward, .* 2 data-parallel ranks would diverge"
    ):
        refuse_embeddings(bounded, spec, 2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_transposed_and_complex_parameters(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory layout of their own, as channels_last gives it, and numbers that are not real, as a Fourier layer has."""
    (tmp_path / "spectral.py").write_text(
        "import torch\n"
        "class Waves(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.spectrum = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))\n"
        "    def forward(self, x):\n"
        "        return torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=4)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.waves, self.weight = Waves(), torch.nn.Parameter(torch.randn(5, 4).t())\n"
        "    def forward(self, x):\n"
        "        return self.waves(x) @ self.weight\n"
        "def data(split):\n"
        "    one = torch.Generator().manual_seed(1)\n"
        "    made = [(torch.randn(4, generator=one), torch.randn(5, generator=one)) for _ in range(8)]\n"
        "    return made if split == 'train' else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {
        "job": {"name": "spectral", "steps": 4, "output_dir": "out", "seed": 7},
        "model": {"name": "spectral:Net", "loss": "torch.nn.functional:mse_loss"}, "dataset": {"name": "spectral:data"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "batch": {"global_size": 8, "micro_size": 4},
        "precision": {"mode": "fp32"}, "sharding": {"stage": stage, **({"wrap": "class:Waves"} if stage == 3 else {})},
    }  # fmt: skip
    hpctrain.run(tables)
    code = __import__("spectral")
    torch.manual_seed(derive_seed(7, "model"))
    module, (inputs, targets) = code.Net(), map(torch.stack, zip(*code.data("train"), strict=True))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for row in rows():
        loss = torch.nn.functional.mse_loss(module(inputs), targets)
        assert row["loss"] == pytest.approx(loss.item(), rel=2e-6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.thorough
@pytest.mark.usefixtures("digits_module")
def test_epochs_freeze_and_given_weights() -> None:
    result = hpctrain.run(digits(job={"steps": 30}))
    assert result["exit_code"] == 0
    tables = digits(job={"output_dir": "tuned", "name": "tuned"}, model={"weights": "out/checkpoints/latest"})
    del tables["job"]["steps"]
    tables["job"]["epochs"] = 2.5
    tables["model"]["freeze"] = ["1.*"]
    result = hpctrain.run(tables)
    assert result["step"] == int(2.5 * 200) // 40
    first = next(r for r in rows("tuned") if "loss" in r)
    assert first["loss"] < 0.5, "it began where the other one ended"


def test_only_some_parameters_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """What `trainable` names, without what `freeze` names: the rest is as it began."""
    trained = {"layers.1.mlp.up.weight", "head.weight"}
    hpctrain.run(job(model={"trainable": ["layers.1.mlp.up.*", "head.*"], "freeze": ["*.bias"]}))
    assert " trained" in capsys.readouterr().out
    (form,) = (one for one in build_registry().instances("checkpoint") if one.name == "hdf5")
    changed = set()
    for name, before in module_of(job(job={"seed": 1234}), torch.float32).named_parameters():
        after = torch.empty_like(before)
        form.load(Path("out/checkpoints/step-00000004"), [Piece.whole(f"model/{name}", after)])
        changed |= set() if torch.equal(before, after) else {name}
    assert changed == trained


def test_unused_parameters_and_nonfinite_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(5, 5)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        return self.used(x) * (float('nan') if self.calls == 3 else 1.0)\n"
        "def data(split): return [(torch.randn(2), torch.zeros(1)) for _ in range(8)] if split == 'train' else None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {
        "job": {"name": "odd", "steps": 5, "output_dir": "odd"},
        "model": {"name": "odd:Odd", "loss": "torch.nn.functional:mse_loss"}, "dataset": {"name": "odd:data"},
        "optimizer": {"name": "adamw", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4},
    }  # fmt: skip
    torch.manual_seed(0)
    with pytest.raises(TrainingError, match="step 3: loss nan"):
        hpctrain.run(tables)
    torch.manual_seed(0)
    tables["job"].update(output_dir="on")
    tables["guard"] = {"non_finite": "skip"}
    assert hpctrain.run(tables)["step"] == 5
    done = rows("on")
    assert done[2]["loss"] is None and done[2]["skipped"] and done[3]["loss"] is not None


def test_a_git_that_does_not_answer_holds_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has gone away: what it has said until then counts."""
    git = tmp_path / "git"
    git.write_text('#!/bin/sh\ncase "$*" in *rev-parse*) echo c0ffee;; *) exec sleep 30;; esac\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(starts, "_GIT_SECONDS", 1.5)
    starts.note_start(tmp_path, Identity(), [], [], 0.0, torch.device("cpu"))
    assert json.loads((tmp_path / "starts.jsonl").read_text())["git"] == {"commit": "c0ffee", "changed": None}


def test_a_job_leaves_no_groups_to_the_next_one_of_its_process() -> None:
    """DTensor remembers the groups of its meshes by name, and the next job gives the names to others."""
    hpctrain.run(job(sharding={"stage": 3}))
    assert _get_fast_path_sharding_prop_cache_stats() == (0, 0)


def test_a_job_leaves_nothing_compiled_to_the_next_one_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that differ between two jobs would be compiled as one that is unknown."""
    resets: list[bool] = []
    monkeypatch.setattr(torch, "compile", lambda made, **_: made)  # generated code takes half a minute
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    hpctrain.run(job(job={"steps": 1}, compile={"enabled": True}))
    assert resets == [True]


def test_a_program_that_has_set_up_torch_distributed_itself() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"call destroy_process_group\(\) before"):
            hpctrain.run({})
        assert dist.is_initialized()  # it is the program's
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "loss", "sentence", "frames"),
    [
        ("build", "torch.nn.functional:cross_entropy", "its forward raised RuntimeError: Expected 3D", []),
        ("own", "torch.nn.functional:cross_entropy", "its forward raised RuntimeError: mat1 and mat2", ["forward", "helper"]),
        ("fits", "fails_on_batches:loss", "its loss raised KeyError: 'no such class'", ["loss"]),
    ],
)  # fmt: skip
def test_what_a_model_of_ones_own_raises_on_a_batch(model: str, loss: str, sentence: str, frames: list[str]) -> None:
    Path("fails_on_batches.py").write_text(
        "import torch\n"
        "def build(): return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten())\n"
        "def fits(): return torch.nn.Linear(4, 2)\n"
        "def helper(layer, x): return layer(x[:, :3])\n"
        "class Own(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return helper(super().forward, x)\n"
        "def own(): return Own(4, 2)\n"
        "def loss(outputs, target): raise KeyError('no such class')\n"
        "def data(split='train'): return [(torch.zeros(4), torch.tensor(1))] * 40 if split == 'train' else None\n"
    )
    tables = {
        "job": {"name": "fails", "steps": 2, "output_dir": "out"}, "model": {"name": f"fails_on_batches:{model}", "loss": loss},
        "dataset": {"name": "fails_on_batches:data"}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 4, "micro_size": 2},
    }  # fmt: skip
    with pytest.raises(TrainingError) as found:
        hpctrain.run(tables)
    first, *rest = str(found.value).splitlines()
    assert first.startswith(f"[model] name = 'fails_on_batches:{model}': {sentence}")
    assert first.endswith("on a batch of 0 (2, 4) float32, 1 (2,) int64")
    assert [line.split(", in ")[1] for line in rest if ", in " in line] == frames
    assert "Traceback" in Path("out/log/rank-00000.log").read_text()


def test_images_with_their_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's input is laid out so, and no loss changes."""
    seen: list[bool] = []

    class Seeing(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous())
            return super().forward(input)

    class Images:
        def __init__(self, split: str) -> None:
            self.images = torch.randn(40, 3, 6, 8, generator=torch.Generator().manual_seed(1))

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.images[index], torch.tensor(index % 2)

    def build() -> nn.Module:
        return nn.Sequential(Seeing(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

    monkeypatch.setitem(sys.modules, "seeing", SimpleNamespace(build=build, Images=Images))
    losses = {}
    for last in (False, True):
        result = hpctrain.run(
            {
                "job": {"name": "images", "steps": 4, "output_dir": f"out-{last}"},
                "model": {"name": "seeing:build", "loss": "torch.nn.functional:cross_entropy"},
                "dataset": {"name": "seeing:Images"}, "optimizer": {"name": "sgd", "lr": 0.5},
                "batch": {"global_size": 8, "micro_size": 4, "channels_last": last},
            }
        )  # fmt: skip
        losses[last] = result["losses"]
        assert seen[-8:] == [last] * 8
    assert losses[True] == pytest.approx(losses[False], rel=1e-5) and len(losses[True]) == 4


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("outputs", r"the loss of odd_losses:build has the shape \(2, 3\), expected a scalar.*loss.flatten\(1\).mean\(1\)"),
        ("{'a': outputs.sum(), 'b': outputs[:, :1]}", r"the loss 'b' of .* shape \(2, 1\)"),
        ("outputs.sum(1)[:1]", r"the shape \(1,\), expected a scalar.* or \(2,\), one loss per row: return loss.mean\(\)"),
        ("outputs.detach().sum()", r"\[model\] name = 'odd_losses:build': its loss has no gradient, expected"),
        ("outputs.argmax(1).float()", r"its loss has no gradient"),
    ],
)  # fmt: skip
def test_losses_that_are_none(loss: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw logits and losses per token would train as sums, with many times the gradient."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "odd_losses.py").write_text(
        "import torch\n"
        "def build(): return torch.nn.Linear(4, 3)\n"
        f"def loss(outputs, target): return {loss}\n"
        "def data(split): return [(torch.ones(4), torch.tensor(1))] * 8 if split == 'train' else None\n"
    )
    tables = {
        "job": {"name": "odd", "steps": 1, "output_dir": "out"}, "model": {"name": "odd_losses:build", "loss": "odd_losses:loss"},
        "dataset": {"name": "odd_losses:data"}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 4, "micro_size": 2},
    }  # fmt: skip
    with pytest.raises(TrainingError, match=sentence):
        hpctrain.run(tables)
