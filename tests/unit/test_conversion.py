"""`hpctrain convert`: every documented key is told, and what is written trains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli
from click.testing import CliRunner
from hpctrain_tools.convert.conversion import LIBRARIES, Conversion, converted
from jobs import TINY

import hpctrain
from hpctrain.base.errors import UsageError
from hpctrain.cli import cli

OWN = {name: TINY[name] for name in ("model", "dataset")}
DOCUMENTED = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
optimizer{type params{lr betas eps weight_decay momentum muon_lr adam_lr torch_adam adam_w_mode ns_method per_head_muon}}
scheduler{type params{warmup_min_lr warmup_max_lr warmup_num_steps}}
communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor
fp16{enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
fp16_master_weights_and_grads}
bf16{enabled bf16_master_weights_and_grads bf16_optimizer_states}
torch_autocast{enabled dtype lower_precision_safe_modules}
gradient_clipping
zero_optimization{stage allgather_partitions allgather_bucket_size compute_grad_norm overlap_comm reduce_scatter
reduce_bucket_size contiguous_gradients load_from_fp32_weights round_robin_gradients parameter_alignment
offload_param{device nvme_path pin_memory buffer_count buffer_size max_in_cpu}
offload_optimizer{device nvme_path pin_memory ratio buffer_count fast_init}
stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold
sub_group_size elastic_checkpoint stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients log_trace_cache_warnings cpu_offload
ignore_unused_parameters save_muon_momentum_buffer_in_memory}
aio{block_size queue_depth thread_count single_submit overlap_events}
tensor_parallel{autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config}
hybrid_engine expert_parallel disable_python_gc steps_per_print wall_clock_breakdown dump_state autotuning flops_profiler
activation_checkpointing{partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
synchronize_checkpoint_boundary profile}
data_efficiency tensorboard{enabled output_path job_name} wandb{enabled group team project} comet
csv_monitor{enabled output_path job_name} comms_logger
checkpoint{tag_validation load_universal use_node_local_storage parallel_write{pipeline_stage}}
compile data_types{grad_accum_dtype}
"""
"""The keys of DeepSpeed's page of November 2026; tables that are told as a whole without their own."""


def documented() -> set[str]:
    found, above, last = set(), [], ""
    for word in re.findall(r"\w+|[{}]", DOCUMENTED):
        if word == "{":
            above.append(last)
        elif word == "}":
            above.pop()
        else:
            last = word
            found.add(".".join([*above, word]))
    return {key for key in found if not any(other.startswith(f"{key}.") for other in found)}


def test_every_documented_key_of_deepspeed_is_told() -> None:
    known = set(LIBRARIES["deepspeed"].rules)
    assert len(documented()) > 100 and documented() <= known, documented() - known


def test_no_key_is_dropped_in_silence(tmp_path: Path) -> None:
    for value in ("auto", False, True, 0, 1):
        given: dict[str, Any] = {"fp16": {"enabled": "auto"}}
        for key in documented() - {"optimizer.type", "scheduler.type"}:
            inner, (*above, last) = given, key.split(".")
            for name in above:
                inner = inner.setdefault(name, {})
            if last != "enabled":
                inner[last] = value
        for table in ("bf16", "torch_autocast", "tensorboard", "wandb", "csv_monitor"):
            given[table]["enabled"] = True
        (tmp_path / "given.json").write_text(json.dumps(given))
        try:
            text = converted(tmp_path / "given.json", "deepspeed", 8).text([])
        except UsageError as error:  # a value that is none
            assert re.search("would not take|stage", str(error)), error
            continue
        silent = {key for key in documented() - {"optimizer.type", "scheduler.type"} if key not in text}
        assert not silent, (value, silent)
    off = tmp_path / "off.json"
    off.write_text(
        '{"fp16": {"enabled": false, "loss_scale": 3}, "zero_optimization": {"stage": 3, "overlap_comm": false}}'
    )
    text = converted(off, "deepspeed", 8).text([])
    assert "fp16.enabled = false: not needed" in text and "overlap_comm = false: stage 3 always overlaps" in text


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": "8", "zero_optimization": {"stage": 2, "overlap_comm": "false"}}',
        '{ # of us\n  // two\n  "train_batch_size": 8, /* x,\n */ "zero_optimization": {"stage": 2, "overlap_comm": false,},\n}',
        "{\n  train_batch_size: 8\n  zero_optimization: {\n    stage: 2 // as before\n    overlap_comm: false\n  }\n}",
        "train_batch_size: 8\nzero_optimization:\n  stage: 2\n  overlap_comm: false\n",
        '# ours\n{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": false}, "comet": {"url": "a//b, # c"}}',
    ],
)
def test_a_file_is_read_as_deepspeed_reads_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text(text)
    found = tomli.loads(converted(tmp_path / "given.json", "deepspeed", 8).text(["head"]))
    assert found["batch"]["global_size"] == 8 and found["sharding"] == {"stage": 2, "overlap_communication": False}
    assert "comet" not in text or "a//b, # c" in converted(tmp_path / "given.json", "deepspeed", 8).text([])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b]0;t\x07", "\u2028", "\x85"])
def test_text_of_a_configuration_becomes_no_line_of_the_job(end: str, tmp_path: Path) -> None:
    evil = f'x{end}[model]{end}name = "os:system"{end}'
    for given in ({evil: 1}, {"comet": {evil: evil}}, {"wandb": {"enabled": True, "project": evil, "group": evil}}):
        (tmp_path / "given.json").write_text(json.dumps(given))
        text = converted(tmp_path / "given.json", "deepspeed", 8).text([evil])
        assert "model" not in tomli.loads(text) and "\x1b" not in text
        if "wandb" in given:
            assert tomli.loads(text)["logger"][0]["project"] == evil


def tables_of(directory: Path, library: str, given: Mapping[str, Any], ranks: int | None = None) -> dict[str, Any]:
    """The tables that a configuration becomes, through the file that is written."""
    (directory / "given.json").write_text(json.dumps(given))
    return tomli.loads(converted(directory / "given.json", library, ranks).text(["head"]))


ZERO_2 = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"},
    },
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 3},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e4, "allgather_bucket_size": 1e5},
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "x"},
}  # fmt: skip
ZERO_3 = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "min_loss_scale": 2, "hysteresis": 3},
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}, "offload_optimizer": {"device": "nvme"},
        "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": 5e8,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
}  # fmt: skip
ZERO_1 = {
    "train_batch_size": 8, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_optimization": {"stage": 1},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 4, "warmup_num_steps": 1, "cos_min_ratio": 0.1}},
    "tensorboard": {"enabled": True}, "communication_data_type": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted", "lacks"),
    [
        (
            ZERO_2,
            {
                "batch": {"global_size": 16, "micro_size": 2}, "job": {"steps": 4}, "precision": {"mode": "bf16"},
                "optimizer": {
                    "name": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 0.5,
                },
                "schedule": {"name": "linear", "warmup_steps": 2}, "logger": [{"name": "csv"}],
                "sharding": {
                    "stage": 2, "overlap_communication": False, "reduce_bucket_size": 200_000, "allgather_bucket_size": 400_000,
                },
            },
            [],
        ),
        (
            ZERO_3,
            {
                "batch": {"global_size": 8, "micro_size": 2}, "optimizer": {"name": "adam", "lr": 1e-3, "weight_decay": 0.1},
                "precision": {"mode": "fp16", "initial_scale": 1024.0, "minimum_scale": 2.0, "hysteresis": 3},
                "sharding": {"stage": 3, "offload_parameters": True, "pin_memory": False},
                "activation_checkpointing": {"mode": "full", "offload": True},
            },
            ["zero_optimization.offload_optimizer.device", "zero_optimization.stage3_prefetch_bucket_size"],
        ),
        (
            ZERO_1,
            {
                "batch": {"global_size": 8, "micro_size": 4}, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
                "job": {"steps": 4}, "schedule": {"name": "cosine", "warmup_steps": 1, "final_factor": 0.1},
                "precision": {"mode": "fp32"}, "sharding": {"stage": 1}, "logger": [{"name": "tensorboard"}],
                "compression": {"name": "bf16"},
            },
            ["scheduler.params.warmup_type"],
        ),
    ],
    ids=["zero-2", "zero-3", "zero-1"],
)  # fmt: skip
def test_a_configuration_of_deepspeed_trains(
    tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any], lacks: list[str]
) -> None:
    assert tables_of(tmp_path, "deepspeed", given, 1) == wanted
    assert converted(tmp_path / "given.json", "deepspeed", 1).keys["no counterpart"] == lacks
    job = {"name": "ds", "output_dir": str(tmp_path / "out"), "steps": 4, **wanted.get("job", {})}
    if "offload" in str(wanted):
        wanted = {**wanted, "activation_checkpointing": {"mode": "full"}}  # needs an accelerator
    assert hpctrain.run({**wanted, **OWN, "job": job})["step"] == 4


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # the schedule's peak holds, whichever table comes first
        (
            {
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 2}},
                "optimizer": {"type": "adam", "params": {"lr": 3e-5}},
            },
            {"optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.0}, "precision": {"mode": "fp32"}},
        ),
        # a schedule with a peak of its own
        (
            {
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "weight_decay": 0.1}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}},
            },
            {"optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1}, "precision": {"mode": "fp32"}},
        ),
        # what a program fills in is left to it
        (
            {
                "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto",
                "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale_window": 7},
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
            },
            {"batch": {"micro_size": 4}, "optimizer": {"name": "adamw"}, "schedule": {"name": "constant"}, "precision": None},
        ),
        # tables with a switch are off without it; ranks of tensor parallelism share samples
        (
            {
                "wandb": {"project": "x"}, "fp16": {"loss_scale": 3}, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": 32,
                "zero_optimization": {"cpu_offload": True, "mics_shard_size": 2},
            },
            {
                "precision": {"mode": "fp32"}, "parallelism": {"tensor": 2, "replicate": 2},
                "batch": {"global_size": 32, "micro_size": 8},
            },
        ),
    ],
    ids=["peak", "own peak", "auto", "switches"],
)  # fmt: skip
def test_what_a_configuration_means(tmp_path: Path, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    made = tables_of(tmp_path, "deepspeed", given, 8)
    assert {name: made.get(name) for name in wanted} == wanted
    assert not {"logger", "sharding"} & set(made)


def test_accelerate_with_a_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({**ZERO_1, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3})
    )
    given = {
        "distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 2, "mixed_precision": "no", "use_cpu": True,
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}, "debug": True,
    }  # fmt: skip
    made = tables_of(tmp_path, "accelerate", given)
    assert made["batch"] == {"global_size": 24, "micro_size": 3} and made["sharding"] == {"stage": 1}
    assert made["communicator"] == {"device": "cpu"} and made["precision"] == {"mode": "fp32"}
    text = converted(tmp_path / "given.json", "accelerate", None).text(["head"])
    assert "# start it with: hpctrain run JOB.toml -n 4" in text and "--nodes 2 --ranks-per-node 2" in text


def test_accelerate_with_fsdp_axes_and_compilation(tmp_path: Path) -> None:
    axes = {
        f"parallelism_config_{name}_size": size for name, size in {"dp_replicate": 2, "dp_shard": 2, "tp": 2}.items()
    }
    fsdp = {
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    }
    given = {
        "mixed_precision": "bf16", "distributed_type": "FSDP", "parallelism_config": axes, "tpu_env": [], "downcast_bf16": "no",
        "fsdp_config": {**fsdp, "fsdp_activation_checkpointing": True}, "dynamo_config": {"dynamo_backend": "INDUCTOR"},
    }  # fmt: skip
    made = tables_of(tmp_path, "accelerate", given)
    assert made == {
        "sharding": {"stage": 2}, "precision": {"mode": "bf16"},
        "parallelism": {"replicate": 2, "tensor": 2}, "activation_checkpointing": {"mode": "full"}, "compile": {"enabled": True},
    }  # fmt: skip
    lacks = converted(tmp_path / "given.json", "accelerate", None).keys["no counterpart"]
    assert lacks == ["fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_offload_params"]
    full = {**given, "fsdp_config": {**fsdp, "fsdp_sharding_strategy": "FULL_SHARD"}}
    assert tables_of(tmp_path, "accelerate", full)["sharding"] == {
        "stage": 3, "wrap": "class:Block", "offload_parameters": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"train_micro_batch_size_per_gpu": 4}',
            "train_batch_size is micro batch x accumulation steps x ranks; give --ranks",
        ),
        ('{"train_batch_size": 10, "gradient_accumulation_steps": 3}', "give --ranks"),
        (
            '{"zero_optimization": {"reduce_bucket_size": "big"}}',
            'reduce_bucket_size: found "big", which deepspeed would not take',
        ),
        ("[1, 2]", "holds list, expected a table of keys"),
        ("{a: [", "is neither JSON, Hjson nor YAML"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', "has the key 'train_batch_size' twice"),
        ("a: 1\na: 2", "has the key 'a' twice"),
        (
            '{"zero_optimization": {"stage": 5}}',
            "stage: found 5, which deepspeed would not take (expected 0, 1, 2 or 3)",
        ),
        ("a: &x [1, 2]\nb: *x", "has an alias"),
        ("[" * 100_000, "is neither JSON"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "given.json").write_text(text)
    with pytest.raises(UsageError, match=re.escape(told)):
        converted(tmp_path / "given.json", "deepspeed", None)


def test_the_command_writes_a_new_file_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(ZERO_3))
    words = ["convert", "deepspeed", "ds.json", "made.toml"]
    done = CliRunner().invoke(cli, [*words, "--ranks", "1"])
    assert done.exit_code == 0 and "2 have none: zero_optimization.offload_optimizer.device" in done.output
    again = CliRunner().invoke(cli, [*words, "--ranks", "1"])
    assert isinstance(again.exception, UsageError) and "made.toml exists already" in str(again.exception)
    gone = CliRunner().invoke(cli, ["convert", "deepspeed", "gone.json", "b.toml"])
    assert "gone.json cannot be read" in str(gone.exception)


def test_a_key_within_a_value_stays_one() -> None:
    """A rule may pass a table on, whose keys are another person's."""
    value = {'a = 1 }\nname = "subprocess:getoutput"\nz = { b': 1, "plain": [2.0]}
    made = Conversion()
    made.write({"optimizer.options": value}, "key")
    assert tomli.loads(made.text([])) == {"optimizer": {"options": value}}


def test_what_the_rules_have_not_written_is_refused() -> None:
    made = Conversion()
    made.write({"optimizer.lr": 0.1}, "key")
    made.lines["optimizer"]["# note"] = '# a\nname = "subprocess:getoutput"'
    with pytest.raises(UsageError, match="would become a part of the job"):
        made.text([])
