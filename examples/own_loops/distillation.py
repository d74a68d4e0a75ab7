"""Distillation: a student learns the answers of a frozen teacher, which is sharded over the ranks."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain

torch.manual_seed(0)
DATA = list(torch.randn(512, 8))


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 4))


with hpctrain.own_loop(sys.argv[1], dataset={"name": DATA}) as loop:
    teacher = loop.setup(mlp(64).requires_grad_(False), name="teacher", sharding={"stage": 3})
    net = mlp(8)
    student, optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2), name="student")
    for step in loop.steps():
        for inputs in step:
            with torch.no_grad():
                answers = teacher(inputs).softmax(-1)
            loop.backward(cross_entropy(student(inputs), answers))
        optimizer.step()
        optimizer.zero_grad()
