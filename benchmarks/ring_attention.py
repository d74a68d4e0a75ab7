"""Measures what a rank of a ring computes in attention, on one device and without communication:

    python benchmarks/ring_attention.py [--ranks 4] [--tokens 4096 8192 16384 32768] [--dtype bf16] [--device gpu]

Rank 0 of the ring attends with all its tokens to its own keys, causally, and with the second half of them to the keys of each
other rank, forward and backward. Its seconds are compared with torch's causal attention over its tokens alone, times the
number of ranks: the same number of products. The peak bytes beyond the tensors themselves are those of the kernel that the
job takes, and of plain arithmetic (whole matrices of scores).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpctrain.api import AttentionKernel, device_name, device_of_rank, is_accelerator
from hpctrain.toolkit.attention import Arithmetic, kernel_of, merge

HEADS, SIZE = 8, 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def ring(kernel: AttentionKernel, ranks: int, tensors: list[Tensor]) -> None:
    """Forward and backward of rank 0, as parallelism/context/ring.py makes them."""
    query, key, value, gradient = tensors
    half = query.shape[2] // 2
    wide = torch.promote_types(query.dtype, torch.float32)
    late, late_gradient = query[:, :, half:].contiguous(), gradient[:, :, half:].contiguous()
    part, rows = kernel.forward(query, key, value, True)
    output, rows = part.to(wide, copy=True), rows.clone()
    for _ in range(ranks - 1):
        part, part_rows = kernel.forward(late, key, value, False)
        before = output[:, :, half:], rows[:, :, half:]
        output[:, :, half:], rows[:, :, half:] = merge(before, (part.to(wide), part_rows))
    output = output.to(query.dtype)
    kernel.backward(gradient, query, key, value, output, rows, True)
    for _ in range(ranks - 1):
        kernel.backward(
            late_gradient, late, key, value, output[:, :, half:].contiguous(), rows[:, :, half:].contiguous(), False
        )


def at_once(tensors: list[Tensor]) -> None:
    """torch's own attention over the same tokens, forward and backward."""
    query, key, value = (one.detach().requires_grad_() for one in tensors[:3])
    scaled_dot_product_attention(query, key, value, is_causal=True).backward(tensors[3])


def measured(work: Callable[[], None], device: torch.device) -> tuple[float, int] | None:
    """The least seconds of three, and the peak bytes beyond what was there; None if memory is short."""
    seconds, peak = [], 0
    try:
        for _ in range(4):
            if is_accelerator(device):
                torch.accelerator.synchronize()
                torch.accelerator.reset_peak_memory_stats()
                before = torch.accelerator.memory_allocated()
            begin = time.perf_counter()
            work()
            if is_accelerator(device):
                torch.accelerator.synchronize()
                peak = torch.accelerator.max_memory_allocated() - before
            seconds.append(time.perf_counter() - begin)
    except torch.OutOfMemoryError:
        torch.accelerator.empty_cache()
        return None
    return min(seconds[1:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="on each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.device == "cpu" else device_of_rank(0)
    print(f"{arguments.ranks} ranks, {HEADS} heads of {SIZE}, {arguments.dtype}, on {device_name(device)}")
    for tokens in arguments.tokens:
        shape = (1, HEADS, tokens, SIZE)
        tensors = [torch.randn(shape, dtype=DTYPES[arguments.dtype], device=device) for _ in range(4)]
        kernel = kernel_of(*tensors[:3])
        alone = measured(lambda: at_once(tensors), device)  # noqa: B023
        line = f"{tokens:6} tokens a rank"
        for one in (kernel, Arithmetic()):
            found = measured(lambda: ring(one, arguments.ranks, tensors), device)  # noqa: B023
            name = type(one).__name__.strip("_")
            if found is None or alone is None:
                line += f"  {name}: out of memory"
                continue
            line += f"  {name}: {found[0] * 1e3:.1f} ms, {found[0] / alone[0] / arguments.ranks:.2f} of torch's"
            line += f", {found[1] / 1e6:,.0f} MB" if found[1] else ""
        print(line, flush=True)


if __name__ == "__main__":
    main()
