"""Data to and from a GPU: batches through pinned memory, checkpoints, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import hpctrain, run
from on_gpu import DEVICE, OTHER_DEVICE, SAME_DEVICE, job, losses, needs_gpu, plain, trained
from plain import batches_of, gpt_loss, module_of, train_gpt
from safetensors.torch import load_file
from torch import Tensor, nn

from hpctrain.contracts.dataset import Samples
from hpctrain.contracts.optimization import Optimizer
from hpctrain.data.batches import Batches
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.registry.registry import build_registry

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

RESUMED = 1e-6
"""Relative: a GPU's sums differ in the last bits from run to run."""


class Numbers(Samples):
    """Sample i is full of i."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((1000,), float(index)), "labels": torch.full((1000,), index)}

    def fingerprint(self) -> str:
        return "numbers"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_through_pinned_memory(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pinned, pin_memory = [], Tensor.pin_memory
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or pin_memory(tensor))
    plan = [Planned([i, i + 1], i) for i in range(0, 40, 2)]
    pool = Pool(Batches(Numbers()), workers, 4)
    loader = Loader(pool, iter(plan), lambda batch: batch, len, DEVICE, torch.bfloat16)
    try:
        for planned, micro in zip(plan, loader, strict=True):
            x, labels = micro.batch["x"], micro.batch["labels"]
            assert x.device == labels.device == DEVICE and x.dtype == torch.bfloat16
            expected = torch.tensor(planned.indices)[:, None].expand(2, 1000)
            # used at once, as in a step: the copy may still be running
            assert torch.equal(labels.cpu(), expected) and torch.equal(x.float().cpu(), expected.float())
    finally:
        loader.close()
        pool.close()
    assert len(pinned) == 2 * len(plan)


def test_training_with_workers(tmp_path: Path) -> None:
    tables = job(tmp_path, dataset={"workers": 2})
    assert losses(trained(tables)) == pytest.approx([loss for loss, _ in plain(tables)[1]], rel=SAME_DEVICE)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waits", "behind"])
@pytest.mark.parametrize("kind", ["hdf5", "dcp"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resume_goes_on_as_if_nothing_had_been(tmp_path: Path, stage: int, kind: str, asynchronous: bool) -> None:
    tables: dict[str, Any] = {
        "sharding": {"stage": stage},
        "checkpoint": {"format": kind, "asynchronous": asynchronous, "every_steps": 2},
    }
    whole = trained(job(tmp_path / "whole", **tables))
    trained(job(tmp_path / "parts", **tables, job={"steps": 3}))
    parts = trained(job(tmp_path / "parts", **tables))
    assert losses(parts) == pytest.approx(losses(whole), rel=RESUMED)


@pytest.mark.parametrize(("first", "then"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_run_goes_on_on_another_device(tmp_path: Path, first: str, then: str) -> None:
    on: dict[str, dict[str, Any]] = {"cpu": {"communicator": {"name": "gloo"}}, "gpu": {}}
    _, steps = train_gpt(job(tmp_path), torch.float32)
    trained(job(tmp_path, **on[first], job={"steps": 4}))
    rows = trained(job(tmp_path, **on[then]))
    assert losses(rows) == pytest.approx([loss for loss, _ in steps], rel=OTHER_DEVICE)


def test_an_exported_checkpoint_of_a_gpu_is_the_plain_loop_s_model(tmp_path: Path) -> None:
    tables = job(tmp_path / "out")
    trained(tables)
    checkpoint = str(next((tmp_path / "out" / "checkpoints").glob("step*")))
    assert run(hpctrain("checkpoint", "verify", checkpoint), tmp_path).code == 0
    words = hpctrain("checkpoint", "export", checkpoint, "--to", "safetensors", "weights.safetensors")
    assert run(words, tmp_path).code == 0
    module, (ids, labels) = module_of(tables, torch.float32), next(batches_of(tables))
    module.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    expected = gpt_loss(plain(tables)[0].cpu(), ids, labels).item()
    assert gpt_loss(module, ids, labels).item() == pytest.approx(expected, rel=SAME_DEVICE)


def parameters() -> Iterator[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return (nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in ((300, 70), (70,), (1,)))


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_fused_optimizers(name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    cls = build_registry().find("optimizer", name).cls
    plugin = cls(cls.Options(lr=0.01, **options))
    assert isinstance(plugin, Optimizer)
    mine, plainly = list(parameters()), list(parameters())
    optimizer = plugin.build([{"params": mine}])
    assert optimizer.param_groups[0]["fused"] is True
    reference = kind(plainly, lr=0.01, fused=False, foreach=False, **options)  # type: ignore[call-arg]
    for step in range(5):
        for one, other in zip(mine, plainly, strict=True):
            one.grad = torch.sin(torch.arange(one.numel(), device=DEVICE).view_as(one) * (step + 1.0))
            other.grad = one.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(mine, plainly, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("stage", [0, 2])
def test_adamw_8bit_stays_near_adamw(tmp_path: Path, stage: int) -> None:
    tables = job(tmp_path, sharding={"stage": stage})
    expected = [loss for loss, _ in plain(tables)[1]]
    tables["optimizer"]["name"] = "adamw-8bit"
    assert losses(trained(tables)) == pytest.approx(expected, rel=5e-4)
