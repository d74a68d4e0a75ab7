"""Helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from hpctrain.base.devices import nccl_version

T = TypeVar("T")


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a block; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """Remember the result for each set of arguments."""
    return cache(function)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a Horovod for a framework; here, for "torch" only."""
    return ext_base_name == "torch"


def mpi_built(verbose: bool = False) -> bool:
    """Whether operations can run over MPI."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """Whether operations can run over gloo: always, as torch brings it."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as a number such as 22703; 0 without an NVIDIA GPU."""
    return nccl_version()


def no_such_build(verbose: bool = False) -> bool:
    """Builds of Horovod that do not exist here: DDL, oneCCL and ROCm."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Whether tensors on an NVIDIA GPU can be used."""
    return bool(nccl_built())
