"""Memory that all ranks of a node share: an anonymous file, mapped by each rank.

The file is anonymous (memfd_create), not an MPI window or a file in /dev/shm, for three reasons. Many containers limit
/dev/shm to 64 MB, and one page too many is a SIGBUS. The MPI library need not support it. And it is gone with the last rank.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

import torch
from torch import Tensor

from hpctrain.mpi.all_ranks import broadcast_json, gather_json
from hpctrain.mpi.library import MPI


def create(comm: MPI.Comm, nbytes: int) -> list[Tensor] | None:
    """Zeros that all ranks of `comm` share, (nbytes,) uint8 for each of them; None if that is not possible.

    Collective; `nbytes` is equal on all ranks. The memory lives as long as one of the tensors on any rank.
    """
    whole = nbytes * comm.size
    descriptor, found = None, None
    if comm.rank == 0:
        token = secrets.token_bytes(16)
        descriptor = _anonymous_file(whole + len(token), token)
        found = (os.getpid(), descriptor, token.hex())
    process, descriptor_there, token_there = broadcast_json(comm, found)
    memory = _open(process, descriptor_there, bytes.fromhex(token_there), whole)
    everybody = all(gather_json(comm, memory is not None))
    if descriptor is not None:
        os.close(descriptor)
    if memory is None or not everybody:
        return None
    # one storage per rank: memory accounting of a rank must not count the others' parts
    return [torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=r * nbytes) for r in range(comm.size)]


def _anonymous_file(size: int, token: bytes) -> int | None:
    """The descriptor of a file of `size` bytes that ends with `token`."""
    if not hasattr(os, "memfd_create"):
        return None  # not Linux
    try:
        descriptor = os.memfd_create("hpctrain")
        os.pwrite(descriptor, token, size - len(token))
    except OSError:
        return None
    return descriptor


def _open(process: int, descriptor: int | None, token: bytes, nbytes: int) -> mmap.mmap | None:
    """The mapped file; None if it is out of reach: a container with its own process numbers finds another file or none."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), nbytes + len(token))
        return memory if memory[nbytes:] == token else None
    return None
