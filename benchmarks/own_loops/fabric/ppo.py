"""PPO, with Lightning Fabric: fabric run ppo.py DIRECTORY STEPS."""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.distributions import Categorical

GAMES, MOVES, EPOCHS, CLIP = 24, 16, 2, 0.2


def play(policy: nn.Module, games: range, step: int) -> torch.Tensor:
    """(games, MOVES, 4): the place, the move, its log probability, and the reward still to come."""
    draws = [torch.Generator().manual_seed(step * GAMES + game) for game in games]
    place = torch.stack([torch.rand((), generator=one) * 4 - 2 for one in draws])
    moves, rewards = [], []
    for _ in range(MOVES):
        answers = policy(place[:, None])
        chances = zip(answers.softmax(-1), draws, strict=True)
        move = torch.cat([torch.multinomial(row, 1, generator=draw) for row, draw in chances])
        moves.append(torch.stack([place, move, Categorical(logits=answers).log_prob(move)], 1))
        place = place + (move * 2 - 1) * 0.25
        rewards.append(-place.abs())
    to_come = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.cat([torch.stack(moves, 1), to_come.T[..., None]], -1)


DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])

fabric = Fabric(loggers=CSVLogger(DIRECTORY, name="logs", flush_logs_every_n_steps=1))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
policy, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
rank, ranks = fabric.global_rank, fabric.world_size
mine = range(rank * GAMES // ranks, (rank + 1) * GAMES // ranks)
state = {"policy": policy, "optimizer": optimizer, "step": 0}
if (DIRECTORY / "checkpoint").exists():
    fabric.load(DIRECTORY / "checkpoint", state)
for step in range(state["step"] + 1, STEPS + 1):
    with torch.no_grad():
        played = fabric.all_gather(fabric.to_device(play(policy, mine, step)))
    place, move, before, to_come = played.view(-1, 4).unbind(-1)
    advantage = (to_come - to_come.mean()) / to_come.std()
    share = slice(rank, None, ranks)
    for _ in range(EPOCHS):
        chances = Categorical(logits=policy(place[share, None])).log_prob(move[share])
        ratio = (chances - before[share]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * advantage[share], clipped * advantage[share]).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    reward = to_come.view(-1, MOVES)[:, 0].mean()
    fabric.log_dict({"loss": fabric.all_reduce(loss), "reward": reward}, step)
fabric.save(DIRECTORY / "checkpoint", {**state, "step": STEPS})
