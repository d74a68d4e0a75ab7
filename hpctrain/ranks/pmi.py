"""A rank's side of PMI-1, for ranks whose MPI does not use it: through their launcher, the ranks exchange short texts.

Flux gives every task a connected descriptor. Requests and replies are lines of `key=value` words, as hpctrain_tools.launch serves.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import pmi_numbers

LONGEST = 1000
"""The longest text in bytes: PMI-1 promises 1024 for a value."""
_SECONDS = 300.0
"""How long the ranks wait for each other, as in the meeting that follows."""


class LauncherPmi:
    """The launcher's service for this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises EnvironmentUnfitError if the launcher offers none, or does not answer."""
        try:
            self.rank, self.size, descriptor = pmi_numbers(environment)
            self._socket = socket.socket(fileno=os.dup(descriptor))
        except (KeyError, ValueError, OSError) as error:
            raise EnvironmentUnfitError(
                f"the launcher offers no PMI-1 through which ranks without MPI could meet ({error!r}); expected the variables "
                "PMI_FD, PMI_RANK and PMI_SIZE: under Flux leave `-o pmi` out, or start the ranks with torchrun"
            ) from None
        self._socket.settimeout(_SECONDS)
        self._answers = self._socket.makefile("r", encoding="ascii", errors="replace")
        self._rounds = 0
        self._ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._space = self._ask("cmd=get_my_kvsname", "my_kvsname")["kvsname"]
        atexit.register(self._finalize)

    def exchange(self, mine: str) -> list[str]:
        """Every rank's text, in rank order. Collective."""
        self._rounds += 1
        self._publish(mine)
        self._meet()
        return [self._text_of(rank) for rank in range(self.size)]

    def text_of_first(self, mine: str | None) -> str:
        """Rank 0's text, on every rank; the others give None. Collective."""
        self._rounds += 1
        if mine is not None:
            self._publish(mine)
        self._meet()
        return self._text_of(0)

    def _publish(self, text: str) -> None:
        # each round has keys of its own: PMI has no way to set a key anew
        key = f"hpctrain-{self._rounds}-{self.rank}"
        self._ask(f"cmd=put kvsname={self._space} key={key} value={text}", "put_result")

    def _meet(self) -> None:
        self._ask("cmd=barrier_in", "barrier_out")

    def _text_of(self, rank: int) -> str:
        asked = f"cmd=get kvsname={self._space} key=hpctrain-{self._rounds}-{rank}"
        return self._ask(asked, "get_result")["value"]

    def _ask(self, request: str, expected: str) -> dict[str, str]:
        """The words of the answer."""
        try:
            self._socket.sendall(f"{request}\n".encode())
            line = self._answers.readline()
        except OSError as error:
            raise self._failed(request, str(error) or "no answer") from None
        words = dict(word.partition("=")[::2] for word in line.split())
        if words.get("cmd") != expected or words.get("rc", "0") != "0":
            raise self._failed(request, line.strip() or "the end of the connection")
        return words

    def _failed(self, request: str, answer: str) -> EnvironmentUnfitError:
        command = request.split()[0].removeprefix("cmd=")
        return EnvironmentUnfitError(
            f"rank {self.rank} on {socket.gethostname()} asked its launcher over PMI-1 for {command} and found: {answer}; look for "
            f"another rank's message, or for a node on which a rank could not start (a rank waits {_SECONDS:.0f} s)"
        )

    def _finalize(self) -> None:
        with suppress(EnvironmentUnfitError):  # the launcher is gone already
            self._socket.settimeout(1.0)
            self._ask("cmd=finalize", "finalize_ack")


@cache
def launcher_pmi() -> LauncherPmi:
    """The service, opened once: the connection belongs to the process, and the launcher counts its barriers."""
    return LauncherPmi(os.environ)
