"""The simulated accelerator keeps its memory from the host: tests on it rely on that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import simulated

BEGIN = """
import ctypes, simulated, torch
simulated.register()
one, other = torch.ones(3000, device="sim"), torch.zeros(3, device="sim")
print((one + 1).sum().item(), flush=True)
"""


def ended(code: str) -> tuple[int, str]:
    """Exit code and output of a process on the device; the first of a torch compiles it."""
    simulated.built()
    words = [sys.executable, "-c", BEGIN + code]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, env=variables, check=False)
    return done.returncode, done.stdout


@pytest.mark.cases(thorough=["ctypes.string_at(one.data_ptr(), 4)"], rest="nightly")
@pytest.mark.parametrize(
    "read",
    [
        "ctypes.string_at(one.data_ptr(), 4)",
        "ctypes.string_at(other.data_ptr(), 4)",
        "ctypes.memset(one.data_ptr(), 0, 4)",
        "place = one.data_ptr(); del one; ctypes.string_at(place, 4)",
    ],
)
def test_a_host_that_reads_its_memory_ends(read: str) -> None:
    assert ended(read) == (-signal.SIGSEGV, "6000.0\n")


@pytest.mark.thorough
def test_what_nobody_has_written_is_nan() -> None:
    pinned = "torch.ones(3).pin_memory()"
    code = f"""
print(torch.empty(2, device="sim").tolist())
late = torch.empty(3, pin_memory=True).copy_(one[:3], non_blocking=True)
print(late.tolist())
torch.accelerator.synchronize()
print(late.tolist(), {pinned}.to("sim", non_blocking=True).tolist())
"""
    assert ended(code) == (0, "6000.0\n[nan, nan]\n[nan, nan, nan]\n[1.0, 1.0, 1.0] [1.0, 1.0, 1.0]\n")


@pytest.mark.thorough
def test_a_view_by_sign_is_copied_as_on_any_device() -> None:
    """torch keeps conjugates and the imaginary part of one as a sign in the view, which copies resolve."""
    code = """
here = torch.tensor([1 + 2j])
there = here.to("sim").conj()
print(there.tolist(), there.clone().tolist(), there.imag.to("cpu").tolist(), (there * 2).tolist())
"""
    expected = "6000.0\n[(1-2j)] [(1-2j)] [-2.0] [(2-4j)]\n"
    assert ended(code) == (0, expected)


@pytest.mark.thorough
def test_moments_of_8_bits_are_saved_from_host_memory() -> None:
    """In float32 they would need four times their bytes on the device, which may not be there."""
    pytest.importorskip("torchao")
    code = """
from hpctrain.checkpoint.state import restore_quantized, state_pieces
from hpctrain.contracts.pieces import Piece
from torchao.optim.subclass_8bit import OptimState8bit
module = torch.nn.Linear(128, 64, bias=False, device="sim")
optimizer = torch.optim.SGD(module.parameters())
moment = OptimState8bit.zeros((64, 128), True, 256, device="sim")
moment.copy_(torch.randn(64, 128).to("sim"))
optimizer.state[module.weight]["exp_avg"] = moment
trained = [Piece.of("weight", module.weight)]
saved = state_pieces(module, trained, ["weight"], optimizer)[-1]
again = OptimState8bit.zeros((64, 128), True, 256, device="sim")
again.copy_(moment.dequantize())  # codes at a border change
moment.copy_(torch.zeros(64, 128).to("sim"))
restore_quantized(trained, optimizer, [saved])
print(saved.name, saved.tensor.device, torch.equal(moment.codes.cpu(), again.codes.cpu()))
"""
    assert ended(code) == (0, "6000.0\noptimizer/weight/exp_avg cpu True\n")
