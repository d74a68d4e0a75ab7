"""The backends that communicators name: over MPI, and over gloo with ranks that prove themselves. Registered on first use."""

from __future__ import annotations


def mpi_backend() -> str:
    """Register torch.distributed's backend over MPI and return its name, for communicators that use it.

    Its options are MPISettings.
    """
    import hpctrain.mpi

    return hpctrain.mpi.BACKEND


def gloo_backend() -> str:
    """Register the backend over gloo whose groups are authenticated by the ranks, and return its name."""
    from hpctrain.base.store.gloo import BACKEND

    return BACKEND


def gloo_transport() -> str | None:
    """The transport of this process's gloo groups, "" for the default. None before the first group: it can still be set."""
    from hpctrain.base.store.gloo import transport_in_use

    return transport_in_use()
