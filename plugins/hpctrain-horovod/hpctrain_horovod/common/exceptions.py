"""Horovod's exceptions, under their usual path."""

from hpctrain_horovod.engine.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
