"""Loss scaling and learning rates, against what the papers say."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.checking.check import check
from hpctrain.contracts.model import MetaModel
from hpctrain.contracts.optimization import Schedule
from hpctrain.contracts.precision import LossScaler, Precision
from hpctrain.job.raw import RawJob
from hpctrain.model.build import build_on_meta
from hpctrain.registry.registry import build_registry

REGISTRY = build_registry()


def fp16(**options: float) -> LossScaler:
    cls = REGISTRY.find("precision", "fp16").cls
    plugin = cls(cls.Options(**options))
    assert isinstance(plugin, Precision)
    return plugin.start()


def schedule(name: str, **options: float) -> Schedule:
    cls = REGISTRY.find("schedule", name).cls
    plugin = cls(cls.Options(**options))
    assert isinstance(plugin, Schedule)
    return plugin


def test_dynamic_scale_halves_after_hysteresis_and_doubles_after_a_window() -> None:
    scaler = fp16(initial_scale=1024, window=3, hysteresis=2, minimum_scale=128)
    scaler.update(finite=False)
    assert scaler.scale == 1024
    scaler.update(finite=False)
    assert scaler.scale == 512
    scaler.update(finite=False)
    assert scaler.scale == 256, "the patience is used up until a good window"
    for _ in range(3):
        scaler.update(finite=True)
    assert scaler.scale == 512
    scaler.update(finite=False)
    assert scaler.scale == 512, "the window brought the patience back"
    for _ in range(9):
        scaler.update(finite=False)
    assert scaler.scale == 128


def test_overflow_at_the_smallest_scale_is_no_excuse() -> None:
    scaler = fp16(initial_scale=2, hysteresis=1, minimum_scale=1)
    assert scaler.skips_nonfinite
    scaler.update(finite=False)
    assert not scaler.skips_nonfinite
    assert not fp16(static_scale=8).skips_nonfinite


def test_static_scale_stays() -> None:
    scaler = fp16(static_scale=64)
    for _ in range(5):
        scaler.update(finite=False)
    assert scaler.scale == 64


def test_the_state_of_the_scaler_comes_back() -> None:
    scaler, fresh = fp16(initial_scale=1024, window=3), fp16(initial_scale=8, window=3)
    for finite in (False, False, True, True):
        scaler.update(finite)
    fresh.restore(scaler.state())
    for finite in (True, False, True, True, True):
        scaler.update(finite)
        fresh.update(finite)
        assert fresh.scale == scaler.scale


def test_the_state_of_another_mode_changes_nothing() -> None:
    fresh, static = fp16(initial_scale=8), fp16(static_scale=64)
    fresh.restore({})
    static.restore(fp16(initial_scale=1024).state())
    assert (fresh.scale, static.scale) == (8, 64)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_and_never_zero(name: str) -> None:
    plugin = schedule(name, warmup_steps=4)
    assert [plugin.factor(step, 20) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_decay_ends_at_the_final_factor() -> None:
    linear, cosine = schedule("linear", final_factor=0.1), schedule("cosine", final_factor=0.1, warmup_steps=5)
    assert linear.factor(0, 11) == 1.0 and linear.factor(10, 11) == pytest.approx(0.1)
    assert linear.factor(5, 11) == pytest.approx(0.55)
    assert cosine.factor(99, 100) == pytest.approx(0.1)
    middle = cosine.factor(5 + 47, 100)
    assert middle == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 47 / 94)) / 2)
    assert schedule("constant").factor(10**6, 10) == 1.0
    assert schedule("cosine", warmup_steps=50).factor(30, 10) < 1, "a warm-up longer than the job"
    assert schedule("cosine").factor(0, 1) == 1.0, "a job of one step"


def test_auto_says_what_it_took() -> None:
    (auto,) = (one for one in REGISTRY.instances("precision") if one.name == "auto")
    assert auto.describe(torch.device("cpu")) == "fp32 (auto)"
    fp16_plugin = next(one for one in REGISTRY.instances("precision") if one.name == "fp16")
    assert fp16_plugin.describe(torch.device("cpu")) == "fp16"


def test_two_runs_of_one_plugin_share_no_scale() -> None:
    cls = REGISTRY.find("precision", "fp16").cls
    plugin = cls(cls.Options(initial_scale=1024, hysteresis=1))
    one, other = plugin.start(), plugin.start()
    one.update(finite=False)
    assert (one.scale, other.scale, plugin.start().scale) == (512, 1024, 1024)


FP8 = REGISTRY.find("precision", "fp8").cls


def test_fp8_takes_the_linear_layers_of_blocks() -> None:
    """Without the head, and without layers whose sizes float8 products can't have."""
    from torchao.float8.float8_linear import Float8Linear

    options = {"hidden_size": 32, "layers": 2, "attention_heads": 2, "vocab_size": 64, "max_seq_length": 16}
    model = REGISTRY.find("model", "gpt").cls
    spec = model(model.Options(**options))
    assert isinstance(spec, MetaModel)
    module = build_on_meta(spec)
    FP8(FP8.Options()).convert(module, spec)
    found = {name for name, one in module.named_modules() if isinstance(one, Float8Linear)}
    layers = ("attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down")
    assert found == {f"layers.{block}.{name}" for block in range(2) for name in layers}
    small = model(model.Options(**{**options, "hidden_size": 20}))
    with pytest.raises(UsageError, match="no Linear layer"):
        FP8(FP8.Options()).convert(build_on_meta(small), small)


def test_fp8_refuses_layers_that_are_cut() -> None:
    def told(**axes: int) -> str:
        tables = {
            "job": {"name": "fp8", "steps": 1},
            "model": {"name": "gpt", "hidden_size": 32, "layers": 2, "attention_heads": 2, "vocab_size": 64},
            "dataset": {"name": "synthetic"}, "optimizer": {"name": "adamw", "lr": 0.1},
            "batch": {"global_size": 8, "micro_size": 4}, "precision": {"mode": "fp8"}, "parallelism": axes,
        }  # fmt: skip
        try:
            check(RawJob(tables, {}, "job"), 2)
        except HpctrainError as error:
            return str(error)
        return ""

    assert "float8 layers can't be cut by [parallelism] tensor" in told(tensor=2)
    assert "float8" not in told(context=2)


_PEAKS = """
import json, sys, torch
from hpctrain_tools.plan.torch_fake import fake_tensors
from hpctrain_tools.plan.accelerator import KIND, planned_accelerator
from hpctrain.registry.registry import build_registry
from hpctrain.training.meters.meters import peak_flops

device = planned_accelerator()
torch.get_device_module(KIND).get_device_name = lambda device: "NVIDIA H100 80GB HBM3"
found = {}
with fake_tensors():
    for one in build_registry().instances("precision"):
        operand = torch.empty(4, 4, dtype=one.parameter_dtype, device=device)
        with one.forward(device):
            made = (operand @ operand).dtype
        assert one.product_dtype(device) == made, one.name
        found[one.name] = str(made), peak_flops(device, one)
print(json.dumps(found))
"""


def test_a_peak_is_that_of_the_products_that_a_precision_computes() -> None:
    """For every registered precision, what comes out of a product on an accelerator, and the data sheet's figure for that."""
    done = subprocess.run([sys.executable, "-c", _PEAKS], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    sheet = {"torch.float64": 67e12, "torch.float32": 67e12, "torch.bfloat16": 989.4e12, "torch.float16": 989.4e12}
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"auto", "bf16", "fp16", "fp8", "fp32", "tf32", "fp64"} <= found.keys() == set(REGISTRY.names("precision"))
    assert found.pop("tf32") == ["torch.float32", 494.7e12]
    assert found["auto"] == found["bf16"]
    for name, (dtype, peak) in found.items():
        assert peak == sheet[dtype], name
