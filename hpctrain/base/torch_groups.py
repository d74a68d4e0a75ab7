"""torch's private names around process groups: groups and handles in Python, and how torch makes its own.

As in torch_private.py, torch may change these names without notice. The standalone hpctrain.mpi uses the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

# The options of an all-gather, which torch.distributed exports for every other collective.
# HashStore is documented as torch.distributed.HashStore, which torch's own types lack.
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import HashStore as HashStore

# The output of a functional collective before it was waited for: hpctrain.mpi waits for such tensors.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor

__all__ = ["AllgatherOptions", "group_around", "make_backend"]


class PythonGroup(dist.ProcessGroup):
    """A process group on the CPU whose operations are methods in Python."""

    def __init__(self, rank: int, size: int) -> None:
        make: Any = super().__init__  # the types of torch 2.13 and 2.14 lack the arguments
        make(rank, size)

    def _get_backend(self, device: torch.device) -> Any:
        """The object that torch asks for `supports_coalescing`, in torch.distributed.batch_isend_irecv since 2.14.

        In C++ a group has one backend per device; this group is its own backend.
        """
        return self if device.type == "cpu" else super()._get_backend(device)

    # torch's Python code calls all_gather_single and reduce_scatter_single, its C++ code these.

    def _allgather_base(self, *args: Any) -> Any:
        return self.all_gather_single(*args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        return self.reduce_scatter_single(*args)


def group_around(
    backend: Any, options: Any, kind: dist.ProcessGroup.BackendType, devices: Iterable[str]
) -> dist.ProcessGroup:
    """A group of torch's own around a backend for tensors on these kinds of devices.

    options: torch's `_DistributedBackendOptions`, which a registered backend gets.
    """
    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(options.group_id)
    group._set_group_desc("")
    made: dist.ProcessGroup = group
    return made


def make_backend(name: str, options: Any, device: torch.device) -> Any:
    """The backend of a group; a whole group where the registered one is made in Python."""
    plugin = dist.Backend._plugins.get(name.upper())
    place = options.store, options.group_rank, options.group_size
    if plugin is not None:
        return plugin.creator_fn(options, None) if plugin.extended_api else plugin.creator_fn(*place, options.timeout)
    made: Any
    if name == dist.Backend.GLOO:
        made = dist.ProcessGroupGloo(*place, options.timeout)
    elif name in (dist.Backend.NCCL, dist.Backend.XCCL) and hasattr(dist, f"ProcessGroup{name.upper()}"):
        cls = getattr(dist, f"ProcessGroup{name.upper()}")
        given = cls.Options()  # a group's own: they hold its ranks and its name
        given.global_ranks_in_group, given.group_name = options.global_ranks_in_group, options.group_id
        made = cls(*place, given)
        made.set_timeout(options.timeout)
    else:
        raise OSError(f"found tensors on {device.type} and the backend {name!r}, which this torch lacks")
    if name != dist.Backend.XCCL:
        made._set_sequence_number_for_group()
    return made


class PythonWork(dist.Work):
    """The handle of an operation in Python. A message also has `source_rank()`, the sender's rank in the group."""

    done = False
    error: BaseException | None = None

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        """torch.distributed.recv calls this after a receive from any rank."""
        rank: int = self.source_rank()
        return rank
