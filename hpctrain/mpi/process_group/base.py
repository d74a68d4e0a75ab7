"""The common part of a group's operations: submission to the engine, and receive buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.torch_groups import PythonGroup
from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.library import MPI
from hpctrain.mpi.process_group.engine import Engine
from hpctrain.mpi.process_group.messages import Messages
from hpctrain.mpi.process_group.work import MPIWork, Run
from hpctrain.mpi.settings import Settings
from hpctrain.mpi.transfer.buffers import overlap, plain_like
from hpctrain.mpi.transfer.operation import Operation
from hpctrain.mpi.transfer.watch import OperationWatch


class GroupBase(PythonGroup):
    """Hands operations to the engine."""

    def __init__(
        self,
        collectives: Collectives,
        comm: MPI.Comm,
        watch: OperationWatch,
        settings: Settings,
        name: str,
        timeout: timedelta,
    ) -> None:
        """comm: for messages between two ranks."""
        super().__init__(collectives.rank, collectives.size)
        self._rank, self._size = collectives.rank, collectives.size
        self._collectives, self._presence = collectives, watch.presence
        self.settings = settings
        self._name = name
        self._timeout = timeout.total_seconds()
        self._engine = Engine(collectives, watch, self._presence.group)
        self._messages = Messages(comm, self._presence, self._timeout)

    def _submit(
        self,
        name: str,
        run: Run,
        result: Any,
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        nbytes: int | None = None,
        agreed: int | None = None,
        meet_first: bool = False,
    ) -> MPIWork:
        """tensors: this rank's input. agreed: the size that must be equal on all ranks; None: the size of `tensors`."""
        if nbytes is None:
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)
        if agreed is None:
            agreed = nbytes
        timeout = opts.timeout.total_seconds() if opts is not None else -1.0
        operation = Operation(
            name=name,
            nbytes=nbytes,
            agreed_bytes=agreed,
            dtype=tensors[0].dtype if tensors else torch.uint8,
            meet_first=meet_first,
            timeout=timeout if timeout > 0 else self._timeout,
        )
        return self._engine.submit(operation, run, result, asynchronous=opts is None or opts.asyncOp)


def apart(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The tensor, or a copy of it if it shares memory with the receive buffer."""
    return tensor.clone() if overlap(tensor, buffer) else tensor


def into(targets: Sequence[Tensor], move: Callable[[Sequence[Tensor]], None]) -> None:
    """Receive into the targets, through temporaries where they are not contiguous."""
    buffers = [plain_like(target) for target in targets]
    move(buffers)
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            target.copy_(buffer)
