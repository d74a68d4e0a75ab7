"""A run that changes its layout every other step has the curve of one uninterrupted process."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_layouts import INTERLEAVED, SEQUENCE, ULYSSES, ZERO_BUBBLE, size
from test_stages import OPTIMIZERS, compare, reference
from training import job, train_here

from hpctrain.base.errors import UsageError

pytestmark = pytest.mark.usefixtures("world")

# parallelism and stage; each resumes from the previous one, so neighbours differ as much as possible
LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"tensor": 2}, 1),
    ({"pipeline": 2}, 0),
    ({}, 3),
    ({"tensor": SEQUENCE}, 3),
    ({"context": 2, "tensor": 2}, 2),
    ({"pipeline": ZERO_BUBBLE}, 1),
    ({"context": ULYSSES}, 0),
    ({}, 2),
    ({"pipeline": 2, "tensor": SEQUENCE}, 1),
    ({"replicate": 2}, 3),
    ({"pipeline": INTERLEAVED}, 2),
    ({"context": 2, "replicate": 2}, 3),
    ({"tensor": 2}, 0),
]


@pytest.mark.ranks(2)
def test_every_layout_goes_on_from_the_one_before(root) -> None:
    ranks, rows = dist.get_world_size(), []
    optimizer = "sgd" if ranks % 4 else "adamw"
    fitting = [(axes, stage) for axes, stage in LAYOUTS if ranks % prod(size(axis) for axis in axes.values()) == 0]
    if len(fitting) < 3:
        pytest.skip("needs an even number of ranks")
    for number, (parallelism, stage) in enumerate(fitting, 1):
        used = prod(size(axis) for name, axis in parallelism.items() if name != "replicate")
        tables = job(
            job={"output_dir": str(root), "steps": number}, optimizer=OPTIMIZERS[optimizer], model={"layers": 4},
            sharding={"stage": stage}, parallelism=parallelism, batch={"micro_size": 12 * used // ranks},
        )  # fmt: skip
        rows += train_here(tables).rows
    assert [row["step"] for row in rows] == list(range(1, len(fitting) + 1))
    compare(rows, reference(tables)[1], losses=2e-6, norms=1e-5)


class Layerwise(torch.optim.Optimizer):
    """The length of a step is the norm of the parameter."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                parameter.sub_(gradient / (gradient.norm() + 1e-9) * parameter.norm() * group["lr"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "tables", [{"sharding": {"stage": 1}}, {"sharding": {"stage": 3}}, {"parallelism": {"tensor": 2}}]
)
def test_optimizer_state_that_is_not_cut_as_its_parameter_is_refused_before_the_first_step(
    root, tables: dict[str, Any]
) -> None:
    if dist.get_world_size() > 2:
        pytest.skip("2 ranks have shown it")
    adafactor = {"name": "torch.optim:Adafactor", "lr": 0.01}
    with pytest.raises(UsageError, match=r"Adafactor keeps 'row_var' of the shape .*use another optimizer"):
        train_here(job(job={"output_dir": str(root)}, optimizer=adafactor, **tables))
    layerwise = {"name": f"{__name__}:Layerwise", "lr": 0.01}
    with pytest.raises(
        UsageError, match=r"Layerwise' needs a whole parameter to update it, but ranks hold parts of some"
    ):
        train_here(job(job={"output_dir": str(root)}, optimizer=layerwise, **tables))
    assert not (root / "metrics.jsonl").exists()
