"""The tables of a job file that say what is trained: model, data, optimizer, batches, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.job.table_types import SlotTable, Table, error_of_several_keys


class ModelTable(SlotTable):
    """[model]"""

    name: str
    """A model plugin, or "package.module:callable" that returns a torch.nn.Module."""
    weights: Path | None = None
    """Start from these weights: a safetensors file (or the .safetensors.index.json of several), a directory that transformers'
    save_pretrained() made, a torch file, or a checkpoint's directory."""
    weights_strict: bool = True
    """Whether weights must have exactly the model's tensors; false: take those that fit by name and shape, and list the others."""
    sync_batch_norm: bool = False
    """Whether BatchNorms normalize over the micro batches of all data-parallel ranks, not of each."""
    freeze: list[str] = []
    """Parameters that are not trained, as patterns such as "embedding.*"."""
    trainable: list[str] | None = Field(default=None, min_length=1)
    """Patterns of the only parameters that are trained; parameters in freeze are never trained."""
    loss: str | None = None
    """Loss of a module of your own: "package.module:callable", called as loss(outputs, target); a mean or a loss per sample."""


class DatasetTable(SlotTable):
    """[dataset]"""

    name: str
    """A dataset plugin, or "package.module:callable" called as callable(split=..., **options)."""
    seq_length: int | None = Field(default=None, ge=1)
    """Tokens per sample (default: the model's max_seq_length)."""
    workers: int | None = Field(default=None, ge=0, le=1024)
    """Processes that load samples; 0 loads in the rank's process (default: 0, or num_workers of a DataLoader of your own)."""
    start_method: Literal["spawn", "forkserver", "fork"] = "forkserver"
    """How worker processes start: from a process that has imported torch and has no MPI, anew, or as a copy of the rank, which
    shares its data but is undefined under MPI."""
    prefetch: int = Field(default=2, ge=1)
    """Micro batches that each worker loads ahead of the step; without workers, a thread does if the data draws no numbers."""
    weights: str | None = None
    """Weights for data of your own: "package.module:callable", called with the data set; returns a weight for each training
    sample, by which samples are drawn with replacement (default: the data set's `sample_weights` if it has them, else none)."""
    collate: str | None = None
    """Collation of data of your own: "package.module:callable", called with a list of samples; returns the micro batch
    (default: the data set's `collate_fn` if it has one, else torch's default_collate)."""
    cache: Path | None = None
    """Directory for prepared data such as token ids (default: $XDG_CACHE_HOME/hpctrain or ~/.cache/hpctrain)."""


class ParameterGroup(SlotTable):
    """[[optimizer.groups]]: other options for some parameters."""

    pattern: str | Annotated[list[str], Field(min_length=1)] = "*"
    """The parameters of the group, such as "*.bias"; a parameter belongs to the first group that matches."""
    max_dims: int | None = Field(default=None, ge=0)
    """Only parameters of at most so many dimensions; 1 are biases and the weights of norms."""

    @model_validator(mode="after")
    def _chooses(self) -> ParameterGroup:
        if not self.model_fields_set & {"pattern", "max_dims"}:
            raise error_of_several_keys("expected pattern or max_dims, found neither")
        return self


class OptimizerTable(SlotTable):
    """[optimizer]"""

    name: str
    """An optimizer plugin, or "package.module:callable" called as callable(groups, **options)."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest global norm of the gradients."""
    groups: list[ParameterGroup] = []
    """Parameter groups with options of their own."""


class ScheduleTable(SlotTable):
    """[schedule]"""

    name: str = "constant"
    """A schedule plugin, or "package.module:callable"."""
    unit: Literal["step", "epoch"] = "step"
    """Count optimizer steps, or the epochs of [job] epochs, in each of which the rate stays as it is."""


class BatchTable(Table):
    """[batch]"""

    global_size: int | None = Field(default=None, ge=1)
    """Samples per optimizer step, over all ranks."""
    micro_size: int | None = Field(default=None, ge=1)
    """Samples per forward on one rank."""
    tokens: int | None = Field(default=None, ge=1)
    """Instead of global_size: the most tokens per optimizer step, over all ranks, without padding."""
    micro_tokens: int | None = Field(default=None, ge=1)
    """Instead of micro_size: the most tokens per forward on one rank, padding included."""
    packing: bool = False
    """Lay the samples of a micro batch, of which tokens says the size, one behind the other in one row instead of padding them to
    one length; each attends to itself alone."""
    drop_last: bool | None = None
    """End each epoch with its own samples where global batches don't divide it: true drops the rest, false makes a smaller batch of
    it, as torch's DataLoader does (default: the next epoch's samples fill it)."""
    channels_last: bool = False
    """Lay images (batch, channels, height, width) out with the channels last, as the convolutions of GPUs want them."""

    @model_validator(mode="after")
    def _samples_or_tokens(self) -> BatchTable:
        sizes = ("global_size", "micro_size", "tokens", "micro_tokens")
        found = [key for key in sizes if getattr(self, key) is not None]
        if found not in (["global_size", "micro_size"], ["tokens", "micro_tokens"]):
            raise error_of_several_keys(
                f"expected either global_size and micro_size or tokens and micro_tokens, found {', '.join(found) or 'none'}"
            )
        if self.tokens is not None and self.micro_tokens is not None and self.micro_tokens > self.tokens:
            raise error_of_several_keys(
                f"expected tokens >= micro_tokens, found tokens = {self.tokens} and micro_tokens = {self.micro_tokens}"
            )
        if self.packing and self.tokens is None:
            raise error_of_several_keys(
                "expected packing with tokens and micro_tokens, found global_size and micro_size"
            )
        if self.drop_last is not None and self.tokens is not None:
            raise error_of_several_keys(
                "expected drop_last with global_size and micro_size, found tokens and micro_tokens"
            )
        return self

    @property
    def size(self) -> int:
        """Samples or tokens per optimizer step."""
        return self.global_size or self.tokens or 0


class EvaluationTable(Table):
    """[evaluation]"""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate at this interval of steps and at the end; 0 is never."""
    every_epochs: float = Field(default=0, ge=0, le=1e9)
    """Evaluate at this interval of epochs, after the step that completes it, and at the end; 0 is never."""
    batches: int | None = Field(default=None, ge=1)
    """Global batches of the validation split to evaluate on (default: all of it)."""

    @property
    def enabled(self) -> bool:
        """Whether the job evaluates at all."""
        return bool(self.every_steps or self.every_epochs)


class MetricTable(SlotTable):
    """[[metric]]"""

    name: str
    """A metric plugin, or "package.module:callable"."""
