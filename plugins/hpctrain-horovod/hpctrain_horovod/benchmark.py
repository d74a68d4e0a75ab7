"""Measures Horovod's operations on the ranks of this job, beside torch.distributed, MPI itself, and a real Horovod where one is
installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hpctrain_tools.bench import Spread, spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hpctrain_horovod.torch as ours
from hpctrain.mpi import BACKEND, MPI

OPERATIONS = ("allreduce", "allgather", "broadcast")
SIZES = (4 * 1024, 2**20, 64 * 2**20)
"""Bytes: of the reduced or broadcast tensor, of the gathered one."""
TOGETHER = "64 allreduces"
STEP = "training step"
_TURN = 10  # repetitions before the next engine's turn
_WARMUP = 3  # at the start of each turn
_LARGE, _FEWER = 16 * 2**20, 5
"""Bytes from which a measurement takes a fifth of the repetitions."""

VOCABULARY, SEQUENCE, WIDTH, LAYERS, HEADS, BATCH = 4096, 128, 512, 8, 8, 4


@dataclass(frozen=True)
class Row:
    """A measurement. nbytes: of the operation, 0 for a step. seconds, low, high: the slowest rank's median and its quartiles.
    ratio: to torch.distributed over MPI in the same turns, of a step to that of torch's DDP."""

    operation: str
    engine: str
    nbytes: int
    seconds: float
    low: float
    high: float
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


def measure(
    repetitions: int = 50, steps: int = 7, sizes: Sequence[int] = SIZES, model: Callable[[], nn.Module] = GPT
) -> list[Row]:
    """Time float32 operations and training steps over all ranks. Collective; ranks use one thread each.

    The engines take turns, so that a busy machine slows all of them alike. model: gives logits (batch, seq, vocabulary) for tokens.
    """
    dist.init_process_group(BACKEND, init_method="mpi://")
    engines = {"hpctrain": ours, **_real()}
    for engine in engines.values():
        engine.init()
    gloo, rows = dist.new_group(backend="gloo"), []
    assert isinstance(gloo, dist.ProcessGroup)  # of all ranks
    for operation in OPERATIONS:
        for nbytes in sizes:
            calls = {
                "torch mpi": _of_torch(operation, nbytes, None),
                "torch gloo": _of_torch(operation, nbytes, gloo),
                "mpi4py": _of_mpi(operation, nbytes),
                **{name: _of_engine(engine, operation, nbytes) for name, engine in engines.items()},
            }
            rows += _rows(operation, nbytes, calls, repetitions // (_FEWER if nbytes >= _LARGE else 1))
    parts = [torch.zeros(1024) for _ in range(64)]
    together = {name: _reduce_all(engine, parts) for name, engine in engines.items()}
    rows += _rows(TOGETHER, 64 * 4096, {"torch mpi": _reduce_each(parts), **together}, repetitions)
    training = {
        "torch ddp": _step(model, None, ddp=True),
        "single rank": _step(model, None),
        **{name: _step(model, engine) for name, engine in engines.items()},
    }
    rows += _rows(STEP, 0, training, steps, turn=1, warmup=1)
    for engine in engines.values():
        engine.shutdown()
    dist.destroy_process_group()
    return rows


def _real() -> dict[str, Any]:
    try:
        importlib.metadata.distribution("horovod")
        return {"horovod": importlib.import_module("horovod.torch")}
    except (importlib.metadata.PackageNotFoundError, ImportError):
        return {}


def _of_torch(operation: str, nbytes: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    whole, part = _tensors(nbytes)
    found: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(whole, group=group),
        "allgather": lambda: dist.all_gather_single(whole, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    return found[operation]


def _of_mpi(operation: str, nbytes: int) -> Callable[[], object]:
    whole, part = (tensor.numpy() for tensor in _tensors(nbytes))
    found: dict[str, Callable[[], object]] = {
        "allreduce": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, whole),
        "allgather": lambda: MPI.COMM_WORLD.Allgather(part, whole),
        "broadcast": lambda: MPI.COMM_WORLD.Bcast(whole, 0),
    }
    return found[operation]


def _of_engine(engine: Any, operation: str, nbytes: int) -> Callable[[], object]:
    """Horovod's operation. Its allgather makes the gathered tensor, as it knows no place for it."""
    whole, part = _tensors(nbytes)
    name = f"{operation} {nbytes}"
    found: dict[str, Callable[[], object]] = {
        "allreduce": lambda: engine.allreduce_(whole, name=name, op=engine.Sum),
        "allgather": lambda: engine.allgather(part, name=name),
        "broadcast": lambda: engine.broadcast_(whole, 0, name=name),
    }
    return found[operation]


def _tensors(nbytes: int) -> tuple[Tensor, Tensor]:
    """The whole tensor, of a multiple of the ranks, and a rank's part."""
    part = max(1, nbytes // 4 // dist.get_world_size())
    return torch.zeros(part * dist.get_world_size()), torch.zeros(part)


def _reduce_each(parts: Sequence[Tensor]) -> Callable[[], object]:
    def run() -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            assert work is not None
            work.wait()

    return run


def _reduce_all(engine: Any, parts: Sequence[Tensor]) -> Callable[[], object]:
    def run() -> None:
        handles = [engine.allreduce_async_(part, name=f"part.{n}", op=engine.Sum) for n, part in enumerate(parts)]
        for handle in handles:
            engine.synchronize(handle)

    return run


def _step(make: Callable[[], nn.Module], engine: Any, ddp: bool = False) -> Callable[[], object]:
    torch.manual_seed(0)
    model = DistributedDataParallel(make()) if ddp else make()
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
    nbytes: int,
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
    mine = np.array([spread(taken) for taken in times.values()])
    ranks = np.empty((MPI.COMM_WORLD.Get_size(), *mine.shape))
    MPI.COMM_WORLD.Allgather(mine, ranks)
    slowest = {name: Spread(*ranks[ranks[:, at, 0].argmax(), at].tolist()) for at, name in enumerate(times)}
    reference = next(iter(slowest.values())).median
    return [Row(operation, name, nbytes, *found, found.median / reference) for name, found in slowest.items()]
