"""Cross entropy of language models, whole or a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hpctrain.api import Plan

IGNORED = -100
"""The label of a token that has no loss, as in torch's cross_entropy."""
NOT_CHUNKED = (
    "neither a pipeline's last stage nor sequence parallelism has the hidden states of all tokens where the loss is "
    "computed; leave one of the two out"
)
"""The problem of a job that `can_chunk` refuses."""


def can_chunk(plan: Plan) -> bool:
    """Whether the axes of a job leave the head and its whole input to `chunked_cross_entropy`."""
    own = [traits for traits in plan.traits if not traits.cuts_samples]
    return all(traits.ranks_have == "the same samples" and traits.repeats_activations for traits in own)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over labels that are not `IGNORED`. logits: `(..., classes)`, labels: `(...)`."""
    # at least float32: a sum over thousands of tokens does not fit 16 bits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if not labels.numel():  # a rank may have no rows of a last micro batch, and torch can't flatten an empty DTensor
        return cross_entropy(wide.movedim(-1, 1), labels, ignore_index=IGNORED, reduction="sum")
    return cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, tokens: int) -> Tensor:
    """The same of the logits `head(hidden)`, of which those of `tokens` tokens exist at a time: backward computes them again.

    hidden: `(batch, seq, hidden)`, labels: `(batch, seq)`. Saves the 16 bytes or so that a step keeps of each logit, for a third
    product with the head's matrix beside forward's and the two of backward.
    """

    def loss_of(rows: Tensor, targets: Tensor) -> Tensor:
        return summed_cross_entropy(head(rows), targets)

    chunks = zip(hidden.flatten(0, 1).split(tokens), labels.flatten().split(tokens), strict=True)
    # a head draws no random numbers whose state would have to be kept
    losses = [checkpoint(loss_of, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(losses).sum()
