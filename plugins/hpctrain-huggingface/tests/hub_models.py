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
    "qwen2, windows": {"model_type": "qwen2", **_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "phi3": {"model_type": "phi3", **_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LONGEST,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1,
    },
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **_LLAMA, "head_dim": 8, "num_experts": 4, **_EXPERTS},
}  # fmt: skip
"""Causal language models."""
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}
_DEEPSEEK = {
    **_LLAMA, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "olmo2": {"model_type": "olmo2", **_LLAMA},
    "granite": {"model_type": "granite", **_LLAMA},
    "cohere": {"model_type": "cohere", **_LLAMA},
    "starcoder2": {"model_type": "starcoder2", **_LLAMA, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "smollm3": {"model_type": "smollm3", **_LLAMA},
    "glm4": {"model_type": "glm4", **_LLAMA, "head_dim": 8},
    "phi": {"model_type": "phi", **_LLAMA, "num_key_value_heads": 4},
    "gpt_neox": {"model_type": "gpt_neox", **_PLAIN, "intermediate_size": 40},
    "falcon": {"model_type": "falcon", **_PLAIN},
    "bloom": {"model_type": "bloom", **_PLAIN, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "opt": {"model_type": "opt", **_PLAIN, "ffn_dim": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 16, "dropout": 0.0,
            "pad_token_id": 1},
    "gptj": {"model_type": "gptj", "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16,
             "rotary_dim": 4},
    "mpt": {"model_type": "mpt", "vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 16},
    "deepseek_v2": {"model_type": "deepseek_v2", **_DEEPSEEK},
    "deepseek_v3": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "gpt_oss": {"model_type": "gpt_oss", **_LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 5},
    "olmoe": {"model_type": "olmoe", **_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"model_type": "mamba", **_MAMBA},
    "mamba2": {"model_type": "mamba2", **_MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 4},
    "rwkv": {"model_type": "rwkv", "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2},
    "jamba": {"model_type": "jamba", **_LLAMA, "num_hidden_layers": 4, "num_experts": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    "recurrent_gemma": {"model_type": "recurrent_gemma", **_LLAMA, "lru_width": 16, "num_hidden_layers": 3,
                        "attention_window_size": 4},
    "bamba": {"model_type": "bamba", **_LLAMA, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4,
              "attn_layer_indices": [1]},
    "qwen3_next": {"model_type": "qwen3_next", **_LLAMA, "head_dim": 8, "num_experts": 4, **_EXPERTS,
                   "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 4, "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip
"""Causal language models of many kinds."""


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
