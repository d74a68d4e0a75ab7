"""The keys of `[model] name = "huggingface"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from hpctrain.api import Field, Options

Task = Literal[
    "causal-lm", "masked-lm", "seq2seq-lm", "token-classification", "sequence-classification", "image-classification",
    "audio-classification",
]  # fmt: skip
"""The names in tasks.py."""


class PreferenceOptions(Options):
    """Direct preference optimization."""

    beta: float = Field(
        default=0.1, gt=0, description="how much a preference may move the model away from what it was before"
    )


class HuggingFaceOptions(Options):
    path: Path | None = Field(
        default=None,
        description="a directory that save_pretrained() made, with config.json and *.safetensors, or the name of a repository of "
        "the hub that this machine's cache has",
    )
    config: dict[str, Any] = Field(
        default={},
        description="keys of transformers' configuration: over those of `path`, or, with model_type, a model that begins with "
        "random values",
    )
    task: Task | None = Field(
        default=None, description="the task that the model is trained for (default: the one of its `architectures`)"
    )
    attention: str | None = Field(
        default=None,
        description='transformers\' attention: "sdpa", "eager", "flex_attention", "flash_attention_2", ... (default: its own '
        "choice, sdpa for most models)",
    )
    experts: str | None = Field(
        default=None,
        description='transformers\' way to compute experts: "grouped_mm", "batched_mm", "eager" (default: its own choice)',
    )
    loss_chunk: int = Field(
        default=0,
        ge=0,
        description="tokens whose logits exist at a time when a causal-lm trains, for a large vocabulary; 0: all",
    )
    frozen_dtype: Literal["parameters", "bf16", "fp16"] = Field(
        default="parameters",
        description="the dtype of frozen parameters where adapters are trained: bf16 halves the base's memory",
    )
    adapter: dict[str, Any] = Field(
        default={},
        description='an adapter of peft: kind = "lora" and the keys of its configuration such as r, or path = "DIR" of a saved one',
    )
    preference: PreferenceOptions | None = Field(
        default=None, description="train on pairs of answers, of which one is preferred (DPO); needs an adapter"
    )
    trust_remote_code: bool = Field(
        default=False, description="run the Python code of a model that transformers doesn't have, from `path`"
    )

    @model_validator(mode="after")
    def _names_a_model(self) -> HuggingFaceOptions:
        if self.path is None and "model_type" not in self.config:
            raise ValueError('expected path = "DIR", or config = { model_type = "llama", ... }')
        if self.frozen_dtype != "parameters" and not self.adapter:
            raise ValueError("frozen_dtype goes with an adapter: without one, the parameters are trained")
        if self.preference is not None and self.loss_chunk:
            raise ValueError(
                "preference compares whole answers, whose logits loss_chunk does not keep; leave one of them out"
            )
        if self.preference is not None and not self.adapter:
            raise ValueError(
                "preference needs an adapter: the model without it is what the preferences are measured against"
            )
        return self
