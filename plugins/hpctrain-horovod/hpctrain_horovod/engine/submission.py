"""An operation that this process has submitted and waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hpctrain_horovod.engine.request import Key, Request


@dataclass(slots=True, eq=False)
class Submission:
    """tensor: this rank's input. output: where the result belongs, if its shape is known. value: what only this rank can say
    in the negotiation. splits: the rows for each rank, of an alltoall. result: set when done."""

    request: Request
    number: int
    tensor: Tensor | None = None
    output: Tensor | None = None
    value: Any = None
    splits: list[int] | None = None
    result: Any = None
    error: Exception | None = None
    done: bool = False
    submitted: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Key:
        return self.request.kind, self.request.name, self.number

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        """Called once, by the thread that ran the operation."""
        self.result, self.error = result, error
        self.done = True
