"""Alternating freezing: body and head of a model are trained in turn."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpctrain

torch.manual_seed(0)
DATA = [(point, point.sum(0, keepdim=True).sin()) for point in torch.randn(512, 4)]

with hpctrain.own_loop(sys.argv[1], dataset={"name": DATA}) as loop:
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    model, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    body, _, head = model
    for step in loop.steps():
        trained, frozen = (body, head) if step.number % 2 else (head, body)
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        for points, values in step:
            loop.backward(mse_loss(model(points), values))
        optimizer.step()
        optimizer.zero_grad()
