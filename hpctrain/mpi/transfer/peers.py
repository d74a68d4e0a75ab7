"""The memory of the node's other processes: what all of them share, and their own, read directly: one copy, and the owner need not
act.

Linux allows that (process_vm_readv(2)) between processes of one user, unless a security module (Yama's ptrace_scope), a
container's filter or different process numbers prevent it. So it is tried once before use.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hpctrain.mpi.all_ranks import broadcast_json, gather_json
from hpctrain.mpi.errors import CommunicationError
from hpctrain.mpi.library import MPI


class _Memory(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _readv is not None:
    _several = (ctypes.POINTER(_Memory), ctypes.c_ulong)
    _readv.argtypes = (ctypes.c_int, *_several, *_several, ctypes.c_ulong)
    _readv.restype = ctypes.c_ssize_t


class Peers:
    """The processes of some ranks of a node."""

    def __init__(self, processes: list[int]) -> None:
        self._processes = processes

    @staticmethod
    def create(comm: MPI.Comm) -> Peers | None:
        """The processes of `comm`, if each can read the memory of all. Collective."""
        token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
        there = gather_json(comm, (os.getpid(), token.data_ptr(), token.tolist()))
        peers = Peers([process for process, _, _ in there])
        readable = _readv is not None and all(
            peers._finds(rank, address, wanted) for rank, (_, address, wanted) in enumerate(there)
        )
        # All tokens stay alive until all ranks have read them.
        return peers if all(gather_json(comm, readable)) else None

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Fill a plain tensor of any size with the bytes at an address of that rank's process.

        Raises CommunicationError if the process is gone or has freed that memory.
        """
        start, rest = into.data_ptr(), into.nbytes
        while rest:
            # The system reads up to 2 GiB at a time.
            count = _readv(self._processes[rank], _Memory(start, rest), 1, _Memory(address, rest), 1, 0)
            if count <= 0:
                number = ctypes.get_errno() if count else errno.EFAULT
                raise CommunicationError(
                    f"process {self._processes[rank]} of this node ended or left the operation while its memory was "
                    f"read ({os.strerror(number)}); the log of its rank says why"
                )
            start, address, rest = start + count, address + count, rest - count

    def _finds(self, rank: int, address: int, wanted: list[int]) -> bool:
        found = torch.zeros(len(wanted), dtype=torch.uint8)
        try:
            self.read(rank, address, found)
        except CommunicationError:
            return False
        return found.tolist() == wanted


def shared_memory(comm: MPI.Comm, nbytes: int) -> list[Tensor] | None:
    """Zeros that all ranks of `comm` share, (nbytes,) uint8 for each of them; None if that is not possible.

    Collective; `nbytes` is equal on all ranks. The memory lives as long as one of the tensors on any rank.

    It is an anonymous file (memfd_create), not an MPI window or a file in /dev/shm, for three reasons. Many containers limit
    /dev/shm to 64 MB, and one page too many is a SIGBUS. The MPI library need not support it. And it is gone with the last rank.
    """
    whole = nbytes * comm.size
    descriptor, found = None, None
    if comm.rank == 0:
        token = secrets.token_bytes(16)
        descriptor = _anonymous_file(whole + len(token), token)
        found = (os.getpid(), descriptor, token.hex())
    process, descriptor_there, token_there = broadcast_json(comm, found)
    memory = _opened(process, descriptor_there, bytes.fromhex(token_there), whole)
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


def _opened(process: int, descriptor: int | None, token: bytes, nbytes: int) -> mmap.mmap | None:
    """The mapped file; None if it is out of reach: a container with its own process numbers finds another file or none."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), nbytes + len(token))
        return memory if memory[nbytes:] == token else None
    return None
