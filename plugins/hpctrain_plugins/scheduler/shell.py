"""The common parts of the scripts for Slurm, PBS and Flux."""

from __future__ import annotations

from hpctrain.api import Field, Launch, Options
from hpctrain.toolkit.scripts import Line, quoted

# the option by which Apptainer gives a container the node's GPUs: only the node knows whether they are AMD's or NVIDIA's. The
# driver of AMD's is also there for graphics beside NVIDIA's.
_GPUS = '"$([ -e /dev/kfd ] && [ ! -e /dev/nvidiactl ] && echo --rocm || echo --nv)"'


class ShellOptions(Options):
    """Options of a batch script."""

    modules: list[Line] = Field(default=[], description="modules to load before the ranks start")
    setup: list[Line] = Field(default=[], description="lines of shell before the ranks start, such as exports")
    container: Line | None = Field(default=None, description="Apptainer image that has hpctrain; the ranks run in it")


def program(options: ShellOptions, launch: Launch, uses_gpus: bool) -> str:
    """hpctrain on a rank, for the shell: in its container, or as it is installed."""
    if options.container is None:
        return quoted(*launch.program)
    gpus = f" {_GPUS}" if uses_gpus else ""
    return f"apptainer exec{gpus} {quoted(options.container)} hpctrain"
