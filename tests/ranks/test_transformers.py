"""A model of Hugging Face's transformers, as in the example, without any code for hpctrain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from modules import built
from plain import batches_of, train_plainly
from test_stages import compare
from torch import Tensor
from training import train_here

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2), pytest.mark.shown_on(2)]


@pytest.mark.cases(nightly=["tensor, full"], rest="thorough")
@pytest.mark.parametrize(
    "layout",
    [
        {},  # as in the example: its own tensor-parallel plan, every block recomputed
        {"sharding": {"stage": 3}, "parallelism": {}, "activation_checkpointing": {"mode": "selective"}},
    ],
    ids=["tensor, full", "stage 3, selective"],
)
def test_the_llama_example(root, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    tables = {**tomli.loads((EXAMPLE / "llama.toml").read_text()), **layout}
    tables["job"] |= {"steps": 4, "seed": 5, "output_dir": str(root)}
    tables["model"] |= {"hidden_size": 32, "tied": True}
    tables["precision"] = {"mode": "fp32"}
    tables |= {"optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9}, "batch": {"global_size": 8, "micro_size": 2}}
    compare(train_here(tables).rows, alone(tables), losses=2e-6, norms=1e-5)


def alone(tables: dict[str, Any]) -> Any:
    import llama

    options = {key: value for key, value in tables["model"].items() if key not in ("name", "loss")}
    module = built(tables, lambda: llama.build(**options))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)

    def losses() -> Iterator[Any]:
        def loss(ids: Tensor, labels: Tensor) -> Tensor:
            return llama.loss(module(input_ids=ids), labels).mean()

        for batch in batches_of(tables):
            yield lambda batch=batch: loss(*batch)

    return train_plainly(module, optimizer, losses())
