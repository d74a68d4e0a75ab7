"""The slot `communicator`: what moves the bytes between ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plugin import Plugin


class Communicator(Plugin):
    """Names the torch.distributed backend of a job."""

    preference: ClassVar[int | None] = None
    """`auto` takes the available one with the highest; None is never taken by itself."""

    on_accelerators: ClassVar[bool] = False
    """Whether the ranks compute on accelerators. Rank 0 then deals one to each of them: `identity.accelerator` of `device`."""

    def candidates(self, installed: list[Communicator]) -> list[Communicator]:
        """The communicators to use in place of this one, the best first; `installed` holds all. The first that lacks nothing on
        any rank is taken."""
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
