"""Alternating freezing of body and head, with Accelerate: python freezing.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import os
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

torch.manual_seed(0)
DATA = [(point, point.sum(0, keepdim=True).sin()) for point in torch.randn(512, 4)]

DIRECTORY, (STEPS, GLOBAL_SIZE, MICRO_SIZE) = Path(sys.argv[1]), map(int, sys.argv[2:])

plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
handler = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(
    gradient_accumulation_plugin=plugin, kwargs_handlers=[handler], log_with="tensorboard", project_dir=DIRECTORY
)
accumulation = accelerator.gradient_accumulation_steps = GLOBAL_SIZE // MICRO_SIZE // accelerator.num_processes
accelerator.init_trackers("logs")
net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
body, _, head = net
loader = DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
begin = 0
if newest := max(DIRECTORY.glob("step_*"), key=os.path.getctime, default=None):
    accelerator.load_state(newest)
    begin = int(newest.name.removeprefix("step_"))
batches = chain.from_iterable(repeat(loader))
for step in range(begin + 1, STEPS + 1):
    trained, frozen = (body, head) if step % 2 else (head, body)
    trained.requires_grad_(True)
    frozen.requires_grad_(False)
    total = 0.0
    for points, values in islice(batches, accumulation):
        with accelerator.accumulate(model):
            loss = mse_loss(model(points), values)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / accumulation
    accelerator.log({"loss": accelerator.reduce(total, "mean").item()}, step)
accelerator.save_state(DIRECTORY / f"step_{STEPS}")
accelerator.end_training()
