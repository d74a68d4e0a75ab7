"""PPO (Schulman et al., 2017) on a toy: walk to the middle of a line. Each rank plays some of the games; all learn from all."""

import sys

import torch
from torch import nn
from torch.distributions import Categorical

import hpctrain

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


with hpctrain.own_loop(sys.argv[1]) as loop:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
    policy, optimizer = loop.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    mine = range(loop.rank * GAMES // loop.world_size, (loop.rank + 1) * GAMES // loop.world_size)
    for step in loop.steps():
        with torch.no_grad():
            played = loop.gather(play(policy, mine, step.number).to(loop.device))
        place, move, before, to_come = played.flatten(0, 1).unbind(-1)
        advantage = (to_come - to_come.mean()) / to_come.std()
        share = slice(loop.rank, None, loop.world_size)
        for _ in range(EPOCHS):
            chances = Categorical(logits=policy(place[share, None])).log_prob(move[share])
            ratio = (chances - before[share]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loop.backward(-torch.min(ratio * advantage[share], clipped * advantage[share]).mean())
            optimizer.step()
            optimizer.zero_grad()
        loop.log(reward=to_come.view(-1, MOVES)[:, 0].mean())
