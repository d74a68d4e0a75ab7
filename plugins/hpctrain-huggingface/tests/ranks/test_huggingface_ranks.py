"""Models of transformers over ranks, held against a plain loop on what from_pretrained gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
import torch.distributed as dist
from hub_models import CONFIGS
from test_stages import compare
from training import thorough, train_here

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

ADAPTER = {"kind": "lora", "r": 3, "lora_alpha": 6, "target_modules": "all-linear"}


def saved(root: Path, name: str) -> Path:
    """A model that rank 0 has saved."""
    path = root / "saved"
    if dist.get_rank() == 0:
        hub_models.save(CONFIGS[name], path, max_shard_size="20KB")
    dist.barrier()
    return path


def plain(path: Path, adapter: dict[str, Any] | None = None) -> torch.nn.Module:
    """What from_pretrained gives, in fp64."""
    from transformers import AutoModelForCausalLM

    made: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    return made


TENSOR: dict[str, Any] = {"parallelism": {"tensor": 2}}
STAGE_3: dict[str, Any] = {"sharding": {"stage": 3}}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", STAGE_3),
        pytest.param("llama", {**TENSOR, **STAGE_3}, marks=pytest.mark.shown_on(4)),
        pytest.param("llama, tied", TENSOR, marks=pytest.mark.shown_on(2)),
        pytest.param("qwen3", TENSOR, marks=pytest.mark.shown_on(2)),
        ("mixtral", STAGE_3),
        thorough("llama", {"sharding": {"stage": 2}}),
        thorough("llama, tied", STAGE_3),
        *(
            pytest.param(name, TENSOR, marks=[pytest.mark.shown_on(2), pytest.mark.thorough])
            for name in ("llama", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe")
        ),
        *(thorough(name, STAGE_3) for name in ("qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "qwen3_moe")),
    ],
    ids=str,
)
def test_a_model_of_the_hub(root: Path, name: str, layout: dict[str, Any]) -> None:
    path = saved(root, name)
    tables = hub_models.job(root / "run", path, **layout)
    expected = hub_models.trained_plainly(plain(path), tables)
    # the norms and routers of all but GPT-2 compute in float32, whatever the parameters are
    compare(train_here(tables).rows, expected, *((1e-10, 1e-8) if name == "gpt2" else (1e-7, 1e-6)))
