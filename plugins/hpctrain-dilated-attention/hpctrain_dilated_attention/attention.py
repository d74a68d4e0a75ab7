"""Dilated attention, forward and backward, on one rank or over several that have parts of a sequence.

Softmax denominators mix the groups: the output is attention to the keys of all groups, in which a key counts as often as
groups select it. So groups, blocks and other ranks' keys are parts of one attention, which add up by their log-sum-exps. Each part
is a fused operator of torch's, without a matrix of scores, where torch has one for the device and dtype. A token that no group
selects for a head gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import AttentionKernel, UsageError
from hpctrain.toolkit.attention import kernel_of, merge
from hpctrain_dilated_attention.exchange import Exchange
from hpctrain_dilated_attention.layout import Layout, Places, Work, layout
from hpctrain_dilated_attention.pattern import Pattern, Place, steps

_KEPT = 8
"""Layouts that are kept, which have a number for each selected token; samples that grow have a new one for each token."""


class DilatedAttention:
    """Dilated attention of a pattern, for any number of modules; keeps the layouts of the last lengths."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.group: dist.ProcessGroup | None = None
        """The ranks over which sequences are cut, if they are."""
        self._layouts: dict[tuple[int | torch.device, ...], Layout] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, first_head: int = 0) -> Tensor:
        """query, key, value: this rank's tokens, `(batch, heads, seq, head_size)` -> the same.

        first_head: the number of the first of these heads among all of the model's.
        """
        if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (one.to(dtype) if one.dtype == torch.float32 else one for one in (query, key, value))
        apply: Callable[..., Tensor] = _Attention.apply
        # chosen while gradients are on: not every kernel has a backward for every size
        parts = _Parts(self.pattern, self._layout(query, first_head), kernel_of(query, key, value), self.group)
        return apply(query, key, value, parts)

    def _layout(self, query: Tensor, first_head: int) -> Layout:
        (heads, each), device = query.shape[1:3], query.device
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        known = (size, rank, each, heads, first_head, device)
        found = self._layouts.pop(known, None)
        if found is None:
            places = [Place(size * each, one * each, (one + 1) * each, first_head, heads) for one in range(size)]
            found = layout(self.pattern, places, rank, device)
            if len(self._layouts) >= _KEPT:
                del self._layouts[next(iter(self._layouts))]
        self._layouts[known] = found  # the last one, now
        return found


class _Parts:
    """The parts of an attention and how they are computed."""

    def __init__(
        self, pattern: Pattern, found: Layout, kernel: AttentionKernel, group: dist.ProcessGroup | None
    ) -> None:
        self.pattern, self.found, self.kernel, self.group = pattern, found, kernel, group

    def exchange(self) -> Exchange:
        return Exchange(self.found.traffic, self.group)

    def add(self, work: Work, keys: tuple[int, int], query: Tensor, both: Tensor, output: Tensor, rows: Tensor) -> None:
        """Add attention of a work's queries to the selected tokens `keys`, whose keys and values are `both`, to output and rows."""
        span, (heads, tokens) = work.span, work.here
        for step in steps(self.pattern, span, keys):
            mine = _pieces(query, step.query, step.queries, step.count)
            key, value = (_pieces(one, step.key, step.keys, step.count) for one in both)
            part, part_rows = self.kernel.forward(mine, key, value, step.causal)
            at = (slice(None), heads, tokens[..., step.query : step.query + step.queries * step.count])
            before, before_rows = output[at], rows[at]
            more = part.to(before.dtype).reshape(before.shape), part_rows.reshape(before_rows.shape)
            output[at], rows[at] = merge((before, before_rows), more)

    def add_gradients(
        self,
        work: Work,
        keys: tuple[int, int],
        given: tuple[Tensor, ...],
        both: Tensor,
        of_query: Tensor,
        of_both: Tensor,
    ) -> None:
        """Add this part's gradients. given: the output's gradient, query, output and rows of the work's tokens."""
        span = work.span
        for step in steps(self.pattern, span, keys):
            ours, theirs = (step.query, step.queries, step.count), (step.key, step.keys, step.count)
            gradient, query, output, rows = (_pieces(one, *ours) for one in given)
            key, value = (_pieces(one, *theirs) for one in both)
            made = self.kernel.backward(gradient, query, key, value, output, rows, step.causal)
            for total, one, place in zip((of_query, *of_both), made, (ours, theirs, theirs), strict=True):
                begin, length, count = place
                into = total[:, :, :, begin : begin + length * count]
                into += one.reshape(into.shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: _Parts) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros_like(query, dtype=wide)
        rows = torch.full(query.shape[:3], float("-inf"), dtype=wide, device=query.device)
        both = torch.stack([key, value])
        exchange = parts.exchange()
        exchange.begin(both)
        for work in parts.found.works:
            parts.add(work, work.span.held, _at(query, work.here), _at_both(both, work.here), output, rows)
        theirs = exchange.received()
        for work in parts.found.works:
            for keys, where in work.others:
                parts.add(work, keys, _at(query, work.here), theirs[:, :, where], output, rows)
        output = output.to(query.dtype)
        ctx.parts = parts
        ctx.save_for_backward(query, both, theirs, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():  # only where the gradient is to be differentiated
            raise UsageError(
                "dilated attention has no second derivative, such as a gradient penalty (create_graph=True) needs"
            )
        query, both, theirs, output, rows = ctx.saved_tensors
        parts: _Parts = ctx.parts
        of_query, of_both, of_theirs = (torch.zeros_like(one, dtype=rows.dtype) for one in (query, both, theirs))

        def add(work: Work, keys: tuple[int, int], ours: Tensor) -> Tensor:
            """Add to of_query; the gradients of these keys and values."""
            given = tuple(_at(one, work.here) for one in (gradient, query, output, rows))
            of_mine, of_ours = (torch.zeros_like(one, dtype=rows.dtype) for one in (given[1], ours))
            parts.add_gradients(work, keys, given, ours, of_mine, of_ours)
            of_query[:, work.here[0], work.here[1]] += of_mine
            return of_ours

        for work in parts.found.works:
            for keys, where in work.others:
                of_theirs[:, :, where] = add(work, keys, theirs[:, :, where])
        exchange = parts.exchange()
        exchange.begin_return(of_theirs.to(both.dtype))
        for work in parts.found.works:
            heads, tokens = work.here
            of_both[:, :, heads, tokens] += add(work, work.span.held, _at_both(both, work.here))
        exchange.add_returned(of_both)
        of_key, of_value = of_both.to(both.dtype)
        return of_query.to(query.dtype), of_key, of_value, None


def _at(tensor: Tensor, here: Places) -> Tensor:
    """(batch, heads, seq, ...) -> (batch, heads, segments, tokens, ...)"""
    return tensor[:, here[0], here[1]]


def _at_both(both: Tensor, here: Places) -> Tensor:
    return both[:, :, here[0], here[1]]


def _pieces(tensor: Tensor, begin: int, length: int, count: int) -> Tensor:
    """(batch, heads, segments, tokens, ...) -> (batch x heads, segments x count, length, ...), contiguous: a kernel may go by the
    pointer alone."""
    part = tensor[:, :, :, begin : begin + length * count]
    shape = part.shape[0] * part.shape[1], part.shape[2] * count, length, *part.shape[4:]
    return part.reshape(shape).contiguous()
