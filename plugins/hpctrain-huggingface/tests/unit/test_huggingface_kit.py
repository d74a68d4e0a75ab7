"""The kit finds nothing in this distribution's plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hpctrain_tools.testing.jobs import Rows
from hub_models import CONFIGS

from hpctrain.testing import check_plugin

datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def columns(rows: Rows) -> Any:
    items = [rows[index] for index in range(len(rows))]
    return datasets.Dataset.from_dict({key: [item[key].tolist() for item in items] for key in items[0]})


def test_data_sets(tmp_path: Path) -> None:
    splits = {"train": columns(Rows(60, 1)), "validation": columns(Rows(13, 2))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path))
    check_plugin("dataset.huggingface", job={"dataset": {"path": str(tmp_path)}})


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_models(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if value is not None}
    check_plugin("model.huggingface", job={"model": {"config": config, "task": "causal-lm"}})


def test_the_hook() -> None:
    check_plugin("hook.huggingface-export")
