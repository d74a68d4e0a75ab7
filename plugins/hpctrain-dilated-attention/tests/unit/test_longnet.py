"""The models: options, problems, sizes, operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import times_seen
from hpctrain_dilated_attention.model import CausalLongNet, LongNetEncoder, LongNetOptions

from hpctrain.api import HpctrainError, UsageError
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.model.build import build_on_meta

SIZES = {"longnet-125m": (12, 768), "longnet-350m": (24, 1024), "longnet-1.3b": (24, 2048)}
REST: dict[str, Any] = {
    "job": {"name": "long", "steps": 1},
    "model": {"name": "longnet"},
    "dataset": {"name": "synthetic", "seq_length": 64},
    "optimizer": {"name": "adamw", "lr": 1e-4},
    "batch": {"global_size": 2, "micro_size": 1},
}


def problems(**tables: Any) -> str:
    with pytest.raises(HpctrainError) as raised:
        check(
            RawJob({name: {**REST.get(name, {}), **tables.get(name, {})} for name in {**REST, **tables}}, {}, "j"), None
        )
    return str(raised.value)


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_published_sizes(name: str, tmp_path: Path) -> None:
    layers, hidden = SIZES[name]
    path = tmp_path / "job.toml"
    rest = "[job]\nname = 'sized'\nsteps = 1\n[dataset]\nname = 'synthetic'\n[optimizer]\nname = 'adamw'\nlr = 1e-4\n"
    path.write_text(f'extends = "preset:{name}"\n{rest}[batch]\nglobal_size = 1\nmicro_size = 1\n')
    spec = check(read_job(path), None).parts.model
    assert isinstance(spec, CausalLongNet)
    assert spec.pattern.groups == [(2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12)]
    counted = sum(one.numel() for one in build_on_meta(spec).parameters())
    # matrices and biases of a block, and its two norms; the embedding, which is the head, too; the last norm
    block = 12 * hidden**2 + 9 * hidden + 4 * hidden
    assert counted == layers * block + 100288 * hidden + 2 * hidden


@pytest.mark.parametrize("sparse", [{}, {"sparsity_ratio": 0.4, "block_size": 3}], ids=str)
def test_operations_are_those_of_the_pairs_that_see_each_other(sparse: dict[str, Any]) -> None:
    spec = CausalLongNet(
        LongNetOptions(
            hidden_size=16, layers=3, attention_heads=2, segment_lengths=[8, 20, 40], dilation_rates=[1, 2, 5], **sparse
        )
    )
    batch = {"input_ids": torch.zeros(2, 40, dtype=torch.long)}
    pairs = times_seen(LongNetEncoder(spec.options).pattern, 40, 2).sum()  # both sides of the diagonal, as for gpt
    matrices = 12 * 3 * 16**2 + 16 * 256
    assert spec.flops(batch) == 6 * matrices * 2 * 40 + 12 * 3 * 8 * 2 * int(pairs)


def test_an_encoder_refuses_labels_that_its_tokens_see() -> None:
    spec = LongNetEncoder(LongNetOptions(hidden_size=16, attention_heads=2))
    ids = torch.arange(48).view(2, 24)
    shifted = {"input_ids": ids, "labels": ids + 1}
    with pytest.raises(UsageError, match="the labels are the next tokens, which each token sees"):
        spec.count(shifted)
    assert CausalLongNet(spec.options).count(shifted) == 48
    hidden = torch.full_like(ids, -100)
    hidden[0, 2] = 3  # one of few hidden tokens may well be equal to the next one
    assert spec.count({"input_ids": ids, "labels": hidden}) == 1


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"model": {"hidden_size": 20, "attention_heads": 4}}, "a multiple of 2 x attention_heads = 8, found 20"),
        ({"model": {"segment_lengths": [8], "dilation_rates": [1, 2]}}, "found 2 and 1"),
        ({"model": {"segment_lengths": [8, 0], "dilation_rates": [1, 2]}}, "of at least 1"),
        ({"model": {"segment_lengths": [8], "dilation_rates": [2]}}, "expected a rate of 1"),
        ({"parallelism": {"context": {"size": 2, "method": "ring"}}}, "leave method = 'ring' out"),
        (
            {"compile": {"enabled": True}, "activation_checkpointing": {"mode": "selective"}},
            "dilated attention is not compiled",
        ),
        (
            {
                "model": {"name": "longnet-encoder"},
                "batch": {"tokens": 64, "micro_tokens": 64, "global_size": None, "micro_size": None},
            },
            "PaddedModel",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_can_not_be_right_is_refused(tables: dict[str, Any], sentence: str) -> None:
    assert sentence in problems(**tables)
