"""Horovod's interface on torch.distributed's transports: scripts that say `import horovod.torch as hvd` run unchanged.

Of hpctrain it uses what is public: hpctrain.api, hpctrain.mpi and hpctrain.toolkit.
"""

from hpctrain import __version__ as _own_version
from hpctrain_horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = f"0.28.1+hpctrain.{_own_version}"
"""The version of Horovod whose interface this is: scripts compare it."""

HPCTRAIN_COMMUNICATES = True
"""The watchdog counts a thread in this package's code as one that waits for other ranks."""
