"""PPO (Schulman et al., 2017) on a toy: walk to the middle of a line. Rollout actors play, the ranks of a Training learn.

python ppo.py ppo.toml [STEPS]
"""

from __future__ import annotations

import sys

import hpctrain_ray
import ray
import torch
from torch import nn
from torch.distributions import Categorical

GAMES, MOVES, EPOCHS, CLIP, PLAYERS = 24, 16, 2, 0.2, 2


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))


class Policy(hpctrain_ray.Learner):
    """The work of a rank on its share of the games."""

    def setup(self, loop):
        net = make_policy()
        self.model, self.optimizer = loop.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))

    def train(self, batch):
        place, move, before, to_come = batch.unbind(-1)
        everybody = self.loop.gather(to_come.flatten())
        advantage = (to_come - everybody.mean()) / everybody.std()
        for _ in range(EPOCHS):
            chances = Categorical(logits=self.model(place.flatten()[:, None]).view(*place.shape, 2)).log_prob(move)
            ratio = (chances - before).exp()
            self.loop.backward(-torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"reward": to_come[:, 0].mean().item()}


@ray.remote(num_cpus=0)
class Player:
    """Plays with the newest weights, which all players of a node read from one copy."""

    def __init__(self):
        self.policy = make_policy()

    @torch.no_grad()
    def play(self, weights, games, step):
        """(games, MOVES, 4): the place, the move, its log probability, and the reward still to come."""
        self.policy.load_state_dict(weights)
        draws = [torch.Generator().manual_seed(step * GAMES + game) for game in games]
        place = torch.stack([torch.rand((), generator=one) * 4 - 2 for one in draws])
        moves, rewards = [], []
        for _ in range(MOVES):
            answers = self.policy(place[:, None])
            chances = zip(answers.softmax(-1), draws, strict=True)
            move = torch.cat([torch.multinomial(row, 1, generator=draw) for row, draw in chances])
            moves.append(torch.stack([place, move, Categorical(logits=answers).log_prob(move)], 1))
            place = place + (move * 2 - 1) * 0.25
            rewards.append(-place.abs())
        to_come = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        return torch.cat([torch.stack(moves, 1), to_come.T[..., None]], -1)


def main(job, steps):
    with hpctrain_ray.Training(Policy, job) as training:
        players = [Player.remote() for _ in range(PLAYERS)]
        share = GAMES // PLAYERS
        for step in range(training.step, steps):
            weights = training.weights()
            played = [
                one.play.remote(weights, range(number * share, (number + 1) * share), step)
                for number, one in enumerate(players)
            ]
            told = training.train_step(torch.cat(ray.get(played)))
            print(f"step {told['step']:.0f}, reward {told['reward']:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
