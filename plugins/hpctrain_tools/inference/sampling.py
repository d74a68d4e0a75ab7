"""Text that a trained language model continues, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import refuse_machine
from hpctrain.contracts.dataset import TextDataset
from hpctrain.contracts.model import Batch, TokenModel
from hpctrain.contracts.plugin import Machine
from hpctrain.contracts.runner import MicroBatch
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.mesh import build_meshes, layout_of
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.meeting import World
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.trained_model import TrainedModel

# share of the logits' range by which they may differ: the rounding of 16 bits
_ROUNDING = 0.005


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text, and how it goes on: `tokens` more tokens, drawn from the `top_k` most likely ones (None: all)
    with their logits divided by `temperature`; 0 always takes the most likely one."""

    text: str
    tokens: int
    temperature: float
    top_k: int | None
    seed: int


def sample(
    prompt: Prompt,
    say: Callable[[str], None],
    checkpoint: Path,
    kept_by: str | None,
    checked: CheckedJob,
    world: World,
    device: torch.device,
    hooks: LifeCycle,
) -> dict[str, Any]:
    """The `text` behind a prompt, by a checkpoint's weights, or those that the plugin `kept_by` keeps. Collective, equal on all
    ranks. say: is told what is added."""
    job, parts = _with_whole_samples(checked.job, checked.parts)
    refuse_machine(job, parts, Machine(world.identity, device), checked.registry)
    meshes = build_meshes(layout_of(job, parts, world.identity.size), device)
    dataset = text_dataset(parts)
    model = TrainedModel(job, parts, meshes, device, hooks)
    model.load(checkpoint, kept_by)
    return {"text": continue_text(model, dataset, _length(job, parts), prompt, device, say)}


def text_dataset(parts: Parts) -> TextDataset:
    """The job's dataset. Raises UsageError if its samples are no text; equal on all ranks."""
    if not isinstance(parts.dataset, TextDataset):
        raise UsageError(
            f"sample needs a dataset of text, found {parts.dataset.name!r}, which has no encode and decode; use text or "
            "stdlib-text, or a dataset plugin that is a TextDataset"
        )
    return parts.dataset


def continue_text(
    model: TrainedModel,
    dataset: TextDataset,
    length: int,
    prompt: Prompt,
    device: torch.device,
    say: Callable[[str], None],
) -> str:
    """The text behind the prompt. Collective; every rank returns the same. length: of a sample in training, in tokens. say: is told
    the prompt, once the model has been asked, and what is added, each time that it grows by whole characters.

    The model reads at most the last `length` tokens. There is no cache of keys and values: a token costs a forward.
    """
    ids, told = dataset.encode(prompt.text), ""
    if not ids:
        raise UsageError("sample needs a prompt of one token at least")
    _refuse_encoder(model, dataset, ids, length, device)
    begin, generator = len(ids), torch.Generator().manual_seed(prompt.seed)
    for number in range(prompt.tokens):
        logits = _next_logits(model, ids[-length:], length, device)
        if number == 0:
            say(prompt.text)
        mine = None if logits is None else _drawn(logits[: dataset.vocabulary], prompt, generator)
        ids.append(next(one for one in gather_values(mine) if one is not None))
        text = dataset.decode(ids[begin:])
        if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(told):  # else a character has begun
            say(text[len(told) :])
            told = text
    return dataset.decode(ids[begin:])


def _refuse_encoder(
    model: TrainedModel, dataset: TextDataset, ids: list[int], length: int, device: torch.device
) -> None:
    """Raises UsageError if what the model says of a token depends on later ones. Collective."""
    ids = ids[-length:][: length - 1]
    behind = [_next_logits(model, ids, length, device, other) for other in (0, dataset.vocabulary - 1)] if ids else []
    first, second = behind or (None, None)
    differs = False
    if first is not None and second is not None:
        differs = not torch.allclose(first, second, rtol=0, atol=_ROUNDING * float(first.max() - first.min()))
    if any(gather_values(differs)):
        raise UsageError(
            f"sample needs a language model; what {model.spec.name!r} says of a token depends on the tokens behind it, as in an "
            "encoder"
        )


def _next_logits(
    model: TrainedModel, ids: list[int], length: int, device: torch.device, behind: int = 0
) -> Tensor | None:
    """(vocabulary,): of the token behind `ids`, on the ranks that have the model's outputs. Collective.

    The input always has `length` tokens. behind: the ones that follow, which change nothing.
    """
    row = torch.full((1, length), behind, dtype=torch.int64, device=device)
    row[0, : len(ids)] = torch.tensor(ids)
    found: list[Tensor] = []

    def see(outputs: Any, batch: Batch) -> None:
        values = model.spec.logits(outputs)
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        if whole.shape[:2] != (1, length):
            shape = tuple(whole.shape)
            raise UsageError(
                f"sample needs a model that returns logits (batch, seq, vocabulary), found the shape {shape}"
            )
        found.append(whole[0, len(ids) - 1].detach().float().cpu())

    model.runner.evaluate([MicroBatch({"input_ids": row, "labels": row}, 0)], see)
    return found[0] if found else None


def _drawn(logits: Tensor, prompt: Prompt, generator: torch.Generator) -> int:
    if prompt.temperature == 0:
        return int(logits.argmax())
    logits = logits / prompt.temperature
    if prompt.top_k is not None and prompt.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(prompt.top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


def _with_whole_samples(job: Job, parts: Parts) -> tuple[Job, Parts]:
    """The job without axes that cut samples: one text that grows has no parts."""
    kept = {name: axis for name, axis in parts.parallelism.items() if not axis.traits.cuts_samples}
    tables = {name: table for name, table in job.parallelism.items() if name in kept or name not in parts.parallelism}
    return job.model_copy(update={"parallelism": tables}), replace(parts, parallelism=kept)


def _length(job: Job, parts: Parts) -> int:
    """Tokens of a sample in training."""
    longest = parts.model.max_seq_length if isinstance(parts.model, TokenModel) else None
    length = job.dataset.seq_length or longest
    if length is None:
        raise UsageError("sample needs the length of a sample; give [dataset] seq_length")
    return length
