"""User's modules that are hard to shard, their data, and their results in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from plain import Step, train_plainly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.base.random_numbers import derive_seed
from hpctrain.data.order import SampleOrder
from hpctrain.registry.user_code.dataset import UserDataset


class Averaging(nn.Module):
    """Keeps a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 7), nn.BatchNorm1d(7)
        self.register_buffer("mask", torch.ones(3, 1, dtype=torch.bool).expand(3, 4))  # elements share memory

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids).mean(1))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Has batch norms over two and three dims, without and with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norms = (
            nn.Embedding(7, 7),
            nn.ModuleList(nn.Sequential(nn.BatchNorm1d(7)) for _ in range(2)),
        )
        self.plain, self.head = nn.BatchNorm1d(7, affine=False, momentum=None), nn.Linear(7, 7)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, seq) -> (batch, 7)"""
        hidden = self.norms[0](self.embedding(ids).transpose(1, 2)).relu()
        return self.head(self.plain(self.norms[1](hidden.mean(2))))  # type: ignore[no-any-return]


class _Scaled(nn.BatchNorm1d):
    """Does something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnNorm(Averaging):
    def __init__(self) -> None:
        super().__init__()
        self.own = _Scaled(7)

    def forward(self, ids: Tensor) -> Tensor:
        return self.own(super().forward(ids))  # type: ignore[no-any-return]


class Half(nn.Module):
    """A unit for `wrap`, with a bias of one element, which no two ranks can share, complex parameters, and some of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.hollow = nn.Linear(5, 1), nn.Linear(1, 5), nn.Linear(5, 0)
        self.turn = nn.Parameter(torch.full((5,), 0.1 + 0.2j, dtype=torch.get_default_dtype().to_complex()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.fft.ifft(torch.fft.fft(x) * self.turn).real + self.hollow(x).sum(-1, keepdim=True)
        return x + self.wide(torch.tanh(self.narrow(x)))


class Twin(nn.Module):
    """A block that shares a module with another one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class Odd(nn.Module):
    """An embedding that is also the head, parameters used by no sample or by some samples only, and a frozen parameter."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        shared = nn.Linear(5, 5)
        self.halves = nn.Sequential(Half(), Half(), Twin(shared), Twin(shared))
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.full((5,), 0.5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (1, 3) -> (1, 7)"""
        h = self.embedding(ids).mean(1) * self.frozen
        if ids[0, 0] % 2:
            h = h + self.sometimes(h)
        return self.head(self.halves(h)) * getattr(self, "scale", 1.0)


class Hollow(nn.Module):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hollow = nn.Embedding(7, 7), nn.Parameter(torch.zeros(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).mean(1)  # type: ignore[no-any-return]


class Switched(nn.Module):
    """Ranks make gradients in another order: a sample goes through one half or the other first, or through one only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)
        self.halves = nn.ModuleList(nn.Sequential(*(nn.Linear(5, 5) for _ in range(6))) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (1, 3) -> (1, 7)"""
        h = self.embedding(ids).mean(1)
        first, second = (self.halves[0], self.halves[1])[:: -1 if ids[0, 0] % 2 else 1]
        h = torch.tanh(first(h))
        return self.head(h if ids[0, 1] % 2 else torch.tanh(second(h)))


class Auxiliary(Switched):
    """Leaves the second half out of evaluations."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, 3) -> (batch, 7)"""
        h = torch.tanh(self.halves[0](self.embedding(ids).mean(1)))
        return self.head(torch.tanh(self.halves[1](h)) if self.training else h)


def sequence_of_halves() -> nn.Sequential:
    """A pipeline written without a plugin, with a module in two places. ids: (batch, 3) -> (batch, 7)"""
    twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    return nn.Sequential(nn.Embedding(7, 5), twice, *(Half() for _ in range(4)), twice, nn.Flatten(), nn.Linear(15, 7))


class Counting(torch.optim.Optimizer):
    """Has a plain number in its state for each parameter."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / count)


def two_losses(outputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return a mean, and a loss for each row."""
    return {"class": cross_entropy(outputs, target), "size": 0.1 * outputs.square().mean(1)}


def loss_and_size(outputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The one to train, and one that is reported only."""
    return {"size": outputs.square().mean(1), "loss": cross_entropy(outputs, target)}


def samples(split: str) -> list[tuple[Tensor, Tensor]] | None:
    """ids (3,) and a label."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(7, (100, 3), generator=generator)
    return [(row, row.sum() % 7) for row in ids] if split == "train" else None


def samples_of_both(split: str) -> list[tuple[Tensor, Tensor]] | None:
    """The same samples in training and in evaluations."""
    return samples("train")


class Attention(nn.Module):
    """Attention with a number of heads as attribute, and with names from which a plan is guessed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        q, k, v = (
            linear(x).view(rows, seq, self.num_heads, self.head_dim).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).reshape(rows, seq, -1))


class NormedAttention(Attention):
    """With norms of each head's queries and keys (Henry et al., "Query-Key Normalization for Transformers", 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)  # type: ignore[assignment]


class FusedAttention(nn.Module):
    """q, k and v in one matrix, [q; k; v], with fewer heads of k and v if asked."""

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_value_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * key_value_heads) * self.head_dim)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        heads = self.qkv(x).view(rows, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], dim=1)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(rows, seq, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHead(FusedAttention):
    """The rows of q, k and v are grouped by head, so that [q; k; v] is a wrong guess."""

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        heads = self.qkv(x).view(rows, seq, self.num_heads, 3, self.head_dim)
        q, k, v = heads.transpose(1, 2).unbind(3)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(rows, seq, -1))


class AllHeads(FusedAttention):
    """Relies on the full width of its input, which a share of the heads does not have."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(x.shape[-1], dim=2)
        return self.proj(q + k * v)


class FusedMLP(nn.Module):
    """gate and up in one matrix, [gate; up]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.tanh(gate) * up)


ATTENTIONS = {
    "plain": Attention,
    "normed": NormedAttention,
    "fused": FusedAttention,
    "by-head": ByHead,
    "all-heads": AllHeads,
}


TP_PLAN = {
    "head": "colwise_gather_output", "embedding": "embedding_rowwise", "attention.[qkv]_proj": "colwise",
    "attention.?_norm": "replicated_with_grad_allreduce", "attention.o_proj": "rowwise",
    "mlp.0": "colwise_gather_output", "mlp.2": "rowwise_split_input", "mlp.1": "replicate",
}  # fmt: skip
"""A plan in the form of transformers 5."""


class Transformer(nn.Module):
    """A block and a tied head, as a third party would write them."""

    def __init__(
        self,
        vocabulary: int = 12,
        width: int = 8,
        heads: int = 4,
        attention: str = "plain",
        key_value_heads: int = 4,
        mlp: str = "plain",
        planned: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        kind: Any = ATTENTIONS[attention]
        fused = issubclass(kind, FusedAttention)
        self.attention = kind(width, heads, key_value_heads) if fused else kind(width, heads)
        plain = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = FusedMLP(width) if mlp == "fused" else plain
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self._tp_plan = TP_PLAN if planned else {}

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (batch, seq) -> (batch, vocabulary): logits of the token after the last."""
        h = self.embedding(ids)
        h = h + self.attention(h)
        return self.head((h + self.mlp(h))[:, -1])


def foreign_steps(
    module: nn.Module, tables: dict[str, Any], optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> list[Step]:
    """The job of `tables` with a user's module, sample by sample."""
    seed, size = tables["job"]["seed"], tables["batch"]["global_size"]
    trained = [p for p in module.parameters() if p.requires_grad]
    dataset = UserDataset("modules:samples", {})
    opened = dataset.open("train", None)  # type: ignore[arg-type]
    assert opened is not None
    order = SampleOrder(len(opened), seed, opened.fingerprint())

    def losses() -> Iterator[Any]:
        for step in range(tables["job"]["steps"]):
            chosen = [opened[int(i)] for i in order.at(step * size, (step + 1) * size)]
            yield lambda chosen=chosen: torch.stack(
                [cross_entropy(module(ids[None]), label[None]) for ids, label in chosen]
            ).mean()

    return train_plainly(module, optimizer_class(trained, **options), losses())


def built(tables: dict[str, Any], make: Any) -> nn.Module:
    """A module with the initial values of the trainer's seed."""
    torch.manual_seed(derive_seed(tables["job"]["seed"], "model"))
    return make()


def odd_steps(tables: dict[str, Any], optimizer_class: type[torch.optim.Optimizer], **options: Any) -> list[Step]:
    """A job with Odd."""
    module = built(tables, lambda: Odd(tables["model"].get("scalar", False)))
    module.frozen.requires_grad_(False)  # type: ignore[operator, union-attr]
    return foreign_steps(module, tables, optimizer_class, **options)


def both_splits(split: str) -> list[tuple[Tensor, Tensor]]:
    """The train split of `samples`; 7 of them for validation."""
    found = samples("train")
    assert found is not None
    return found if split == "train" else found[:7]


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise from the third step on (Welling and Teh, 2011); `seed` draws as the trainer does."""

    def __init__(self, groups: Any, lr: float, seed: int | None = None) -> None:
        super().__init__(groups, {"lr": lr})
        self._seed, self._steps = seed, 0
        for group in self.param_groups:
            group.setdefault("taken", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self._seed is not None:
                torch.manual_seed(derive_seed(self._seed, "optimizer", group["taken"], 0))
            for parameter in group["params"]:
                noise = torch.randn_like(parameter) if group["taken"] > 1 else 0.0
                parameter.sub_(group["lr"] * parameter.grad + 0.01 * noise)
            group["taken"] += 1
