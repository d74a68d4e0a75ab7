"""The plugin `huggingface`: chooses the kind of model by the job's keys and by the model's configuration."""

from __future__ import annotations

from hpctrain.api import ModelSpec, hookimpl
from hpctrain_huggingface.model.options import HuggingFaceOptions
from hpctrain_huggingface.model.preference import PreferenceModel
from hpctrain_huggingface.model.spec import AttentiveModel, CausalLanguageModel, HubModel, TextModel
from hpctrain_huggingface.model.tasks import task_of


class HuggingFace(HubModel):
    """A model of transformers, with an adapter of peft or without."""

    name = "huggingface"

    def __new__(cls, options: HuggingFaceOptions) -> HubModel:  # type: ignore[misc]  # another kind of the same base
        """The kind says what others may do with the model: cut its texts, pass its layers on, or neither."""
        from hpctrain_huggingface.model.building import config_of

        if options.preference is not None:
            return PreferenceModel(options)
        config = config_of(options)
        if task_of(options.task, config, options.path) == "causal-lm":
            has_heads = hasattr(config.get_text_config(), "num_attention_heads")
            return AttentiveModel(options) if has_heads else CausalLanguageModel(options)
        return TextModel(options) if hasattr(config, "vocab_size") else HubModel(options)


@hookimpl
def hpctrain_model() -> list[type[ModelSpec]]:
    return [HuggingFace]
