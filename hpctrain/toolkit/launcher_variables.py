"""Variables of launchers: the scheduler's job, and torchrun's for a rank that mpiexec, PALS, Flux or srun has started.

Imports nothing else, for programs that stand in front of each rank.
"""

from hpctrain.base.launcher_variables import job_id, set_variables

__all__ = ["job_id", "set_variables"]
