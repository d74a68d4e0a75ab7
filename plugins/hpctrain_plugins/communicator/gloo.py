"""The communicator gloo: torch's own, over TCP, with encryption if torch was built with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from hpctrain.api import Communicator, Field, Identity, Machine, Options, gloo_backend, gloo_transport, hookimpl

_PROBE = "import torch.distributed as dist; dist.ProcessGroupGloo.create_default_device()"
_PROBE_SECONDS = 60


class TLS(Options):
    """Files in PEM format, on every node."""

    certificate: Path = Field(description="this rank's certificate")
    key: Path = Field(description="its private key")
    authority: Path = Field(description="the certificate of the authority that signed all ranks' certificates")

    def variables(self) -> dict[str, str]:
        """Gloo's environment variables; it reads them once per process."""
        return {
            "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT": str(self.certificate),
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY": str(self.key),
            "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE": str(self.authority),
        }


class GlooOptions(Options):
    tls: TLS | None = Field(
        default=None, description="encrypt the connections, by TLS; needs a torch whose gloo was built with it"
    )


class Gloo(Communicator):
    """torch's own TCP communicator, for ranks that compute on CPUs."""

    name = "gloo"
    Options = GlooOptions
    options: GlooOptions
    preference: ClassVar[int | None] = 10

    def missing(self, machine: Machine) -> str | None:
        if not dist.is_gloo_available():
            return "this torch was built without gloo"
        return None if self.options.tls is None else _without_tls(self.options.tls)

    def backend(self) -> str:
        if self.options.tls is not None:
            os.environ.update(self.options.tls.variables())
        return gloo_backend()

    def device(self, identity: Identity) -> torch.device:
        return torch.device("cpu")


def _without_tls(tls: TLS) -> str | None:
    """The reason why gloo can't encrypt here. Tried in another process: in this one, gloo would keep the settings."""
    for file in (tls.certificate, tls.key, tls.authority):
        if not os.access(file, os.R_OK):
            return f"[communicator] tls: {file} can't be read"
    if gloo_transport() not in (None, "TCP_TLS"):
        return (
            "[communicator] tls: an earlier job of this process used gloo without TLS, and gloo reads its settings once; start "
            "this job in a new process"
        )
    from hpctrain.base.child_python import python_code

    environment = {**os.environ, **tls.variables()}
    try:
        tried = subprocess.run(
            python_code(_PROBE), env=environment, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"[communicator] tls: gloo did not start within {_PROBE_SECONDS} s"
    if tried.returncode == 0:
        return None
    if "unsupported gloo device" in tried.stderr:
        return (
            "[communicator] tls: this torch was built without gloo's TLS; leave tls out, or build torch with "
            "USE_GLOO_WITH_OPENSSL=1"
        )
    return f"[communicator] tls: gloo refuses it: {tried.stderr.strip().rpartition(chr(10))[2][:300]}"


@hookimpl
def hpctrain_communicator() -> list[type[Communicator]]:
    return [Gloo]
