"""The actor through which the MPI libraries of ranks on several nodes find each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hpctrain.starting.pmi import PmiBoard


class PmiActor:
    """Answers the ranks' requests of PMI-1. A barrier's answer comes when all ranks are in it."""

    def __init__(self, counts: Sequence[int]) -> None:
        """counts: the ranks of each node."""
        self._board = PmiBoard(counts)
        self._answers: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(self._board.ranks)]

    async def ask(self, rank: int, line: str) -> str:
        """The answer to a rank's line."""
        for other, answer in self._board.answers(rank, line):
            self._answers[other].put_nowait(answer)
        return await self._answers[rank].get()
