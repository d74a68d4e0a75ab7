"""tf32, bf16, fp16 and fp8 on a GPU: each close to the float32 curve, and closer to a plain torch loop in that mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import AT_ONCE, DEVICE, batches_on, compare, job, losses, needs_gpu, plain, trained
from plain import gpt_loss, module_of
from torch import nn

from hpctrain.base.devices import nvidia_capability

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

CAPABILITY = nvidia_capability(DEVICE) or (0, 0)
needs_tf32 = pytest.mark.skipif(CAPABILITY < (8, 0), reason="tf32 needs an NVIDIA GPU of capability 8.0")
needs_fp8 = pytest.mark.skipif(CAPABILITY < (8, 9), reason="fp8 needs an NVIDIA GPU of capability 8.9")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

NEAR_FP32 = {"tf32": 1e-3, "bf16": 5e-3, "fp16": 1e-3, "fp8": 3e-2}
"""The largest deviation of a loss from the float32 curve, relative, over all steps."""
SAME_FORMAT = 1e-3
"""The same from the loss of a plain loop in that format: single roundings may differ."""
OVERFLOWING = 2.0**30
"""A loss scale at which the first gradients do not fit fp16."""


@pytest.fixture
def default_products() -> Iterator[None]:
    """A test may change the rounding of products; this restores it."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before


def autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return partial(torch.autocast, DEVICE.type, dtype)


def near_but_not_the_same(rows: list[dict[str, Any]], mode: str, curve: list[float]) -> None:
    """Check that losses are close to the float32 curve but not equal: fewer bits were used."""
    assert losses(rows) == pytest.approx(curve, rel=NEAR_FP32[mode])
    assert max(abs(a - b) / b for a, b in zip(losses(rows), curve, strict=True)) > 1e-7


@needs_tf32
@pytest.mark.usefixtures("default_products")
def test_tf32_and_fp32_after_it(tmp_path: Path) -> None:
    exact = trained(job(tmp_path / "fp32", batch=AT_ONCE))
    tables = job(tmp_path / "tf32", batch=AT_ONCE, precision={"mode": "tf32"})
    rounded = trained(tables)
    near_but_not_the_same(rounded, "tf32", losses(exact))
    torch.backends.cuda.matmul.allow_tf32 = True
    compare(rounded, plain(tables)[1], SAME_FORMAT)
    again = trained(job(tmp_path / "again", batch=AT_ONCE))  # in this process, which allowed tf32
    assert losses(again) == pytest.approx(losses(exact), rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16(tmp_path: Path, stage: int) -> None:
    tables = job(tmp_path, batch=AT_ONCE, precision={"mode": "bf16"}, sharding={"stage": stage})
    rows = trained(tables)
    near_but_not_the_same(rows, "bf16", [loss for loss, _ in plain(tables)[1]])
    compare(rows, plain(tables, forward=autocast(torch.bfloat16))[1], SAME_FORMAT)


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16(tmp_path: Path, stage: int) -> None:
    tables = job(tmp_path, batch=AT_ONCE, precision={"mode": "fp16"}, sharding={"stage": stage})
    rows = trained(tables)
    near_but_not_the_same(rows, "fp16", [loss for loss, _ in plain(tables)[1]])
    expected, skipped = with_grad_scaler(tables, 65536.0)
    assert losses(rows) == pytest.approx(expected, rel=SAME_FORMAT) and not any(skipped)


def test_fp16_leaves_out_steps_as_torch_s_scaler_does(tmp_path: Path) -> None:
    mode = {"mode": "fp16", "initial_scale": OVERFLOWING, "hysteresis": 1}
    tables = job(tmp_path, batch=AT_ONCE, precision=mode, job={"steps": 24})
    rows = trained(tables)
    expected, skipped = with_grad_scaler(tables, OVERFLOWING)
    assert losses(rows) == pytest.approx(expected, rel=SAME_FORMAT)
    found = [row.get("skipped", False) for row in rows]
    assert any(found) and not all(found) and found == sorted(found, reverse=True), "at first, until the scale fits"
    assert abs(sum(found) - sum(skipped)) <= 1, "a gradient at the edge may fall on the other side"


def with_grad_scaler(tables: dict[str, Any], scale: float) -> tuple[list[float], list[bool]]:
    """The losses of a plain loop in fp16 with torch's own scaler, and the steps that it skipped."""
    module = module_of(tables, torch.float32).to(DEVICE)
    options = {key: value for key, value in tables["optimizer"].items() if key != "name"}
    optimizer = torch.optim.AdamW(module.parameters(), **options, fused=False, foreach=False)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=scale, growth_interval=1000)
    found, skipped = [], []
    for batch in batches_on(tables, DEVICE):
        with torch.autocast(DEVICE.type, torch.float16):
            loss = gpt_loss(module, *batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
        skipped.append(scaler.get_scale() < before)
    return found, skipped


@needs_fp8
@needs_torchao
@pytest.mark.parametrize(("stage", "compiled"), [(0, False), (2, False), (3, False), (0, True)], ids=str)
def test_fp8(tmp_path: Path, stage: int, compiled: bool) -> None:
    tables = job(
        tmp_path, batch=AT_ONCE, precision={"mode": "fp8"}, sharding={"stage": stage}, compile={"enabled": compiled}
    )
    rows = trained(tables)
    near_but_not_the_same(rows, "fp8", [loss for loss, _ in plain(tables)[1]])
    compare(rows, plain(tables, forward=autocast(torch.bfloat16), convert=to_float8)[1], 10 * SAME_FORMAT)
    bf16 = plain(tables, forward=autocast(torch.bfloat16))[1]
    assert losses(rows) != pytest.approx([loss for loss, _ in bf16], rel=1e-6), "float8 was used"


def to_float8(module: nn.Module) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(module.get_submodule("layers"))


@needs_fp8
@needs_torchao
def test_fp8_of_tokens_that_16_does_not_divide(tmp_path: Path) -> None:
    """The gradient of a weight is a product over the tokens, and float8 products take multiples of 16."""
    tables = job(tmp_path, batch={"global_size": 3, "micro_size": 1}, dataset={"seq_length": 31})
    tables["precision"] = {"mode": "fp8"}
    rows = trained(tables)
    assert losses(rows) == pytest.approx([loss for loss, _ in plain(tables)[1]], rel=NEAR_FP32["fp8"])


def test_a_format_that_the_gpu_lacks_is_refused_in_a_sentence(tmp_path: Path) -> None:
    if CAPABILITY >= (8, 9) and find_spec("torchao") is not None:
        pytest.skip("this GPU has every format")
    from hpctrain.base.errors import EnvironmentUnfitError

    with pytest.raises(EnvironmentUnfitError, match=r"\[precision\] mode = 'fp8': .*(float8|torchao)"):
        trained(job(tmp_path, precision={"mode": "fp8"}))
