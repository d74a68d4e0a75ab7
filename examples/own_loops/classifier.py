"""A classifier in a loop of its own: python classifier.py JOB.toml, or with mpiexec or srun in front."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain

torch.manual_seed(0)
DATA = [(point, (point.prod() > 0).long()) for point in torch.randn(512, 2)]

with hpctrain.own_loop(sys.argv[1], dataset={"name": DATA}) as loop:
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for step in loop.steps():
        for points, labels in step:
            loop.backward(cross_entropy(model(points), labels))
        optimizer.step()
        optimizer.zero_grad()
