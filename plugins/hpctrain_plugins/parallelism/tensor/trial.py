"""Tries a guessed cut of an attention or MLP out: the parts of all ranks must add up to what the whole one gives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpctrain_plugins.parallelism.tensor.cut import Cut, linear_of, row_runs

LOG = logging.getLogger("hpctrain")


@torch.no_grad()
def adds_up(
    block: nn.Module, into: str, cut: Cut, out: str, size: int, share: Callable[[nn.Module, int], None]
) -> bool:
    """Whether `block` can be cut over `size` ranks at its children `into`, fused, and `out`.

    share: what makes a copy know its share of the heads only. False as well for a forward that takes more than
    (batch, seq, hidden), since it can't be tried.
    """
    why = "the parts of the ranks do not add up"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = _with_values(block)
            x = torch.randn(1, 4, linear_of(whole, into).in_features)
        expected = _first(whole(x))
        parts = [_first(_part(whole, into, cut, out, rank, size, share)(x)) for rank in range(size)]
        total = torch.stack(parts).sum(0)
        if expected.shape == total.shape and torch.allclose(total, expected, rtol=1e-3, atol=1e-4):
            return True
    except Exception as error:  # a forward of the user's own may raise anything
        why = f"it can't be tried ({type(error).__name__}: {error})"
    LOG.warning(
        "[parallelism.tensor] a %s is left whole on every rank: with %s cut in parts of %s rows, %s; a plan says how it is cut",
        type(block).__name__,
        into,
        ", ".join(map(str, cut.rows(into, linear_of(block, into)))),
        why,
    )
    return False


def _with_values(block: nn.Module) -> nn.Module:
    """A copy in float32 on the CPU that does not draw, with values that hide nothing: a first value is often zero."""
    one = copy.deepcopy(block)
    if any(tensor.is_meta for tensor in (*one.parameters(), *one.buffers())):
        one = one.to_empty(device="cpu")
        for buffer in one.buffers():
            buffer.fill_(1)
    one = one.to("cpu", torch.float32).eval()
    for parameter in one.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    return one


def _part(
    whole: nn.Module, into: str, cut: Cut, out: str, rank: int, size: int, share: Callable[[nn.Module, int], None]
) -> nn.Module:
    part = copy.deepcopy(whole)
    first, last = linear_of(part, into), linear_of(part, out)
    runs = row_runs(cut.rows(into, first), size)[rank]
    for parameter in first.parameters():
        parameter.data = torch.cat([parameter[begin : begin + rows] for begin, rows in runs])
    last.weight.data = last.weight.chunk(size, 1)[rank]
    if rank and last.bias is not None:
        last.bias.zero_()
    share(part, size)
    return part


def _first(outputs: object) -> Tensor:
    """Some attentions return their weights, too."""
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(found, Tensor)
    return found
