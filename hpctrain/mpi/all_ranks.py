"""Small JSON values between ranks over MPI.

mpi4py's lower-case methods send pickles, which run code on arrival.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

from hpctrain.mpi.library import MPI


def gather_json(comm: MPI.Comm, value: Any) -> list[Any]:
    """Every rank's `value` in rank order, on all ranks."""
    content = json.dumps(value).encode()
    lengths = np.empty(comm.size, dtype=np.int64)
    comm.Allgather(np.array([len(content)], dtype=np.int64), lengths)
    everything = bytearray(int(lengths.sum()))
    begins = np.concatenate(([0], lengths.cumsum()))
    comm.Allgatherv([content, MPI.BYTE], [everything, (lengths.tolist(), begins[:-1].tolist()), MPI.BYTE])
    return [json.loads(everything[begin:end]) for begin, end in itertools.pairwise(begins)]


def broadcast_json(comm: MPI.Comm, value: Any = None) -> Any:
    """Rank 0's `value`, on all ranks."""
    return gather_json(comm, value if comm.rank == 0 else None)[0]
