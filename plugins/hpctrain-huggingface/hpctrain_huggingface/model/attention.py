"""The attention of transformers' causal models: of each sample of a packed row to itself alone, in windows, and over ranks.

Without masks: to find samples in a row, transformers would read the positions from the device in each forward, and its masks have
as many elements as a row has pairs of tokens.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from hpctrain.api import Documents, UsageError, causal_attention, uncompiled
from hpctrain.toolkit.attention import shared

_NAME = "hpctrain"
"""The name of this attention in transformers' interface. It has no function that makes masks."""
_MASKS = re.compile(r"\b(create_\w*mask\w*|\w+_mask_function|block_sequence_ids|blockwise_overlay)\b")
_BIDIRECTIONAL = re.compile(r"if self\.config\.use_bidirectional_attention:\n(?: {16}.*\n)+")
"""The statement of a model whose attentions are not `is_causal`."""
_WINDOW_MASK = "create_sliding_window_causal_mask"
_PLAIN_MASKS = {"create_causal_mask", _WINDOW_MASK, "create_bidirectional_mask"}
"""transformers' functions that a model without masks of its own calls: the others would show tokens more, or fewer."""


def attend_causally(model: PreTrainedModel) -> None:
    """Take the place of torch's or the model's own attention in a model that shows each token those before it, or the newest of
    them."""
    config, found, windows = model.config, _attentions(model), _windows(model)
    kind = config._attn_implementation
    if not (model._supports_attention_backend and kind in ("sdpa", "eager") and found) or windows is None:
        return
    if getattr(config, "is_causal", True) and all(one.is_causal is True for one in found):
        masks = set(_MASKS.findall(_BIDIRECTIONAL.sub("", _source(type(model)))))
        own = getattr(sys.modules[type(found[0]).__module__], "eager_attention_forward", None)
        compute = sdpa_attention_forward if kind == "sdpa" else own
        if masks <= _PLAIN_MASKS and (_WINDOW_MASK in masks or not any(windows)) and compute is not None:
            for one, window in zip(found, windows, strict=True):
                one.__dict__.update(window=window, compute=compute)
            AttentionInterface.register(_NAME, _attention)
            model.set_attn_implementation(_NAME)


def _source(kind: type[PreTrainedModel]) -> str:
    """The code of the class, and of all that it names in its file, such as its layers and their functions."""
    text = inspect.getsource(sys.modules[kind.__module__])
    lines, found = text.splitlines(), ""
    places = {one.name: one for one in ast.parse(text).body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
    named = {kind.__name__}
    while new := [places.pop(name) for name in named & places.keys()]:
        parts = ["\n".join(lines[one.lineno - 1 : one.end_lineno]) for one in new]
        named, found = {name for part in parts for name in re.findall(r"\w+", part)}, "\n".join([found, *parts, ""])
    return found


def _windows(model: PreTrainedModel) -> list[int | None] | None:
    """How many tokens, with itself, each attention shows a token, None for all; None where it is not known of all."""
    config: Any = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None) or None, getattr(config, "layer_types", None)
    if kinds and set(kinds) - {"full_attention", "sliding_attention"}:
        return None
    found, kind = _attentions(model), dict(enumerate(kinds or ()))
    windows = [window if not kinds or kind.get(one.layer_idx) == "sliding_attention" else None for one in found]
    says = [
        (getattr(one, "sliding_window", given) or None) if getattr(one, "is_sliding", True) else None
        for one, given in zip(found, windows, strict=True)
    ]
    return windows if says == windows else None


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
    windows = _windows(model)
    if windows is None or any(windows):
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
        one.__dict__["attend"] = _attend
    return found


def _attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
    heads = query.shape[1]
    return causal_attention(query, shared(key, heads), shared(value, heads), documents)


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
        documents, inputs = keywords.pop("documents", None), (query, key, value)
        options = {"dropout": dropout, "scaling": scaling, **keywords}
        if documents is not None:
            return _of_documents(documents, module, inputs, options), None
        if attention_mask is None:
            return _of_sequence(module, inputs, options), None
        if module.window is not None:
            attention_mask = attention_mask & _visible(query.shape[2], query.shape[2], module.window, query.device)
        return _computed(module, inputs, attention_mask, options), None
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
            + ("set [model] config = { attention_dropout = 0.0 }" if dropout else "use another axis")
        )
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # `attend` scales by 1 / sqrt(head_size)
    return module.attend(query, key, value, keywords.get("documents")).transpose(1, 2).contiguous(), None


@uncompiled  # rows differ in lengths, for which nothing is to be compiled anew
def _of_documents(documents: Documents, module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Attention of each document to itself alone."""
    parts = zip(*(one.split(documents.lengths, dim=2) for one in inputs), strict=True)
    return torch.cat([_of_sequence(module, part, options) for part in parts], dim=1)


def _of_sequence(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    """Causal attention, (batch, seq, heads, head_size), in the module's window."""
    length = inputs[0].shape[2]
    window = length if module.window is None else min(module.window, length)
    mask = None if module.compute is sdpa_attention_forward else _visible(window, window, window, inputs[0].device)
    first = _computed(module, tuple(one[:, :, :window] for one in inputs), mask, options)
    return first if window == length else torch.cat([first, _in_window(module, inputs, window, options)], dim=1)


def _in_window(module: Any, inputs: tuple[Tensor, ...], window: int, options: dict[str, Any]) -> Tensor:
    """Outputs of the tokens behind the first `window`: in blocks of half a window, whose keys are those of one and a half."""
    if module.compute is sdpa_attention_forward:  # once, not in each block
        groups = inputs[0].shape[1] // inputs[1].shape[1]
        inputs = inputs[0], *(repeat_kv(one, groups) for one in inputs[1:])
    (batch, _, length, _), step = inputs[0].shape, max(1, window // 2)
    whole = (length - window) // step * step
    mask, parts = _mask(step, window, inputs[0]), []
    if whole:
        rows = []
        for row in range(batch):
            query, key, value = (one[row, :, : window + whole] for one in inputs)
            blocks = [query[:, window:].unfold(1, step, step)]
            blocks += [one.unfold(1, window + step, step) for one in (key, value)]  # views, which overlap
            found = _computed(module, tuple(one.permute(1, 0, 3, 2) for one in blocks), mask, options)
            rows.append(found.flatten(0, 1))
        parts.append(torch.stack(rows))
    if (rest := length - window - whole) > 0:
        last = inputs[0][:, :, -rest:], *(one[:, :, whole:] for one in inputs[1:])
        parts.append(_computed(module, last, mask[:, :, :rest, : rest + window], options))
    return torch.cat(parts, dim=1)


def _computed(module: Any, inputs: tuple[Tensor, ...], mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """(batch, seq, heads, head_size)."""
    query, key, value = inputs
    if module.compute is not sdpa_attention_forward:
        if mask is not None and mask.dtype == torch.bool:
            mask = _added(mask, query.dtype)
    elif mask is not None and query.shape[1] == key.shape[1]:
        dropout, scale = options["dropout"], options["scaling"]
        return scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale).transpose(1, 2)
    output: Tensor = module.compute(module, query, key, value, mask, **options)[0]
    return output


def _visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """The keys that the last `queries` of as many tokens as there are keys see, (1, 1, queries, keys)."""
    before = keys - queries
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril(before).triu(before - window + 1)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that are added to the scores: finite in the float32 of softmax, too, for rows of padding that see nothing."""
    hidden = max(torch.finfo(one).min for one in (dtype, torch.float32))
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, hidden)


def _mask(queries: int, window: int, like: Tensor) -> Tensor:
    """The mask of `queries` tokens behind a window of keys, in the dtype of the scores: backward keeps one for all layers."""
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    if torch.compiler.is_compiling():
        return _added(_visible(queries, queries + window, window, like.device), dtype)
    return _made(queries, window, dtype, like.device, getattr(like, "fake_mode", None))


@lru_cache(maxsize=4)
def _made(queries: int, window: int, dtype: torch.dtype, device: torch.device, fake_mode: object) -> Tensor:
    with torch.inference_mode(False):
        return _added(_visible(queries, queries + window, window, device), dtype)
