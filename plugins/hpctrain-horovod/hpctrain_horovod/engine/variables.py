"""HOROVOD_ variables: those that tell a worker who it is, and those of the original that change nothing here."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from hpctrain.base.launcher_variables import set_variables

if TYPE_CHECKING:
    from hpctrain_horovod.engine.world import World  # imports torch, which the program before each worker does without

WORKER = "HPCTRAIN_HOROVOD_WORKER"
"""The name by which the starter of workers without MPI knows a process: their ranks come from it, not from a launcher."""
_OF_TORCHRUN = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}
_CONTROLLERS = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")

_NO_CYCLES = "what all ranks have submitted runs at once, so that there are no cycles to wait for or to tune"
_NO_CHOICE = "the transport chooses how it reduces and gathers"
_NO_STREAMS = "torch's NCCL group runs the operations on GPUs"
_NO_LOG = "there is no log: stalls and errors are always told"
_NO_CCL = "there is no oneCCL"
_NO_RENDEZVOUS = "the ranks meet through MPI or horovodrun, at the address by which they reach it"
SWITCHES = {
    "HOROVOD_AUTOTUNE": _NO_CYCLES,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _NO_CHOICE,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _NO_CHOICE,
    "HOROVOD_TORUS_ALLREDUCE": _NO_CHOICE,
    "HOROVOD_MPI_THREADS_DISABLE": "the engine calls MPI from several threads",
    "HOROVOD_BATCH_D2D_MEMCOPIES": _NO_STREAMS,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _NO_STREAMS,
    "HOROVOD_DISABLE_NVTX_RANGES": _NO_STREAMS,
    "HOROVOD_DISABLE_GROUP_FUSION": "no result depends on what is fused",
    "HOROVOD_ENABLE_XLA_OPS": "there is no TensorFlow",
    "HOROVOD_CCL_CACHE": _NO_CCL,
    "HOROVOD_LOG_HIDE_TIME": _NO_LOG,
    "HOROVOD_LOG_TIMESTAMP": _NO_LOG,
}
"""Variables that the original reads and this engine does not, and why. These are without effect in the original, too, at 0."""
VALUES = {
    "HOROVOD_CYCLE_TIME": _NO_CYCLES,
    "HOROVOD_AUTOTUNE_LOG": _NO_CYCLES,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_CYCLES,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_CYCLES,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_CYCLES,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_CYCLES,
    "HOROVOD_NUM_NCCL_STREAMS": _NO_STREAMS,
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum sends each tensor whole",
    "HOROVOD_THREAD_AFFINITY": "no thread is bound to a core",
    "HOROVOD_CCL_BGT_AFFINITY": _NO_CCL,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "an operation that all ranks have agreed on may take 30 minutes",
    "HOROVOD_GLOO_IFACE": _NO_RENDEZVOUS,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _NO_RENDEZVOUS,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _NO_RENDEZVOUS,
    "HOROVOD_LOG_LEVEL": _NO_LOG,
}
"""Variables as SWITCHES, with values of other kinds."""

_told: set[str] = set()


def of_world(world: World) -> dict[str, str]:
    """The variables of this worker, which `init` has placed."""
    numbers = {
        "RANK": world.rank, "SIZE": world.size, "LOCAL_RANK": world.local_rank, "LOCAL_SIZE": world.local_size,
        "CROSS_RANK": world.cross_rank, "CROSS_SIZE": world.cross_size,
    }  # fmt: skip
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()} | {
        "HOROVOD_HOSTNAME": os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        "HOROVOD_CONTROLLER": _controller(world),
    }


def of_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that mpiexec or srun has told of this worker. Its place among several nodes is unknown before `init`."""
    always = {"HOROVOD_HOSTNAME": socket.gethostname()}
    if WORKER in environment:
        return always | _controller_of(environment, "gloo")
    told = {name: value for name, value in environment.items() if name not in _OF_TORCHRUN.values()}
    set_variables(told)
    found = {name: told[other] for name, other in _OF_TORCHRUN.items() if other in told}
    if not found:
        return {}
    if found["HOROVOD_SIZE"] == found.get("HOROVOD_LOCAL_SIZE"):
        found |= {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    return found | always | _controller_of(environment, "mpi")


def of_place(hosts: Sequence[str], rank: int, by_name: bool) -> dict[str, str]:
    """The variables of a rank whose starter has placed all; `hosts` has the host of each.

    by_name: hosts are numbered by their names, as horovodrun's workers without MPI; else as they come.
    """
    host = hosts[rank]
    local = hosts[:rank].count(host)
    order = sorted(set(hosts)) if by_name else list(dict.fromkeys(hosts))
    across = [one for one in order if hosts.count(one) > local]
    numbers = {
        "RANK": rank, "SIZE": len(hosts), "LOCAL_RANK": local, "LOCAL_SIZE": hosts.count(host),
        "CROSS_RANK": across.index(host), "CROSS_SIZE": len(across),
    }  # fmt: skip
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()} | {"HOROVOD_HOSTNAME": host}


def of_started(hosts: Sequence[str], rank: int, told: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of a rank that horovodrun has started; none where its launcher has placed the ranks otherwise.

    told: what the launcher has told of it; None without one.
    """
    if told is not None and told.get("HOROVOD_SIZE") != str(len(hosts)):
        return {}
    place = of_place(hosts, rank, by_name=told is None)
    agree = told is None or all(told.get(name) == place[name] for name in ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"))
    return place if agree else {}


def settle(world: World, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of this worker; rank 0 tells those that have no effect, each once."""
    if world.rank == 0:
        for name, why in useless(world, environment).items():
            if name not in _told:
                _told.add(name)
                print(f"horovod: {name}={environment[name]} has no effect here: {why}", file=sys.stderr, flush=True)
    environment.update(of_world(world))


def useless(world: World, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in the environment that this engine does not follow, and why."""
    given = {name: value.lower() for name, value in environment.items() if value}
    found = {name: why for name, why in SWITCHES.items() if given.get(name, "0") not in ("0", "false")}
    found |= {name: why for name, why in VALUES.items() if name in given}
    controller = _controller(world)
    why = f"the ranks were started to communicate over {controller}"
    return found | {name: why for name in _CONTROLLERS if given.get(name, controller) != controller}


def _controller_of(environment: Mapping[str, str], controller: str) -> dict[str, str]:
    """The controllers; what the user has set stays until `init`, which tells it."""
    return {"HOROVOD_CONTROLLER": environment.get("HOROVOD_CONTROLLER") or controller}


def _controller(world: World) -> str:
    return "mpi" if world.uses_mpi else "gloo"
