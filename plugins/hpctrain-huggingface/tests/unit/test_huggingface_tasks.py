"""Each task of transformers' models, held against the loss that transformers computes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
from torch import Tensor

import hpctrain

_BERT = {
    "model_type": "bert", "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_AST = {
    "model_type": "audio-spectrogram-transformer", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_length": 32, "num_mel_bins": 16, "num_labels": 5, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_WAV2VEC2 = {
    "model_type": "wav2vec2", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 24, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0, "num_labels": 5,
    "classifier_proj_size": 16, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0,
}  # fmt: skip
ROWS = 4


class Samples:
    """Samples of a kind, each with another length where it is text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        if self.kind in ("image", "audio", "sound"):
            shape = {"image": (3, 8, 8), "audio": (32, 16), "sound": (160,)}[self.kind]
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            name = "pixel_values" if self.kind == "image" else "input_values"
            return {name: values, "labels": torch.tensor(index % 5)}
        ids = torch.randint(2, 61, (4 + index % 5,), generator=draw)
        sample = {"input_ids": ids}  # the mask follows from the padding
        if self.kind in ("tokens", "decoder"):
            labels = torch.randint(2, 61, ids.shape, generator=draw)
            labels[0] = -100
            return {**sample, "labels": labels}
        of_sample = {
            "classes": torch.tensor(index % 5),
            "number": torch.tensor(index / 7, dtype=torch.float64),
            "several": (torch.arange(5) == index % 5).double(),
        }
        return {**sample, "labels": of_sample[self.kind]}


def samples(kind: str, split: str) -> Samples | None:
    return Samples(kind) if split == "train" else None


def padded(rows: list[dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """A batch as transformers takes it."""
    fill = {"input_ids": 0, "labels": -100}

    def stacked(name: str) -> Tensor:
        tensors = [row[name] for row in rows]
        if (name in fill and tensors[0].dim() and kind != "several") or name == "input_ids":
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill[name])
        return torch.stack(tensors)

    batch = {name: stacked(name) for name in rows[0]}
    if "input_ids" in batch:
        batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row["input_ids"])) for row in rows], True
        ).long()
    return batch


@pytest.mark.cases(
    default=[
        "AutoModelForTokenClassification--tokens",
        "AutoModelForSequenceClassification--classes",
        "AutoModelForAudioClassification--sound",
    ],
    rest="thorough",
)
@pytest.mark.parametrize(
    ("auto", "config", "kind"),
    [
        ("AutoModelForMaskedLM", _BERT, "tokens"),
        ("AutoModelForTokenClassification", {**_BERT, "num_labels": 61}, "tokens"),
        ("AutoModelForSequenceClassification", {**_BERT, "num_labels": 5}, "classes"),
        ("AutoModelForSequenceClassification", {**_BERT, "num_labels": 1, "problem_type": "regression"}, "number"),
        (
            "AutoModelForSequenceClassification",
            {**_BERT, "num_labels": 5, "problem_type": "multi_label_classification"},
            "several",
        ),
        ("AutoModelForSeq2SeqLM", _T5, "decoder"),
        ("AutoModelForImageClassification", _VIT, "image"),
        ("AutoModelForAudioClassification", _AST, "audio"),
        ("AutoModelForAudioClassification", _WAV2VEC2, "sound"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_loss_is_that_of_transformers(tmp_path: Path, auto: str, config: dict[str, Any], kind: str) -> None:
    import transformers

    path = hub_models.save(config, tmp_path / "saved", auto)
    tables = hub_models.job(tmp_path / "run", path)
    tables |= {
        "dataset": {"name": f"{__name__}:samples", "kind": kind},
        "batch": {"global_size": 3 * ROWS, "micro_size": 3 * ROWS},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    tables.pop("evaluation")
    hpctrain.run(tables)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    module = getattr(transformers, auto).from_pretrained(path, dtype=torch.float64).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    every = Samples(kind)
    batch = padded([every[i] for i in range(len(every))], kind)  # each step sees all of them
    for row in found:
        loss = module(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-7), (auto, row)
