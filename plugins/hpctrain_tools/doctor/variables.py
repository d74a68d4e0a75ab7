"""The variables of the libraries below hpctrain that `hpctrain doctor` shows and compares between ranks."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.job.environment import PREFIXES, SECRET

# variables by which Open MPI's mpiexec tells its ranks something; no settings
_OF_THE_LAUNCHER = {"OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs"}


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables that a job could set, for `hpctrain doctor`, without secrets and without those that differ by nature."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
        and not SECRET.search(name)
        and not name.endswith("_VISIBLE_DEVICES")
        and name not in _OF_THE_LAUNCHER
    }
