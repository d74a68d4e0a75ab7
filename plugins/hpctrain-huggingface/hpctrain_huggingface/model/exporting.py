"""Writes a trained model as `from_pretrained` of transformers or peft loads it, some layers at a time."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from hpctrain.api import UsageError
from hpctrain_huggingface.model.building import Built
from hpctrain_huggingface.model.plan import base_name, is_tuned

Values = Callable[[str], Tensor]
"""The full value of a parameter or buffer of a checkpoint, by its name."""

_SHARD_BYTES = 5 * 10**9
"""Bytes of a file of weights, as transformers writes them."""
_BESIDE = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.model",
    "*processor_config.json", "generation_config.json",
)  # fmt: skip
"""The files beside a model that its training does not change."""


def export(built: Built, values: Values, out: Path, merged: bool, shard_bytes: int = _SHARD_BYTES) -> str:
    """Write the model of `built`, or its adapter, into the directory `out`; return what it is.

    Holds some layers in memory, up to `shard_bytes` and one more. Raises UsageError for `merged` without an adapter.
    """
    has_adapter = built.module is not built.base
    if merged and not has_adapter:
        raise UsageError(
            "--merged adds an adapter to what it adapts, and this model was trained without one; leave it out"
        )
    if built.weights_at is not None:
        for path in sorted({path for pattern in _BESIDE for path in built.weights_at.glob(pattern) if path.is_file()}):
            shutil.copyfile(path, out / path.name)
    if has_adapter and not merged:
        return _save_adapter(built, values, out)
    read = _merging(built, values) if merged else values
    config = copy.deepcopy(built.config)
    config.architectures = [type(built.base).__name__]
    config.dtype = built.base.config.dtype
    kept = _still_tied(built) if merged else built.tied
    if kept != built.tied:
        for one in (config, config.get_text_config()):
            one.tie_word_embeddings = False
    config.save_pretrained(out)
    _save_shards(_layers(built, read, {other for _, *others in kept for other in others}), out, shard_bytes)
    return type(built.base).__name__ + (" with its adapter added" if merged else "")


def _save_adapter(built: Built, values: Values, out: Path) -> str:
    module: Any = built.module
    state = {
        stored: values(name).contiguous().clone() for name, several in built.adapter_names.items() for stored in several
    }
    save_file(state, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(module.peft_config["default"])
    config.inference_mode = True
    if built.named is not None:
        config.base_model_name_or_path = str(built.named)
    config.save_pretrained(str(out))
    return f"an adapter, {config.peft_type.value}, of {type(built.base).__name__}"


def _still_tied(built: Built) -> list[list[str]]:
    """The groups of tied parameters that the adapter has not parted. Raises UsageError for a model that can't do without a tie."""
    places = _places(built)
    kept = [
        names
        for names in built.tied
        if len({id(built.module.get_parameter(places[name])) for name in names}) == 1
        and not any(".base_layer." in places[name] for name in names)
    ]
    if kept != built.tied and (kept or built.base.config.is_encoder_decoder):
        first, other, *_ = next(names for names in built.tied if names not in kept)
        raise UsageError(
            f"--merged: the adapter has parted {other} from {first}, and a {type(built.base).__name__} ties them; export the "
            "adapter alone, without --merged"
        )
    return kept


def _places(built: Built) -> dict[str, str]:
    """The name in the module with adapter of each parameter and buffer of the model without; of one that the adapter trains as a
    whole, that of the trained one, which comes after the original."""
    every = [*built.recipes, *(name for name, _ in built.module.named_parameters(remove_duplicate=False))]
    return {base_name(name): name for name in every}


def _layers(built: Built, values: Values, left_out: set[str]) -> Iterator[dict[str, Tensor]]:
    """The state under the names of transformers' files, a layer at a time: a stored tensor may be made of several of one."""
    state: dict[str, Tensor] = {}
    of = ""
    for name in built.wanted:
        if name in left_out:
            continue
        layer = ".".join(
            name.split(".")[: 1 + next((i for i, part in enumerate(name.split(".")) if part.isdigit()), -1)]
        )
        if state and layer != of:
            yield revert_weight_conversion(built.base, state)
            state = {}
        of, state[name] = layer, values(name)
    if state:
        yield revert_weight_conversion(built.base, state)


def _save_shards(layers: Iterator[Mapping[str, Tensor]], out: Path, shard_bytes: int) -> None:
    """Write the layers into files of about `shard_bytes`, with an index if there are several."""
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def write() -> None:
        save_file(shard, out / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(shard))
        shard.clear()

    for layer in layers:
        size = sum(tensor.nbytes for tensor in layer.values())
        if shard and sum(tensor.nbytes for tensor in shard.values()) + size > shard_bytes:
            write()
        shard.update({name: tensor.contiguous() for name, tensor in layer.items()})
        total += size
    write()
    if len(files) == 1:
        (out / "part-0").rename(out / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (out / f"part-{number}").rename(out / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _merging(built: Built, values: Values) -> Values:
    """The values of the model that is adapted, by its own names, with the adapter added by peft's own arithmetic."""
    names = _places(built)
    first = {id(one): name for name, one in built.module.named_parameters()}
    stored = {name: first[id(one)] for name, one in built.module.named_parameters(remove_duplicate=False)}
    owners = {name: module for name, module in built.module.named_modules() if is_tuned(module)}
    nested = [name for name in owners if any(name.startswith(f"{other}.") for other in owners)]
    if nested:
        raise UsageError(
            f"--merged: {nested[0]} is adapted twice, and the sum would change both; export the adapter alone, without --merged"
        )

    def of_module(name: str) -> Tensor:
        return values(stored.get(name, name))

    def value(own: str) -> Tensor:
        name = names[own]
        before, _, last = name.rpartition(".base_layer.")
        if before in owners:
            return _merged(of_module, before, owners[before]).get_parameter(last).detach()
        return of_module(name)

    return value


def _merged(values: Values, name: str, module: nn.Module) -> nn.Module:
    """The layer that `module` of peft adapts, with the adapter added."""
    made: Any = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for inner, parameter in made.named_parameters():
            parameter.copy_(values(f"{name}.{inner}"))
        try:
            made.merge()
        except (ValueError, NotImplementedError) as error:
            raise UsageError(f"--merged: {name}: {error}; export the adapter alone, without --merged") from error
    return made.get_base_layer()  # type: ignore[no-any-return]
