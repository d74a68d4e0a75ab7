"""Horovod's interface on torch.distributed's transports: scripts that say `import horovod.torch as hvd` run unchanged.

It uses only hpctrain.mpi, hpctrain.store and the base (errors, devices, torch_private) from the rest of hpctrain.
"""

from hpctrain.horovod.runner import run
from hpctrain.version import __version__ as _own_version

__all__ = ["__version__", "run"]

__version__ = f"0.28.1+hpctrain.{_own_version}"
"""The version of Horovod whose interface this is: scripts compare it."""
