"""A model of transformers that classifies texts, its data and its loss, for a job of hpctrain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def build(directory: str, labels: int) -> torch.nn.Module:
    """The model with its pretrained weights and a new head."""
    made: torch.nn.Module = AutoModelForSequenceClassification.from_pretrained(_there(directory), num_labels=labels)
    return made


def loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean over a micro batch. outputs: what the model returns; target: (batch,)"""
    return cross_entropy(outputs.logits, target)


def samples(split: str, directory: str, files: Mapping[str, str], length: int) -> torch.utils.data.Dataset[Any] | None:
    """The texts of a split ("train", "validation" or "test"); None if there are none."""
    return Texts(files[split], directory, length) if split in files else None


class Texts(torch.utils.data.Dataset[Any]):
    """Reads JSON lines with `text` and `label`, and encodes a text when it is asked for."""

    def __init__(self, file: str, directory: str, length: int) -> None:
        self._rows = [
            json.loads(line) for line in _there(file).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        self._tokenizer, self._length = AutoTokenizer.from_pretrained(_there(directory)), length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The model's arguments, (length,) each, and the label."""
        row = self._rows[index]
        encoded = self._tokenizer(
            row["text"], truncation=True, max_length=self._length, padding="max_length", return_tensors="pt"
        )
        return {**{name: value[0] for name, value in encoded.items()}, "labels": row["label"]}


def _there(path: str) -> Path:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}; give its path in the job file")
    return Path(path)
