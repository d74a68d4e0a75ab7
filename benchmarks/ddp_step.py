"""Measures the cost of data parallelism: a training step of a 29 M-parameter GPT alone, with DDP over MPI, and over gloo.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/ddp_step.py [--json] [--steps N]

The three take turns step by step, so that a busy machine slows all of them alike. Prints medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hpctrain.mpi

VOCABULARY, SEQUENCE, WIDTH, LAYERS, HEADS = 4096, 128, 512, 8, 8
BATCH = 4  # per rank


class Block(nn.Module):
    """Pre-norm attention and MLP. x: (batch, seq, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """tokens: (batch, seq) -> logits (batch, seq, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """Run one training step; return its seconds."""
    start = time.perf_counter()
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)

    def build(group: dist.ProcessGroup | None) -> nn.Module:
        torch.manual_seed(0)
        return (
            GPT()
            if group is None
            else DistributedDataParallel(GPT(), process_group=group, gradient_as_bucket_view=True)
        )

    models = {"alone": build(None), "mpi": build(dist.group.WORLD), "gloo": build(gloo)}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(arguments.steps + 2):
        for name, model in models.items():
            dist.barrier()
            seconds = step(model, optimizers[name], tokens)
            if number >= 2:
                times[name].append(seconds)

    medians = {name: statistics.median(values) for name, values in times.items()}
    slowest = torch.tensor(list(medians.values()), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    result: dict[str, float] = {
        "ranks": dist.get_world_size(),
        "parameters": sum(p.numel() for p in models["alone"].parameters()),
    }
    for name, seconds in zip(medians, slowest.tolist(), strict=True):
        result[f"{name}_ms"] = round(seconds * 1e3, 1)
        result[f"{name}_ratio"] = round(seconds / slowest[0].item(), 4)
    if dist.get_rank() == 0:
        print(json.dumps(result) if arguments.json else "\n".join(f"{key:12} {value}" for key, value in result.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
