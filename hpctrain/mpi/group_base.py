"""What the operations of a group have in common: the way to the engine, and buffers to receive into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hpctrain.mpi.buffers import overlap, plain_like
from hpctrain.mpi.engine import Engine
from hpctrain.mpi.operation import Operation
from hpctrain.mpi.point_to_point import Messages
from hpctrain.mpi.transport import Transport
from hpctrain.mpi.work import MPIWork


class GroupBase(ProcessGroup):
    """Hands operations to the engine."""

    def __init__(self, transport: Transport, name: str, timeout: timedelta) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg]
        self._transport, self._size = transport, transport.size
        self._presence = transport.watch.presence
        self._name = name
        self._timeout = timeout.total_seconds()
        self._engine = Engine(transport, self._presence.group)
        self._messages = Messages(transport.network.comm, self._presence, self._timeout)

    def _submit(
        self,
        name: str,
        run: Callable[[Transport], None],
        result: Any,
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        nbytes: int | None = None,
        agreed: int | None = None,
        meet_first: bool = False,
    ) -> MPIWork:
        """tensors: what this rank puts in. agreed: the size that all ranks must have, None for that of `tensors`."""
        if nbytes is None:
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)
        if agreed is None:
            agreed = nbytes
        timeout = opts.timeout.total_seconds() if opts is not None else -1.0
        operation = Operation(
            name=name,
            run=run,
            result=result,
            nbytes=nbytes,
            agreed_bytes=agreed,
            dtype=tensors[0].dtype if tensors else torch.uint8,
            meet_first=meet_first,
            timeout=timeout if timeout > 0 else self._timeout,
        )
        return self._engine.submit(operation, asynchronous=opts is None or opts.asyncOp)


def apart(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The tensor, or a copy of it if it shares memory with the buffer that is received into."""
    return tensor.clone() if overlap(tensor, buffer) else tensor


def into(targets: Sequence[Tensor], move: Callable[[Sequence[Tensor]], None]) -> None:
    """Receive into the targets, by way of temporaries where they are not contiguous."""
    buffers = [plain_like(target) for target in targets]
    move(buffers)
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            target.copy_(buffer)
