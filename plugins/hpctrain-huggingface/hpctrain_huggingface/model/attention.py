"""The attention of transformers' causal models: of each sample of a packed row to itself alone, and over ranks.

Without masks: to find samples in a row, transformers would read the positions from the device in each forward.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hpctrain.api import Documents, UsageError, causal_attention, uncompiled

_NAME = "hpctrain"
"""The name of this attention in transformers' interface. It has no function that makes masks."""
_MASKS = re.compile(r"\b(create_\w*mask\w*|\w+_mask_function|block_sequence_ids|blockwise_overlay)\b")
_PLAIN_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask"}
"""transformers' functions that a model without masks of its own calls: the others would show tokens more, or fewer."""


def attend_causally(model: PreTrainedModel) -> None:
    """Take the place of torch's attention in a model that shows each token all those before it."""
    config, found = model.config, _attentions(model)
    if not (model._supports_attention_backend and config._attn_implementation == "sdpa" and found):
        return
    is_causal = getattr(config, "is_causal", True) and all(one.is_causal is True for one in found)
    masks = set(_MASKS.findall(inspect.getsource(sys.modules[type(model).__module__])))
    if is_causal and not _sees_window(config) and masks <= _PLAIN_MASKS:
        AttentionInterface.register(_NAME, _attention)
        model.set_attn_implementation(_NAME)


def causal_mask(padding: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """The mask (batch, 1, seq, seq) that transformers would make for entries of samples, None for one that hides only what comes
    later: of the tokens that `padding` (batch, seq) says there are, or else of samples that lie one behind the other, each with
    `positions` (batch, seq) that rise by one. Reads the device once."""
    if padding is not None:
        seen = padding.bool()[:, None, None, :]
    elif positions is not None:
        sample = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        seen = (sample[:, :, None] == sample[:, None, :])[:, None]
    else:
        return None
    return None if seen.all() else seen & torch.ones(2 * seen.shape[-1:], dtype=torch.bool, device=seen.device).tril()


def _attentions(model: PreTrainedModel) -> list[Any]:
    return [one for one in model.modules() if hasattr(one, "is_causal") and hasattr(one, "layer_idx")]


def _sees_window(config: Any) -> bool:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    return bool(kinds - {"full_attention"} or (getattr(text, "sliding_window", None) and not kinds))


def not_exchanged(model: PreTrainedModel) -> str | None:
    """Why ranks with parts of a sequence can't compute this model, None if they can."""
    kind = type(model).__name__
    found = _attentions(model)
    if any(isinstance(one, nn.Conv1d) for one in model.modules()):
        return f"a {kind} mixes tokens elsewhere than in attention, too"
    if any(hasattr(one, "v_head_dim") and one.v_head_dim != getattr(one, "qk_head_dim", None) for one in found):
        return f"the values in the attention of a {kind} have other sizes than the keys"
    if not model._supports_attention_backend or not found:
        return f"a {kind} computes attention outside of transformers' AttentionInterface, where it could be exchanged"
    if _sees_window(model.config):
        return (
            f"the attention of this {kind} sees a window of tokens, which ranks with parts of a sequence do not compute"
        )
    return None


def give_to_attention(model: PreTrainedModel) -> list[nn.Module]:
    """Let the model's attention modules call their method `attend`, (batch, heads, seq, head_size) three times; return them."""
    found = _attentions(model)
    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)
    for one in found:
        one.__dict__["attend"] = causal_attention
    return found


def is_given(model: PreTrainedModel) -> bool:
    """Whether the model computes attention here."""
    config = model.config
    return bool(config._attn_implementation == _NAME)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Causal attention -> (batch, seq, heads, head_size), by torch's or by `module.attend`. Raises UsageError for what that can't
    compute."""
    if not hasattr(module, "attend"):
        documents = keywords.pop("documents", None)
        if documents is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **keywords)
        return _of_documents(documents, module, (query, key, value), dropout=dropout, scaling=scaling, **keywords), None
    kinds = {
        "dropout": bool(dropout),
        "a mask": attention_mask is not None,
        "a cap on the scores": bool(keywords.get("softcap")),
        "a bias by position": keywords.get("position_bias") is not None,
        "sinks": keywords.get("s_aux") is not None,
        "no causal order": keywords.get("is_causal") is False,
    }
    found = next((name for name, is_there in kinds.items() if is_there), None)
    if found is not None:
        raise UsageError(
            f"[parallelism] context: the model's attention has {found}, which attention over ranks does not compute; "
            + ("set [model] config = { attention_dropout = 0.0 }" if dropout else "use another axis"),
            everywhere=True,
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # `attend` scales by 1 / sqrt(head_size)
    return module.attend(query, key, value, keywords.get("documents")).transpose(1, 2).contiguous(), None


@uncompiled  # rows differ in lengths, for which nothing is to be compiled anew
def _of_documents(documents: Documents, module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Attention of each document to itself alone."""
    parts = zip(*(one.split(documents.lengths, dim=2) for one in inputs), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in parts], dim=1)
