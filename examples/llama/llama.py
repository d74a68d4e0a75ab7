"""A Llama of Hugging Face's transformers, as it comes: nothing in it knows of hpctrain.

pip install transformers; cd examples/llama && hpctrain run llama.toml -n 2
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


def build(hidden_size: int, layers: int, heads: int, tied: bool = False) -> nn.Module:
    """What `[model] name = "llama:build"` calls; for weights made elsewhere `[model] weights` names the safetensors file."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # bytes
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
        )
    )


def loss(outputs: CausalLMOutputWithPast, labels: Tensor) -> Tensor:
    """The mean over the tokens of each row, (batch,). labels: (batch, seq), shifted by the dataset."""
    assert outputs.logits is not None
    return functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none").mean(1)
