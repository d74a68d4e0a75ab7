"""The hosts of a job that a user names, with the ranks that each may run."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain_tools.launch.mpi_library import OPEN_MPI

__all__ = ["HERE", "Hosts", "read_hostfile"]

HERE = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().split(".")[0]}
"""This machine's names."""
_LINE = r"(\w[\w.-]*)(?:\s+slots\s*=\s*(\d+)|:(\d+))?"
# variables that Open MPI hands over to other hosts
_PASSED_ON = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Hosts:
    """Host names and their slots, in the order of the ranks."""

    named: tuple[tuple[str, int], ...]

    @property
    def slots(self) -> int:
        """The most ranks that the hosts may run."""
        return sum(slots for _, slots in self.named)

    @property
    def are_here(self) -> bool:
        """Whether every host is this machine."""
        return all(name in HERE for name, _ in self.named)

    def first(self, ranks: int) -> Hosts:
        """The hosts of so many ranks, with no more slots than these need."""
        named, left = [], ranks
        for name, slots in self.named:
            if left:
                named.append((name, min(slots, left)))
                left -= min(slots, left)
        return Hosts(tuple(named))

    @property
    def by_rank(self) -> list[str]:
        """The host of each rank, if all slots are taken: ranks fill them in order."""
        return [name for name, slots in self.named for _ in range(slots)]

    def called(self, node: str) -> str | None:
        """The host that calls itself, or is called, `node`: by its name, or the part before the first dot."""
        alike = {node, node.partition(".")[0]}
        names = [name for name, _ in self.named]
        found = next((name for name in names if name == node), None)
        found = found or next((name for name in names if name.partition(".")[0] in alike), None)
        return found or next((name for name in names if name in HERE and alike & HERE), None)

    def words(self, flavour: str, variables: Collection[str] = ()) -> list[str]:
        """The options of an mpiexec for these hosts, which also get this process's settings of Python and these variables."""
        text = ",".join(f"{name}:{slots}" for name, slots in self.named)
        if flavour != OPEN_MPI:  # the others pass on every variable
            return ["-hosts", text]
        names = sorted(name for name in os.environ if name in _PASSED_ON or name in variables)
        return ["--host", text, *(word for name in names for word in ("-x", name))]


def read_hostfile(file: Path) -> Hosts:
    """The hosts of a file with a line `HOST slots=SLOTS` or `HOST:SLOTS` for each; without a number it is one slot.

    A host that has several lines, as in a PBS node file, has the sum of their slots. Raises UsageError.
    """
    try:
        content = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"--hostfile {file}: cannot be read: {error.strerror}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            name, found = _host(text, f"--hostfile {file}:{number}")
            slots[name] = slots.get(name, 0) + found
    if not slots:
        raise UsageError(f"--hostfile {file}: found no host, expected a line `HOST slots=SLOTS` for each")
    return Hosts(tuple(slots.items()))


def _host(part: str, where: str) -> tuple[str, int]:
    found = re.fullmatch(_LINE, part)
    numbers = [] if found is None else [int(number) for number in found.groups()[1:] if number is not None]
    if found is None or numbers == [0]:
        raise UsageError(f"{where}: found {part!r}, expected HOST slots=SLOTS or HOST:SLOTS")
    return found[1], numbers[0] if numbers else 1
