"""torchrun's variables for a rank that mpiexec, PALS, Flux or srun has started.

Imports nothing else, for programs that stand in front of each rank.
"""

from hpctrain.base.launcher_variables import set_variables

__all__ = ["set_variables"]
