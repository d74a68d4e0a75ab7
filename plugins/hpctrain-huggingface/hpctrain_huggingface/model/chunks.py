"""The loss of a causal language model a few tokens at a time, where its logits would not fit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpctrain.api import UsageError
from hpctrain.toolkit.losses import chunked_cross_entropy

_SLICES = "SliceBackward0", "AliasBackward0"
"""The operations by which a model takes the tokens whose logits are asked for: here all."""


def lose_in_chunks(model: PreTrainedModel, tokens: int) -> None:
    """Let the model's forward return the sum of the loss of `loss_labels`, if it gets them, in place of its outputs.

    Raises UsageError for a model that does more behind its layers than to call its head.
    """
    why = _hindrance(model)
    if why:
        raise UsageError(f"[model] loss_chunk: {why} in a {type(model).__name__}; leave it out")
    forward = model.forward

    def with_loss(*inputs: Any, loss_labels: Tensor | None = None, **named: Any) -> Any:
        if loss_labels is None:
            return forward(*inputs, **named)
        hidden = _body(model)(*inputs, **named)[0]
        return chunked_cross_entropy(_head(model), hidden, loss_labels, tokens)

    model.forward = with_loss  # an attribute, so that parameters keep their names


def _body(model: PreTrainedModel) -> Any:
    return getattr(model, model.base_model_prefix, None)


def _head(model: PreTrainedModel) -> Any:
    """The head, which an adapter may have replaced."""
    return model.get_output_embeddings()


class _Outputs(tuple[Any, ...]):
    """The outputs of a body: hidden states, and None for whatever else a model asks for."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _Body(nn.Module):
    """Stands for a model's layers."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._outputs = _Outputs([hidden])

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return self._outputs


def _hindrance(model: PreTrainedModel) -> str:
    """Why the loss can't be computed from the body's hidden states and the head alone; "" if it can.

    Runs a copy without values, and looks whether the head gets what the body gives, and the caller what the head gives.
    """
    if _body(model) in (None, model) or _head(model) is None:
        return "there is no head apart from the other layers"
    twin, passed = copy.deepcopy(model), dict[str, Tensor]()
    nn.Module.to(twin, "meta")
    head, weight = _head(twin), next(_head(twin).parameters())
    hidden = torch.empty(1, 2, weight.shape[-1], dtype=weight.dtype, device="meta", requires_grad=True)
    setattr(twin, model.base_model_prefix, _Body(hidden))
    head.register_forward_hook(lambda _, inputs, output: passed.update(taken=inputs[0], logits=output))
    try:
        outputs = twin(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"))
    except Exception as error:  # a model may ask for values
        return f"it is not known what lies behind the layers ({(str(error) or type(error).__name__).splitlines()[0]})"
    taken = passed.get("taken")
    if taken is None or outputs.logits is not passed["logits"]:
        return "logits are changed behind the head"
    node = taken.grad_fn
    while node is not None and node.name() in _SLICES:
        node = node.next_functions[0][0]
    begins = taken is hidden or (node is not None and getattr(node, "variable", None) is hidden)
    return "" if begins and taken.shape == hidden.shape else "hidden states are changed in front of the head"
