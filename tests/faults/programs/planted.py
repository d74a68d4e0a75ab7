"""A model and data for a job in which rank 1 hangs in one way, the variable PLANT, in its fourth forward."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

PLANT = os.environ.get("PLANT", "")


def rank() -> int:
    return int(os.environ["RANK"])


class Data(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if PLANT == "worker" and index % 10 == 5 and get_worker_info() is not None:
            while True:  # in a worker
                pass
        sample = torch.full((8,), index / 4000)
        return sample, sample.sum().reshape(1)


def data(split: str) -> Data:
    return Data()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.evaluations = nn.Linear(8, 1), 0, 0
        self.pair = dist.new_group([0, 1]) if PLANT == "group" else None

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 4:
                self.hang(rank())
        else:
            self.evaluations += 1
            if PLANT == "evaluation" and self.evaluations == 2 and rank() == 1:
                time.sleep(10_000)  # in an evaluation
        out: Tensor = self.layer(batch)
        return out

    def hang(self, rank: int) -> None:
        if PLANT == "group" and rank == 0:
            dist.barrier(group=self.pair)  # without rank 1
        if PLANT == "mismatch":
            dist.all_reduce(torch.ones(3 if rank == 1 else 2))
        if PLANT == "stop-first" and rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if PLANT.removeprefix("fails-") == str(rank):
            raise ValueError("planted")
        if PLANT.startswith("fails-"):
            time.sleep(10_000)  # a wait that does not notice it, as NCCL's
        if rank != 1:
            return
        if PLANT == "sleep":
            time.sleep(10_000)  # in a forward
        elif PLANT == "input":
            os.read(os.pipe()[0], 1)  # nobody writes
        elif PLANT == "loop":
            while True:  # in a forward
                pass
        elif PLANT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif PLANT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def net() -> Net:
    return Net()


def loss(outputs: Tensor, target: Tensor) -> Tensor:
    return ((outputs - target) ** 2).mean()
