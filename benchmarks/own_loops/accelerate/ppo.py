"""PPO, with Accelerate: python ppo.py DIRECTORY STEPS."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
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

accelerator = Accelerator(log_with="tensorboard", project_dir=DIRECTORY)
accelerator.init_trackers("logs")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
policy, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
rank, ranks = accelerator.process_index, accelerator.num_processes
mine = range(rank * GAMES // ranks, (rank + 1) * GAMES // ranks)
begin = 0
if newest := max(DIRECTORY.glob("step_*"), key=os.path.getctime, default=None):
    accelerator.load_state(newest)
    begin = int(newest.name.removeprefix("step_"))
for step in range(begin + 1, STEPS + 1):
    with torch.no_grad():
        played = accelerator.gather(play(policy, mine, step).to(accelerator.device))
    place, move, before, to_come = played.flatten(0, 1).unbind(-1)
    advantage = (to_come - to_come.mean()) / to_come.std()
    share = slice(rank, None, ranks)
    for _ in range(EPOCHS):
        chances = Categorical(logits=policy(place[share, None])).log_prob(move[share])
        ratio = (chances - before[share]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * advantage[share], clipped * advantage[share]).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    reward = to_come.view(-1, MOVES)[:, 0].mean()
    accelerator.log({"loss": accelerator.reduce(loss, "mean").item(), "reward": reward.item()}, step)
accelerator.save_state(DIRECTORY / f"step_{STEPS}")
accelerator.end_training()
