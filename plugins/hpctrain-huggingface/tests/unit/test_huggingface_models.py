"""Models of transformers on one rank, held against a plain loop on what from_pretrained gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
from hub_models import CONFIGS

import hpctrain


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows(directory) if "grad_norm" in row]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_losses_are_those_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path = hub_models.save(CONFIGS[name], tmp_path / "saved", max_shard_size="20KB")
    tables = hub_models.job(tmp_path / "run", path)
    tables["batch"] = {"global_size": 24, "micro_size": 24}
    hpctrain.run(tables)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    expected = hub_models.trained_plainly(plain, tables)
    found = steps_of(tmp_path / "run")
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-8)
