"""The slot `communicator`: the backend that moves bytes between ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plugin import Plugin


class Communicator(Plugin):
    """Names the torch.distributed backend of a job."""

    preference: ClassVar[int | None] = None
    """`auto` takes the available communicator with the highest preference, and never one with None."""

    on_accelerators: ClassVar[bool] = False
    """Whether the ranks compute on accelerators. Rank 0 then assigns one to each of them: `identity.accelerator` of `device`."""

    def candidates(self, installed: list[Communicator]) -> list[Communicator]:
        """The communicators to try in place of this one, best first: the first that lacks nothing on any rank is taken. installed:
        all communicators."""
        return [self]

    @abstractmethod
    def backend(self) -> str:
        """The backend for torch.distributed.init_process_group; registers it first where it is not torch's own."""

    def backend_options(self) -> Any:
        """The `pg_options` of init_process_group; None for the backend's own defaults."""
        return None

    @abstractmethod
    def device(self, identity: Identity) -> torch.device:
        """The device that this rank computes on."""
