"""`[job] deterministic`: nothing that sums in any order is left, and what has no other way is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpctrain
from hpctrain.base.errors import EnvironmentUnfitError, HpctrainError
from hpctrain.training.determinism import deterministic

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def settings() -> dict[str, Any]:
    """What the key sets."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "searches": torch.backends.cudnn.benchmark,
        "cudnn's attention": torch.backends.cuda.cudnn_sdp_enabled(),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


SEEN: list[dict[str, Any]] = []


class Puts(nn.Module):
    """An operation without a deterministic implementation, on CPUs too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: Tensor) -> Tensor:
        SEEN.append(settings())
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        out: Tensor = self.layer(batch)
        return out


def job(directory: Path, deterministic: bool) -> dict[str, Any]:
    samples = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    return {
        "job": {"name": "t", "steps": 2, "output_dir": str(directory), "deterministic": deterministic},
        "model": {"name": Puts, "loss": nn.functional.mse_loss},
        "dataset": {"name": {"train": samples}},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 4, "micro_size": 4},
    }


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


def test_an_operation_without_a_deterministic_way_ends_the_job(searching: None, tmp_path: Path) -> None:
    before = settings()
    hpctrain.run(job(tmp_path / "a", False))
    assert SEEN and all(one == before for one in SEEN)
    with pytest.raises(HpctrainError, match="put_ does not have a deterministic implementation"):
        hpctrain.run(job(tmp_path / "b", True))
    assert SEEN[-1] == {
        "algorithms": True, "only warns": False, "searches": False, "cudnn's attention": False,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring",
    }  # fmt: skip
    assert settings() == before


@pytest.mark.parametrize(
    ("name", "value"), [("NCCL_ALGO", "Tree"), ("NCCL_ALGO", "NVLS"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0")]
)
def test_a_variable_that_prevents_it_is_named(
    name: str, value: str, searching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    before = settings()
    with pytest.raises(EnvironmentUnfitError, match=rf"\[job\] deterministic: the variable {name} is '{value}'"):
        deterministic().__enter__()
    assert settings() == before
