"""A gradient penalty, with Lightning Fabric: fabric run gradient_penalty.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
DATA = list(zip(torch.randn(512, 2) + 2, torch.randn(512, 2), torch.rand(512, 1), strict=True))

DIRECTORY, (STEPS, GLOBAL_SIZE, MICRO_SIZE) = Path(sys.argv[1]), map(int, sys.argv[2:])

fabric = Fabric(loggers=CSVLogger(DIRECTORY, name="logs", flush_logs_every_n_steps=1))
accumulation = GLOBAL_SIZE // MICRO_SIZE // fabric.world_size
net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))
critic, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True))
state = {"critic": critic, "optimizer": optimizer, "step": 0}
if (DIRECTORY / "checkpoint").exists():
    fabric.load(DIRECTORY / "checkpoint", state)
batches = chain.from_iterable(repeat(loader))
for step in range(state["step"] + 1, STEPS + 1):
    total = 0.0
    for number, (real, fake, share) in enumerate(islice(batches, accumulation), 1):
        with fabric.no_backward_sync(critic, enabled=number < accumulation):
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = (critic(fake).mean() - critic(real).mean() + 10 * penalty) / accumulation
            fabric.backward(loss)
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    fabric.log_dict({"loss": fabric.all_reduce(total)}, step)
fabric.save(DIRECTORY / "checkpoint", {**state, "step": STEPS})
