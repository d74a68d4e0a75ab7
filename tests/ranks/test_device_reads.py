"""A step waits for its device once: every read of a tensor that may be on a device is a wait, and nothing else may read one."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from training import job, nightly, train_here

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.shown_on(2)]

READS = {
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__",
    )
} | {torch.nonzero, torch.equal}  # fmt: skip
OWN = ("hpctrain", "hpctrain_plugins")


class DeviceReads(TorchFunctionMode):
    """Counts the lines of hpctrain that read a tensor on this thread, in `lines`.

    On a CPU every tensor could be read for nothing. Those that an accelerator's job would have on the host are told by how
    they were made: without a device, or of such tensors only. Compressors run on a thread of their own and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        moves = kwargs.get("device") is not None or any(isinstance(one, torch.device) for one in args)
        of_host = all(getattr(one, "is_of_host", False) for one in given) and not moves
        if func in READS and not of_host and (line := _own_line()):
            self.lines[line] += 1
        made = func(*args, **kwargs)
        if of_host:
            for one in _tensors(made):
                one.is_of_host = True  # type: ignore[attr-defined]
        return made


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _own_line() -> str | None:
    """The line of hpctrain that reads; None if torch reads, as an optimizer its counter of steps, which is on the host."""
    frame = sys._getframe(2)
    name = frame.f_globals.get("__name__", "")
    return f"{name}:{frame.f_lineno}" if name.partition(".")[0] in OWN else None


@pytest.mark.cases(thorough=["{'parallelism': {'pipeline': 2}}"], nightly=["{'sharding': {'stage': 3}}"])
@pytest.mark.parametrize(
    "tables",
    [
        {"sharding": {"stage": 0}, "optimizer": {"clip_norm": 0.1}},
        {"sharding": {"stage": 3}},
        {"parallelism": {"pipeline": 2}},
        nightly({"sharding": {"stage": 1}}),
        nightly({"sharding": {"stage": 2}, "precision": {"mode": "bf16"}}),
        nightly({"sharding": {"stage": 3}, "parallelism": {"tensor": 2}}),
        nightly({"parallelism": {"context": 2}, "activation_checkpointing": {"mode": "full"}}),
    ],
    ids=str,
)
def test_a_step_reads_one_tensor_of_its_device(root, tables: dict[str, Any]) -> None:
    each: list[Counter[str]] = []
    with DeviceReads() as reads:
        train_here(
            job(job={"output_dir": str(root), "steps": 5}, batch={"micro_size": 3}, **tables),
            lambda: (each.append(reads.lines.copy()), reads.lines.clear()),
        )
    for lines in each[2:]:  # the first step tries contracts, and with it the second may
        assert sum(lines.values()) == 1, lines
        assert all(line.startswith("hpctrain.training.figures:") for line in lines), lines
