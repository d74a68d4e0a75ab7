"""The tasks that a model of transformers can be trained for: the class that builds it, what it takes, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor

from hpctrain.api import Batch, UsageError
from hpctrain.toolkit.losses import IGNORED as IGNORED
from hpctrain.toolkit.losses import summed_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Task:
    """A kind of model. auto: transformers' class that builds it from a configuration. suffixes: how its classes' names end."""

    auto: str
    suffixes: tuple[str, ...]
    of_tokens: bool
    """Whether each token has a label; else each sample has."""


TASKS = {
    "causal-lm": Task("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel"), True),
    "masked-lm": Task("AutoModelForMaskedLM", ("ForMaskedLM",), True),
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", ("ForConditionalGeneration",), True),
    "token-classification": Task("AutoModelForTokenClassification", ("ForTokenClassification",), True),
    "sequence-classification": Task("AutoModelForSequenceClassification", ("ForSequenceClassification",), False),
    "image-classification": Task("AutoModelForImageClassification", ("ForImageClassification",), False),
    "audio-classification": Task("AutoModelForAudioClassification", ("ForAudioClassification",), False),
}


def task_of(given: str | None, config: PreTrainedConfig, path: Path | None) -> str:
    """The task that the job names, else that of the configuration's classes. Raises UsageError if they name none, and for one that
    transformers does not have for the configuration."""
    classes: list[str] = getattr(config, "architectures", None) or []
    classes_of = {name: _classes(task, config) for name, task in TASKS.items()}
    possible = [name for name, found in classes_of.items() if found]
    # one class may be there for several tasks, and one end of a name as well: a ForSequenceClassification of sounds
    exact = [name for name in possible if classes_of[name] & {*classes}]
    by_end = [name for name in possible for kind in classes if kind.endswith(TASKS[name].suffixes)]
    chosen = [given] if given is not None else [*(one for one in exact if one in by_end), *exact, *by_end]
    if not chosen or chosen[0] not in possible:
        where = "[model] config" if path is None else f"config.json in {path}"
        found = f"{where} names {' and '.join(classes) or 'no architectures'}" if given is None else f"found {given!r}"
        expected = f"a model of the type {config.model_type!r} is trained for {', '.join(map(repr, possible)) or 'no task here'}"
        raise UsageError(f"[model] task: {found}; {expected}")
    return chosen[0]


def _classes(task: Task, config: PreTrainedConfig) -> set[str]:
    """The names of the classes that transformers has for a configuration and a task; of a model's own code, those that it names.
    None for tasks of texts where the model reads images or sounds besides."""
    import transformers

    others = ("vision" in key or "audio" in key for key in getattr(config, "sub_configs", {}))
    if any(others) and task.auto not in ("AutoModelForImageClassification", "AutoModelForAudioClassification"):
        return set()
    own: Any = getattr(config, "auto_map", None) or {}
    mapping = getattr(transformers, task.auto)._model_mapping
    found = mapping.get(type(config), ())
    every = {one.__name__ for one in (found if isinstance(found, tuple) else (found,))}
    return every | {own[task.auto].rpartition(".")[2]} if task.auto in own else every


def count(task: Task, batch: Batch) -> int:
    """Labels that are not ignored; for a task of samples, the rows of the labels."""
    labels: Tensor = batch["labels"]
    return int((labels != IGNORED).sum()) if task.of_tokens else len(labels)


def problem_of(config: PreTrainedConfig, labels: Tensor) -> str:
    """transformers' `problem_type`, or what it takes it for where the configuration names none."""
    given = getattr(config, "problem_type", None)
    if given is not None:
        return str(given)
    if getattr(config, "num_labels", 2) == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def refuse_copies(task: str, batch: Batch) -> None:
    """Raises UsageError for labels that the model sees: of a causal language model its inputs, as transformers' Trainer takes them,
    of any other the next inputs."""
    ids, labels = batch.get("input_ids"), batch["labels"]
    if ids is None or ids.shape != labels.shape or ids.shape[-1] < 2:
        return
    counted = labels != IGNORED
    if not bool((ids[..., 1:] != ids[..., :-1]).any()) or not bool(counted.any()):
        return
    if task != "causal-lm":
        most, same = counted[..., :-1], (ids[..., 1:] == labels[..., :-1])[counted[..., :-1]]
        if 2 * int(most.sum()) > most.numel() and bool(same.all()):
            raise UsageError(
                f"[dataset]: the labels are the next input_ids, which a model with the task {task!r} sees and would learn to copy; "
                "expected labels of its own, such as the masked ids, or a model with the task 'causal-lm'"
            )
    elif bool((ids == labels)[counted].all()):
        raise UsageError(
            "[dataset]: the labels are the input_ids themselves, which the model would learn to copy; expected the label of each "
            "place to be the next id, as hpctrain's data sets give them: shift them by one"
        )


def loss(task: Task, problem: str | None, logits: Tensor, batch: Batch) -> Tensor:
    """The sum of the loss over what `count` counts, in at least float32.

    logits: (batch, seq, vocabulary) with labels (batch, seq), which the data set has shifted for a causal language model; or
    (batch, classes) with labels (batch,). problem: transformers' `problem_type`: "regression" is the mean squared error of a
    sample, "multi_label_classification" the mean binary cross entropy of a sample's classes.
    """
    labels: Tensor = batch["labels"]
    if task.of_tokens:
        return summed_cross_entropy(logits, labels)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if problem == "regression":
        return (wide - labels.to(wide.dtype).view(wide.shape)).square().flatten(1).mean(1).sum()
    if problem == "multi_label_classification":
        each = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none")
        return each.flatten(1).mean(1).sum()
    return F.cross_entropy(wide, labels, reduction="sum")


def inputs(task: str, pad: int | None, batch: Batch, routes: bool = False) -> dict[str, Any]:
    """The arguments of the module's forward: all entries of the batch but the labels.

    `positions` (seq,) of a packed row or from context parallelism is `position_ids` (1, seq), from which transformers tells the
    samples of a row apart. Where a token sees what comes after it, the attention
    must know what is padding: without an `attention_mask`, ids `pad` at the end of a row are. pad: transformers' `pad_token_id`.
    routes: whether the loss has that of a router, which must not see padding either.
    Raises UsageError for samples without names, and where padding is unknown.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            "[dataset]: the model 'huggingface' takes samples that name their entries, such as input_ids and labels; "
            f"found {type(batch).__name__}: let the data set give a dict"
        )
    given = {key: value for key, value in batch.items() if key not in ("labels", "positions", "documents")}
    if "positions" in batch:
        given["position_ids"] = batch["positions"].unsqueeze(0)
        if "documents" in batch and "attention_mask" in given:
            raise UsageError(
                "[batch] packing: found attention_mask in the samples, with which transformers does not keep them apart; leave it "
                "out: padding at the end of a sample needs none"
            )
        if "attention_mask" in given:
            raise UsageError(
                "[parallelism] context: found attention_mask in the samples, which ranks with parts of a sequence do not apply; "
                "leave it out: padding at the end of a row needs none"
            )
    if (task != "causal-lm" or routes) and "input_ids" in given and "attention_mask" not in given:
        if pad is None:
            raise UsageError(
                f"[dataset]: found no attention_mask beside input_ids, and the configuration has no pad_token_id: for {task!r} "
                "padding would count as text; give [model] config a pad_token_id, or let the data set give attention_mask"
            )
        at_the_end = (given["input_ids"] == pad).long().flip(-1).cumprod(-1).flip(-1)
        given["attention_mask"] = 1 - at_the_end
    return given
