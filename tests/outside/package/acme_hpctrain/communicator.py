"""A communicator over gloo."""

from __future__ import annotations

import torch

from hpctrain.api import Communicator, gloo_backend, hookimpl


class AcmeGloo(Communicator):
    """gloo under another name."""

    name = "acme-gloo"

    def backend(self):
        return gloo_backend()

    def device(self, identity):
        return torch.device("cpu")


@hookimpl
def hpctrain_communicator():
    return [AcmeGloo]
