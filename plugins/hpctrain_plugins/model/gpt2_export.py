"""Writes a `gpt` as transformers' GPT-2, which has the same arithmetic in transposed matrices, with query, key and value in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

# the modules of a block, and their names in GPT-2
_LAYER = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def export_gpt2(
    values: Callable[[str], Tensor],
    out: Path,
    hidden_size: int,
    layers: int,
    attention_heads: int,
    vocab_size: int,
    max_seq_length: int,
    tie_embeddings: bool,
) -> str:
    """Write config.json and model.safetensors into the directory `out`; return the class that loads them. Holds the whole model."""
    state = {
        "transformer.wte.weight": values("token_embedding.weight"),
        "transformer.wpe.weight": values("position_embedding.weight"),
        "transformer.ln_f.weight": values("norm.weight"),
        "transformer.ln_f.bias": values("norm.bias"),
    }
    if not tie_embeddings:
        state["lm_head.weight"] = values("head.weight")
    for layer in range(layers):
        own, other = f"layers.{layer}", f"transformer.h.{layer}"
        for name, theirs in _LAYER.items():
            weight = values(f"{own}.{name}.weight")
            state[f"{other}.{theirs}.weight"] = weight.T.contiguous() if weight.dim() == 2 else weight
            state[f"{other}.{theirs}.bias"] = values(f"{own}.{name}.bias")
        parts = [f"{own}.attention.{name}" for name in ("query", "key", "value")]
        state[f"{other}.attn.c_attn.weight"] = torch.cat([values(f"{name}.weight") for name in parts]).T.contiguous()
        state[f"{other}.attn.c_attn.bias"] = torch.cat([values(f"{name}.bias") for name in parts])
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": max_seq_length,
        "n_embd": hidden_size,
        "n_layer": layers,
        "n_head": attention_heads,
        "activation_function": "gelu",
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(state["transformer.wte.weight"].dtype).removeprefix("torch."),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return "GPT2LMHeadModel"
