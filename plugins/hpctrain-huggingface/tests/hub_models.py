"""Tiny models of transformers with random weights, saved as `from_pretrained` takes them, and plain loops that train them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

warnings.filterwarnings("ignore", category=FutureWarning)

VOCABULARY, LONGEST = 61, 16
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "llama, tied": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 8},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": 5},
    "gemma2": {"model_type": "gemma2", **_LLAMA, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", **_LLAMA, "head_dim": 8, "sliding_window": 5},
    "phi3": {"model_type": "phi3", **_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LONGEST,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1,
    },
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **_LLAMA, "head_dim": 8, "num_experts": 4, **_EXPERTS},
}  # fmt: skip
"""Causal language models."""


def save(config: dict[str, Any], directory: Path, auto: str = "AutoModelForCausalLM", **more: Any) -> Path:
    """Save a model of `config` with values that are all other than transformers would begin with."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, **more)
    return directory


def job(directory: Path, path: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """A job that trains the model at `path`."""
    made: dict[str, Any] = {
        "job": {"name": "hub", "steps": 4, "seed": 7, "output_dir": str(directory)},
        "model": {"name": "huggingface", "path": str(path)},
        "dataset": {"name": "synthetic", "samples": 40, "validation_samples": 6, "seq_length": 8},
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 1.0},
        "batch": {"global_size": 24, "micro_size": 2},
        "evaluation": {"every_steps": 2},
        "precision": {"mode": "fp64"},
    }
    for name, table in tables.items():
        made[name] = {**made.get(name, {}), **table}
    return made


def causal_loss(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens, whose labels the data set has shifted."""
    return cross_entropy(module(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels.flatten())


def trained_plainly(module: nn.Module, tables: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and norm of each step of the job in a plain loop, in one process."""
    module.train()
    from plain import batches_of, train_plainly

    trained = [p for p in module.parameters() if p.requires_grad]
    options = {key: value for key, value in tables["optimizer"].items() if key not in ("name", "clip_norm")}
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[tables["optimizer"]["name"]](trained, **options)

    def losses() -> Iterator[Callable[[], Tensor]]:
        for ids, labels in batches_of(tables):
            yield lambda ids=ids, labels=labels: causal_loss(module, ids, labels)

    return train_plainly(module, optimizer, losses(), tables["optimizer"].get("clip_norm"))


if __name__ == "__main__":
    save(json.loads(sys.argv[1]), Path(sys.argv[2]), max_shard_size="300MB")
