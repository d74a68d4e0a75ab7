"""Gloo over the guarded store, for groups that are complete: gloo itself would wait without saying for whom."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpctrain.base.errors import EnvironmentUnfitError

__all__ = ["create_group"]

BACKEND = "named_gloo"

_CONNECT = timedelta(seconds=60)  # all members are there by then


def create_group(options: Any, _: Any = None) -> dist.ProcessGroupGloo:
    """The group described by torch's `_DistributedBackendOptions`. Collective over its members.

    Raises DistStoreError if a member is missing, EnvironmentUnfitError if members can't reach each other.
    """
    rank, size = options.group_rank, options.group_size
    if size == 1:  # it connects to nobody
        return dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
    from hpctrain.base.store.client import await_members  # here: a rank alone needs no store

    store = await_members(options)
    try:
        group = dist.ProcessGroupGloo(store, rank, size, _CONNECT)
    except (dist.DistStoreError, dist.DistNetworkError):
        raise
    except RuntimeError as error:
        raise EnvironmentUnfitError(
            f"gloo: group {options.group_id!r} could not be connected: {str(error).partition(chr(10))[0][:500]}; expected a "
            "network between all ranks (GLOO_SOCKET_IFNAME selects its interface)"
        ) from error
    group.set_timeout(options.timeout)
    return group


def gloo_backend() -> str:
    """The name of the backend over gloo whose groups name missing ranks, for communicators."""
    return BACKEND


dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
