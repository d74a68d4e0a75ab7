"""A compiled loss gives what the loss gives, its errors are the loss's own, and what can't be compiled runs as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hpctrain.training.runner import CompiledLoss


def made(loss: Callable[[Any, Any], Any]) -> CompiledLoss:
    return CompiledLoss(SimpleNamespace(name="own", loss=loss), "default")  # type: ignore[arg-type]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The graphs that are compiled; code is generated for none of them, which takes half a minute."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    return graphs


def sum_of(outputs: Any, batch: dict[str, Tensor]) -> Any:
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return {"entropy": cross_entropy(logits.float(), batch["labels"], reduction="sum"), "size": logits.square().sum()}


def test_it_is_compiled_for_tensors_only(calls: list[int]) -> None:
    logits, batch = torch.randn(6, 5, requires_grad=True), {"labels": torch.arange(6) % 5}
    loss = made(sum_of)
    expected = sum_of(logits, batch)
    assert loss({"logits": logits}, batch) == expected and calls == []
    torch.testing.assert_close(loss(logits, batch), expected)
    with torch.no_grad():
        torch.testing.assert_close(loss(logits[:4], {"labels": batch["labels"][:4]})["size"], logits[:4].square().sum())
    assert calls


@pytest.mark.usefixtures("calls")
def test_its_error_is_the_loss_s_own() -> None:
    with pytest.raises(ValueError, match="Expected input batch_size"):
        made(sum_of)(torch.randn(3, 5), {"labels": torch.tensor([1, 2])})


def test_a_loss_that_can_t_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("no kernel\nand more")

    tried: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuses)
    loss, outputs = made(lambda outputs, batch: outputs.sum()), torch.ones(3)
    with caplog.at_level(logging.WARNING):
        assert loss(outputs, None) == loss(outputs, None) == 3
    assert len(tried) == 1 and [record.getMessage() for record in caplog.records] == [
        "[compile]: the loss of the model 'own' can't be compiled and runs as it is: no kernel"
    ]


def test_a_lack_of_memory_is_no_reason_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: lacks)
    with pytest.raises(torch.OutOfMemoryError):
        made(lambda outputs, batch: pytest.fail("run again"))(torch.ones(3), None)
