"""Models of the hub as typed: an adapter, its resume on other ranks, its export, and what other programs load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hub_models
import pytest
import tomli_w
from launching import Finished, run

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
ELSEWHERE = """
import sys, torch
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained("saved")
if sys.argv[1] == "adapter":
    from peft import PeftModel
    base = PeftModel.from_pretrained(base, "adapter")
else:
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert "hpctrain" not in sys.modules
with torch.no_grad():
    torch.save(base.eval()(torch.arange(12)[None] * 5 % 61).logits, sys.argv[1] + ".pt")
"""


def job(path: Path, **tables: dict[str, Any]) -> Path:
    made = hub_models.job(path.parent / "run", path.parent / "saved", **{"precision": {"mode": "fp32"}, **tables})
    path.write_text(tomli_w.dumps(made))
    return path


def hpctrain(directory: Path, *words: str) -> Finished:
    done = run([HPCTRAIN, *words], directory, timeout=200)
    assert done.code == 0, done
    return done


def losses(directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "grad_norm" in row]


@pytest.mark.nightly
def test_an_adapter_goes_to_other_ranks_and_to_other_programs(tmp_path: Path) -> None:
    import torch

    import hpctrain as library

    hub_models.save(hub_models.CONFIGS["llama"], tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    model = {"adapter": {"kind": "lora", "r": 4, "target_modules": "all-linear"}}
    layout = {"sharding": {"stage": 3}, "parallelism": {"tensor": 2}}
    hpctrain(tmp_path, "run", str(job(tmp_path / "job.toml", model=model, **layout)), "-n", "2")
    newest = tmp_path / "run" / "checkpoints" / "latest"
    for out, words in (("adapter", []), ("merged", ["--merged"])):
        hpctrain(tmp_path, "checkpoint", "export", str(newest), "--to", "huggingface", out, *words)
        assert (tmp_path / out / "tokenizer.json").is_file()
        done = run([sys.executable, "-c", ELSEWHERE, out], tmp_path, timeout=100)
        assert done.code == 0, done
    with torch.no_grad():
        mine = library.load(newest)(torch.arange(12)[None] * 5 % 61).logits
    for out in ("adapter", "merged"):
        torch.testing.assert_close(torch.load(tmp_path / f"{out}.pt"), mine, rtol=1e-5, atol=1e-5)
    plain = torch.load(run_plainly(tmp_path))
    assert (plain - mine).abs().max() > 1e-3, "the training has changed nothing"
    # the same training from its middle on, on twice as many ranks in another layout, and on one
    stored = hpctrain(tmp_path, "checkpoint", "show", str(newest), "--json")
    names = [name for name in json.loads(stored.out)["tensors"] if name.startswith("model/")]
    assert names and all("lora_" in name for name in names), "more than the adapter is in the checkpoint"
    more = {"job": {"steps": 7}, "model": model}
    hpctrain(tmp_path, "run", str(job(tmp_path / "job.toml", sharding={"stage": 2}, **more)), "-n", "4")
    found = losses(tmp_path / "run")
    alone = {**more, "job": {"steps": 7, "output_dir": str(tmp_path / "alone")}}
    hpctrain(tmp_path, "run", str(job(tmp_path / "alone.toml", **alone)))
    assert found == pytest.approx(losses(tmp_path / "alone"), rel=2e-5)


def run_plainly(directory: Path) -> Path:
    done = run([sys.executable, "-c", ELSEWHERE, "saved"], directory, timeout=100)
    assert done.code == 0, done
    return directory / "saved.pt"


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("gpt2", "gemma3", "mixtral"))]
)
def test_a_plan_for_accelerators_where_tables_of_positions_have_values(tmp_path: Path, name: str) -> None:
    tables = hub_models.job(tmp_path / "run", tmp_path, sharding={"stage": 3}, precision={"mode": "bf16"})
    config = {key: value for key, value in hub_models.CONFIGS[name].items() if value is not None}
    tables["model"] = {"name": "huggingface", "config": config, "task": "causal-lm"}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    done = hpctrain(tmp_path, "plan", "job.toml", "--machine", "h100", "--json", "-n", "4")
    from transformers import AutoConfig, AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    elements = sum(one.numel() for one in module.parameters())
    assert elements <= json.loads(done.out)["of_ranks"][0]["parameters_bytes"] < 1.2 * elements, "4 bytes, on 4 ranks"


SHAPES = """
import torch


def samples(split, kind):
    of = {
        "bert": {"input_ids": torch.arange(8), "labels": torch.tensor(1)},
        "t5": {"input_ids": torch.arange(8), "labels": torch.arange(8)},
        "vit": {"pixel_values": torch.ones(3, 8, 8), "labels": torch.tensor(1)},
    }
    return [of[kind]] * 24 if split == "train" else None
"""
_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 5}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "task", "config"),
    [
        ("bert", "sequence-classification", {"vocab_size": 61, **_SMALL}),
        ("t5", "seq2seq-lm", {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
                              "decoder_start_token_id": 0}),
        ("vit", "image-classification", {"image_size": 8, "patch_size": 4, **_SMALL}),
    ],
)  # fmt: skip
def test_a_plan_of_other_models_than_causal_ones(tmp_path: Path, kind: str, task: str, config: dict[str, Any]) -> None:
    (tmp_path / "shapes.py").write_text(SHAPES)
    tables = hub_models.job(tmp_path / "run", tmp_path, sharding={"stage": 3}, precision={"mode": "bf16"})
    tables.pop("evaluation")
    tables |= {
        "model": {"name": "huggingface", "config": {"model_type": kind, **config}, "task": task},
        "dataset": {"name": "shapes:samples", "kind": kind}, "batch": {"global_size": 24, "micro_size": 3},
    }  # fmt: skip
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    done = hpctrain(tmp_path, "plan", "job.toml", "--machine", "h100", "--json", "-n", "4")
    assert json.loads(done.out)["of_ranks"][0]["parameters_bytes"] > 0, done
