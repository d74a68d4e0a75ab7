"""Models of transformers over ranks, held against a plain loop on what from_pretrained gives."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from hub_models import ARCHITECTURES, CONFIGS
from plain import samples_of, train_plainly
from test_stages import compare
from test_token_batches import losses_of, mean_loss
from torch import Tensor
from torch.distributed.tensor import DTensor
from training import nightly, session_of, thorough, train_here

from hpctrain.data.order import SampleOrder
from hpctrain.job.problems import JobError
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

ADAPTER = {"kind": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def saved(root: Path, name: str) -> Path:
    """A model that rank 0 has saved."""
    path = root / "saved"
    if dist.get_rank() == 0:
        hub_models.save(ARCHITECTURES[name], path, max_shard_size="20KB")
    dist.barrier()
    return path


def plain(path: Path) -> Any:
    """The model of from_pretrained, in fp64, with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    kinds = {"experts_implementation": "eager", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **kinds)


TENSOR: dict[str, Any] = {"parallelism": {"tensor": 2}}
STAGE_3: dict[str, Any] = {"sharding": {"stage": 3}}
SEQUENCE: dict[str, Any] = {"parallelism": {"tensor": {"size": 2, "sequence_parallel": True}}}
CONTEXT: dict[str, Any] = {"parallelism": {"context": 2}}
PIPELINE: dict[str, Any] = {"parallelism": {"pipeline": 2}}


@pytest.mark.cases(
    default=["llama-{'parallelism': {'tensor': {'size': 2, 'sequence_parallel': True}}}"],
    thorough=[
        "mixtral-{'sharding': {'stage': 3}}",
        "llama-{'parallelism': {'context': 2}}",
        "gemma2-{'parallelism': {'pipeline': 2}}",
    ],
    rest="nightly",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", STAGE_3),
        pytest.param("llama", {**TENSOR, **STAGE_3}, marks=pytest.mark.shown_on(4)),
        pytest.param("llama, tied", TENSOR, marks=pytest.mark.shown_on(2)),
        pytest.param("qwen3", TENSOR, marks=pytest.mark.shown_on(2)),
        ("mixtral", STAGE_3),
        pytest.param("llama", SEQUENCE, marks=pytest.mark.shown_on(2)),
        pytest.param("llama", {**SEQUENCE, **STAGE_3}, marks=[pytest.mark.shown_on(4), pytest.mark.nightly]),
        *(
            pytest.param(name, SEQUENCE, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for name in ("llama, tied", "qwen3", "mistral", "gemma2", "gemma3", "phi3")
        ),
        pytest.param("llama", CONTEXT, marks=pytest.mark.shown_on(2)),
        pytest.param("gpt2", PIPELINE, marks=pytest.mark.shown_on(2)),
        pytest.param("gemma2", PIPELINE, marks=pytest.mark.shown_on(2)),
        pytest.param("llama, tied", {**PIPELINE, "sharding": {"stage": 2}}, marks=pytest.mark.shown_on(4)),
        *(
            pytest.param(name, PIPELINE, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for name in ("llama", "qwen3", "mistral", "gemma3", "phi3", "mixtral", "qwen3_moe")
        ),
        *(
            pytest.param(name, CONTEXT, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for name in ("llama, tied", "qwen3", "phi3", "gpt2", "mixtral")
        ),
        nightly("llama", {"sharding": {"stage": 2}}),
        nightly("llama, tied", STAGE_3),
        *(
            pytest.param(name, TENSOR, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for name in ("llama", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe")
        ),
        *(nightly(name, STAGE_3) for name in ("qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "qwen3_moe")),
    ],
    ids=str,
)
def test_a_model_of_the_hub(root: Path, name: str, layout: dict[str, Any]) -> None:
    path = saved(root, name)
    tables = hub_models.job(root / "run", path, **layout)
    expected = hub_models.trained_plainly(plain(path), tables)
    # the norms and routers of all but GPT-2 compute in float32, whatever the parameters are
    compare(train_here(tables).rows, expected, *((1e-10, 1e-8) if name == "gpt2" else (1e-7, 1e-6)))


@pytest.mark.cases(default=["llama-{'sharding': {'stage': 3}}"], rest="thorough")
@pytest.mark.shown_on(2)
@pytest.mark.parametrize(
    ("name", "layout"), [("llama", STAGE_3), ("llama, tied", TENSOR), ("gpt2", CONTEXT), ("mixtral", {})], ids=str
)
def test_a_loss_in_chunks(root: Path, name: str, layout: dict[str, Any]) -> None:
    path = saved(root, name)
    tables = hub_models.job(root / "run", path, model={"loss_chunk": 5}, **layout)
    expected = hub_models.trained_plainly(plain(path), tables)
    compare(train_here(tables).rows, expected, *((1e-10, 1e-8) if name == "gpt2" else (1e-7, 1e-6)))


@pytest.mark.shown_on(2)
def test_units_that_are_gathered_in_16_bits_stay_near_the_curve(root: Path) -> None:
    path = saved(root, "llama")
    tables = hub_models.job(root / "run", path, **STAGE_3, precision={"mode": "bf16"})
    compare(train_here(tables).rows, hub_models.trained_plainly(plain(path), tables), *BOUNDS["bf16"])


PADDED: dict[str, Any] = {"batch": {"packing": False}}
ULYSSES: dict[str, Any] = {"parallelism": {"context": {"size": 2, "method": "ulysses"}}}


@pytest.mark.cases(thorough=["mistral-{'sharding': {'stage': 3}}"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("mistral", STAGE_3, marks=pytest.mark.shown_on(2)),
        pytest.param("llama", CONTEXT, marks=pytest.mark.shown_on(2)),
        # whose samples transformers' own masks would not keep apart
        *(nightly(name, {}) for name in (*CONFIGS, "gpt_oss")),
        *(nightly(name, layout) for layout in (STAGE_3, PADDED) for name in ("gemma2", "gemma3", "qwen2, windows")),
        *(
            pytest.param(name, layout, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for layout in (CONTEXT, ULYSSES)
            for name in ("llama, tied", "qwen3", "phi3", "gpt2", "mixtral")
        ),
        *(
            pytest.param(name, TENSOR, marks=[pytest.mark.shown_on(2), pytest.mark.nightly])
            for name in CONFIGS
            if name != "gpt2"
        ),
    ],
    ids=str,
)
def test_packed_rows(root: Path, name: str, layout: dict[str, Any]) -> None:
    """Samples in a row with others, or padded, have the losses of samples that are forwarded one by one."""
    path = saved(root, name)
    dataset = {"samples": 40, "min_length": 1}
    tables = hub_models.job(root / "run", path, dataset=dataset, **layout)
    tables["batch"] = {"tokens": 70, "micro_tokens": 30, "packing": True, **layout.get("batch", {})}
    module = plain(path).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    alone = losses_of(tables, lambda ids: module(input_ids=ids, use_cache=False).logits)
    expected = train_plainly(module, optimizer, alone, tables["optimizer"]["clip_norm"])
    found = train_here(tables)
    compare(found.rows, expected, losses=1e-7, norms=1e-6)
    samples = [*map(samples_of(tables, "validation").__getitem__, range(6))]
    evaluated = mean_loss(lambda ids: module(input_ids=ids, use_cache=False).logits, samples)
    assert found.evaluations[-1]["evaluation_loss"] == pytest.approx(evaluated.item(), rel=1e-7)


def saved_adapter(root: Path, path: Path, **options: Any) -> Path:
    """A LoRA adapter that rank 0 has saved, whose matrices are all other than zero."""
    from peft import LoraConfig, get_peft_model

    adapter = root / "adapter"
    if dist.get_rank() == 0:
        torch.manual_seed(5)
        config = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules="all-linear", **options)
        model = get_peft_model(plain(path), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.2)
        model.save_pretrained(str(adapter))
    dist.barrier()
    return adapter


CHUNKED: dict[str, Any] = {"model": {"loss_chunk": 5}}


@pytest.mark.cases(thorough=["gpt2-{'sharding': {'stage': 2}}"], rest="nightly")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", STAGE_3),
        pytest.param("llama, tied", TENSOR, marks=pytest.mark.shown_on(2)),
        pytest.param("llama", {**TENSOR, **STAGE_3}, marks=pytest.mark.shown_on(4)),
        ("gpt2", {"sharding": {"stage": 2}}),
        nightly("llama", {**CHUNKED, **STAGE_3}),
        nightly("llama", {"sharding": {"stage": 1}}),
        nightly("llama", {"activation_checkpointing": {"mode": "full"}, **STAGE_3}),
        nightly("mixtral", STAGE_3),
    ],
    ids=str,
)
def test_an_adapter_of_peft(root: Path, name: str, layout: dict[str, Any]) -> None:
    from peft import PeftModel

    path = saved(root, name)
    adapter = saved_adapter(root, path)
    tables = hub_models.job(root / "run", path, **layout)
    tables["model"]["adapter"] = {"path": str(adapter)}
    module = PeftModel.from_pretrained(plain(path), str(adapter), is_trainable=True).double()
    expected = hub_models.trained_plainly(module, tables)
    found = train_here(tables)
    compare(found.rows, expected, losses=1e-7, norms=1e-6)


def pairs(split: str) -> list[dict[str, Tensor]]:
    """Pairs of answers of different lengths."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(30 if split == "train" else 7):
        sample = {}
        for side, length in (("chosen", 4 + number % 3), ("rejected", 3 + number % 5)):
            ids = torch.randint(0, hub_models.VOCABULARY, (length + 1,), generator=draw)
            labels = ids[1:].clone()
            labels[:2] = -100
            sample |= {f"{side}_input_ids": ids[:-1], f"{side}_labels": labels}
        made.append(sample)
    return made


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}


@pytest.mark.parametrize(
    ("layout", "dropout"),
    [
        thorough(STAGE_3, True),
        pytest.param(TENSOR, False, marks=pytest.mark.shown_on(2)),
        nightly({"sharding": {"stage": 2}}, False),
        nightly({}, True),
        nightly({"activation_checkpointing": {"mode": "full"}, **STAGE_3}, True),
    ],
    ids=str,
)
def test_preferences(root: Path, layout: dict[str, Any], dropout: bool) -> None:
    """DPO against its formula on a model of peft, pair by pair, without dropout; with the metrics of training and evaluation."""
    from peft import PeftModel

    path = saved(root, "gpt2" if "parallelism" not in layout else "llama")
    adapter = saved_adapter(root, path, lora_dropout=0.4 * dropout)
    tables = hub_models.job(root / "run", path, **layout)
    tables["model"] |= {"adapter": {"path": str(adapter)}, "preference": {"beta": 0.3}}
    tables["model"]["config"] = DROPOUT if dropout else {}
    tables["dataset"] = {"name": f"{__name__}:pairs"}
    module = PeftModel.from_pretrained(plain(path), str(adapter), is_trainable=True).double().eval()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    measured: list[dict[str, float]] = []

    def answer(sample: dict[str, Tensor], side: str) -> Tensor:
        """The log-probability of an answer."""
        ids, labels = sample[f"{side}_input_ids"], sample[f"{side}_labels"]
        of_ids = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        return sum((of_ids[place, one] for place, one in enumerate(labels) if one >= 0), torch.zeros(()))

    def loss(samples: list[dict[str, Tensor]]) -> Tensor:
        rewards = []
        for sample in samples:
            with torch.no_grad(), module.disable_adapter():
                before = torch.stack([answer(sample, side) for side in ("chosen", "rejected")])
            rewards.append(0.3 * (torch.stack([answer(sample, side) for side in ("chosen", "rejected")]) - before))
        chosen, rejected = torch.stack(rewards).unbind(1)
        means = chosen, rejected, chosen - rejected, (chosen > rejected).double()
        names = "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy"
        measured.append({name: one.mean().item() for name, one in zip(names, means, strict=True)})
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    samples = samples_of(tables)
    order = SampleOrder(len(samples), tables["job"]["seed"], samples.fingerprint())
    steps = ([samples[int(i)] for i in order.at(step * 24, step * 24 + 24)] for step in range(4))
    expected = train_plainly(module, optimizer, (partial(loss, one) for one in steps), clip_norm=1.0)
    last = loss(pairs("validation")).item()
    found = train_here(tables)
    compare(found.rows, expected, losses=1e-7, norms=1e-6)
    for row, rewards in zip(found.rows, measured[:4], strict=True):
        assert {name: row[name] for name in rewards} == pytest.approx(rewards, rel=1e-6)
    assert found.evaluations[-1]["evaluation_loss"] == pytest.approx(last, rel=1e-6)
    assert {name: found.evaluations[-1][f"evaluation_{name}"] for name in measured[4]} == pytest.approx(
        measured[4], rel=1e-6
    )


@pytest.mark.cases(thorough=["3"], nightly=["0"])
@pytest.mark.shown_on(2)  # which divides all rows
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_base_costs_no_gradients_and_no_state(root: Path, stage: int) -> None:
    """Bytes of what the optimizer holds, of gradients, and of a rank's part of the bf16 base."""
    path = saved(root, "llama")
    tables = hub_models.job(root / "run", path, sharding={"stage": stage})
    tables["optimizer"] = {"name": "adamw", "lr": 1e-3}
    tables["precision"] = {"mode": "fp32"}
    tables["model"] |= {"adapter": ADAPTER, "frozen_dtype": "bf16"}
    with session_of(tables) as session:
        train(session, StopRequest())
        model, ranks = session.model, dist.get_world_size()
        share = model.trained_elements / (1 if stage == 0 else ranks)
        held = sum(piece.tensor.numel() for piece in model.pieces)
        state = sum(t.nbytes for one in model.optimizer.state.values() for t in one.values() if t.dim())
        gradients = sum(piece.tensor.grad.nbytes for piece in model.pieces)
        frozen = [p for p in model.module.parameters() if not p.requires_grad]
        assert all(p.grad is None and p.dtype == torch.bfloat16 for p in frozen)
        assert {piece.tensor.dtype for piece in model.pieces} == {torch.float32}
        base = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in frozen)
        if stage == 3:
            assert base == pytest.approx(2 * (model.elements - model.trained_elements) / ranks, rel=0.1)
        assert held == pytest.approx(share, rel=0.15)
        assert (state, gradients) == (8 * held, 4 * held)


@pytest.mark.nightly
@pytest.mark.shown_on(4)
def test_no_rank_holds_the_weights(root: Path) -> None:
    """A gigabyte of weights over four ranks: the memory that a rank takes while it builds its quarter of the model."""
    config = {**CONFIGS["llama"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    path = root / "saved"
    if dist.get_rank() == 0:  # in a process of its own, whose memory goes with it
        words = [sys.executable, hub_models.__file__, json.dumps(config), str(path)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "MPI"))}
        subprocess.run(words, check=True, env=environment, timeout=50)
    dist.barrier()
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert size > 1e9
    tables = hub_models.job(root / "run", path, **STAGE_3)
    tables["precision"] = {"mode": "fp32"}
    tables["optimizer"] = {"name": "sgd", "lr": 0.1}
    with session_of({**tables, "model": {**tables["model"], "path": str(path)}}):
        pass  # imports, and pages of libraries
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with session_of(tables) as session:
        peak = memory("VmHWM") - before
        assert session.model.elements * 4 == pytest.approx(size, rel=0.01)
    assert peak < size / 3, (peak, size)


def memory(kind: str) -> int:
    """Bytes of this process, by the kernel's name."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(kind))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("gpt2", {}, "brings no plan, and a derived one cuts no activations"),
        ("mixtral", {}, "doesn't tell how model.layers.0.mlp"),
        ("llama", {"adapter": ADAPTER}, r"doesn't tell how .*q_proj.lora_A.default is cut"),
    ],
    ids=str,
)
@pytest.mark.shown_on(2)
def test_activations_are_cut_of_models_whose_plan_tells_how(
    root: Path, name: str, options: dict[str, Any], sentence: str
) -> None:
    tables = hub_models.job(root / "run", saved(root, name), **SEQUENCE)
    tables["model"] |= options
    with pytest.raises(JobError, match=sentence), session_of(tables):
        pass
