"""Reads the memory of other processes on the node directly: one copy, and the owner need not act.

Linux allows it (process_vm_readv(2)) between processes of one user, unless a security module (Yama's ptrace_scope), a
container's filter or different process numbers prevent it. So it is tried once before use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from typing import Any

import torch
from torch import Tensor

from hpctrain.mpi.all_ranks import gather_json
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
