"""`hpctrain plan`: the screen, JSON, Python, machines, and jobs that can't be planned. tests/ranks/test_planned.py has runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jobs import JobFile
from launching import hpctrain, in_process, run

import hpctrain as package
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob

MACHINE = """
[machine]
memory = 1e6
bandwidth = 1e12
flops = { float32 = 1e12 }
inside = 1e11
across = 1e10
per_node = 2
"""


def test_a_plan_says_what_a_rank_needs_and_whether_it_fits(job: JobFile) -> None:
    (job.directory / "small.toml").write_text(MACHINE)
    words = ["plan", "job.toml", "-n", "4", "--machine", "small.toml"]
    done = run(hpctrain(*words), job.directory)
    assert done.code == 0, done
    for told in (
        "layout        dp_replicate 4; sharding zero-0; ",
        "parameters ",
        "in all_reduce over dp_replicate, 4 ranks between nodes",
        "TFLOP on a rank in a step",
        "step          about ",
        "memory        fits: rank 0 needs ",
    ):
        assert told in done.out, (told, done)
    small = run(hpctrain(*words, "--memory", "100kB"), job.directory)
    assert small.code == 1 and "memory        does not fit: rank 0 needs " in small.out, small
    assert not job.output.exists(), "a plan leaves no files"


@pytest.mark.nightly
def test_json_and_python_say_the_same(job: JobFile) -> None:
    job.set(sharding={"stage": 1}, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9})
    told = json.loads(run(hpctrain("plan", "job.toml", "-n", "3", "--machine", "a100", "--json"), job.directory).out)
    planned = package.plan(package.load_job(job.path), ranks=3, machine="a100")
    assert told == json.loads(json.dumps(planned.as_dict()))
    assert told["fits"] and told["memory_bytes"] == 80e9 and told["axes"] == {"dp_replicate": 1, "dp_shard": 3}
    sent = {one["operation"]: one for one in told["of_ranks"][0]["exchanges"]}
    assert sent["reduce_scatter"]["ranks"] == 3 and sent["reduce_scatter"]["inside_node"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--machine", "h900"], "--machine h900: expected one of v100, a100, h100, h200, b200, mi250x, mi300x, pvc, or a TOML"),
        (["--machine", "bad.toml"], "bad.toml: [machine] bandwidth: Input should be greater than 0, found -1"),
        (["--memory", "much"], "found 'much', expected bytes such as 80GB or 40GiB"),
        (["-n", "5"], "[batch] global_size: 12 does not divide over 5"),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_told(job: JobFile, words: list[str], sentence: str) -> None:
    (job.directory / "bad.toml").write_text(MACHINE.replace("bandwidth = 1e12", "bandwidth = -1"))
    done = in_process("plan", "job.toml", *words, cwd=job.directory)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err, done


def with_own_linear(job: JobFile, forward: str, **dataset: int) -> None:
    """Give the job a layer of its own and samples for it. forward: the layer's result for `x`, (batch, 4)."""
    (job.directory / "mine.py").write_text(
        "import torch\n\n\n"
        "class Own(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        return {forward}\n\n\n"
        "def samples(split):\n"
        "    return [(torch.randn(4), torch.randn(2)) for _ in range(24)]\n"
    )
    made = {"name": "mine:Own", "in_features": 4, "out_features": 2, "loss": "torch.nn.functional:mse_loss"}
    job.tables.update(model=made, dataset={"name": "mine:samples", **dataset})
    job.write()


@pytest.mark.thorough
def test_what_a_plan_leaves_out_is_told(tmp_path: Path, job: JobFile) -> None:
    with_own_linear(job, "super().forward(x if (x > 9).any() else -x)", workers=2)
    job.set(compile={"enabled": True})
    done = run(hpctrain("plan", "job.toml"), tmp_path)
    assert done.code == 0 and "note          [compile]: planned without" in done.out, done
    assert "a truth value was asked of tensors 2 times" in done.out, done


@pytest.mark.nightly
def test_what_is_offloaded_is_in_the_host_s_memory(job: JobFile) -> None:
    def planned(**tables: dict[str, object]) -> dict[str, int]:
        job.set(**tables)
        found = package.plan(package.load_job(job.path), ranks=2).ranks[0]
        return {"state": found.optimizer_state, "host": found.host, "parameters": found.parameters}

    there = planned(sharding={"stage": 1})
    here = planned(sharding={"stage": 1, "offload_optimizer": True})
    assert here["state"] == 0 and here["parameters"] == there["parameters"]
    # a half of each: parameters in float32 and two moments, then gradients of two micro batches and what AdamW computes with
    assert 3 <= 2 * (here["host"] - there["host"]) / there["parameters"] <= 8
    spread = planned(sharding={"stage": 3, "offload_optimizer": False, "offload_parameters": True})
    assert spread["parameters"] == spread["state"] == 0 and spread["host"] > there["state"]


@pytest.mark.nightly
def test_attention_and_averages_of_weights_count(job: JobFile) -> None:
    """The products of a GPT are those that the model itself gives; an average of the weights is held beside them."""
    plain = package.plan(package.load_job(job.path))
    model = check(RawJob(job.tables, {}, "job"), 1).parts.model
    step = {"input_ids": torch.zeros(12, 8)}
    assert plain.largest.flops == pytest.approx(model.flops(step), rel=0.03)
    job.tables["hook"] = [{"name": "ema", "decay": 0.9}]
    job.write()
    averaged = package.plan(package.load_job(job.path))
    grown = averaged.largest.peak - plain.largest.peak
    assert plain.largest.parameters <= grown <= 1.5 * plain.largest.parameters + 2**15


def test_a_model_that_needs_values_is_told(tmp_path: Path, job: JobFile) -> None:
    with_own_linear(job, "super().forward(x[x[:, 0] > 0])")
    done = run(hpctrain("plan", "job.toml"), tmp_path)
    assert done.code == 3 and "this job can't be planned: " in done.err, done
    assert "needs the values of tensors, and a plan has their shapes only" in done.err, done


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("gathered", ["products", pytest.param("parameters", marks=pytest.mark.nightly)])
def test_the_peak_of_stage_3_does_not_grow_by_whole_blocks(job: JobFile, gathered: str) -> None:
    """In bf16 with every block computed again, a further block costs its shard and its input only."""
    width, ranks = 1024, 64
    job.set(
        sharding={"stage": 3, "gather_dtype": gathered}, precision={"mode": "bf16"},
        activation_checkpointing={"mode": "full"}, batch={"global_size": 64, "micro_size": 1},
        model={"hidden_size": width, "attention_heads": 16},
    )  # fmt: skip

    def planned(layers: int) -> tuple[int, int]:
        job.set(model={"layers": layers})
        largest = package.plan(package.load_job(job.path), ranks=ranks, machine="h100").largest
        return largest.peak, largest.parameters

    (few, few_held), (many, held) = planned(4), planned(8)
    blocks = 4 * 12 * width**2
    assert 4 * blocks <= ranks * (held - few_held) <= 4.1 * blocks, "float32 shards"
    assert many - few < (16 / ranks + 0.2) * blocks, "far from 2 bytes of each weight"
