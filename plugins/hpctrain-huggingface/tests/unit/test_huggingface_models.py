"""Models of transformers on one rank, held against a plain loop on what from_pretrained gives."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
from click.testing import CliRunner
from hpctrain_huggingface.model import attention
from hpctrain_huggingface.model.adapters import KINDS
from hpctrain_huggingface.model.options import HuggingFaceOptions
from hpctrain_huggingface.model.plugin import HuggingFace
from hub_models import ARCHITECTURES, CONFIGS
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import hpctrain
from hpctrain.api import Documents, HpctrainError, UsageError
from hpctrain.checking.check import check
from hpctrain.cli import cli
from hpctrain.job.raw import RawJob
from hpctrain.model.build import build_on_meta


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows(directory) if "grad_norm" in row]


@pytest.mark.cases(default=["qwen2, windows"], rest="thorough")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_losses_are_those_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path = hub_models.save(CONFIGS[name], tmp_path / "saved", max_shard_size="20KB")
    tables = hub_models.job(tmp_path / "run", path)
    tables["batch"] = {"global_size": 24, "micro_size": 24}
    hpctrain.run(tables)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    expected = hub_models.trained_plainly(plain, tables)
    found = steps_of(tmp_path / "run")
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-8)


def told(tables: dict[str, Any]) -> str:
    """The error of a job."""
    with pytest.raises(HpctrainError) as raised:
        hpctrain.run(tables)
    return str(raised.value)


@pytest.mark.thorough
def test_another_base_is_refused(tmp_path: Path) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    model = {"adapter": {"kind": "lora", "target_modules": ["q_proj"]}}
    hpctrain.run(hub_models.job(tmp_path / "run", path, model=model, job={"steps": 2}))
    hub_models.save({**CONFIGS["llama"], "initializer_range": 0.3}, path)
    found = told(hub_models.job(tmp_path / "run", path, model=model))
    assert "was saved without the model's frozen values, which were others than now" in found


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"path": "gone"}, "path: there is no directory gone, and no repository of that name in this machine's cache"),
        ({"config": {"hidden_sizes": 3}}, "config: 'hidden_sizes' is no key of transformers' LlamaConfig"),
        (
            {"config": {"hidden_size": 32}},
            "has the shape [61, 16], expected [61, 32]: the weights are of another model",
        ),
        ({"adapter": {"kind": "loro"}}, "[model] adapter: found an adapter of the kind 'loro', expected one of beft, "),
        ({"adapter": {"kind": "lora", "rank": 3}}, "[model] adapter: 'rank' is no key of peft's LoraConfig"),
        (
            {"adapter": {"kind": "lora", "target_modules": ["gone"]}},
            "[model] adapter: Target modules {'gone'} not found",
        ),
        ({"adapter": {"kind": "lora", "use_dora": True}}, "use_dora needs whole matrices of the base"),
        ({"adapter": {"path": "gone"}}, "expected adapter_config.json and adapter_model.safetensors in gone"),
        ({"preference": {"beta": 0.1}}, "preference needs an adapter"),
        ({"frozen_dtype": "bf16"}, "frozen_dtype goes with an adapter"),
        ({"adapter": {"kind": "adalora", "total_step": 4}}, "found an adapter of the kind 'adalora', expected one of"),
        (
            {
                "adapter": {"kind": "lora", "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
                "config": {"tie_word_embeddings": True},
            },
            "ensure_weight_tying would tie the adapters of two layers",
        ),
        ({"adapter": {"kind": "vera"}}, "found an adapter of the kind 'vera', expected one of"),
        ({"adapter": {"kind": "lora", "trainable_token_indices": [3]}}, "trainable_token_indices needs whole matrices"),
        (
            {"task": "image-classification"},
            "task: found 'image-classification'; a model of the type 'llama' is trained for 'causal-lm', ",
        ),
        (
            {"config": {"num_hidden_layers": 1}},
            "has besides model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
            "model.layers.1.mlp.gate_proj.weight, ...: its weights are of another model than the LlamaForCausalLM",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_get_a_sentence(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    with pytest.raises(HpctrainError) as raised:
        check(RawJob(hub_models.job(tmp_path / "run", path, model=keys), {}, "job"), 1)
    assert sentence in str(raised.value).replace("\n", " ")


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        ("llava", "LlavaForConditionalGeneration", "trained for no task here"),
        ("gemma3", "Gemma3ForConditionalGeneration", "trained for no task here"),
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "trained for no task here"),
        ("whisper", "WhisperForConditionalGeneration", "trained for 'causal-lm', 'audio-classification'"),
        (
            "bert",
            "BertForQuestionAnswering",
            "names BertForQuestionAnswering; a model of the type 'bert' is trained for",
        ),
        ("bert", "BertLMHeadModel", "would learn to copy; set [model] config = { is_decoder = true }"),
        ("xlnet", "XLNetLMHeadModel", "would learn to copy"),
        ("xlm", "XLMWithLMHeadModel", "would learn to copy"),
        ("wav2vec2", "Wav2Vec2ForCTC", "trained for 'audio-classification'"),
        ("hubert", "HubertForSequenceClassification", "audio-classification"),
        ("bart", "BartForConditionalGeneration", "seq2seq-lm"),
        ("falcon_mamba", "FalconMambaForCausalLM", "causal-lm"),
        ("git", "GitForCausalLM", "trained for no task here"),
    ],
    ids=str,
)
def test_the_task_is_that_of_the_architecture(kind: str, architecture: str, expected: str) -> None:
    options = HuggingFaceOptions(config={"model_type": kind, "architectures": [architecture]})
    try:
        spec = HuggingFace(options)
        build_on_meta(spec)
        found = spec.task
    except HpctrainError as error:
        found = str(error)
    assert expected in found


@pytest.mark.parametrize(
    "adapter",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_an_adapter_on_tied_embeddings_exports_the_trained_model(tmp_path: Path, adapter: dict[str, Any]) -> None:
    path = hub_models.save(CONFIGS["llama, tied"], tmp_path / "saved")
    model = {"adapter": {"kind": "lora", "r": 4, "target_modules": ["q_proj"], **adapter}}
    tables = hub_models.job(tmp_path / "run", path, precision={"mode": "fp32"}, model=model)
    refuse_other_exports(tmp_path, path, tables)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_adapter_exports_what_peft_loads(tmp_path: Path, kind: str) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    model = {"adapter": {"kind": kind, "target_modules": ["q_proj", "v_proj"]}}
    if kind == "ia3":
        model["adapter"]["feedforward_modules"] = []
    tables = hub_models.job(tmp_path / "run", path, precision={"mode": "fp32"}, model=model)
    refuse_other_exports(tmp_path, path, tables)


def refuse_other_exports(tmp_path: Path, path: Path, tables: dict[str, Any]) -> None:
    """Compares the trained model with what peft and transformers load of its exports."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, kind = torch.arange(12)[None] * 5 % 61, tables["model"]["adapter"]["kind"]
    checkpoint = hpctrain.run(tables)["checkpoint"]
    base = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected, before = hpctrain.load(checkpoint)(input_ids=ids).logits, base(input_ids=ids).logits
        assert (expected - before).abs().max() > 1e-3, "the training has changed nothing"
        for words in ([], ["--merged"]):
            out = tmp_path / f"out{len(words)}"
            done = CliRunner().invoke(
                cli, ["checkpoint", "export", str(checkpoint), "--to", "huggingface", str(out), *words]
            )
            if words and kind in ("beft", "lily"):  # peft adds neither to such a base
                assert isinstance(done.exception, HpctrainError) and "export the adapter alone" in str(done.exception)
                continue
            assert done.exit_code == 0, done.output
            found = AutoModelForCausalLM.from_pretrained(out) if words else PeftModel.from_pretrained(base, str(out))
            torch.testing.assert_close(found(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_initial_values_are_distributed_as_transformers_draws_them(name: str) -> None:
    """Mean and deviation of each parameter that begins with random values, and equality of the others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpctrain.checking.check import check
    from hpctrain.job.raw import RawJob

    config = {**CONFIGS[name], "vocab_size": 4001}
    tables = hub_models.job(Path("run"), Path("unused"))
    tables["model"] = {"name": "huggingface", "config": {**config, "architectures": ["XForCausalLM"]}}
    spec = check(RawJob(tables, {}, "job"), None).parts.model
    with torch.device("meta"):
        module = spec.build()
    torch.manual_seed(0)
    plain = dict(AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).named_parameters())
    for key, like in module.named_parameters():
        mine = torch.empty(like.shape)
        spec.initialize(key, mine, (0, len(mine)), 5)
        other = plain[key].detach()
        if other.std() == 0:
            assert torch.equal(mine, other), key
            continue
        off = 5 * other.std() / other.numel() ** 0.5  # five times the error of a mean of so many
        assert (mine.mean() - other.mean()).abs() < off * 1.5 and (mine.std() - other.std()).abs() < off, key
        half = torch.empty(like.shape)[3:]
        spec.initialize(key, half, (3, len(mine)), 5)
        assert torch.equal(half, mine[3:]), key


@pytest.mark.thorough
def test_the_built_in_gpt_exports_as_a_model_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tables = hub_models.job(tmp_path / "run", Path("unused"), precision={"mode": "fp32"})
    tables["model"] = {
        "name": "gpt", "hidden_size": 20, "layers": 2, "attention_heads": 2, "vocab_size": 61, "max_seq_length": 16,
    }  # fmt: skip
    for tied in (False, True):
        tables["model"]["tie_embeddings"] = tied
        tables["job"]["output_dir"] = str(tmp_path / f"run{tied}")
        result = hpctrain.run(tables)
        done = CliRunner().invoke(
            cli,
            ["checkpoint", "export", str(result["checkpoint"]), "--to", "huggingface", str(tmp_path / f"out{tied}")],
        )
        assert done.exit_code == 0 and "GPT2LMHeadModel" in done.output, done.output
        module = hpctrain.load(result["checkpoint"])
        ids = torch.arange(12)[None] * 5 % 61
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(tmp_path / f"out{tied}")(ids).logits
            torch.testing.assert_close(found, module(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_export_writes_what_other_libraries_load(tmp_path: Path) -> None:
    """A mixture of experts in several files with the names of its release; an adapter alone, and added to its base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = hub_models.save(CONFIGS["mixtral"], tmp_path / "saved")
    (path / "tokenizer.json").write_text("{}")
    ids = torch.arange(12)[None] * 5 % 61
    for adapter in (
        None,
        {"kind": "lora", "r": 4, "target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"]},
    ):
        tables = hub_models.job(tmp_path / f"run{bool(adapter)}", path, precision={"mode": "fp32"})
        tables["model"] |= {"adapter": adapter or {}, "experts": "eager"}
        tables["hook"] = [{"name": "huggingface-export", "merged": bool(adapter)}]
        checkpoint = hpctrain.run(tables)["checkpoint"]
        with torch.no_grad():
            expected = hpctrain.load(checkpoint)(input_ids=ids).logits
            at_the_end = AutoModelForCausalLM.from_pretrained(
                tmp_path / f"run{bool(adapter)}" / "export", experts_implementation="eager"
            )
            torch.testing.assert_close(at_the_end(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        for words in ([], ["--merged"]) if adapter else ([],):
            out = tmp_path / f"out{bool(adapter)}{len(words)}"
            done = CliRunner().invoke(
                cli, ["checkpoint", "export", str(checkpoint), "--to", "huggingface", str(out), *words]
            )
            assert done.exit_code == 0 and (out / "tokenizer.json").is_file(), done.output
            base = path if adapter and not words else out
            module = AutoModelForCausalLM.from_pretrained(base, experts_implementation="eager")
            if adapter and not words:
                module = PeftModel.from_pretrained(module, str(out))
            with torch.no_grad():
                torch.testing.assert_close(module(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    stored = {name for file in (tmp_path / "outFalse0").glob("*.safetensors") for name in load_file(file)}
    assert stored == {name for file in path.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.thorough
def test_layers_that_the_files_lack_are_refused_and_heads_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    longer = told(hub_models.job(tmp_path / "longer", path, model={"config": {"num_hidden_layers": 3}}))
    assert (
        "lacks model.layers.2.self_attn.q_proj.weight" in longer
        and "of another model than the LlamaForCausalLM of the configuration" in longer
    )
    config = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3, "pad_token_id": 0}
    tables = hub_models.job(tmp_path / "head", path, model={"config": config}, job={"steps": 1})
    tables["dataset"] = {"name": f"{__name__}:classes"}
    tables.pop("evaluation")
    hpctrain.run(tables)
    found = " ".join(record.getMessage() for record in caplog.records)
    assert "lacks score.weight, which begin with random values" in found
    assert "the model has no use for lm_head.weight" in found


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_of_another_model_end_the_start(tmp_path: Path, stage: int) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    tables = hub_models.job(tmp_path / "run", path, sharding={"stage": stage})
    file = path / "model.safetensors"
    state = load_file(file)
    save_file({**state, "head.weight": torch.zeros(3)}, file)
    assert "has besides head.weight: its weights are of another model than the LlamaForCausalLM" in told(tables)
    state["head.weight"] = state.pop("lm_head.weight")
    save_file(state, file)
    assert "lacks lm_head.weight and has besides head.weight: its weights are of another model" in told(tables)


def test_a_head_of_another_class_of_the_architecture_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the hub's BERT, which calls itself BertForMaskedLM."""
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    path = hub_models.save(config, tmp_path / "saved", "AutoModelForPreTraining")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "architectures": ["BertForMaskedLM"]}))
    tables = hub_models.job(tmp_path / "run", path, job={"steps": 1})
    assert "which a model with the task 'masked-lm' sees and would learn to copy" in told(tables), "next tokens"
    tables.pop("evaluation", None)
    hpctrain.run({**tables, "dataset": {"name": f"{__name__}:quarter_masked"}})
    assert "the model has no use for bert.pooler.dense.bias" in " ".join(one.getMessage() for one in caplog.records)


def quarter_masked(split: str) -> list[dict[str, torch.Tensor]] | None:
    """Texts of which every fourth token is masked."""
    ids = [torch.arange(8) + row % 5 for row in range(24)]
    at = torch.arange(8) % 4 == 0
    return (
        [{"input_ids": one.where(~at, 1), "labels": one.where(at, -100)} for one in ids] if split == "train" else None
    )


def classes(split: str) -> list[dict[str, torch.Tensor]] | None:
    """Texts of one length in three classes."""
    rows = [{"input_ids": torch.arange(6) + row % 5, "labels": torch.tensor(row % 3)} for row in range(24)]
    return rows if split == "train" else None


def test_tied_parameters_that_are_stored_apart_are_refused(tmp_path: Path) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    found = told(hub_models.job(tmp_path / "run", path, model={"config": {"tie_word_embeddings": True}}))
    assert "with different values, and the configuration ties them; set [model] config = { tie_word_embeddings" in found


def test_labels_that_are_the_inputs_are_refused(tmp_path: Path) -> None:
    path = hub_models.save(CONFIGS["llama"], tmp_path / "saved")
    tables = hub_models.job(tmp_path / "run", path)
    tables["dataset"] = {"name": f"{__name__}:unshifted"}
    tables.pop("evaluation")
    assert "the labels are the input_ids themselves, which the model would learn to copy" in told(tables)


def test_what_transformers_would_not_keep_apart_in_a_row_is_refused(tmp_path: Path) -> None:
    batch = {"tokens": 60, "micro_tokens": 30, "packing": True}
    router = {"config": {"output_router_logits": True}}
    tables = hub_models.job(tmp_path / "run", hub_models.save(CONFIGS["mixtral"], tmp_path / "experts"), model=router)
    assert "packing: the loss of the router would need a mask" in told({**tables, "batch": batch})
    tables = hub_models.job(tmp_path / "other", hub_models.save(CONFIGS["llama"], tmp_path / "saved"))
    tables |= {"dataset": {"name": f"{__name__}:masked"}, "batch": batch}
    tables.pop("evaluation")
    assert "packing: found attention_mask in the samples" in told(tables)


class masked:  # noqa: N801
    """Samples with a mask of their own."""

    def __init__(self, split: str) -> None:
        self.has = 24 if split == "train" else 0

    def __len__(self) -> int:
        return self.has

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(7) + index
        return {"input_ids": ids[:-1], "labels": ids[1:], "attention_mask": torch.ones(6)}

    def lengths(self) -> list[int]:
        return [6] * self.has


def unshifted(split: str) -> list[dict[str, torch.Tensor]] | None:
    """Samples as transformers' Trainer takes them."""
    rows = [{"input_ids": torch.arange(6) + row, "labels": torch.arange(6) + row} for row in range(24)]
    return rows if split == "train" else None


def test_draws_that_torch_leaves_out_on_the_meta_device_are_repeated() -> None:
    """ViT's embeddings are truncated normal numbers; a mask that a pipeline's later layers would not see is refused."""
    from hpctrain.checking.check import check
    from hpctrain.job.raw import RawJob

    config = {
        "model_type": "vit", "image_size": 32, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 24, "initializer_range": 0.5,
        "architectures": ["ViTForImageClassification"],
    }  # fmt: skip
    tables = hub_models.job(Path("run"), Path("unused"))
    tables["model"] = {"name": "huggingface", "config": config}
    tables["dataset"] = {"name": f"{__name__}:classes"}
    tables.pop("evaluation")
    spec = check(RawJob(tables, {}, "job"), None).parts.model
    with torch.device("meta"):
        module = spec.build()
    name = next(name for name, _ in module.named_parameters() if name.endswith("position_embeddings"))
    values = torch.empty(module.get_parameter(name).shape)
    spec.initialize(name, values, (0, len(values)), 3)
    assert values.abs().max() <= 2.0 and values.std() == pytest.approx(0.5, rel=0.05)
    tables["model"] = {"name": "huggingface", "config": {**CONFIGS["llama"], "architectures": ["LlamaForCausalLM"]}}
    causal: Any = check(RawJob(tables, {}, "job"), None).parts.model
    with pytest.raises(HpctrainError, match="found attention_mask in the samples, which layers on other ranks"):
        causal.embed(module, {"input_ids": torch.ones(1, 4), "attention_mask": torch.ones(1, 4)})


def test_a_model_that_leaves_layers_out_is_not_cut() -> None:
    from hpctrain_huggingface.model.layers import Decoder
    from transformers import AutoConfig, AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["llama"]))
    decoder = Decoder.of(module)
    assert decoder is not None and len(decoder.others(torch.zeros(1, 4, 16))) == 2
    module.config.num_hidden_layers = 1  # its forward goes by this number
    with pytest.raises(HpctrainError, match="LlamaForCausalLM can't be cut: its forward calls 1 of its 2 layers"):
        decoder.others(torch.zeros(1, 4, 16))


class Reads(TorchDispatchMode):
    """Counts the operators for whose result the program waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


_WINDOWS = ["mistral", "gemma2", "gemma3", "qwen2, windows", "gpt_oss"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "phi3", *_WINDOWS])
def test_attention_sees_what_transformers_shows_it_and_reads_no_tensor(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path = hub_models.save(ARCHITECTURES[name], tmp_path / "saved")
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
    theirs.set_attn_implementation("eager")
    spec = check(RawJob(hub_models.job(tmp_path / "run", path), {}, "job"), None).parts.model
    ours.config.use_cache = False  # as in a build
    attention.attend_causally(ours)
    assert attention.is_given(ours)
    ids, lengths = torch.arange(24).view(2, 12) * 7 % 50 + 3, [7, 1, 4]
    positions = torch.cat([torch.arange(length) for length in lengths])
    padding = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    masked = {"attention_mask": padding}
    alone = torch.cat([theirs(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)], 1)
    for given, expected in (
        ({}, theirs(input_ids=ids, use_cache=False).logits),
        (masked, theirs(input_ids=ids, use_cache=False, **masked).logits),
        ({"position_ids": positions.expand(2, -1)}, alone),
        ({"positions": positions, "documents": Documents(lengths)}, alone[:1]),
    ):
        with Reads() as reads:
            found = spec.forward(ours, {"input_ids": ids[: len(expected)], **given})
        rows = padding.bool() if given is masked else torch.ones(found.shape[:2], dtype=torch.bool)
        assert found[rows].sub(expected[rows]).abs().max() < 1e-5, given
        assert reads.count == len(given.keys() & {"attention_mask", "position_ids"})


@pytest.mark.parametrize(
    "kind",
    ["cohere2", "cwm", "exaone4", "gemma4_text", "granite_swa", "ministral", "ministral3", "mixtral", "olmo3", "phi3", "qwen2_moe",
     "qwen3", "qwen3_moe", "smollm3", "starcoder2", "vaultgemma"],
)  # fmt: skip
def test_windows_of_other_kinds(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 4}
    # all experts, between which rounding makes no choice
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "decoder_sparse_step": 1}
    small = {"head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": hub_models.VOCABULARY}
    config = AutoConfig.for_model(**{**CONFIGS["llama"], "model_type": kind, **sizes, **experts, **small})
    config.use_cache = False
    torch.manual_seed(3)
    ours = AutoModelForCausalLM.from_config(config).eval()
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    attention.attend_causally(ours)
    assert any(attention._windows(ours) or ()) and attention.is_given(ours)
    ids, lengths = torch.arange(14)[None] * 7 % 50 + 3, [9, 5]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    alone = torch.cat([theirs(input_ids=one).logits for one in ids.split(lengths, 1)], 1)
    assert ours(input_ids=ids).logits.sub(theirs(input_ids=ids).logits).abs().max() < 1e-5
    packed = ours(input_ids=ids, position_ids=positions, documents=Documents(lengths)).logits
    assert packed.sub(alone).abs().max() < 1e-5


def test_a_window_is_trained_without_masks_of_all_pairs_of_tokens() -> None:
    """The gradients of a model whose windows are a small part of its rows, and what backward keeps of the masks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIGS["mistral"])
    config.max_position_embeddings, config.use_cache = 512, False
    torch.manual_seed(3)
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    theirs = copy.deepcopy(ours)
    attention.attend_causally(ours)
    ids = torch.arange(400)[None] * 7 % 50 + 3
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.update({one.data_ptr(): one.numel()}) or one, lambda one: one
    ):
        loss = ours(input_ids=ids).logits.square().mean()
    assert max(kept.values()) < 400 * 400
    loss.backward()
    theirs(input_ids=ids).logits.square().mean().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_a_model_that_changes_its_logits_refuses_a_loss_in_chunks(name: str) -> None:
    spec = HuggingFace(HuggingFaceOptions(config=ARCHITECTURES[name], loss_chunk=4, task="causal-lm"))
    with pytest.raises(UsageError, match="loss_chunk: logits are changed behind the head in a "), torch.device("meta"):
        spec.build()
