"""A classifier, with Lightning Fabric: fabric run classifier.py DIRECTORY STEPS GLOBAL_SIZE MICRO_SIZE."""

import sys
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
DATA = [(point, (point.prod() > 0).long()) for point in torch.randn(512, 2)]

DIRECTORY, (STEPS, GLOBAL_SIZE, MICRO_SIZE) = Path(sys.argv[1]), map(int, sys.argv[2:])

fabric = Fabric(loggers=CSVLogger(DIRECTORY, name="logs", flush_logs_every_n_steps=1))
accumulation = GLOBAL_SIZE // MICRO_SIZE // fabric.world_size
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(DATA, MICRO_SIZE, shuffle=True, drop_last=True))
state = {"model": model, "optimizer": optimizer, "step": 0}
if (DIRECTORY / "checkpoint").exists():
    fabric.load(DIRECTORY / "checkpoint", state)
batches = chain.from_iterable(repeat(loader))
for step in range(state["step"] + 1, STEPS + 1):
    total = 0.0
    for number, (points, labels) in enumerate(islice(batches, accumulation), 1):
        with fabric.no_backward_sync(model, enabled=number < accumulation):
            loss = cross_entropy(model(points), labels) / accumulation
            fabric.backward(loss)
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    fabric.log_dict({"loss": fabric.all_reduce(total)}, step)
fabric.save(DIRECTORY / "checkpoint", {**state, "step": STEPS})
