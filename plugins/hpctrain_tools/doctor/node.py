"""Checks of a node: accelerators, cores, limits, and memory that ranks share."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import urllib.request
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.devices import (
    accelerator,
    accelerator_count,
    device_name,
    device_of_rank,
    is_accelerator,
    unusable_accelerator,
)
from hpctrain.base.errors import reason, spans
from hpctrain.base.safe_files import scratch_directory, temporary_place
from hpctrain.base.store.server import files_needed
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.binding import Binding
from hpctrain_tools.doctor.findings import Finding, FindingOfRanks, row_of

_SPARE_FILES = 256
_SHARED_MEMORY = 256 * 2**20
_LOOPBACK_SECONDS = 5.0
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")


def loopback() -> Finding | None:
    """A finding if processes of this node can't reach each other by TCP."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_SECONDS).close()
    except OSError as error:
        found = (
            f"no connection to 127.0.0.1 on {socket.gethostname()} ({reason(error)}), over which ranks of a node talk"
        )
        return Finding("loopback", "fail", found, "`ip link set lo up`, also in a container or a network namespace")
    return None


def accelerators() -> Finding:
    """The accelerators that this rank sees."""
    check = "devices"
    kind = accelerator()
    if kind is None:
        why = unusable_accelerator()
        if why is not None:
            return Finding(check, "warn", f"the node has {why}: ranks compute on the CPU",
                           "install a torch that fits the GPU and its driver (nvidia-smi, rocm-smi show the version)")  # fmt: skip
        return Finding(check, "ok", "no accelerator: ranks compute on the CPU")
    count = accelerator_count()
    return Finding(check, "ok", f"{count} x {device_name(torch.device(kind.type, 0))}")


def device(identity: Identity) -> torch.device:
    """This rank's accelerator; the CPU where there is none, or none that works, which `accelerators` reports."""
    try:
        return device_of_rank(identity.local_rank)
    except RuntimeError:  # torch's
        return torch.device("cpu")


def cores(binding: Binding) -> dict[str, Any]:
    """The CPUs that this rank may run on, and its threads, for `judge_cores`."""
    return {"cores": sorted(binding.cpus), "threads": binding.threads, "by_hpctrain": binding.by_hpctrain}


def judge_cores(of_ranks: Sequence[dict[str, Any]], nodes: Sequence[str]) -> list[FindingOfRanks]:
    """A row for each node: whether its ranks share CPUs, or have more threads than CPUs."""
    rows = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, name in enumerate(nodes) if name == node]
        masks = [set(of_ranks[rank]["cores"]) for rank in ranks]
        there, threads = set().union(*masks), sum(of_ranks[rank]["threads"] for rank in ranks)
        shared = set().union(*(one & other for one, other in combinations(masks, 2)))
        bound = ", bound by hpctrain" if all(of_ranks[rank]["by_hpctrain"] for rank in ranks) else ""
        found = f"{len(there)} CPUs ({spans(sorted(there))}), {threads} threads of {len(ranks)} ranks{bound}"
        if threads > len(there):
            finding = Finding("cores", "warn", f"{found}: threads wait for each other",
                              "start fewer ranks, or set OMP_NUM_THREADS to a rank's share of the cores")  # fmt: skip
        elif shared:
            finding = Finding("cores", "warn", f"{found}; ranks share the CPUs {spans(sorted(shared))}",
                              "bind each rank to cores of its own: srun --cpu-bind=cores, mpiexec -bind-to core:N (MPICH), "
                              "mpirun --map-by slot:PE=N (Open MPI)")  # fmt: skip
        else:
            finding = Finding("cores", "ok", found)
        rows.append(row_of(finding, ranks, nodes))
    return rows


def open_files(identity: Identity) -> Finding:
    """The limit of open files against what this rank needs; rank 0 serves the store."""
    # the store has raised rank 0's soft limit as far as the hard one goes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(identity.size) if identity.rank == 0 else _SPARE_FILES
    allowed = hard if identity.rank == 0 else soft
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return Finding("open files", "ok", "enough for this rank")
    why = f", for the store of {identity.size} ranks" if identity.rank == 0 else ""
    return Finding("open files", "fail", f"at most {allowed}, needed {needed}{why}",
                   f"`ulimit -n {needed}` in the job script, or a higher limit in /etc/security/limits.conf")  # fmt: skip


def locked_memory() -> Finding:
    """The limit of locked memory, which InfiniBand needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft // 1024} KiB"
    cards = Path("/sys/class/infiniband")
    if soft != resource.RLIM_INFINITY and cards.is_dir() and any(cards.iterdir()):
        return Finding("locked memory", "warn", f"{found}, and the node has InfiniBand",
                       "`ulimit -l unlimited`, for Slurm in slurmd's unit (LimitMEMLOCK=infinity)")  # fmt: skip
    return Finding("locked memory", "ok", found)


def shared_memory() -> Finding:
    """/dev/shm, through which data workers and NCCL pass tensors."""
    usage = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm has {usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    if usage.free < _SHARED_MEMORY:
        return Finding("shared memory", "warn", found, "delete files left there, or enlarge it (docker run --shm-size=1g); "
                       "data workers and NCCL pass tensors through it")  # fmt: skip
    return Finding("shared memory", "ok", found)


def neighbours(identity: Identity) -> Finding:
    """Whether ranks of this node may read each other's memory. Collective over the node under MPI."""
    check = "process_vm_readv"
    if identity.source != "mpi" or identity.local_size == 1:
        return Finding(check, "ok", "not used: no other rank over MPI on this node")
    from hpctrain.mpi.library import MPI
    from hpctrain.mpi.transfer.peers import Peers

    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        if Peers.create(comm) is not None:
            return Finding(check, "ok", "ranks of the node read each other's memory")
    finally:
        comm.Free()
    scope = _PTRACE.read_text().strip() if _PTRACE.exists() else "absent"
    return Finding(check, "warn", f"not allowed (ptrace_scope: {scope}): large messages within the node take one copy more",
                   "sysctl kernel.yama.ptrace_scope=0; in a container also --cap-add=SYS_PTRACE")  # fmt: skip


def proxies(nodes: Iterable[str]) -> list[Finding]:
    """Proxies that would take what goes to this job's own nodes."""
    schemes = ("http_proxy", "https_proxy", "all_proxy")
    given = [name for name in os.environ if name.lower() in schemes and os.environ[name]]
    hosts = [host for host in dict.fromkeys(("localhost", *nodes)) if not urllib.request.proxy_bypass(host)]
    caught = ",".join(hosts[:4])
    users = [name for name in ("mlflow", "ray", "wandb") if find_spec(name)]
    if not (given and caught and users):
        return []
    found = f"{given[0]} is set, and no_proxy lacks {caught}: HTTP of {', '.join(users)} or your code goes to the proxy"
    return [Finding("proxies", "warn", f"{found}, and fails; ranks talk without it", f"export no_proxy={caught}")]


def surroundings(device: torch.device) -> list[Finding]:
    """Directories and programs of the node that some jobs need."""
    # as torch's inductor and Triton look for compilers
    language, variable, names = ("C", "CC", ("gcc", "clang")) if is_accelerator(device) else ("C++", "CXX", ("g++",))
    chosen = os.environ[variable].split()[:1] if os.environ.get(variable) else names
    temporary, told = temporary_place(), list[tuple[str, str, str]]()
    try:
        with scratch_directory("doctor-", Path.home()):
            pass
    except OSError as error:
        why = "tokens and kernels are made anew at each start, and without MUNGE ranks of several nodes don't meet"
        remedy = "set HOME, or XDG_CACHE_HOME for the caches alone, to a directory that you may write to"
        told += [("home directory", f"{Path.home()} can't be written to ({error.strerror}): {why}", remedy)]
    if os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        why = f"{temporary} is mounted noexec: what [compile] and Triton build there can't be loaded"
        told += [("temporary files", why, "set TMPDIR to a directory of the node's disk without noexec")]
    if not any(map(shutil.which, chosen)):
        why = f"found no {language} compiler ({' or '.join(chosen)}), without which [compile] enabled = true fails"
        told += [("compiler", why, f"install one, or load its module; {variable} may name it")]
    return [Finding(check, "warn", why, remedy) for check, why, remedy in told]
