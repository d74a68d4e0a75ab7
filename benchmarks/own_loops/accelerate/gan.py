"""A GAN, with Accelerate: python gan.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import os
import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

torch.manual_seed(0)
RING = torch.randn(512, 2)
# the noise is part of the data, so that it is the same on any number of ranks
DATA = list(zip(RING / RING.norm(dim=1, keepdim=True), torch.randn(512, 4), strict=True))


def mlp(*sizes: int) -> nn.Sequential:
    first, second, last = sizes
    return nn.Sequential(nn.Linear(first, second), nn.LeakyReLU(0.2), nn.Linear(second, last))


DIRECTORY, (STEPS, GLOBAL_SIZE, MICRO_SIZE) = Path(sys.argv[1]), map(int, sys.argv[2:])

plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
accelerator = Accelerator(gradient_accumulation_plugin=plugin, log_with="tensorboard", project_dir=DIRECTORY)
accumulation = accelerator.gradient_accumulation_steps = GLOBAL_SIZE // MICRO_SIZE // accelerator.num_processes
accelerator.init_trackers("logs")
net_g, net_d = mlp(4, 32, 2), mlp(2, 32, 1)
of_g, of_d = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (net_g, net_d))
loader = DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True)
generator, critic, of_g, of_d, loader = accelerator.prepare(net_g, net_d, of_g, of_d, loader)
begin = 0
if newest := max(DIRECTORY.glob("step_*"), key=os.path.getctime, default=None):
    accelerator.load_state(newest)
    begin = int(newest.name.removeprefix("step_"))
batches = chain.from_iterable(repeat(loader))
for step in range(begin + 1, STEPS + 1):
    of_step, total_d, total_g = list(islice(batches, accumulation)), 0.0, 0.0
    for real, noise in of_step:
        with accelerator.accumulate(critic):
            with torch.no_grad():
                fake = generator(noise)
            loss = softplus(-critic(real)).mean() + softplus(critic(fake)).mean()
            accelerator.backward(loss)
            of_d.step()
            of_d.zero_grad()
        total_d += loss.detach() / accumulation
    for _, noise in of_step:
        with accelerator.accumulate(generator, critic):
            loss = softplus(-critic(generator(noise))).mean()
            accelerator.backward(loss)
            of_g.step()
            of_g.zero_grad()
            of_d.zero_grad()
        total_g += loss.detach() / accumulation
    loss_g, loss_d = accelerator.reduce([total_g, total_d], "mean")
    accelerator.log({"loss": loss_g.item(), "loss_discriminator": loss_d.item()}, step)
accelerator.save_state(DIRECTORY / f"step_{STEPS}")
accelerator.end_training()
