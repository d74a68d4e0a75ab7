"""Causal attention over a sequence from parts of it, as ranks of a ring compute it, in one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpctrain.toolkit.attention import kernel_of, merge


def in_parts(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, parts: int) -> list[Tensor]:
    """The output and the gradients of query, key and value, all in float64. Each part attends to itself and to those before."""
    kernel, wide = kernel_of(query, key, value), torch.promote_types(query.dtype, torch.float32)
    queries, keys, values, gradients = (one.chunk(parts, dim=2) for one in (query, key, value, gradient))
    made = [[torch.zeros_like(part, dtype=torch.float64) for part in queries] for _ in range(4)]
    for number, mine in enumerate(queries):
        found = [kernel.forward(mine, keys[at], values[at], at == number) for at in range(number + 1)]
        output, rows = found[0][0].to(wide), found[0][1]
        for part, part_rows in found[1:]:
            output, rows = merge((output, rows), (part.to(wide), part_rows))
        made[0][number] = output.double()
        output = output.to(query.dtype)
        for at in range(number + 1):
            grown = kernel.backward(
                gradients[number].contiguous(), mine, keys[at], values[at], output, rows, at == number
            )
            for place, one in zip((number, at, at), zip(made[1:], grown, strict=True), strict=True):
                one[0][place] += one[1]
    return [torch.cat(one, dim=2) for one in made]


def at_once(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """The same in float64, by torch's attention."""
    wide = [one.double().requires_grad_() for one in (query, key, value)]
    output = scaled_dot_product_attention(*wide, is_causal=True)
    output.backward(gradient.double())
    return [output.detach(), *(one.grad for one in wide if one.grad is not None)]


def drawn(tokens: int, heads: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value and the output's gradient, `(1, heads, tokens, size)`, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, size, generator=generator).to(device, dtype) for _ in range(4)]
