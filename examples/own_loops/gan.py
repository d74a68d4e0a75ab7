"""A GAN: two models with an optimizer each, which take turns."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import hpctrain

torch.manual_seed(0)
RING = torch.randn(512, 2)
# the noise is part of the data, so that it is the same on any number of ranks
DATA = list(zip(RING / RING.norm(dim=1, keepdim=True), torch.randn(512, 4), strict=True))


def mlp(*sizes: int) -> nn.Sequential:
    first, second, last = sizes
    return nn.Sequential(nn.Linear(first, second), nn.LeakyReLU(0.2), nn.Linear(second, last))


with hpctrain.own_loop(sys.argv[1], dataset={"name": DATA}) as loop:
    net_g, net_d = mlp(4, 32, 2), mlp(2, 32, 1)
    generator, of_g = loop.setup(net_g, torch.optim.Adam(net_g.parameters(), lr=1e-3), name="generator")
    critic, of_d = loop.setup(net_d, torch.optim.Adam(net_d.parameters(), lr=1e-3), name="discriminator")
    for step in loop.steps():
        for real, noise in step:
            with torch.no_grad():
                fake = generator(noise)
            loop.backward(softplus(-critic(real)).mean() + softplus(critic(fake)).mean())
        of_d.step()
        of_d.zero_grad()
        for _, noise in step:
            loop.backward(softplus(-critic(generator(noise))).mean())
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
