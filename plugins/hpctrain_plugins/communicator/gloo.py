"""The communicator gloo: torch's own, over TCP."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from hpctrain.api import Communicator, Identity, Machine, gloo_backend, hookimpl


class Gloo(Communicator):
    """torch's own TCP communicator, for ranks that compute on CPUs."""

    name = "gloo"
    preference: ClassVar[int | None] = 10

    def missing(self, machine: Machine) -> str | None:
        return None if dist.is_gloo_available() else "this torch was built without gloo"

    def backend(self) -> str:
        return gloo_backend()

    def device(self, identity: Identity) -> torch.device:
        return torch.device("cpu")


@hookimpl
def hpctrain_communicator() -> list[type[Communicator]]:
    return [Gloo]
