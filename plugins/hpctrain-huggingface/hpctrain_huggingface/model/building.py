"""Builds a model of transformers on the meta device, with everything that its values need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hpctrain.api import EnvironmentUnfitError, HpctrainError, UsageError
from hpctrain_huggingface.model.initial import Recipe, Recorder
from hpctrain_huggingface.model.layers import Decoder, let_run_alone
from hpctrain_huggingface.model.options import HuggingFaceOptions
from hpctrain_huggingface.model.plan import PREFIX, base_name, tensor_plan, with_cut_vocabulary
from hpctrain_huggingface.model.tasks import TASKS
from hpctrain_huggingface.model.weights import Files, Weights

if TYPE_CHECKING:
    from peft import PeftConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def directory_of(path: Path) -> Path:
    """The directory at `path`, or of the repository of that name in this machine's cache. Raises UsageError for neither."""
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or len(path.parts) > 2:
        raise UsageError(f"[model] path: there is no directory {path}; expected one that save_pretrained() made")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UsageError(
            f"[model] path: there is no directory {path}, and no repository of that name in this machine's cache; nothing is "
            f"downloaded in a job: run `hf download {path}` where there is a network"
        ) from None


def config_of(options: HuggingFaceOptions) -> PreTrainedConfig:
    """transformers' configuration. Raises UsageError for a model type or a key that it does not know."""
    keys = dict(options.config)
    if options.path is not None:
        directory = directory_of(options.path)
        if not (directory / "config.json").is_file():
            raise UsageError(f"[model] path: {directory} has no config.json, as save_pretrained() writes it")
        try:
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=options.trust_remote_code, **keys
            )
        except (ValueError, OSError, TypeError) as error:
            raise UsageError(f"[model] path: {directory}: {_first_line(error)}") from error
    else:
        try:
            config = AutoConfig.for_model(**keys)
        except (ValueError, TypeError) as error:
            raise UsageError(f"[model] config: {_first_line(error)}") from error
    for key in keys:
        if not hasattr(config, key):
            raise UsageError(f"[model] config: {key!r} is no key of transformers' {type(config).__name__}")
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "[model] path: these weights are quantized, which can't be trained or cut; expected weights in bf16, fp16 or fp32"
        )
    if getattr(config, "use_cache", None):
        config.use_cache = False  # keys and values for generation; a recomputed forward would add them twice
    return config  # type: ignore[no-any-return]


@dataclass
class Built:
    """A model on the meta device, and where its values come from."""

    module: nn.Module
    base: PreTrainedModel
    recipes: dict[str, Recipe]
    """Initial values by the names of `module`."""
    wanted: dict[str, Tensor]
    """The state of the model of transformers by its own names, before an adapter was put in."""
    tied: list[list[str]]
    """The names of each tied parameter of the model of transformers, its main name first."""
    named: Path | None
    """The directory or the repository that the job names."""
    weights_at: Path | None
    adapter_at: Path | None

    @cached_property
    def weights(self) -> Weights | None:
        """The weights at `path`."""
        if self.weights_at is None:
            return None
        return Weights(Files.of(self.weights_at), self.base, self.wanted, self.tied)

    @cached_property
    def adapter_files(self) -> Files | None:
        """The weights of a saved adapter."""
        return None if self.adapter_at is None else Files.of(self.adapter_at, "adapter_model.safetensors")

    @cached_property
    def adapter_names(self) -> dict[str, str]:
        """The names in peft's files of the adapter's parameters."""
        if self.module is self.base:
            return {}
        from hpctrain_huggingface.model.adapters import stored_names

        return stored_names(self.module)

    def fill(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, the rows `rows` of the parameter or buffer `name`."""
        own, recipe = base_name(name), self.recipes[name]
        files, stored = self.adapter_files, self.adapter_names.get(name)
        if files is not None and stored is not None:
            files.fill(stored, tensor, rows, recipe.shape)
        elif self.weights is not None and own in self.weights.sources:
            self.weights.fill(own, tensor, rows, recipe.shape)
        else:
            recipe.fill(name, tensor, rows, seed)


def build(config: PreTrainedConfig, options: HuggingFaceOptions, task: str, adapter: PeftConfig | None) -> Built:
    """Raises UsageError for a task or an attention that the model does not have, EnvironmentUnfitError for a missing package."""
    frozen = _DTYPES.get(options.frozen_dtype, torch.get_default_dtype())
    base = _base(config, options, task, frozen)
    tied, wanted = _tied(base), dict(base.state_dict())
    recorder = Recorder()
    with torch.device("cpu"):
        for name, buffer in base.named_non_persistent_buffers():
            _set_buffer(base, name, torch.empty_like(buffer, device="cpu"))
        with recorder:
            base.initialize_weights()
    changes = {name: recorder.of(tensor) for name, tensor in _state(base)}
    module: nn.Module = base
    if adapter is not None:
        from hpctrain_huggingface.model.adapters import with_adapter

        with recorder:
            module = with_adapter(base, adapter)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.get_default_dtype())
    recipes = {
        name: Recipe(tuple(tensor.shape), changes.get(base_name(name)) or recorder.of(tensor))
        for name, tensor in _state(module)
    }
    _bring_plan(module, base, task, bool(tied))
    decoder = Decoder.of(base) if task == "causal-lm" else None
    if decoder is not None:
        let_run_alone(decoder)
    at = None if options.path is None else directory_of(options.path)
    saved = options.adapter.get("path")
    return Built(module, base, recipes, wanted, tied, options.path, at, None if saved is None else Path(saved))


def _base(config: PreTrainedConfig, options: HuggingFaceOptions, task: str, dtype: torch.dtype) -> PreTrainedModel:
    auto = getattr(transformers, TASKS[task].auto)
    # torch's grouped products take no float64
    experts = options.experts or ("eager" if torch.get_default_dtype() == torch.float64 else None)
    chosen = {"attn_implementation": options.attention, "experts_implementation": experts}
    given = {key: value for key, value in chosen.items() if value is not None}
    try:
        made: Any = auto.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code, **given)
    except ImportError as error:
        raise EnvironmentUnfitError(f"[model] huggingface: {_first_line(error)}") from error
    except HpctrainError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"[model] huggingface: {_first_line(error)}") from error
    return made  # type: ignore[no-any-return]


def _bring_plan(module: nn.Module, base: PreTrainedModel, task: str, tied: bool) -> None:
    """Give the module the plan that tensor parallelism asks it for."""
    own = getattr(base, "_tp_plan", None)
    if not own:
        return
    prefix = "" if module is base else PREFIX
    plan = tensor_plan(module, own, prefix)
    head: Any = base.get_output_embeddings() if TASKS[task].of_tokens else None
    if isinstance(head, nn.Linear):
        names = {id(one): name for name, one in module.named_modules()}
        embedding = names[id(base.get_input_embeddings())]
        plan = with_cut_vocabulary(plan, module, names[id(head)], embedding, tied)
    module._tp_plan = plan  # type: ignore[assignment]


def _state(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The parameters and the persistent buffers."""
    persistent = module.state_dict(keep_vars=True).keys()
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _tied(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner).register_buffer(last, value, persistent=False)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
