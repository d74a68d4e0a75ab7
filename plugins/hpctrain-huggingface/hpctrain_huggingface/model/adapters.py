"""Adapters of peft: small trained parameters beside a frozen model. Imported where a job has one: peft takes seconds to import."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, PeftType, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpctrain.api import UsageError

KINDS = ("beft", "hira", "ia3", "lily", "loha", "lokr", "lora", "peanut")
"""Kinds whose matrices are drawn on their own, row by row, and that only the optimizer changes."""
_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "token-classification": "TOKEN_CLS",
    "sequence-classification": "SEQ_CLS",
}
"""peft's names of tasks. For classifiers it trains the new head, too."""


def adapter_config(options: Mapping[str, Any], task: str) -> PeftConfig:
    """peft's configuration of `[model] adapter`. Raises UsageError for an unknown kind or key, or if it needs the base's values."""
    given = dict(options)
    path, kind = given.pop("path", None), given.pop("kind", None)
    if path is not None:
        if kind is not None or given:
            raise UsageError(
                "[model] adapter: path names a saved adapter, whose configuration is beside it; give path alone"
            )
        return _saved(Path(path))
    _refuse_kind(str(kind))
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[str(kind).upper()]]
    fields = {one.name for one in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            raise UsageError(
                f"[model] adapter: {key!r} is no key of peft's {cls.__name__}; it has {', '.join(sorted(fields))}"
            )
    try:
        config = cls(**{"task_type": _TASKS.get(task), **given})
    except (TypeError, ValueError) as error:
        raise UsageError(f"[model] adapter: {error}") from error
    _refuse_values_of_the_base(config)
    return config


def _saved(path: Path) -> PeftConfig:
    if not (path / "adapter_config.json").is_file() or not (path / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"[model] adapter: expected adapter_config.json and adapter_model.safetensors in {path}, as save_pretrained() of a "
            "peft model writes them"
        )
    config: PeftConfig = PeftConfig.from_pretrained(str(path))
    kind: Any = config.peft_type
    _refuse_kind(str(kind.value).lower().replace("_", "-"))
    config.inference_mode = False
    _refuse_values_of_the_base(config)
    return config


def _refuse_kind(kind: str) -> None:
    """Raises UsageError for adapters that begin with values of the base, share or change their matrices, or are prompts."""
    if kind not in KINDS:
        raise UsageError(f"[model] adapter: found an adapter of the kind {kind!r}, expected one of {', '.join(KINDS)}")


def _refuse_values_of_the_base(config: PeftConfig) -> None:
    """Raises UsageError for adapters that are computed from the base's values, which no rank holds as a whole."""
    for key in ("use_dora", "trainable_token_indices", "layer_replication"):
        if getattr(config, key, None):
            raise UsageError(
                f"[model] adapter: {key} needs whole matrices of the base, which no rank holds; leave it out"
            )
    how = getattr(config, "init_lora_weights", True)
    if not isinstance(how, bool) and how != "gaussian":
        raise UsageError(
            f"[model] adapter: init_lora_weights = {how!r} computes from the base's matrices, which no rank holds as a whole; "
            'expected true, false or "gaussian"'
        )


def with_adapter(model: PreTrainedModel, config: PeftConfig, task: str) -> PeftModel:
    """`model` with the adapter in it; only the adapter is trained, and a classifier's head, as a whole.

    Raises UsageError for modules that the model does not have.
    """
    config = copy.deepcopy(config)  # peft completes it
    if task.endswith("-classification") and task not in _TASKS and getattr(config, "modules_to_save", None) is None:
        heads: Any = config
        heads.modules_to_save = [name for name, _ in model.named_children() if name != model.base_model_prefix]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for what transformers has renamed
            made: Any = get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise UsageError(f"[model] adapter: {error}") from error
    if getattr(config, "target_modules_to_tie", None):
        raise UsageError(
            "[model] adapter: ensure_weight_tying would tie the adapters of two layers, one the transpose of the other; leave one "
            "of them out, or name it in modules_to_save"
        )
    return made  # type: ignore[no-any-return]


def stored_names(module: nn.Module) -> dict[str, list[str]]:
    """The names in peft's files of each of the adapter's parameters: several of one that is tied."""
    of_tensor = {id(parameter): name for name, parameter in module.named_parameters()}
    own = dict(module.named_parameters(remove_duplicate=False))
    stored: Mapping[str, Tensor] = get_peft_model_state_dict(module, state_dict=own, save_embedding_layers=False)
    found: dict[str, list[str]] = {}
    for key, tensor in stored.items():
        found.setdefault(of_tensor[id(tensor)], []).append(key)
    return found
