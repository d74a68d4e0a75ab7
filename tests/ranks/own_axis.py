"""An axis that does not change the model: its ranks compute the same."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.api import AppliedAxis, AxisTraits, ModelSpec, Parallelism, hookimpl


class Repeat(Parallelism):
    """Nothing is cut."""

    name = "repeat"
    traits = AxisTraits("rp", 45, "the same samples")

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedAxis:
        return AppliedAxis(module)


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Repeat]
