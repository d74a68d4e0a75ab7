"""The guarded store, in which the processes of a job meet: keys and values over TCP, for who knows the job's secret.

One process serves it (`StoreServer` on `listeners`); all open it (`open_store`) as a store of torch's. Its own handshakes are made
of `digest` and `verify`. SECURITY.md says against whom it guards. Imports torch, and nothing of plugins.
"""

from hpctrain.base.store.client import GuardedStore, open_store
from hpctrain.base.store.messages import DIGEST_BYTES, SECRET_BYTES, ProtocolError, digest, verify
from hpctrain.base.store.network import bind_communication, listeners, reachable_addresses
from hpctrain.base.store.server import StoreServer

__all__ = [
    "DIGEST_BYTES",
    "SECRET_BYTES",
    "GuardedStore",
    "ProtocolError",
    "StoreServer",
    "bind_communication",
    "digest",
    "listeners",
    "open_store",
    "reachable_addresses",
    "verify",
]
