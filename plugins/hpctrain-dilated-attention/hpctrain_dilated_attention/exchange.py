"""Selected keys and values between the ranks that have parts of a sequence, and their gradients on the way back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain_dilated_attention.layout import Traffic


class Exchange:
    """A round: `begin` and `received`, or `begin_return` and `add_returned`. What is computed between them takes its time."""

    def __init__(self, traffic: Traffic | None, group: dist.ProcessGroup | None) -> None:
        self._traffic, self._group = traffic, group
        self._arriving = torch.empty(0)
        self._work: dist.Work | None = None

    def begin(self, both: Tensor) -> None:
        """both: this rank's keys and values, (2, batch, heads, seq, head_size)."""
        if self._traffic is None:
            self._arriving = both.new_empty(0, 2, both.shape[1], both.shape[-1])
            return
        heads, tokens = self._traffic.places
        leaving = both[:, :, heads, tokens].permute(2, 0, 1, 3)  # (places, 2, batch, head_size)
        self._start(leaving, self._traffic.sent, self._traffic.received)

    def received(self) -> Tensor:
        """Other ranks' keys and values, (2, batch, places, head_size)."""
        return self._wait().permute(1, 2, 0, 3)

    def begin_return(self, of_theirs: Tensor) -> None:
        """of_theirs: the gradients of what `received` gave."""
        if self._traffic is not None:
            self._start(of_theirs.permute(2, 0, 1, 3), self._traffic.received, self._traffic.sent)

    def add_returned(self, of_both: Tensor) -> None:
        """Add the gradients of this rank's keys and values that the others have computed."""
        if self._traffic is None:
            return
        (heads, tokens), pieces = self._traffic.places, self._traffic.pieces
        returned = self._wait().permute(1, 2, 0, 3).to(of_both.dtype)
        for one, head, token in zip(
            returned.split(pieces, dim=2), heads.split(pieces), tokens.split(pieces), strict=True
        ):  # no place twice in a piece: sums that do not depend on an order of threads
            of_both[:, :, head, token] += one

    def _start(self, leaving: Tensor, sent: list[int], received: list[int]) -> None:
        leaving = leaving.contiguous()
        self._arriving = leaving.new_empty(sum(received), *leaving.shape[1:])
        self._work = dist.all_to_all_single(self._arriving, leaving, received, sent, self._group, async_op=True)

    def _wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._arriving
