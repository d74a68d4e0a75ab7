"""The positions of the ranks, so that an operation that times out can name the ranks that have not entered it.

Nothing is exchanged on the fast path. A rank that has waited for PUBLISH_AFTER seconds writes its position (operation
number and name) into the group's store. A rank whose time is up reads all positions.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from hpctrain.mpi.errors import name_ranks

PUBLISH_AFTER = 1.0  # seconds of waiting
# A rank that enters just before our timeout publishes PUBLISH_AFTER later, so we listen a little longer.
LISTEN = PUBLISH_AFTER + 0.5  # seconds


class Presence:
    """The positions of a group's ranks, kept in the group's store.

    ranks: the global rank of each group rank.
    """

    def __init__(self, store: Store, group_rank: int, ranks: Sequence[int], group_name: str) -> None:
        self._store = store
        self._group_rank = group_rank
        self._ranks = ranks
        self.group_name = group_name

    @property
    def here(self) -> str:
        """This rank, for messages."""
        return f"rank {self._ranks[self._group_rank]} ({socket.gethostname()})"

    @property
    def group(self) -> str:
        """This group, for messages."""
        return f"group {self.group_name!r} ({name_ranks(self._ranks)})"

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a rank of this group."""
        return self._ranks[group_rank]

    def publish(self, number: int, name: str) -> None:
        """Publish that this rank waits in operation `number`, called `name`."""
        try:
            self._store.set(f"position/{self._group_rank}", f"{number} {name}")
        except RuntimeError:
            # The store's host has left. The timeout report will say so; waiting goes on until then.
            return

    def roll_call(self, number: int, name: str) -> str:
        """A description of the ranks that have not entered operation `number`. Waits up to LISTEN seconds for late ones."""
        self.publish(number, name)
        give_up = time.monotonic() + LISTEN
        try:
            while True:
                positions = self._read()
                if not self._absent(positions, number) or time.monotonic() > give_up:
                    break
                time.sleep(0.1)
        except RuntimeError as error:
            return (
                f"which ranks are missing is unknown: the store on rank 0 does not answer ({error}), it may have ended"
            )
        return self._describe(positions, number, name)

    def _read(self) -> dict[int, tuple[int, str]]:
        positions = {}
        for group_rank in range(len(self._ranks)):
            key = f"position/{group_rank}"
            if self._store.check([key]):
                number, name = self._store.get(key).decode().split(" ", 1)
                positions[group_rank] = (int(number), name)
        return positions

    def _absent(self, positions: dict[int, tuple[int, str]], number: int) -> list[int]:
        return [r for r in range(len(self._ranks)) if r not in positions or positions[r][0] < number]

    def _describe(self, positions: dict[int, tuple[int, str]], number: int, name: str) -> str:
        absent = self._absent(positions, number)
        waiting = [r for r, position in positions.items() if position == (number, name) and r != self._group_rank]
        elsewhere = {r: p for r, p in positions.items() if p[0] >= number and p != (number, name)}
        parts = []
        if absent:
            verb = "has" if len(absent) == 1 else "have"
            parts.append(f"{name_ranks([self._ranks[r] for r in absent])} {verb} not entered it")
        parts += [
            f"{name_ranks([self._ranks[r]])} waits in {other} (number {n}) instead"
            for r, (n, other) in sorted(elsewhere.items())
        ]
        if waiting:
            parts.append(f"{name_ranks([self._ranks[r] for r in waiting])} waited as well")
        return "; ".join(parts) if absent or elsewhere else "all ranks entered it, but the transfer did not finish"
