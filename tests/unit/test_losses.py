"""Cross entropy a few tokens at a time, against torch's of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.toolkit.losses import chunked_cross_entropy

VOCABULARY, WIDTH = 50, 6


class Largest(TorchDispatchMode):
    """The most elements of a tensor with a row of logits for each token."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == VOCABULARY and one.shape[0] != WIDTH:
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("tokens", [1, 5, 24, 100])
def test_a_loss_in_chunks_is_that_of_all_logits(tokens: int) -> None:
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden, labels = torch.randn(3, 8, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (3, 8))
    labels[0] = -100  # a chunk of no loss at all
    labels[2, 5:] = -100
    leaves = [hidden, *head.parameters()]
    whole = cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    expected = torch.autograd.grad(3 * whole, leaves)
    with Largest() as largest:
        loss = chunked_cross_entropy(head, hidden, labels, tokens)
        (3 * loss).backward()
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-6)
    assert largest.elements == min(tokens, 24) * VOCABULARY
