"""Measures Horovod's operations on the ranks of this job: this package, MPI itself, and a real Horovod where one is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hpctrain_horovod.torch as ours
from hpctrain.mpi import MPI

SIZES = {"allreduce 4 KB": 4 * 1024, "allreduce 1 MB": 2**20, "allreduce 64 MB": 64 * 2**20}
TOGETHER = "64 allreduces of 4 KB"
STEP = "training step"
_TURN = 10  # repetitions before the next engine's turn
_WARMUP = 3  # at the start of each turn

VOCABULARY, SEQUENCE, WIDTH, LAYERS, HEADS, BATCH = 4096, 128, 512, 8, 8, 4


@dataclass(frozen=True)
class Row:
    """A measurement. seconds: the slowest rank's median. ratio: to MPI's own, of a step to the step of a single rank."""

    operation: str
    engine: str
    seconds: float
    ratio: float


class GPT(nn.Module):
    """29 million parameters. tokens: (batch, seq) -> logits (batch, seq, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def measure(repetitions: int = 50, steps: int = 15) -> list[Row]:
    """Time float32 allreduces and training steps over all ranks. Collective; ranks use one thread each.

    The engines take turns, so that a busy machine slows all of them alike.
    """
    engines = {"hpctrain": ours, **_real()}
    for engine in engines.values():
        engine.init()
    rows = []
    for operation, nbytes in SIZES.items():
        tensor = torch.zeros(nbytes // 4)
        calls = {name: _reduce(engine, tensor, operation) for name, engine in engines.items()}
        rows += _rows(operation, {"mpi4py": _reduce_plainly([tensor]), **calls}, repetitions)
    parts = [torch.zeros(1024) for _ in range(64)]
    together = {name: _reduce_all(engine, parts) for name, engine in engines.items()}
    rows += _rows(TOGETHER, {"mpi4py": _reduce_plainly(parts), **together}, repetitions)
    training = {"single rank": _step(None), **{name: _step(engine) for name, engine in engines.items()}}
    rows += _rows(STEP, training, steps, turn=1, warmup=1)
    for engine in engines.values():
        engine.shutdown()
    return rows


def _real() -> dict[str, Any]:
    try:
        importlib.metadata.distribution("horovod")
        return {"horovod": importlib.import_module("horovod.torch")}
    except (importlib.metadata.PackageNotFoundError, ImportError):
        return {}


def _reduce_plainly(tensors: Sequence[Tensor]) -> Callable[[], object]:
    buffers = [tensor.numpy() for tensor in tensors]

    def run() -> None:
        for buffer in buffers:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)

    return run


def _reduce(engine: Any, tensor: Tensor, name: str) -> Callable[[], object]:
    return lambda: engine.allreduce_(tensor, name=name, op=engine.Sum)


def _reduce_all(engine: Any, parts: Sequence[Tensor]) -> Callable[[], object]:
    def run() -> None:
        handles = [engine.allreduce_async_(part, name=f"part.{n}", op=engine.Sum) for n, part in enumerate(parts)]
        for handle in handles:
            engine.synchronize(handle)

    return run


def _step(engine: Any) -> Callable[[], object]:
    torch.manual_seed(0)
    model = GPT()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if engine is not None:
        optimizer = engine.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))

    def run() -> None:
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()  # a real Horovod's zero_grad takes no set_to_none

    return run


def _rows(
    operation: str,
    calls: Mapping[str, Callable[[], object]],
    repetitions: int,
    turn: int = _TURN,
    warmup: int = _WARMUP,
) -> list[Row]:
    """The first of `calls` is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    while any(len(taken) < repetitions for taken in times.values()):
        for name, call in calls.items():
            for repetition in range(warmup + turn):
                MPI.COMM_WORLD.Barrier()
                start = time.perf_counter()
                call()
                if repetition >= warmup:
                    times[name].append(time.perf_counter() - start)
    medians = np.array([statistics.median(taken) for taken in times.values()])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, medians, MPI.MAX)
    slowest = dict(zip(calls, medians.tolist(), strict=True))
    first = next(iter(slowest.values()))
    return [Row(operation, name, seconds, seconds / first) for name, seconds in slowest.items()]
