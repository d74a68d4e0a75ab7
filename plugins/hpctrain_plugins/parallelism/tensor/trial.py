"""Tries a guessed cut of an attention or MLP: the parts of all ranks must add up to the full output."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hpctrain_plugins.parallelism.tensor.cut import Cut, linear_of, row_runs

LOG = logging.getLogger("hpctrain")


def parameters_between(block: nn.Module, into: Mapping[str, Cut], out: str) -> list[str]:
    """The parameters used between the children `into` and the child `out`, where a rank has only a part.

    Empty if the block can't be tried.
    """
    try:
        whole = _with_values(block)
        for key in into:  # parameters before them see the whole input and get a whole gradient
            whole.get_submodule(key).register_forward_pre_hook(lambda module, inputs: inputs[0].detach())
        given = _given(whole, out, _input(whole, into))
    except Exception:  # a forward of the user's own may raise anything
        return []
    names = [name for name, p in whole.named_parameters() if name.rpartition(".")[0] not in (*into, out)]
    names = [name for name in names if whole.get_parameter(name).requires_grad]
    if not names or not given.requires_grad:
        return []
    found = torch.autograd.grad(given.sum(), [whole.get_parameter(name) for name in names], allow_unused=True)
    return [name for name, gradient in zip(names, found, strict=True) if gradient is not None]


@torch.no_grad()
def adds_up(
    block: nn.Module,
    into: Mapping[str, Cut],
    out: str,
    size: int,
    share: Callable[[nn.Module, int], None],
    untried: bool,
) -> bool:
    """Whether the outputs of the ranks' child `out` add up if `block` is cut over `size` ranks at `into` and `out`.

    share: sets a copy's number of heads to a rank's share. untried: the result for a block that can't be tried, such as a
    block whose forward needs more than (batch, seq, hidden).
    """
    try:
        whole = _with_values(block)
        x = _input(whole, into)
        expected = _given(whole, out, x)
    except Exception as error:  # a forward of the user's own may raise anything
        if untried:
            return True
        why = f"it can't be tried ({type(error).__name__}: {error})"
    else:
        try:
            parts = [_given(_part(whole, into, out, rank, size, share), out, x) for rank in range(size)]
            if torch.allclose(torch.stack(parts).sum(0), expected, rtol=1e-3, atol=1e-4):
                return True
            why = "the parts of the ranks do not add up"
        except Exception as error:
            why = f"a part fails ({type(error).__name__}: {error})"
    LOG.warning(
        "[parallelism.tensor] a %s is left whole on every rank: with %s, %s; a plan can define the cut",
        type(block).__name__,
        " and ".join(f"{key} cut in parts of {_rows(block, key, cut)} rows" for key, cut in into.items()),
        why,
    )
    return False


def _rows(block: nn.Module, key: str, cut: Cut) -> str:
    return ", ".join(map(str, cut.rows(key, linear_of(block, key))))


def _given(block: nn.Module, out: str, x: Tensor) -> Tensor:
    """The outputs of the child `out` in all its calls during a forward, where the ranks' parts are summed."""
    given: list[Tensor] = []
    handle = linear_of(block, out).register_forward_hook(lambda module, inputs, output: given.append(output.flatten()))
    block(x)
    handle.remove()
    return torch.cat(given)


def _input(block: nn.Module, into: Mapping[str, Cut]) -> Tensor:
    """(1, 4, hidden)"""
    generator = torch.Generator().manual_seed(0)
    first = linear_of(block, next(iter(into)))
    return torch.randn(1, 4, first.in_features, dtype=first.weight.dtype, generator=generator)


@torch.no_grad()
def _with_values(block: nn.Module) -> nn.Module:
    """A copy in float32 on the CPU, without dropout, with random values: initial values are often zero and hide errors."""
    one = copy.deepcopy(block)
    if any(tensor.is_meta for tensor in (*one.parameters(), *one.buffers())):
        one = one.to_empty(device="cpu")
        for buffer in one.buffers():
            buffer.fill_(1)
    one = one.to("cpu", torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in one.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0, generator=generator)
    return one


def _part(
    whole: nn.Module, into: Mapping[str, Cut], out: str, rank: int, size: int, share: Callable[[nn.Module, int], None]
) -> nn.Module:
    part = copy.deepcopy(whole)
    for key, cut in into.items():
        first = linear_of(part, key)
        runs = row_runs(cut.rows(key, first), size)[rank]
        for parameter in first.parameters():
            parameter.data = torch.cat([parameter[begin : begin + rows] for begin, rows in runs])
    last = linear_of(part, out)
    last.weight.data = last.weight.chunk(size, 1)[rank]
    if rank and last.bias is not None:
        last.bias.zero_()
    share(part, size)
    return part
