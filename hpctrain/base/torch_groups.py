"""torch's private names around process groups: groups and handles in Python, which hold others or not, and how torch makes one.

As in torch_private.py, torch may change these names without notice. The standalone hpctrain.mpi uses the file.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The options of an all-gather, which torch.distributed exports for every other collective.
# HashStore is documented as torch.distributed.HashStore, which torch's own types lack.
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import HashStore as HashStore

# The output of a functional collective before it was waited for: hpctrain.mpi waits for such tensors.
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor

__all__ = ["AllgatherOptions", "make_group"]


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


def make_group(backend: str, options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """The group that torch makes for `backend`, for a group that wraps it.

    options: torch's `_DistributedBackendOptions`, which a registered backend gets. Collective. Raises ValueError for a backend
    that is neither registered nor gloo, NCCL or XCCL.
    """
    from torch.distributed.distributed_c10d import BackendConfig, PrefixStore

    devices = BackendConfig(dist.Backend(backend)).get_device_backend_map()
    [name] = set(devices.values())
    group: Any = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    options.store = PrefixStore(f"{name}/", options.store)
    made = make_backend(name, options, backend_options)
    if isinstance(made, dist.ProcessGroup):
        return made
    kind = dist.Backend.backend_type_map[name]
    for device in devices:
        group._register_backend(torch.device(device), kind, made)
    group._set_default_backend(kind)
    group._set_group_name(options.group_id)
    group._set_group_desc("")
    finished: dist.ProcessGroup = group
    return finished


def make_backend(name: str, options: Any, backend_options: Any) -> Any:
    """Make a backend of a group; a whole group where the registered one is made in Python."""
    plugin = dist.Backend._plugins.get(name.upper())
    place = options.store, options.group_rank, options.group_size
    if plugin is not None:
        if plugin.extended_api:
            return plugin.creator_fn(options, backend_options)
        return plugin.creator_fn(*place, options.timeout)
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
        raise ValueError(
            f"found the backend {name!r}, expected gloo, NCCL, XCCL or a registered one, in a torch that has it"
        )
    if name != dist.Backend.XCCL:
        made._set_sequence_number_for_group()
    return made


class WrappingGroup(PythonGroup):
    """A group whose operations are those of another one, `inner`, with something before or after."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """An attribute that the inner group has besides torch's names."""
        if name == "inner":
            raise AttributeError(name)  # not made yet
        return getattr(self.inner, name)

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.inner._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.inner._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()


class TransparentGroup(WrappingGroup):
    """A wrapping group in which torch's C++ code finds the inner one's backend: for time limits, and operations of its own."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, inner._get_backend(torch.device("cpu")))
        self._set_default_backend(kind)
        self._set_group_name(inner.group_name)

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)


class WrappingWork(dist.Work):
    """The handle of an operation of another group, `inner`, with something before or after its wait."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done: bool = self.inner.wait(timeout)
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done: bool = self.inner.is_completed()
        return done

    def is_success(self) -> bool:
        good: bool = self.inner.is_success()
        return good

    def exception(self) -> Any:
        return self.inner.exception()

    def result(self) -> Any:
        return self.inner.result()

    def _source_rank(self) -> int:
        """torch.distributed.recv calls this after a receive from any rank."""
        rank: int = self.inner._source_rank()
        return rank

    def get_future(self) -> Any:
        return self.inner.get_future()


class PythonMessageWork(dist.Work):
    """The handle of a send or receive in Python. `source_rank` is the sender's rank in the group."""

    def _source_rank(self) -> int:
        """torch.distributed.recv calls this after a receive from any rank."""
        return self.source_rank()
