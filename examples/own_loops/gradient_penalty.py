"""A critic with a gradient penalty: its loss has a gradient in it, which is differentiated once more."""

import sys

import torch
from torch import nn

import hpctrain

torch.manual_seed(0)
DATA = list(zip(torch.randn(512, 2) + 2, torch.randn(512, 2), torch.rand(512, 1), strict=True))

with hpctrain.own_loop(sys.argv[1], dataset={"name": DATA}) as loop:
    net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))
    critic, optimizer = loop.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    for step in loop.steps():
        for real, fake, share in step:
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loop.backward(critic(fake).mean() - critic(real).mean() + 10 * penalty)
        optimizer.step()
        optimizer.zero_grad()
