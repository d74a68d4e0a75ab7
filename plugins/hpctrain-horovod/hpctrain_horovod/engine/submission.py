"""An operation that this process has submitted and waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hpctrain.base.side_stream import Done
from hpctrain_horovod.engine.request import Key, Request

_AT_ONCE = Done()
"""The CPU leaves nothing for later."""


@dataclass(slots=True, eq=False)
class Submission:
    """tensor: this rank's input. output: where the result belongs, if its shape is known. value: what only this rank can say
    in the negotiation. splits: the rows for each rank, of an alltoall. result: set when done.

    On an accelerator, ready: when the input is there. done: the operation has been launched. over: when it has run.
    """

    request: Request
    number: int
    tensor: Tensor | None = None
    output: Tensor | None = None
    value: Any = None
    splits: list[int] | None = None
    result: Any = None
    error: Exception | None = None
    done: bool = False
    ready: Done = _AT_ONCE
    over: Done = _AT_ONCE
    submitted: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Key:
        return self.request.kind, self.request.name, self.number

    def finish(self, result: Any = None, error: Exception | None = None, over: Done | None = None) -> None:
        """Called once, by the thread that ran the operation. The input is held no longer."""
        self.result, self.error, self.over = result, error, over or self.over
        self.tensor = self.output = None
        self.done = True

    def is_over(self) -> bool:
        """Whether the result is there."""
        return self.done and self.over.is_over()
