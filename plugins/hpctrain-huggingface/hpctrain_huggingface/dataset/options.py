"""The keys of `[dataset] name = "huggingface"`."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from hpctrain.api import Field, Options


class HubDatasetOptions(Options):
    path: Path = Field(
        description="what save_to_disk() made, a directory or a file of parquet, json, csv or text, or the name of a repository of "
        "the hub that this machine's cache has"
    )
    subset: str | None = Field(default=None, description="the configuration of a data set that has several")
    train: str = Field(
        default="train", description="the split to train on; datasets' slices such as train[:90%] are taken"
    )
    validation: str | None = Field(
        default=None, description="the split to evaluate on (default: validation, where the data set has it)"
    )
    test: str | None = Field(default=None, description="the split of `hpctrain evaluate` and `predict` (default: test)")
    streaming: bool = Field(default=False, description="read the rows one after the other, in the data set's order")
    tokenizer: Path | None = Field(
        default=None, description="the directory of a tokenizer that save_pretrained() made, often the model's"
    )
    text: str | None = Field(default=None, description="the column of texts")
    messages: str | None = Field(
        default=None, description="the column of conversations, which the tokenizer's chat template writes out"
    )
    prompt: str | None = Field(default=None, description="the column of what comes before the answer, without loss")
    completion: str | None = Field(default=None, description="the column of answers")
    chosen: str | None = Field(default=None, description="the column of preferred answers, or of whole conversations")
    rejected: str | None = Field(default=None, description="the column of the answers that chosen is preferred to")
    label: str | None = Field(
        default=None, description="the column of a text's class or number; default: the next token"
    )
    answers_only: bool = Field(
        default=True, description="with messages, the loss is that of the assistant's turns alone"
    )
    end_of_text: bool = Field(default=True, description="end a text with the tokenizer's eos token")
    full_length: bool = Field(
        default=False, description="fill each text up to seq_length, as pipelines need it, which take one shape only"
    )
    columns: list[str] = Field(default=[], description="columns that are samples' entries as they are (default: all)")

    @model_validator(mode="after")
    def _one_kind(self) -> HubDatasetOptions:
        kinds = [name for name in ("text", "messages", "completion", "chosen") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"expected one of text, messages, completion and chosen, found {' and '.join(kinds)}")
        if kinds and self.tokenizer is None:
            raise ValueError(f'{kinds[0]} needs tokenizer = "DIR", a tokenizer\'s directory')
        if kinds and self.columns:
            raise ValueError(f"columns are a sample as they are; {kinds[0]} makes one")
        if (self.chosen is None) != (self.rejected is None):
            raise ValueError("expected chosen and rejected together")
        if self.completion is not None and self.prompt is None:
            raise ValueError("expected prompt and completion together")
        if self.prompt is not None and self.completion is None and self.chosen is None:
            raise ValueError("prompt goes with completion, or with chosen and rejected")
        if self.label is not None and self.text is None:
            raise ValueError("label goes with text")
        return self
