"""Loops that train one small network, hpctrain's and others', each timed on the rank that calls it: an MLP of 16,728 parameters on
4,096 samples of 64 numbers, AdamW, clipping, and a loss that is read in every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpctrain
from hpctrain.api import Identity, is_accelerator

WARM = 20
"""Steps before the time begins."""
_SAMPLES, _LR, _LIMIT = 4096, 1e-3, 1.0


def network() -> nn.Module:
    """The MLP."""
    return nn.Sequential(nn.Linear(64, 106), nn.ReLU(), nn.Linear(106, 84), nn.ReLU(), nn.Linear(84, 10))


def samples(split: str = "train") -> TensorDataset | None:
    """Random numbers with labels, in memory."""
    if split != "train":
        return None
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(_SAMPLES, 64, generator=draw), torch.randint(10, (_SAMPLES,), generator=draw))


@dataclass
class Timed:
    """A measurement of `steps` steps after WARM others, with a global batch. directory: for files, equal on all ranks."""

    batch: int
    steps: int
    identity: Identity
    device: torch.device
    directory: str
    seconds: float = 0.0
    _begin: float = field(default=0.0, init=False)

    def step_begins(self, number: int) -> bool:
        """Whether step `number`, from 0 on, is one to train: False where the measurement is over. Call it before each step."""
        if number in (WARM, WARM + self.steps):
            if is_accelerator(self.device):
                torch.accelerator.synchronize()
            now = time.perf_counter()
            self.seconds, self._begin = now - self._begin, now
        return number < WARM + self.steps

    def loader(self) -> DataLoader[Any]:
        """torch's loader of this rank's part of each batch."""
        data, ranks = samples(), self.identity.size
        assert data is not None
        sampler: DistributedSampler[Any] | None = (
            DistributedSampler(data, ranks, self.identity.rank) if ranks > 1 else None
        )
        return DataLoader(data, self.batch // ranks, shuffle=sampler is None, sampler=sampler)

    def tables(self) -> dict[str, Any]:
        """The job of both of hpctrain's loops."""
        return {
            "job": {"name": "small", "steps": WARM + self.steps, "output_dir": self.directory},
            "dataset": {"name": samples}, "optimizer": {"name": "adamw", "lr": _LR, "clip_norm": _LIMIT},
            "batch": {"global_size": self.batch, "micro_size": self.batch // self.identity.size},
            "precision": {"mode": "fp32"}, "checkpoint": {"every_steps": 10**6},
        }  # fmt: skip


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), _LR)


def _endless(loader: Any, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for inputs, labels in loader:
            yield inputs.to(device), labels.to(device)


def _train(
    timed: Timed,
    module: nn.Module,
    optimizer: Any,
    loader: Any,
    backward: Callable[[Tensor], object] = Tensor.backward,
    clip: Callable[[nn.Module], object] = lambda module: nn.utils.clip_grad_norm_(module.parameters(), _LIMIT),
) -> None:
    batches, number = _endless(loader, timed.device), 0
    while timed.step_begins(number):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(module(inputs), labels)
        backward(loss)
        clip(module)
        optimizer.step()
        loss.item()
        number += 1


def plain(timed: Timed) -> None:
    """A loop of plain PyTorch; with torch's DDP on several ranks."""
    module = network().to(timed.device)
    optimizer = _optimizer(module)
    _train(timed, DistributedDataParallel(module) if timed.identity.size > 1 else module, optimizer, timed.loader())


def own_loop(timed: Timed) -> None:
    """hpctrain's own loop."""
    with hpctrain.own_loop(timed.tables()) as loop:
        module = network()
        module, optimizer = loop.setup(module, _optimizer(module))
        for step in loop.steps():
            optimizer.zero_grad()
            for inputs, labels in step:
                loop.backward(cross_entropy(module(inputs), labels))
            optimizer.step()
    _by_rows(timed)


def run(timed: Timed) -> None:
    """`hpctrain run`."""
    hpctrain.run({**timed.tables(), "model": {"name": network, "loss": cross_entropy}})
    _by_rows(timed)


def _by_rows(timed: Timed) -> None:
    """Take the time from the rows of metrics: the last step is saved behind its row, which no other loop does."""
    if timed.identity.rank == 0:
        rows = Path(timed.directory, "metrics.jsonl").read_text().splitlines()
        timed.seconds = json.loads(rows[-1])["time"] - json.loads(rows[WARM - 1])["time"]


def accelerate(timed: Timed) -> None:
    """Accelerate's loop."""
    threads = torch.get_num_threads()
    accelerator = import_module("accelerate").Accelerator(cpu=not is_accelerator(timed.device))
    torch.set_num_threads(threads)  # which Accelerate sets where no variable does
    module = network()
    prepared, optimizer = accelerator.prepare(module, _optimizer(module))
    limit = accelerator.clip_grad_norm_
    _train(
        timed, prepared, optimizer, timed.loader(), accelerator.backward, lambda one: limit(one.parameters(), _LIMIT)
    )


def fabric(timed: Timed) -> None:
    """The loop of Lightning's Fabric."""
    made = import_module("lightning.fabric").Fabric(**_of_lightning(timed, "lightning.fabric"))
    made.launch()
    plain_module = network()
    module, optimizer = made.setup(plain_module, _optimizer(plain_module))
    _train(
        timed, module, optimizer, timed.loader(), made.backward,
        lambda one: made.clip_gradients(one, optimizer, max_norm=_LIMIT),
    )  # fmt: skip


def lightning(timed: Timed) -> None:
    """Lightning's Trainer, which logs each step to a file."""
    library = import_module("lightning.pytorch")

    class Net(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            timed.step_begins(self.global_step)
            loss = cross_entropy(self.inner(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self)

    library.Trainer(
        **_of_lightning(timed, "lightning.pytorch"), max_steps=WARM + timed.steps, gradient_clip_val=_LIMIT, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        logger=import_module("lightning.pytorch.loggers").CSVLogger(timed.directory),
    ).fit(Net(), timed.loader())  # fmt: skip
    timed.step_begins(WARM + timed.steps)


def _of_lightning(timed: Timed, package: str) -> dict[str, Any]:
    """The arguments of Lightning's that say where it runs."""
    where = {
        "accelerator": timed.device.type if is_accelerator(timed.device) else "cpu",
        "devices": timed.identity.local_size,
    }
    if timed.identity.size == 1:
        return where
    environment = import_module("lightning.fabric.plugins.environments").TorchElasticEnvironment()
    strategy = import_module(f"{package}.strategies").DDPStrategy(cluster_environment=environment)
    return {**where, "num_nodes": timed.identity.size // timed.identity.local_size, "strategy": strategy}


LOOPS: dict[str, Callable[[Timed], None]] = {
    one.__name__.replace("_", "-"): one for one in (plain, own_loop, run, accelerate, fabric, lightning)
}
"""The loops by their names; the first is the reference."""
OF_HPCTRAIN = ("own-loop", "run")
"""Loops that set torch.distributed up themselves."""
