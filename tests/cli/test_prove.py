"""`hpctrain prove` on jobs of a user's own: healthy ones pass, and each planted fault is found with the number that shows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jobs import JobFile
from launching import Finished, hpctrain, run

MINE = """
import torch
import torch.distributed as dist
from torch import nn


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.labels = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index].clone(), self.labels[index]


def data(split):
    return Rows(96, 1) if split == "train" else Rows(24, 2) if split == "validation" else None


class Net(nn.Module):
    def __init__(self, fault="", norm=False):
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12) if norm else nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        rank = dist.get_rank() if dist.is_initialized() else 0
        size = dist.get_world_size() if dist.is_initialized() else 1
        if self.fault == "draws by rank" and self.training:
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(rank))
        if self.training and self.fault == "buffer by rank":
            self.seen += inputs.mean()
        outputs = self.layers(inputs)
        if self.fault == "buffer by rank":
            outputs = outputs + self.seen * torch.arange(3) * (not self.training)
        if self.fault == "mean over ranks" and self.training:
            outputs.register_hook(lambda gradient: gradient / size)
        if self.fault == "batch statistics":
            outputs = outputs - outputs.mean(0)
        return outputs


def loss(outputs, target):
    return nn.functional.cross_entropy(outputs, target)
"""


def prove(job: JobFile, *words: str, **model: Any) -> tuple[Finished, dict[str, Any]]:
    (job.directory / "mine.py").write_text(MINE)
    job.tables["model"] = {"name": "mine:Net", "loss": "mine:loss", **model}
    job.tables["dataset"] = {"name": "mine:data"}
    job.tables["optimizer"] = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    job.set(batch={"global_size": 12, "micro_size": 2}, evaluation={"every_steps": 2})
    done = run(hpctrain("prove", "job.toml", "--json", *words), job.directory, 280)
    return done, json.loads(done.out) if done.out.startswith("{") else {}


@pytest.mark.timeout(300)
@pytest.mark.cases(default=["plain"], rest="thorough")
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_a_healthy_job_passes(job: JobFile, norm: bool) -> None:
    done, found = prove(job, *(["--layout", "3 sharding.stage=3"] if not norm else []), norm=norm)
    assert done.code == 0 and found["holds"], done
    assert {row["state"] for row in found["layouts"]} <= {"alike", "refused"} and len(found["layouts"]) >= 3


@pytest.mark.timeout(300)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "first", "hint"),
    [
        ("draws by rank", "the loss at step 1", "draws that differ by rank"),
        ("mean over ranks", "the norm of the gradients at step 1", "it is 1/2 of what it must be"),
        ("buffer by rank", "the evaluation loss at step 4", "buffers that differ by rank"),
        ("batch statistics", "the loss at step 1", "statistics of a batch"),
    ],
)
def test_a_fault_of_a_user_s_is_found(job: JobFile, fault: str, first: str, hint: str) -> None:
    done, found = prove(job, "--layout", "2", fault=fault)
    assert done.code == 5 and not found["holds"], done
    told = [row for row in found["layouts"] if row["state"] != "alike"]
    assert any(first in row["first"] and hint in row["hint"] for row in told), told


BESIDE = """
import torch
import torch.distributed as dist
from hpctrain.api import hookimpl

FAULT = "%s"


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def factor(step, steps):
    return 0.5 if FAULT == "schedule" and rank() else 1.0


@hookimpl
def hpctrain_step_end(step, model):
    if FAULT == "hook":
        with torch.no_grad():
            for piece in model.pieces:
                piece.tensor.mul_(1 + 1e-3 * rank())
        model.refresh()


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index + (1000 * rank() if FAULT == "data" else 0))
        ids = torch.randint(0, 64, (17,), generator=draws)
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def data(split):
    return Tokens()
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "lora": {
        "name": "huggingface", "task": "causal-lm", "config": LLAMA,
        "adapter": {"kind": "lora", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    },
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.cases(thorough=["gpt-schedule", "gpt-hook"], rest="nightly")
@pytest.mark.parametrize("fault", ["", "schedule", "hook", "data"], ids=["healthy", "schedule", "hook", "data"])
@pytest.mark.parametrize("model", MODELS)
def test_what_stands_beside_a_model(job: JobFile, model: str, fault: str) -> None:
    """A schedule, a hook and data of the user's that differ by rank, beside a GPT and a LoRA."""
    (job.directory / "beside.py").write_text(BESIDE % fault)
    if MODELS[model]:
        pytest.importorskip("peft", reason="needs hpctrain-huggingface[peft]")
        job.tables["model"] = MODELS[model]
    job.tables["dataset"] = {"name": "beside:data", "seq_length": 16}
    if model == "gpt":
        job.set(model={"max_seq_length": 16})
    job.set(schedule={"name": "beside:factor"}, plugins={"load": ["beside"]}, batch={"micro_size": 2})
    job.set(evaluation={"every_steps": 2})
    done = run(hpctrain("prove", "job.toml", "--json", "--layout", "2 sharding.stage=3"), job.directory, 280)
    found = json.loads(done.out)
    assert found["holds"] == (not fault) and done.code == (5 if fault else 0), done
    first = found["layouts"][0]
    if fault == "data":
        assert "the dataset 'beside:data' is not the same on all ranks" in first["first"], first
    elif fault:
        name = "token_embedding.weight" if model == "gpt" else "q_proj.lora_A.default.weight"
        assert f"{name} at step 1" in first["first"] and "a schedule, a hook or an optimizer" in first["hint"], first


LOOP = """
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain

FAULT, JOB = sys.argv[1:]
torch.manual_seed(0)
DATA = [(point, (point.prod() > 0).long()) for point in torch.randn(96, 2)]

with hpctrain.own_loop(JOB, dataset={"name": DATA}) as loop:
    net = nn.Sequential(nn.Linear(2, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 2))
    model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=1e-1, momentum=0.9))
    if FAULT == "rate":
        optimizer.param_groups[0]["lr"] *= loop.world_size
    for step in loop.steps():
        for points, labels in step:
            if FAULT == "draws":
                points = points + 0.1 * torch.randn(points.shape, generator=torch.Generator().manual_seed(loop.rank))
            loss = cross_entropy(model(points), labels)
            loop.backward(loss / loop.world_size if FAULT == "mean" else loss)
        optimizer.step()
        optimizer.zero_grad()
"""
"""A program with its own loop: its first word is a fault, its second the job."""


@pytest.mark.timeout(300)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "first", "hint"),
    [
        ("none", "", ""),
        ("draws", "the loss at step 1", "draws that differ by rank"),
        ("mean", "the loss at step 1", "it is 1/2 of what it must be"),
        ("rate", "the lr at step 1", ""),
    ],
)
def test_a_loop_of_one_s_own(job: JobFile, fault: str, first: str, hint: str) -> None:
    (job.directory / "loop.py").write_text(LOOP)
    job.tables = {"job": {"name": "points"}, "batch": {"global_size": 12, "micro_size": 3}, "hook": [{"name": "ema"}]}
    job.set(job={"steps": 200})
    layouts = ("--layout", "2 sharding.stage=3", "--layout", "4")
    done = run(hpctrain("prove", *layouts, "--json", "loop.py", fault, "job.toml"), job.directory, 280)
    found = json.loads(done.out)
    assert found["holds"] == (fault == "none") and done.code == (0 if found["holds"] else 5), done
    assert first in found["layouts"][0]["first"] and hint in found["layouts"][0]["hint"], found
    resumed = [row for row in found["layouts"] if "resumed" in row["layout"]]
    assert len(found["layouts"]) == 4 and len(resumed) == 2 and resumed[0]["state"] == "alike", found


@pytest.mark.thorough
def test_what_can_t_be_proved_is_told(job: JobFile) -> None:
    done, _ = prove(job, "--layout", "two")
    assert done.code == 2 and "found 'two', expected a number of ranks first" in done.err, done
    done, _ = prove(job, more=1)
    assert done.code == 2 and "more" in done.err, done
    (job.directory / "no_loop.py").write_text("print(1)")
    done = run(hpctrain("prove", "no_loop.py", "--set", "job.steps=3"), job.directory, 100)
    assert done.code == 2 and "--set: a program's job is its own" in done.err, done
    done = run(hpctrain("prove", "no_loop.py"), job.directory, 100)
    assert done.code == 2 and "no_loop.py ends without hpctrain.own_loop" in done.err, done
