"""A GAN, with Lightning Fabric: fabric run gan.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
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

fabric = Fabric(loggers=CSVLogger(DIRECTORY, name="logs", flush_logs_every_n_steps=1))
accumulation = GLOBAL_SIZE // MICRO_SIZE // fabric.world_size
net_g, net_d = mlp(4, 32, 2), mlp(2, 32, 1)
generator, of_g = fabric.setup(net_g, torch.optim.Adam(net_g.parameters(), lr=1e-3))
critic, of_d = fabric.setup(net_d, torch.optim.Adam(net_d.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True))
state = {"generator": generator, "critic": critic, "of_g": of_g, "of_d": of_d, "step": 0}
if (DIRECTORY / "checkpoint").exists():
    fabric.load(DIRECTORY / "checkpoint", state)
batches = chain.from_iterable(repeat(loader))
for step in range(state["step"] + 1, STEPS + 1):
    of_step, total_d, total_g = list(islice(batches, accumulation)), 0.0, 0.0
    for number, (real, noise) in enumerate(of_step, 1):
        with fabric.no_backward_sync(critic, enabled=number < accumulation):
            with torch.no_grad():
                fake = generator(noise)
            loss = (softplus(-critic(real)).mean() + softplus(critic(fake)).mean()) / accumulation
            fabric.backward(loss)
        total_d += loss.detach()
    of_d.step()
    of_d.zero_grad()
    for number, (_, noise) in enumerate(of_step, 1):
        with fabric.no_backward_sync(generator, enabled=number < accumulation):
            loss = softplus(-critic(generator(noise))).mean() / accumulation
            fabric.backward(loss)
        total_g += loss.detach()
    of_g.step()
    of_g.zero_grad()
    of_d.zero_grad()
    fabric.log_dict({"loss": fabric.all_reduce(total_g), "loss_discriminator": fabric.all_reduce(total_d)}, step)
fabric.save(DIRECTORY / "checkpoint", {**state, "step": STEPS})
