"""Loops that change parameters and gradients themselves: python changing_loops.py LAYOUT FILE

LAYOUT: the number of a stage, with "w" behind it where stage 3 gathers each layer by itself. Each rank writes to FILE, with its
number behind, the parameters that each loop comes to, or the sentence that refuses it. `plain` has a loop in torch alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hpctrain
from hpctrain.api import TrainingError

STEPS, ROWS = 4, 12
Open = Callable[..., Any]


class Net(nn.Module):
    """Two heads on one body, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5))
        self.a, self.b = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: Tensor, heads: str = "ab") -> Tensor:
        return self.decode(self.encode(x), heads)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + 0.1 * self.body(x).mean()

    def decode(self, hidden: Tensor, heads: str = "ab") -> Tensor:
        return sum((getattr(self, head)(hidden) for head in heads), torch.zeros((), dtype=hidden.dtype))


def distance(outputs: Tensor, x: Tensor) -> Tensor:
    return (outputs - x.sum(1, keepdim=True).sin()).square().mean()


def clipped_weights(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """A critic's weights, after a look at it without gradients."""
    backward(distance(net(x), x))
    yield_update(net)
    with torch.no_grad():
        net(x)
        for one in net.parameters():
            one.clamp_(-0.3, 0.3)


def clipped_data(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """As older code has it: by `data`."""
    backward(distance(net(x), x))
    yield_update(net)
    for one in net.parameters():
        one.data.clamp_(-0.3, 0.3)


def clipped_parts(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    backward(distance(net(x), x))
    yield_update(net)
    with opened(net, whole=False) as parts:
        for _, one in parts:
            one.clamp_(-0.3, 0.3)


def average(net: Any, x: Tensor, backward: Any, opened: Open, slow: Any, **_: Any) -> None:
    """A momentum encoder whose answers the loss has, of the same layout."""
    with torch.no_grad():
        for one, other in zip(slow.parameters(), net.parameters(), strict=True):
            one.lerp_(other, 0.2)
        goal = slow(x)
    backward((net(x) - 0.5 * goal - 0.1).square().mean())
    yield_update(net)


def average_opened(net: Any, x: Tensor, backward: Any, opened: Open, slow: Any, **_: Any) -> None:
    """The same with a teacher of another layout."""
    with torch.no_grad():
        goal = slow(x)
    backward((net(x) - 0.5 * goal - 0.1).square().mean())
    yield_update(net)
    with opened(net) as fast, opened(slow) as averaged:
        for (_, one), (_, other) in zip(averaged, fast, strict=True):
            one.data = one * 0.8 + other * 0.2


def sharpness(net: Any, x: Tensor, backward: Any, opened: Open, drop: Any, **_: Any) -> None:
    """Sharpness-aware minimization (Foret et al., 2021)."""
    backward(distance(net(x), x))
    with opened(net) as named:
        norm = torch.stack([one.grad.norm() for _, one in named]).norm()
        moves = {name: one.grad * (0.05 / norm) for name, one in named}
        for name, one in named:
            one.add_(moves[name])
    drop()
    backward(distance(net(x), x))
    with opened(net) as named:
        for name, one in named:
            one.sub_(moves[name])
    yield_update(net)


def each_clipped(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """Each parameter's gradient has a limit of its own (DINO), and one is doubled in a new tensor."""
    backward(distance(net(x), x))
    with opened(net) as named:
        for name, one in named:
            norm = one.grad.norm()
            if norm > 0.05:
                one.grad.mul_(0.05 / norm)
            if name == "a.weight":
                one.grad = one.grad * 2
    yield_update(net)


def each_clipped_outside(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """By `parameter.grad`, as a public loop has it."""
    backward(distance(net(x), x))
    for name, one in net.named_parameters():
        if one.grad is not None:
            norm = one.grad.norm()
            if float(norm) > 0.05:
                one.grad.mul_(0.05 / float(norm))
            if name == "a.weight":
                one.grad = one.grad * 2
    yield_update(net)


def dropped(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """What has no gradient is left alone, though the optimizer decays and has momentum."""
    backward(distance(net(x), x))
    for name, one in net.named_parameters():
        if name.startswith("b."):
            one.grad = None
    yield_update(net)


def dropped_inside(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    backward(distance(net(x), x))
    with opened(net, names="b.*") as named:
        for _, one in named:
            one.grad = None
    yield_update(net)


def in_turn(net: Any, x: Tensor, backward: Any, opened: Open, step: int, **_: Any) -> None:
    """One head a step: the other one has no gradient."""
    backward(distance(net(x, "ab"[step % 2]), x))
    yield_update(net)


def adding_up(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """Another backward adds to a gradient that the program has halved."""
    backward(distance(net(x), x))
    with opened(net) as named:
        for _, one in named:
            one.grad.mul_(0.5)
    backward(net(x).mean())
    yield_update(net)


def by_methods(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """Two methods in turn, the forward that calls both, and one that calls the module and goes on."""
    backward(distance(net.decode(net.encode(x) * 0.9), x) + net(x).square().mean() + net.loss(x))
    yield_update(net)


def noisy(net: Any, x: Tensor, backward: Any, opened: Open, **_: Any) -> None:
    """Noise on gradients and values: the same on all layouts, which a plain loop can't know."""
    backward(distance(net(x), x))
    for _ in range(2):
        with opened(net) as named:
            for _, one in named:
                one.grad.add_(0.01 * torch.randn_like(one.grad))
                one.add_(0.01 * torch.randn_like(one))
    yield_update(net)


LOOPS = (
    clipped_weights, clipped_data, clipped_parts, average, average_opened, sharpness, each_clipped, each_clipped_outside, dropped,
    dropped_inside, in_turn, adding_up, by_methods, noisy,
)  # fmt: skip
UPDATES: dict[int, Callable[[], None]] = {}


def yield_update(net: nn.Module) -> None:
    """The optimizer's step."""
    UPDATES[id(net)]()


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(2)
    net = Net().double()
    return net, torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.5)


def inputs(step: int) -> Tensor:
    return torch.randn(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def plain(loop: Callable[..., None]) -> dict[str, Tensor]:
    """The loop in torch alone."""

    @contextmanager
    def opened(net: nn.Module, names: str = "", whole: bool = True) -> Iterator[Any]:
        with torch.no_grad():
            yield [(name, one) for name, one in net.named_parameters() if name.startswith(names.rstrip("*"))]

    net, optimizer = made()
    slow = copy.deepcopy(net).requires_grad_(False)
    UPDATES[id(net)] = optimizer.step
    for step in range(STEPS):
        loop(net, inputs(step), Tensor.backward, opened, slow=slow, step=step, drop=optimizer.zero_grad)
        optimizer.zero_grad()
    return {name: one.detach() for name, one in [*net.named_parameters(), *slow.named_parameters("slow")]}


def on_ranks(layout: str, file: str) -> None:
    """All loops on all ranks, each with models of its own."""
    stage = int(layout[0])
    own = {"sharding": {"stage": stage, **({"wrap": "size", "min_parameters": 1} if layout[1:] else {})}}
    other = {} if stage == 3 else {"sharding": {"stage": 3}}
    job = {"job": {"name": "changing", "steps": STEPS, "output_dir": f"{file}.run"}, "precision": {"mode": "fp64"}}
    found: dict[str, Any] = {}
    with hpctrain.own_loop(job, **own) as mine:
        nets: dict[str, Any] = {}
        for loop in LOOPS:
            name = loop.__name__
            net, optimizer = made()
            slow: Any = copy.deepcopy(net).requires_grad_(False)
            net, optimizer = mine.setup(
                net, optimizer, name=name, methods=("encode", "decode", "loss") if loop is by_methods else ()
            )
            if loop in (average, average_opened):
                slow = mine.setup(slow, name=f"slow {name}", **(other if loop is average_opened else {}))
            nets[name] = net, optimizer, slow
            UPDATES[id(net)] = optimizer.step
        for step in mine.steps():
            x = inputs(step.number - 1)[mine.data_rank :: mine.data_size]
            for loop in LOOPS:
                net, optimizer, slow = nets[loop.__name__]
                more = {"slow": slow, "step": step.number - 1, "drop": optimizer.zero_grad}
                try:
                    loop(net, x, mine.backward, mine.parameters, **more)
                except TrainingError as error:
                    found[loop.__name__] = str(error)
                optimizer.zero_grad()
        for name, (net, _, slow) in nets.items():
            averaged = slow.state_dict() if type(slow) is Net else mine.get_state_dict(slow)
            values = {**mine.get_state_dict(net), **{f"slow.{key}": one for key, one in averaged.items()}}
            found.setdefault(name, values)
        torch.save(found, f"{file}{mine.rank}")


if __name__ == "__main__":
    on_ranks(*sys.argv[1:])
