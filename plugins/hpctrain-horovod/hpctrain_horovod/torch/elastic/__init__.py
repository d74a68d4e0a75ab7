"""`hvd.elastic`: training that survives lost workers and takes new ones in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain_horovod.common.elastic import ObjectState, State, run_fn
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.torch.elastic.sampler import ElasticSampler
from hpctrain_horovod.torch.elastic.state import TorchState
from hpctrain_horovod.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `train(state, ...)`: a lost worker sends the others back to the last `state.commit()`; new ones join at a commit.

    Start the script with `horovodrun --min-np`. Under MPI, which cannot go on without a lost process, `train` runs once.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    while True:
        try:
            return init()
        except HorovodInternalError:
            raise
        except (OSError, RuntimeError):
            shutdown()  # another worker was lost while these met: ask for another rank
