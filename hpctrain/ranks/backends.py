"""The backends that communicators name, registered on first use: over MPI, and over gloo with the names of missing ranks."""

from __future__ import annotations


def mpi_backend() -> str:
    """Register torch.distributed's backend over MPI and return its name, for communicators that use it.

    Its options are MPISettings.
    """
    import hpctrain.mpi

    return hpctrain.mpi.BACKEND


def gloo_backend() -> str:
    """Register the backend over gloo whose groups name missing ranks, and return its name."""
    from hpctrain.base.store.gloo import BACKEND

    return BACKEND
