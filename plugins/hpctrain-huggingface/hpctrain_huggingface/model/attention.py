"""The attention of transformers' models where context parallelism cuts the sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hpctrain.api import UsageError, causal_attention

_NAME = "hpctrain"
"""The name of this attention in transformers' interface."""


def give_to_attention(model: PreTrainedModel) -> list[nn.Module]:
    """Let the model's attention modules call their method `attend`, (batch, heads, seq, head_size) three times; return them.

    Raises UsageError for a model that does not compute attention through transformers' interface, or whose attention sees a window.
    """
    kind = type(model).__name__
    found = [one for one in model.modules() if hasattr(one, "is_causal") and hasattr(one, "layer_idx")]
    if not model._supports_attention_backend or not found:
        raise UsageError(
            f"[parallelism] context: a {kind} computes attention outside of transformers' AttentionInterface, where it could be "
            "exchanged; use another axis",
            everywhere=True,
        )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention"} or (getattr(config, "sliding_window", None) and not kinds):
        raise UsageError(
            f"[parallelism] context: the attention of this {kind} sees a window of tokens, which ranks with parts of a sequence do "
            "not compute; use another axis",
            everywhere=True,
        )
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **keywords: None)
    model.set_attn_implementation(_NAME)
    for one in found:
        one.__dict__["attend"] = causal_attention
    return found


def is_given(model: PreTrainedModel) -> bool:
    """Whether `give_to_attention` has changed the model."""
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
    """Causal attention by `module.attend` -> (batch, seq, heads, head_size). Raises UsageError for what that can't compute."""
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
