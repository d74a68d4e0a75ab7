"""A row of a data set as a sample: ids, and a label for each or for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hpctrain.api import TrainingError, UsageError
from hpctrain_huggingface.dataset.options import HubDatasetOptions
from hpctrain_huggingface.model.tasks import IGNORED

Row = Mapping[str, Any]


def tokenizer_of(options: HubDatasetOptions) -> PreTrainedTokenizerBase:
    """Raises UsageError for a directory without a tokenizer, or, for conversations, one without a chat template."""
    path = options.tokenizer
    assert path is not None  # see HubDatasetOptions
    if not path.is_dir():
        raise UsageError(f"[dataset] tokenizer: there is no directory {path}; expected one that save_pretrained() made")
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise UsageError(f"[dataset] tokenizer: {path} has none: {str(error).strip().splitlines()[0]}") from error
    if options.messages is not None and not found.chat_template:
        raise UsageError(
            f"[dataset] messages: the tokenizer in {path} has no chat template; expected chat_template.jinja there"
        )
    return found


class Encoder:
    """Makes samples of rows."""

    def __init__(self, options: HubDatasetOptions, longest: int | None) -> None:
        """longest: tokens of a sample, at most."""
        self._options, self._longest = options, longest
        makes_text = options.text or options.messages or options.completion or options.chosen
        self.tokenizer = tokenizer_of(options) if makes_text else None

    def needed(self) -> list[str]:
        """The columns that rows must have."""
        keys = ("text", "label", "messages", "prompt", "completion", "chosen", "rejected")
        named = (getattr(self._options, key) for key in keys)
        return [name for name in named if name is not None] or list(self._options.columns)

    def sample(self, row: Row) -> dict[str, Tensor]:
        """The sample of a row. Raises TrainingError for a row of another form."""
        options = self._options
        try:
            if options.messages is not None:
                return self._continued(*self._conversation(row[options.messages]))
            if options.chosen is not None and options.rejected is not None:
                before = None if options.prompt is None else row[options.prompt]
                sides = {"chosen": row[options.chosen], "rejected": row[options.rejected]}
                made = {side: self._preferred(before, answer) for side, answer in sides.items()}
                return {f"{side}_{name}": one for side, entries in made.items() for name, one in entries.items()}
            if options.completion is not None:
                assert options.prompt is not None
                return self._continued(*self._answer(row[options.prompt], row[options.completion]))
            if options.text is not None:
                ids = self._ids(row[options.text])
                if options.label is None:
                    return self._continued(ids, [True] * len(ids))
                return {"input_ids": torch.tensor(ids[: self._longest]), "labels": torch.as_tensor(row[options.label])}
            return {name: torch.as_tensor(row[name]) for name in options.columns or row}
        except (TypeError, ValueError, KeyError) as error:
            raise TrainingError(
                f"[dataset]: a row can't be made into a sample: {type(error).__name__}: {error}"
            ) from error

    def _ids(self, text: str, begins: bool = True, ends: bool = True) -> list[int]:
        assert self.tokenizer is not None
        ids = list(self.tokenizer(text, add_special_tokens=begins)["input_ids"])
        end = self.tokenizer.eos_token_id
        if ends and self._options.end_of_text and isinstance(end, int) and ids[-1:] != [end]:
            ids.append(end)
        return ids

    def _answer(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """The ids of both, and whether each is part of the answer. The two are encoded apart, as at a generation."""
        before, after = self._ids(prompt, ends=False), self._ids(completion, begins=False)
        return before + after, [False] * len(before) + [True] * len(after)

    def _preferred(self, prompt: Any, answer: Any) -> dict[str, Tensor]:
        """A side of a pair: an answer to the prompt, or a conversation that begins with that of `prompt`."""
        if isinstance(answer, str):
            if not isinstance(prompt, str):
                raise ValueError("answers that are texts need a column prompt of texts")
            return self._continued(*self._answer(prompt, answer))
        begin = [] if prompt is None else list(prompt)
        return self._continued(*self._conversation([*begin, *answer], last_only=True))

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], last_only: bool = False
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and whether each is the assistant's, or in its last message.

        An assistant's turn is what the template writes behind its own prompt for a generation. Raises ValueError for a template
        that writes earlier turns otherwise once a later one is there.
        """
        whole = self._written(messages)
        answers = [not self._options.answers_only and not last_only] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or (last_only and number < len(messages) - 1):
                continue
            before = self._written(messages[:number], prompts=True)
            until = self._written(messages[: number + 1])
            if whole[: len(before)] != before or whole[: len(until)] != until:
                raise ValueError(
                    "the chat template changes earlier turns; set answers_only = false, or take another template"
                )
            answers[len(before) : len(until)] = [True] * (len(until) - len(before))
        return whole, answers

    def _written(self, messages: Sequence[Mapping[str, Any]], prompts: bool = False) -> list[int]:
        assert self.tokenizer is not None
        turns: Any = list(messages)
        made: Any = self.tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=prompts, return_dict=True
        )
        return list(made["input_ids"])

    def _continued(self, ids: Sequence[int], has_loss: Sequence[bool]) -> dict[str, Tensor]:
        """A sample of a language model: each place's label is the next id, where that has a loss. One of a row that is too short
        to have a label has one place."""
        end = None if self._longest is None else self._longest + 1
        whole, mask = torch.tensor(ids[:end], dtype=torch.long), torch.tensor(has_loss[:end], dtype=torch.bool)
        inputs, labels = whole[:-1], whole[1:].masked_fill(~mask[1:], IGNORED)
        least = self._longest if self._options.full_length and self._longest is not None else 1
        if len(inputs) < least:
            fill, lacking = getattr(self.tokenizer, "pad_token_id", None), least - len(inputs)
            inputs = F.pad(inputs, (0, lacking), value=fill if isinstance(fill, int) else 0)
            labels = F.pad(labels, (0, lacking), value=IGNORED)
        return {"input_ids": inputs, "labels": labels}
