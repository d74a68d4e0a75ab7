"""A GAN: two models with an optimizer each, which take turns."""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

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
            fake = generator(noise)
            ones, zeros = torch.ones_like(real[:, :1]), torch.zeros_like(real[:, :1])
            of_d.zero_grad()
            loop.backward(bce(critic(real), ones) + bce(critic(fake.detach()), zeros))
            of_d.step()
            of_g.zero_grad()
            loop.backward(bce(critic(fake), ones))
            of_g.step()
