"""The request of a process to the others: one operation on one tensor, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER = "alltoall", "reducescatter"
BARRIER, JOIN, PROCESS_SET = "barrier", "join", "process_set"
_TERMS = {
    "dtype": "data types",
    "shape": "tensor shapes",
    "op": "reduction operations",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "root": "root ranks",
    "device": "kinds of devices",
}


class Request(NamedTuple):
    """All processes that submit an operation of the same kind and name must agree on the rest.

    shape: without the first dim where that may differ between processes (allgather, alltoall). root: of a broadcast.
    device: the kind, "cpu" or an accelerator's. name: empty for an unnamed operation, which is matched by its number.
    """

    kind: str
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    device: str = "cpu"

    @staticmethod
    def from_json(fields: list[Any]) -> Request:
        """A request from the list that `json` makes of one."""
        return Request(*fields)._replace(shape=tuple(fields[3]))


Key = tuple[str, str, int]
"""Kind, name and number (-1 for a named operation): what requests are matched by."""


def title(key: Key) -> str:
    """The operation's full name, such as "allreduce.grad.0"."""
    kind, name, number = key
    return f"{kind}.{name or f'noname.{number}'}"


def mismatch(key: Key, one: tuple[int, Request], other: tuple[int, Request]) -> str | None:
    """The sentence for two ranks' requests of one name that differ; None if they agree."""
    if one[1] == other[1]:
        return None
    (rank, mine), (other_rank, theirs) = sorted([one, other])
    for field, term in _TERMS.items():
        a, b = getattr(mine, field), getattr(theirs, field)
        if a != b:
            a, b = (list(value) if isinstance(value, tuple) else value for value in (a, b))
            return (
                f"Mismatched {key[0].upper()} {term}: in {title(key)}, rank {rank} has {a} and rank {other_rank} has {b}; "
                "all ranks must pass the same"
            )
    raise AssertionError("requests of one key differ in a field without a term")
