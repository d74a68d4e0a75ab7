"""Activation checkpointing: the same gradients, and less memory between forward and backward."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import TINY
from live_bytes import LiveBytes

import hpctrain
from hpctrain.api import ActivationCheckpointing, Identity, Machine
from hpctrain.base.errors import UsageError
from hpctrain.checking.check import check
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob
from hpctrain.registry.user_code.model import UserModel

LAYERS = 12
TABLES: dict[str, Any] = {
    "job": {"name": "deep", "steps": 1},
    "model": {"name": "gpt", "hidden_size": 64, "layers": LAYERS, "vocab_size": 32, "max_seq_length": 64},
    "dataset": {"name": "synthetic"}, "optimizer": {"name": "adamw", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4},
}  # fmt: skip


def run(table: dict[str, Any]) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept from forward to backward, and the gradients."""
    parts = check(RawJob({**TABLES, "activation_checkpointing": table}, {}, "j"), None).parts
    torch.manual_seed(0)
    module = parts.model.build()
    parts.activation_checkpointing.apply(module, parts.model, None)
    ids = torch.randint(32, (4, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    with LiveBytes() as live:
        loss = parts.model.loss(parts.model.forward(module, batch), batch)
        kept = live.bytes
    loss.backward()
    return kept, [p.grad for p in module.parameters()]


@pytest.fixture(scope="module")
def everything() -> tuple[int, list[torch.Tensor]]:
    return run({"mode": "none"})


@pytest.mark.parametrize(
    ("table", "most"),
    [
        ({"mode": "full"}, 0.25),
        ({"mode": "full", "every": 2}, 0.65),
        ({"mode": "full", "offload": True}, 0.25),
        ({"mode": "selective"}, 0.8),
        ({"mode": "selective", "keep_every": 2}, 0.6),
        ({"mode": "selective", "keep": []}, 0.25),
    ],
    ids=str,
)
def test_same_gradients_from_less_memory(everything, table: dict[str, Any], most: float) -> None:
    kept, gradients = run(table)
    assert kept < most * everything[0]
    for one, other in zip(gradients, everything[1], strict=True):
        torch.testing.assert_close(one, other)


def test_every_other_block_keeps_more_than_every_block() -> None:
    assert run({"mode": "full"})[0] < run({"mode": "full", "every": 2})[0] < run({"mode": "none"})[0]


def test_the_more_products_are_left_out_the_less_is_kept() -> None:
    kept = [run({"mode": "selective", "keep_every": every})[0] for every in (1, 2, 3, 100)]
    assert kept == sorted(kept, reverse=True) and len({*kept}) == 4


@pytest.mark.cases(nightly=["{'mode': 'full', 'offload': True}"], rest="thorough")
@pytest.mark.parametrize(
    "table", [{"mode": "full", "offload": True}, {"mode": "selective"}, {"mode": "selective", "keep_every": 2}], ids=str
)
def test_blocks_are_compiled_and_computed_again(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by Dynamo, but run without generated code, which takes half a minute."""
    monkeypatch.chdir(tmp_path)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    tables = {**TINY, "job": {"name": "tiny", "steps": 2}, "activation_checkpointing": table}
    curves = []
    for enabled in (False, True):
        tables["job"]["output_dir"] = f"compiled-{enabled}"
        curves.append(hpctrain.run({**tables, "compile": {"enabled": enabled}})["loss"])
    torch._dynamo.reset()
    assert graphs and curves[1] == pytest.approx(curves[0], rel=1e-6)


def checkpointing(table: dict[str, Any]) -> ActivationCheckpointing:
    return check(RawJob({**TABLES, "activation_checkpointing": table}, {}, "j"), None).parts.activation_checkpointing


class Normed(torch.nn.Module):
    """A block with running statistics, in place and by a buffer of its own that is set anew, which it multiplies by, and a
    matrix product into memory that is written to again, as compiled code has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.seen = self.seen + len(x)
        self.forwards += 1
        weight = self.linear.weight.detach()
        squares = torch.mm(weight, weight.T, out=torch.empty_like(weight)).mul_(0.1)
        return x @ squares + scale * torch.relu(self.norm(self.linear(x))) * self.seen * self.forwards.clone()


class Foreign(torch.nn.Module):
    """Blocks in a list, as a user has them whom no ModelSpec describes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Normed(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_of_ones_own_change_their_buffers_once_a_step(mode: str) -> None:
    ended = []
    for table in ({"mode": "none"}, {"mode": mode}):
        spec = UserModel("foreign:Foreign", Foreign, torch.nn.functional.mse_loss, {})
        torch.manual_seed(0)
        module = spec.build()
        assert spec.blocks(module) == list(module.layers)
        checkpointing(table).apply(module, spec, None)
        for seed in range(2):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
            spec.loss(spec.forward(module, [x, x]), [x, x]).backward()
        ended.append({**module.state_dict(), **{name: p.grad for name, p in module.named_parameters()}})
    assert ended[0]["layers.2.norm.num_batches_tracked"] == 2 and ended[0]["layers.2.seen"] == 12
    assert ended[0]["layers.0.forwards"] == 2
    torch.testing.assert_close(ended[1], ended[0], rtol=0, atol=0)


def test_a_transformers_model_keeps_no_keys_and_values() -> None:
    """Each computation of a block would add its own to the cache."""
    module = Foreign()
    module.config, module.layers.config = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    spec = UserModel("foreign:Foreign", lambda: module, torch.nn.functional.mse_loss, {})
    assert spec.build() is module
    assert module.config.use_cache is False and module.layers.config.use_cache is False  # type: ignore[union-attr]


def test_a_module_without_blocks_is_told_what_blocks_are() -> None:
    spec = UserModel("torch.nn:Linear", torch.nn.Linear, torch.nn.functional.mse_loss, {})
    with pytest.raises(
        UsageError, match=r"'torch.nn:Linear' has no blocks; expected .* nn.ModuleList or nn.Sequential"
    ):
        checkpointing({"mode": "full"}).apply(torch.nn.Linear(2, 2), spec, None)


def test_an_operator_that_does_not_exist(everything) -> None:
    with pytest.raises(Exception, match="torch has no operator mmm"):
        run({"mode": "selective", "keep": ["mmm"]})


def test_nothing_to_partition_is_said(everything, caplog) -> None:
    kept, gradients = run({"mode": "full", "partition_activations": True})
    assert kept < 0.25 * everything[0]
    torch.testing.assert_close(gradients, everything[1])
    assert "no ranks hold the same inputs of blocks" in caplog.text


def test_options_of_another_mode_are_refused() -> None:
    with pytest.raises(JobError, match="unknown key 'every'"):
        check(RawJob({**TABLES, "activation_checkpointing": {"mode": "selective", "every": 2}}, {}, "j"), None)


@pytest.mark.parametrize("mode", ["tf32", "fp8"])
def test_gpu_modes_are_unfit_for_a_cpu(mode: str) -> None:
    parts = check(RawJob({**TABLES, "precision": {"mode": mode}}, {}, "j"), None).parts
    why = parts.precision.missing(Machine(Identity(), torch.device("cpu")))
    assert why is not None and "needs an NVIDIA GPU" in why and "use fp32 or bf16" in why


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_no_block_leaves_its_weights_in_16_bits(mode: str) -> None:
    """Autocast's own cache would keep a cast of every weight until the end of forward."""
    tables = {**TABLES, "activation_checkpointing": {"mode": mode}}
    parts = check(RawJob(tables, {}, "j"), None).parts
    module = parts.model.build()
    parts.activation_checkpointing.apply(module, parts.model, None)
    ids = torch.zeros(1, 4, dtype=torch.long)
    with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
        module(ids)
        kept = live.bytes
    assert kept < 0.25 * sum(2 * one.numel() for one in module.parameters())
