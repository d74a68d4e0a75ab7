"""The tasks that a model of transformers can be trained for: the class that builds it, what it takes, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor

from hpctrain.api import Batch, UsageError

IGNORED = -100
"""The label of a position that has no loss, as in torch's cross_entropy and in transformers."""


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


def task_of(architectures: list[str] | None, where: str) -> str:
    """The task of a configuration's classes. Raises UsageError if they name none."""
    for kind in architectures or ():
        for name, task in TASKS.items():
            if kind.endswith(task.suffixes):
                return name
    found = " and ".join(architectures) if architectures else "no architectures"
    raise UsageError(f"[model] task: {where} names {found}; expected task = {', '.join(map(repr, TASKS))}")


def count(task: Task, batch: Batch) -> int:
    """Labels that are not ignored; for a task of samples, the rows of the labels."""
    labels: Tensor = batch["labels"]
    return int((labels != IGNORED).sum()) if task.of_tokens else len(labels)


def loss(task: Task, problem: str | None, logits: Tensor, batch: Batch) -> Tensor:
    """The sum of the loss over what `count` counts, in at least float32.

    logits: (batch, seq, vocabulary) with labels (batch, seq), which the data set has shifted for a causal language model; or
    (batch, classes) with labels (batch,). problem: transformers' `problem_type`: "regression" is the mean squared error of a
    sample, "multi_label_classification" the mean binary cross entropy of a sample's classes.
    """
    labels: Tensor = batch["labels"]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if task.of_tokens:
        return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    if problem == "regression":
        return (wide - labels.to(wide.dtype).view(wide.shape)).square().flatten(1).mean(1).sum()
    if problem == "multi_label_classification":
        each = F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="none")
        return each.flatten(1).mean(1).sum()
    return F.cross_entropy(wide, labels, reduction="sum")


def inputs(task: str, pad: int | None, batch: Batch) -> dict[str, Any]:
    """The arguments of the module's forward: all entries of the batch but the labels.

    `positions` (seq,) from context parallelism is `position_ids` (1, seq). Where a token sees what comes after it, the attention
    must know what is padding: without an `attention_mask`, ids `pad` at the end of a row are. pad: transformers' `pad_token_id`.
    Raises UsageError for samples without names, and where padding is unknown.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            "[dataset]: the model 'huggingface' takes samples that name their entries, such as input_ids and labels; "
            f"found {type(batch).__name__}: let the data set give a dict",
            everywhere=True,
        )
    given = {key: value for key, value in batch.items() if key not in ("labels", "positions")}
    if "positions" in batch:
        given["position_ids"] = batch["positions"].unsqueeze(0)
        if "attention_mask" in given:
            raise UsageError(
                "[parallelism] context: found attention_mask in the samples, which ranks with parts of a sequence do not apply; "
                "leave it out: padding at the end of a row needs none",
                everywhere=True,
            )
    if task != "causal-lm" and "input_ids" in given and "attention_mask" not in given:
        if pad is None:
            raise UsageError(
                f"[dataset]: found no attention_mask beside input_ids, and the configuration has no pad_token_id: for {task!r} "
                "padding would count as text; give [model] config a pad_token_id, or let the data set give attention_mask",
                everywhere=True,
            )
        at_the_end = (given["input_ids"] == pad).long().flip(-1).cumprod(-1).flip(-1)
        given["attention_mask"] = 1 - at_the_end
    return given
