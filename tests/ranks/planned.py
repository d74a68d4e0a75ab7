"""Jobs that are planned and run, and the bytes of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.distributed as dist
from hpctrain_tools.plan.ledger import Origin, bytes_of
from hpctrain_tools.plan.torch_fake import local_tensors
from hpctrain_tools.plan.watch import Watch
from torch import Tensor, nn
from training import job, own_device, session_of

import hpctrain.mpi
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train_step
from hpctrain.training.step import Steps

GPT = {"hidden_size": 64, "layers": 4, "attention_heads": 4, "vocab_size": 512, "max_seq_length": 32}
FULL = {"activation_checkpointing": {"mode": "full"}}
BF16 = {"precision": {"mode": "bf16"}}
CNN = {
    "model": {"name": "planned:cnn", "loss": "torch.nn.functional:cross_entropy"},
    "dataset": {"name": "planned:images"},
}
MLP = {**CNN, "model": {"name": "planned:mlp", "loss": "torch.nn.functional:cross_entropy"}}
LSTM = {
    "model": {"name": "planned:lstm", "loss": "torch.nn.functional:cross_entropy"},
    "dataset": {"name": "planned:images"},
}
EXPERTS = {
    "plugins": {"load": ["experts"]},
    "model": {"name": "mixture", "size": 64},
    "dataset": {"name": "planned:rows"},
}
EIGHT_BITS = {"optimizer": {"name": "adamw-8bit", "lr": 0.01}}
LLAMA = {
    "model": {"name": "planned:llama", "loss": "planned:llama_loss"},
    "dataset": {"name": "planned:sentences"},
}


def _stage(number: int) -> dict[str, Any]:
    return {"sharding": {"stage": number}}


JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "bf16, every block recomputed": (1, {**BF16, **FULL}),
    "a CNN": (1, CNN),
    "a Llama of transformers": (1, LLAMA),
    "an LSTM": (1, LSTM),
    "AdamW in 8 bits": (1, EIGHT_BITS),
    "stage 0": (2, {}),
    "stage 1": (2, _stage(1)),
    "stage 2, bf16": (2, {**_stage(2), **BF16}),
    "stage 3": (2, _stage(3)),
    "a CNN, stage 2": (2, {**CNN, **_stage(2)}),
    "a Llama of transformers, stage 3, some operators recomputed": (
        2,
        {**LLAMA, **_stage(3), "activation_checkpointing": {"mode": "selective"}},
    ),
    "an LSTM, stage 3": (2, {**LSTM, "sharding": {"stage": 3, "wrap": "class:LSTM"}}),
    "AdamW in 8 bits, stage 1": (2, {**EIGHT_BITS, **_stage(1)}),
    "experts 2": (2, {**EXPERTS, "parallelism": {"expert": 2}}),
    "experts 2, stage 1": (4, {**EXPERTS, **_stage(1), "parallelism": {"expert": 2}}),
    "tensor 2": (2, {"parallelism": {"tensor": 2}}),
    "context 2, every block recomputed": (2, {"parallelism": {"context": 2}, **FULL}),
    "pipeline 2": (2, {"parallelism": {"pipeline": 2}, "batch": {"global_size": 64, "micro_size": 4}}),
    "stage 3, tensor 2": (4, {**_stage(3), "parallelism": {"tensor": 2}}),
    "stage 2 in pairs, every block recomputed": (4, {**_stage(2), "parallelism": {"replicate": 2}, **FULL}),
    "stage 1, pipeline 2": (
        4,
        {**_stage(1), "parallelism": {"pipeline": 2}, "batch": {"global_size": 64, "micro_size": 4}},
    ),
    "context 2, tensor 2, bf16": (4, {"parallelism": {"context": 2, "tensor": 2}, **BF16}),
    "stage 3 in pairs, SGD with momentum": (
        4,
        {**_stage(3), "parallelism": {"replicate": 2}, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    ),
}
"""The number of ranks and the tables of each job."""
# The simulated accelerator has no attention of its own.
OF_ACCELERATORS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1, optimizer in host memory": (2, {**MLP, "sharding": {"stage": 1, "offload_optimizer": True}}),
    "stage 3, optimizer in host memory": (2, {**MLP, "sharding": {"stage": 3, "offload_optimizer": True}}),
    "stage 3, parameters in host memory": (2, {**MLP, "sharding": {"stage": 3, "offload_parameters": True}}),
    "blocks' inputs in host memory": (2, {**MLP, "activation_checkpointing": {"mode": "full", "offload": True}}),
}
OPERATIONS = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
    "send": "send",
}
"""The name of hpctrain.mpi for an operation."""
KEPT = "parameters_bytes", "gradients_bytes", "optimizer_state_bytes"
ROW = 8 * 64
"""Bytes of a step's own numbers, which no plan counts: those of its row of metrics, below 64, and the count of its labels."""
CPU_MACHINE = """
[machine]
accelerator = false
memory = 1e9
bandwidth = 1e10
flops = { float32 = 1e11 }
inside = 1e9
across = 1e9
"""
_OF_A_RANK = ("PMI", "MPI", "OMPI", "HYD", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def cnn() -> nn.Module:
    convolution = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), convolution, nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip


class RowReader(nn.Module):
    """Two layers that read an image's rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(16, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 1, 16, 16) -> (batch, 10)"""
        read, _ = self.rows(x.squeeze(1))
        return self.head(read[:, -1])  # type: ignore[no-any-return]


def lstm() -> nn.Module:
    return RowReader()


class Block(nn.Sequential):
    """A residual block. x: (batch, 128)."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 128), *(Block() for _ in range(6)), nn.Linear(128, 10))


def images(split: str) -> list[tuple[Tensor, Tensor]] | None:
    """Pairs of an image (1, 16, 16) and a label ()."""
    return [(torch.zeros(1, 16, 16), torch.tensor(3))] * 96 if split == "train" else None


def rows(split: str) -> list[tuple[Tensor, Tensor]] | None:
    """Pairs of ids (3,) and a label ()."""
    return [(torch.zeros(3, dtype=torch.long), torch.tensor(3))] * 96 if split == "train" else None


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, use_cache=False, **sizes))


def sentences(split: str) -> list[dict[str, Tensor]] | None:
    """Token ids (32,), which are the labels, too."""
    ids = torch.arange(32)
    return [{"input_ids": ids, "labels": ids}] * 96 if split == "train" else None


def llama_loss(outputs: Any, labels: Tensor) -> Tensor:
    """The mean of each row, (batch,). labels: (batch, seq)."""
    return nn.functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none").mean(1)


def tables_of(tables: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The job with `tables`, for three steps."""
    batch = {"global_size": 16, "micro_size": 4}
    model = {} if "name" in tables.get("model", {}) else {"model": GPT}
    return job(job={"output_dir": str(root / "out"), "steps": 3}, **{**model, "batch": batch, **tables})


def plan_of(tables: Mapping[str, Any], root: Path, group: Any) -> dict[str, Any]:
    """The plan that the command prints, on all ranks; rank 0 asks, in a process that is no rank.

    group: of gloo, whose ranks sleep while they wait.
    """
    told = [None]
    if dist.get_rank() == 0:
        (root / "job.toml").write_text(tomli_w.dumps(tables))
        (root / "cpu.toml").write_text(CPU_MACHINE)
        machine = ["--machine", str(root / "cpu.toml")] if own_device().type == "cpu" else []
        words = ["plan", str(root / "job.toml"), "-n", str(dist.get_world_size()), *machine, "--json"]
        alone = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
        alone["PYTHONPATH"] = str(Path(__file__).parent)
        command = [sys.executable, "-m", "hpctrain", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=alone)
        told = [json.loads(done.stdout) if done.returncode == 0 else done.stderr]
    dist.broadcast_object_list(told, src=0, group=group)
    assert isinstance(told[0], dict), told[0]
    return told[0]


def sent_of(mine: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of each of OPERATIONS in a rank's plan."""
    told = Counter[str]()
    for one in mine["exchanges"]:
        told[one["operation"]] += one["nbytes"]
    return {name: told[name] for name in OPERATIONS}


def refuse_difference(
    mine: Mapping[str, Any], found: Mapping[str, int], sent: Mapping[str, int], peak: bool, flops: bool = True
) -> None:
    """Hold a rank's plan against what `measured` gave. peak: its memory, too, which a late group's copies would change. flops: its
    operations, too, of which a device without fused attention has others."""
    for name in KEPT:
        assert mine[name] == found[name], name
    if peak:
        assert mine["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)
    assert not flops or sum(mine["flops"].values()) == found["flops"]
    for name, told in sent_of(mine).items():
        assert sent.get(OPERATIONS[name], 0) - told in range(ROW), name


def measured(tables: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of this rank in the second step, and those of MPI's operations."""
    kind = own_device().type
    watch = Watch(kind)
    with watch, session_of(dict(tables)) as session:
        model = session.model
        parameters = [*model.module.parameters(), *(piece.tensor for piece in model.pieces)]
        steps = Steps(session, StopRequest())
        steps.begin()
        try:
            train_step(steps)
            for one in parameters:
                if one.grad is not None and one.grad.device.type == kind:  # MPI's memory, which no operator has made
                    for tensor in local_tensors(one.grad):
                        watch.device.see(tensor.untyped_storage(), Origin("", "gradient"))
            watch.begin()
            before = hpctrain.mpi.statistics().operations
            train_step(steps)
            after = hpctrain.mpi.statistics().operations
        finally:
            steps.close()
        states = [one for state in model.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
        sent = {name: one.bytes - (before[name].bytes if name in before else 0) for name, one in after.items()}

        def here(tensors: list[Tensor]) -> int:
            return bytes_of(one for one in tensors if one.device.type == kind)

        return {
            "parameters_bytes": here(parameters),
            "gradients_bytes": here([one.grad for one in parameters if one.grad is not None]),
            "optimizer_state_bytes": here(states),
            "peak_bytes": watch.device.peak,
            "flops": sum(one.flops * count for one, count in watch.operators.items()),
        }, sent
