"""Compares each collective between the ranks before any data moves: `[communicator] check = true`.

The group of the communicator is wrapped in another one. Before each collective, its ranks gather a hash of what each called.
Where the hashes differ, they gather the calls in words, and every rank raises an error that names ranks, shapes and lines.
Sends and receives are not compared.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.devices import accelerator
from hpctrain.base.errors import HpctrainError
from hpctrain.base.torch_groups import WrappingGroup, make_group
from hpctrain.mpi.errors import OperationMismatchError, name_ranks
from hpctrain.ranks.watchdog.stacks import spot_of

BACKEND = "compared"
_WORDS = 1000
"""Bytes of a call in words."""


@dataclass(frozen=True)
class Comparison:
    """The options of the backend. backend, options: what init_process_group would get without the comparison."""

    backend: str
    options: Any = None


def compared(backend: str, options: Any) -> tuple[str, Comparison]:
    """The backend and its options that compare what they pass to `backend`."""
    return BACKEND, Comparison(backend, options)


class ComparedMismatchError(HpctrainError, OperationMismatchError):
    """The ranks of a group called different operations; the message has ranks, shapes and lines."""


def _told(name: str, tensors: Callable[..., Iterable[Tensor]] = lambda *_: (), options: int = -1) -> Callable[..., str]:
    """Describes a call. tensors: those of its arguments whose shapes must be equal on all ranks. options: the place of torch's
    options among the arguments."""

    def told(*args: Any) -> str:
        words = [name, *_tensors(tensors(*args))]
        given = args[options] if 0 <= options < len(args) else None
        reduction, root = getattr(given, "reduceOp", None), getattr(given, "rootRank", None)
        if reduction is not None:
            words.append(str(getattr(reduction, "op", reduction)).removeprefix("RedOpType.").lower())
        return " ".join(words) + ("" if root is None else f" root {root}")

    return told


def _tensors(tensors: Iterable[Tensor]) -> Iterator[str]:
    """ "3 x (2,) float32" for equal ones in a row."""
    for told, equal in groupby(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in tensors):
        count = sum(1 for _ in equal)
        yield f"{count} x {told}" if count > 1 else told


def _compared(method: str, told: Callable[..., str]) -> Any:
    """A method of the inner group, after the comparison."""

    def call(self: ComparedGroup, *args: Any, **kwargs: Any) -> Any:
        self.compare(told(*args))
        return getattr(self.inner, method)(*args, **kwargs)

    return call


def _passed(method: str) -> Any:
    """A method of the inner group as it is."""

    def call(self: ComparedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method)(*args, **kwargs)

    return call


class ComparedGroup(WrappingGroup):
    """The operations of `inner`, each after a comparison. The method names are torch's."""

    def __init__(self, inner: dist.ProcessGroup, ranks: list[int], comparison: Comparison) -> None:
        """ranks: the members, as ranks of the world."""
        super().__init__(inner)
        self.comparison, self._ranks = comparison, ranks

    def compare(self, called: str) -> None:
        """Raises ComparedMismatchError on all ranks unless all ranks called the same."""
        mine = hashlib.sha256(called.encode()).digest()
        if self._gather(mine) == mine * self.size():
            return
        line = spot_of(_caller()).line[: _WORDS // 4]
        every = self._gather(f"{called[: _WORDS // 2]}, at {line}".encode()[:_WORDS].ljust(_WORDS))
        parts = [every[start : start + _WORDS] for start in range(0, len(every), _WORDS)]
        found = [part.decode(errors="replace").strip() for part in parts]
        of_call: dict[str, list[int]] = {}
        for rank, one in zip(self._ranks, found, strict=True):
            of_call.setdefault(one, []).append(rank)
        calls = "".join(f"\n  {name_ranks(ranks)}: {one}" for one, ranks in of_call.items())
        raise ComparedMismatchError(
            f"the ranks of a group ({name_ranks(self._ranks)}) called different operations; all must call the same, in the same "
            f"order, with the same shapes and dtypes:{calls}"
        )

    def _gather(self, mine: bytes) -> bytes:
        """Every rank's bytes; all have equally many."""
        every = torch.empty(len(mine) * self.size(), dtype=torch.uint8)
        self.inner.all_gather_single(every, torch.frombuffer(bytearray(mine), dtype=torch.uint8)).wait()
        return every.numpy().tobytes()

    allreduce = _compared("allreduce", _told("all_reduce", lambda tensors, *_: tensors, 1))
    allreduce_coalesced = _compared("allreduce_coalesced", _told("all_reduce", lambda tensors, *_: tensors, 1))
    broadcast = _compared("broadcast", _told("broadcast", lambda tensors, *_: tensors, 1))
    reduce = _compared("reduce", _told("reduce", lambda tensors, *_: tensors, 1))
    all_gather_single = _compared("all_gather_single", _told("all_gather_into_tensor", lambda _, tensor, *__: [tensor]))
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _compared(
        "allgather_into_tensor_coalesced", _told("all_gather_into_tensor", lambda _, tensors, *__: tensors)
    )
    # the parts may differ in size, but all ranks name the same sizes
    allgather = _compared("allgather", _told("all_gather", lambda lists, *_: [one for of in lists for one in of]))
    allgather_coalesced = _compared(
        "allgather_coalesced", _told("all_gather", lambda lists, *_: [one for of in lists for one in of])
    )
    reduce_scatter = _compared(
        "reduce_scatter", _told("reduce_scatter", lambda _, lists, *__: [one for of in lists for one in of], 2)
    )
    reduce_scatter_single = _compared(
        "reduce_scatter_single", _told("reduce_scatter_tensor", lambda _, tensor, *__: [tensor], 2)
    )
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _compared(
        "reduce_scatter_tensor_coalesced", _told("reduce_scatter_tensor", lambda _, tensors, *__: tensors, 2)
    )
    # sizes may differ between ranks
    gather = _compared("gather", _told("gather", options=2))
    scatter = _compared("scatter", _told("scatter", options=2))
    alltoall = _compared("alltoall", _told("all_to_all"))
    all_to_all_single = alltoall_base = _compared("alltoall_base", _told("all_to_all_single"))
    barrier = _compared("barrier", _told("barrier"))
    monitored_barrier = _compared("monitored_barrier", _told("monitored_barrier"))

    send, recv, recv_anysource = _passed("send"), _passed("recv"), _passed("recv_anysource")

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.inner.group_name

    @property
    def group_desc(self) -> str:
        return self.inner.group_desc


def _caller() -> Any:
    """The frame that called a method of the group."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _create(options: Any, comparison: Any) -> ComparedGroup:
    if comparison is None:  # a group of some ranks: as the world's
        comparison = getattr(dist.group.WORLD, "comparison", None)
    if not isinstance(comparison, Comparison):
        raise TypeError(f"found pg_options of {type(comparison)}, expected a Comparison")
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ComparedGroup(make_group(comparison.backend, options, comparison.options), ranks, comparison)


_KINDS = ["cpu"] + [kind.type for kind in (accelerator(),) if kind is not None]
dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=_KINDS)
