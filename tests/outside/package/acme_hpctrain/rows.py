"""A mesh axis whose ranks divide the rows of each micro batch."""

from __future__ import annotations

from hpctrain.api import AppliedAxis, AxisTraits, Parallelism, Plan, Problem, hookimpl


class Rows(Parallelism):
    """Spreads a micro batch over ranks, row by row."""

    name = "rows"
    traits = AxisTraits("rows", 35, "parts of samples")

    def problems(self, plan: Plan) -> list[Problem]:
        size, rows = plan.sizes[self.name], plan.tables["batch"]["micro_size"]
        if rows is None or rows % size:
            return [Problem(f"rows = {size} cuts it; expected a multiple of {size}, found {rows}", "batch.micro_size")]
        return []

    def apply(self, module, spec, mesh):
        return AppliedRows(module, mesh.get_local_rank(), mesh.size())


class AppliedRows(AppliedAxis):
    def __init__(self, module, rank, size):
        super().__init__(module)
        self._rank, self._size = rank, size

    def split_batch(self, batch):
        return {name: rows[self._rank :: self._size] for name, rows in batch.items()}


@hookimpl
def hpctrain_parallelism():
    return [Rows]
