"""Memory that all ranks of a node see: an anonymous file, mapped by each of them.

Anonymous (memfd_create), not an MPI window or a file in /dev/shm: it is not bounded by the 64 MB that many containers
give to /dev/shm (where one page too many is a SIGBUS), needs nothing of the MPI library, and is gone with the last rank.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

import torch
from torch import Tensor

from hpctrain.mpi import values
from hpctrain.mpi.library import MPI


def create(comm: MPI.Comm, nbytes: int) -> list[Tensor] | None:
    """Zeros that all ranks of `comm` share, (nbytes,) uint8 for each of them; None where that is not possible.

    Collective; `nbytes` is the same on all. The memory lives as long as one of the tensors on some rank.
    """
    whole = nbytes * comm.size
    descriptor, found = None, None
    if comm.rank == 0:
        token = secrets.token_bytes(16)
        descriptor = _anonymous_file(whole + len(token), token)
        found = (os.getpid(), descriptor, token.hex())
    process, descriptor_there, token_there = values.broadcast(comm, found)
    memory = _open(process, descriptor_there, bytes.fromhex(token_there), whole)
    everybody = values.on_all(comm, memory is not None)
    if descriptor is not None:
        os.close(descriptor)
    if memory is None or not everybody:
        return None
    # a storage for each: a rank's own memory does not count that of others
    return [torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=r * nbytes) for r in range(comm.size)]


def _anonymous_file(size: int, token: bytes) -> int | None:
    """A descriptor of a file of `size` bytes that ends with `token`."""
    if not hasattr(os, "memfd_create"):
        return None  # not Linux
    try:
        descriptor = os.memfd_create("hpctrain")
        os.pwrite(descriptor, token, size - len(token))
    except OSError:
        return None
    return descriptor


def _open(process: int, descriptor: int | None, token: bytes, nbytes: int) -> mmap.mmap | None:
    """The file, mapped; None where it is out of reach: a container of its own process numbers finds another, or none."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), nbytes + len(token))
        return memory if memory[nbytes:] == token else None
    return None
