"""Time and memory of dilated attention beside torch's attention to all tokens, forward and backward, by length.

python benchmarks/lengths.py OUT.json [LENGTH ...]

Each length and kind is measured in a process of its own, whose peak of resident memory counts from before its first tensor. The
least of three passes is taken. torch's attention is its fused operator, linear in memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from hpctrain_dilated_attention.attention import DilatedAttention
from hpctrain_dilated_attention.pattern import Pattern
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072]
HEADS, SIZE = 2, 16
PATTERNS = {
    "dilated": Pattern((512, 2048, 8192), (1, 4, 16)),
    "block-sparse": Pattern((512, 2048, 8192), (1, 4, 16), block=64, sparsity_ratio=0.5),
}
_LONGEST_WHOLE = 65536
"""Attention to all tokens takes minutes from here."""


def measure(kind: str, tokens: int) -> dict[str, float]:
    """Seconds and MB of a pass."""
    dilated = DilatedAttention(PATTERNS[kind]) if kind in PATTERNS else None
    inputs = [torch.randn(1, HEADS, tokens, SIZE, requires_grad=True) for _ in range(3)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    least = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        output = dilated.attend(*inputs) if dilated else scaled_dot_product_attention(*inputs, is_causal=True)
        output.sum().backward()
        least = min(least, time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": least, "megabytes": peak / 1000}


def main(out: Path, lengths: list[int]) -> None:
    found: dict[str, dict[int, dict[str, float]]] = {}
    for kind in ("whole", *PATTERNS):
        for tokens in lengths:
            if kind != "whole" or tokens <= _LONGEST_WHOLE:
                command = [sys.executable, __file__, "--one", kind, str(tokens)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.setdefault(kind, {})[tokens] = json.loads(done.stdout)
                print(kind, tokens, found[kind][tokens], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]] or LENGTHS)
