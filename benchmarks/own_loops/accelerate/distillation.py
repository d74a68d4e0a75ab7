"""Distillation; teacher not sharded; with Accelerate: python distillation.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import os
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
DATA = list(torch.randn(512, 8))


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 4))


DIRECTORY, (STEPS, GLOBAL_SIZE, MICRO_SIZE) = Path(sys.argv[1]), map(int, sys.argv[2:])

plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
accelerator = Accelerator(gradient_accumulation_plugin=plugin, log_with="tensorboard", project_dir=DIRECTORY)
accumulation = accelerator.gradient_accumulation_steps = GLOBAL_SIZE // MICRO_SIZE // accelerator.num_processes
accelerator.init_trackers("logs")
# with FSDP, an Accelerator has one plugin and shards all models; DeepSpeed can shard the teacher alone
teacher = mlp(64).requires_grad_(False).to(accelerator.device)
net = mlp(8)
loader = DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True)
student, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
begin = 0
if newest := max(DIRECTORY.glob("step_*"), key=os.path.getctime, default=None):
    accelerator.load_state(newest)
    begin = int(newest.name.removeprefix("step_"))
batches = chain.from_iterable(repeat(loader))
for step in range(begin + 1, STEPS + 1):
    total = 0.0
    for inputs in islice(batches, accumulation):
        with accelerator.accumulate(student):
            with torch.no_grad():
                answers = teacher(inputs).softmax(-1)
            loss = cross_entropy(student(inputs), answers)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / accumulation
    accelerator.log({"loss": accelerator.reduce(total, "mean").item()}, step)
accelerator.save_state(DIRECTORY / f"step_{STEPS}")
accelerator.end_training()
