"""The guards of a run in one process: what they leave out, when they stop, and what a rank without memory is told."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import TINY
from torch import Tensor

import hpctrain
from hpctrain.api import LiveModel, Options, Sharding, hookimpl
from hpctrain.base.errors import EXIT_TRAINING, HpctrainError, TrainingError
from hpctrain.checking.check import check
from hpctrain.contracts.runner import MicroBatch
from hpctrain.job.raw import RawJob
from hpctrain.training.guard.first_nonfinite import nonfinite_samples
from hpctrain.training.guard.memory import advice

PLANTED = """
import torch
from hpctrain.api import hookimpl
SEEN, FAILING = [], {}
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
    def forward(self, x):
        step = len(SEEN) + 1
        SEEN.append(x.clone())
        found = FAILING.get(step)
        if found == "CPU":
            torch.empty(2**50)  # more than there can be
        if found == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB free.")
        return super().forward(x) * (1.0 if found is None else found)
def dirty(split):
    return [(torch.full_like(x, {3: float("nan"), 5: float("-inf")}.get(i, 1)), y) for i, (x, y) in enumerate(data(split))]
def data(split):
    values = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    return [(value[:3], value[3:]) for value in values] if split == "train" else None
def stream(split):
    return Stream() if split == "train" else None
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data("train"))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module whose model fails in the forwards with these numbers: one forward is one step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("planted.py").write_text(PLANTED)
    sys.modules.pop("planted", None)
    import planted  # type: ignore[import-not-found]

    yield planted
    sys.modules.pop("planted", None)


def job(steps: int, guard: dict[str, Any], **tables: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "job": {"name": "guarded", "steps": steps, "output_dir": "out"},
        "model": {"name": "planted:Model", "loss": "torch.nn.functional:mse_loss"},
        "dataset": {"name": "planted:data"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "batch": {"global_size": 4, "micro_size": 4},
        "precision": {"mode": "fp32"}, "guard": guard, **tables,
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def plain_losses(batches: list[Tensor], weights: dict[str, Tensor]) -> list[float]:
    """A plain loop over these inputs; their targets are found in the data."""
    import planted

    samples = {tuple(x.tolist()): y for x, y in planted.data("train")}
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(weights)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for inputs in batches:
        targets = torch.stack([samples[tuple(x.tolist())] for x in inputs])
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


class First:
    """Records the weights at the start."""

    @hookimpl
    def hpctrain_job_start(self, model: LiveModel) -> None:
        First.weights = {name: model.value(name) for name in model.shapes}


@pytest.fixture
def first(planted: Any) -> Any:
    planted.First = First
    planted.hpctrain_job_start = hookimpl(lambda model: First().hpctrain_job_start(model))
    return First


def test_a_rollback_is_a_run_that_never_saw_the_samples_in_between(planted: Any, first: Any, capsys: Any) -> None:
    planted.FAILING[6] = math.nan
    tables = job(8, {"non_finite": "rollback"}, checkpoint={"every_steps": 4}, plugins={"load": ["planted"]})
    result = hpctrain.run(tables)
    seen = planted.SEEN
    assert len(seen) == 10 and len({x.sum().item() for x in seen}) == 10, "no batch comes twice"
    assert result["losses"] == pytest.approx(plain_losses(seen[:4] + seen[6:], first.weights), rel=1e-5)
    assert [row["step"] for row in rows()] == list(range(1, 9)), "the rows of undone steps are gone, as after a resume"
    assert [row.get("rollbacks") for row in rows()] == [None] * 4 + [1] * 4
    assert "step 6: loss nan" in capsys.readouterr().out


def test_steps_in_a_row_that_are_left_out_have_a_limit(planted: Any, first: Any, capsys: Any) -> None:
    planted.FAILING.update({2: math.nan, 3: math.inf, 5: math.nan, 6: math.nan, 7: math.nan})
    with pytest.raises(
        TrainingError, match=r"step 7: loss nan.* \[guard\] limit reached: too many steps in a row"
    ) as told:
        hpctrain.run(job(9, {"non_finite": "skip", "limit": 2}, plugins={"load": ["planted"]}))
    assert told.value.exit_code == EXIT_TRAINING
    assert [row.get("skipped_steps") for row in rows()] == [None, 1, 2, 2, 3, 4, 4]
    assert "step 3 left out (2 in a row, at most 2): loss inf" in capsys.readouterr().out
    done = [row["loss"] for row in rows()]
    expected = plain_losses([planted.SEEN[0], planted.SEEN[3]], first.weights)
    assert [done[0], done[3]] == pytest.approx(expected, rel=1e-5)


def test_rollbacks_have_a_limit_and_need_a_checkpoint(planted: Any) -> None:
    planted.FAILING.update(dict.fromkeys(range(4, 100), math.nan))
    tables = job(8, {"non_finite": "rollback", "limit": 3}, checkpoint={"every_steps": 2})
    with pytest.raises(TrainingError, match=r"step 3: .* too many rollbacks to one checkpoint.*step-00000002"):
        hpctrain.run(tables)
    assert len(planted.SEEN) == 4 + 3
    planted.SEEN.clear()
    planted.FAILING[1] = math.nan
    with pytest.raises(TrainingError, match=r"step 1: .*there is no checkpoint yet .*\(newest checkpoint: none\)"):
        hpctrain.run({**tables, "job": {**tables["job"], "output_dir": "early"}})
    with pytest.raises(
        HpctrainError, match=r"\[guard\] non_finite: a rollback needs checkpoints; expected \[checkpoint\]"
    ):
        hpctrain.run(job(8, {"non_finite": "rollback"}))


def test_a_stream_can_t_be_rolled_back(planted: Any) -> None:
    tables = job(8, {"non_finite": "rollback"}, checkpoint={"every_steps": 2}, dataset={"name": "planted:stream"})
    with pytest.raises(HpctrainError, match=r"\[guard\]: a rollback .* 'planted:stream' is a stream"):
        hpctrain.run(tables)


@pytest.mark.parametrize("action", ["warn", "skip", "rollback", "stop"])
def test_a_loss_far_above_the_median(planted: Any, first: Any, action: str, capsys: Any) -> None:
    planted.FAILING.update({2: 100.0, 8: 100.0})  # the first one before the window is full
    spike = {"factor": 20.0, "window": 5, "action": action}
    tables = job(10, {"loss_spike": spike}, checkpoint={"every_steps": 6}, plugins={"load": ["planted"]})
    tables["optimizer"] = {"name": "sgd", "lr": 1e-6}
    if action == "stop":
        with pytest.raises(TrainingError, match=r"step 8: loss .* is above 20 x .*, the median of the last 5 steps"):
            hpctrain.run(tables)
        return
    hpctrain.run(tables)
    assert capsys.readouterr().out.count("the median of the last 5 steps") == 1
    told = [row["step"] for row in rows() if row.get("guard") == "loss_spike"]
    assert told == ([] if action == "rollback" else [8])
    assert [row["step"] for row in rows() if row.get("skipped")] == ([8] if action == "skip" else [])
    assert [row["step"] for row in rows() if "rollbacks" in row] == ([7, 8, 9, 10] if action == "rollback" else [])


def test_the_window_of_losses_comes_back_after_a_resume(planted: Any) -> None:
    planted.FAILING[7] = 100.0
    guard = {"loss_spike": {"factor": 20.0, "window": 5, "action": "skip"}}
    hpctrain.run(job(6, guard))
    hpctrain.run(job(8, guard))
    assert [row["step"] for row in rows() if row.get("skipped")] == [7]


def test_what_is_said_where_memory_ends(planted: Any) -> None:
    planted.FAILING[3] = "oom"
    with pytest.raises(TrainingError) as told:
        hpctrain.run(job(4, {}))
    said = str(told.value)
    assert said.startswith("rank 0 on ") and "ran out of memory in step 3: asked for 20.00 GiB; what helps" in said
    order = ["[activation_checkpointing] mode", "[batch] micro_size = 2, found 4"]
    assert [said.index(one) for one in order] == sorted(said.index(one) for one in order)
    assert "[sharding]" not in said and "[parallelism]" not in said, (
        "there is one rank, and a model without such a plan"
    )


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, ["activation_checkpointing", "stage", "micro_size", "seq_length", "parallelism"]),
        ({"sharding": {"stage": 1}}, ["activation_checkpointing", "stage", "offload", "micro_size", "seq_length", "parallelism"]),
        (
            {
                "activation_checkpointing": {"mode": "full"}, "sharding": {"stage": 3, "offload_optimizer": True},
                "batch": {"micro_size": 1}, "parallelism": {"tensor": 2},
            },
            ["offload_parameters", "seq_length", "parallelism"],
        ),
    ],
    ids=["nothing is on", "stage 1", "much is on"],
)  # fmt: skip
def test_what_helps_a_job_without_memory(tables: dict[str, Any], expected: list[str]) -> None:
    job = {name: {**TINY.get(name, {}), **tables.get(name, {})} for name in {**TINY, **tables}}
    job["batch"] = {**TINY["batch"], "micro_size": 3, **tables.get("batch", {})}
    checked = check(RawJob(job, {}, "job"), 4)
    told = advice(checked.job, checked.parts, 4, torch.device("cuda")).split(": ", 1)[1].split("; ")
    assert len(told) == len(expected) and all(word in one for word, one in zip(expected, told, strict=True)), told
    assert (
        "tensor" not in told[-1] if "parallelism" in tables else "tensor = 2 or context = 2 or pipeline = 2" in told[-1]
    )


class Advises(Sharding):
    """A strategy of somebody else's, which says itself what would help."""

    name = "advises"

    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        return {"dp": ranks}

    def shard(self, *_: Any) -> Any:
        raise NotImplementedError

    def memory_advice(self, ranks: int, device: torch.device) -> list[str]:
        return [f"[sharding] slices = {ranks}"]


def test_a_strategy_gives_its_own_advice() -> None:
    checked = check(RawJob(TINY, {}, "job"), 4)
    told = advice(checked.job, replace(checked.parts, sharding=Advises(Options())), 4, torch.device("cuda"))
    assert "[sharding] slices = 4" in told and "stage" not in told


def test_an_overflow_of_a_loss_scale_is_no_event(planted: Any) -> None:
    """The scale begins so high that the first steps overflow; with a limit of one the guard would stop the job."""
    precision = {"mode": "fp16", "initial_scale": 2.0**40}
    guard = {"non_finite": "skip", "limit": 1}
    result = hpctrain.run(job(30, guard, precision=precision))
    left_out = [row for row in rows() if row.get("skipped")]
    assert result["step"] == 30 and len(left_out) > 2 and not any("guard" in row for row in rows())


def test_a_misspelt_key_of_a_spike_is_told_with_those_there_are() -> None:
    job = {**TINY, "guard": {"loss_spike": {"factr": 3.0}}}
    with pytest.raises(HpctrainError) as told:
        check(RawJob(job, {}, "job"), None)
    assert "factor" in str(told.value) and "non_finite" not in str(told.value)


@pytest.mark.usefixtures("planted")
def test_the_sample_with_nan_is_named_in_place_of_advice_about_the_optimizer() -> None:
    everything = {"global_size": 400, "micro_size": 100}
    with pytest.raises(TrainingError) as found:
        hpctrain.run(job(2, {}, dataset={"name": "planted:dirty"}, batch=everything))
    said = str(found.value)
    assert "; sample 3 has nan; " in said and "mend the samples" in said and "smaller lr" not in said


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_samples_of_any_kind_of_tensor_end_no_run() -> None:
    wrong = torch.ones(3, 2)
    wrong[1, 0] = math.nan
    ragged = list(wrong)
    batch = (
        wrong.to_sparse(), wrong.to_sparse_csr(), torch.nested.nested_tensor(ragged),
        torch.nested.nested_tensor(ragged, layout=torch.jagged), wrong[:, 0] * 1j, torch.complex(wrong, wrong).conj(), Odd(wrong),
    )  # fmt: skip
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        said = [nonfinite_samples([MicroBatch(one, 0)], [[7, 8, 9]], "sample") for one in batch]
    finally:
        dist.destroy_process_group()
    assert said[4:6] == ["sample 8 has nan"] * 2, said


class Odd(Tensor):
    """Knows nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "isnan":
            raise NotImplementedError("no isnan")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_lack_of_memory_of_a_cpu_gets_advice(planted: Any) -> None:
    """The sizes are those of torch's own allocator: nothing is planted but the request."""
    planted.FAILING[2] = "CPU"
    with pytest.raises(TrainingError) as found:
        hpctrain.run(job(3, {}))
    said = str(found.value)
    assert "ran out of memory in step 2: asked for 4194304.00 GiB, " in said and " are free on the machine" in said
    assert "[batch] micro_size = 2, found 4" in said and "offload" not in said
