"""The keys of Accelerate's YAML, as `accelerate config` writes it, and what each is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain_tools.convert.deepspeed import stage
from hpctrain_tools.convert.rules import (
    LackingError,
    Rule,
    Source,
    Written,
    key_of,
    lacking,
    made,
    only,
    switch,
    unneeded,
)

_LAUNCHER = "the launcher knows"
_TPU = "there are no TPUs"
_STAGES = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2,
    "1": 3, "2": 2, "3": 0, "4": 3, "5": 2,
}  # fmt: skip
_FSDP, _DEEPSPEED, _MEGATRON = "fsdp_config", "deepspeed_config", "megatron_lm_config"
_AXES = "parallelism_config"
MODEL_AXES = [f"{_AXES}.{_AXES}_{name}_size" for name in ("tp", "cp", "sp")] + [
    "tp_config.tp_size", f"{_MEGATRON}.megatron_lm_tp_degree", f"{_MEGATRON}.megatron_lm_pp_degree",
]  # fmt: skip
"""Keys whose ranks share samples."""


def _kind(value: Any, source: Source) -> Written:
    if value in ("XLA", "TPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"):
        raise LackingError("ranks train on CPUs and on the accelerators that torch serves by itself")
    return {"sharding.stage": 3} if value == "FSDP" and _stage(source) is None else {}


def _stage(source: Source) -> int | None:
    """The stage that FSDP's strategy is; None where the file has none."""
    strategy = source.get(f"{_FSDP}.fsdp_sharding_strategy") or source.get(f"{_FSDP}.fsdp_reshard_after_forward")
    return _STAGES.get(str(strategy).upper())


def _ranks(value: Any, source: Source) -> Written:
    if value and value > 0:
        source.notes.append(f"start it with: hpctrain run JOB.toml -n {value}")
    return {}


def _nodes(value: Any, source: Source) -> Written:
    if value and value > 1:
        each = source.get("num_processes", value) // value
        source.notes.append(f"on {value} nodes: hpctrain submit JOB.toml --nodes {value} --ranks-per-node {each}")
    return {}


def _precision(value: Any, source: Source) -> Written:
    return {"precision.mode": {"no": "fp32"}.get(str(value).lower(), str(value).lower())}


def _compiled(value: Any, source: Source) -> Written:
    if str(value).upper() == "NO":
        return {}
    if str(value).upper() != "INDUCTOR":
        raise LackingError("blocks are compiled by Inductor")
    return {"compile.enabled": True}


def _mode(value: Any, source: Source) -> Written:
    if value in ("default", None):
        return {}
    if not str(value).startswith("max-autotune"):
        raise LackingError("`[compile] mode` is default or max-autotune-no-cudagraphs")
    return {"compile.mode": "max-autotune-no-cudagraphs"}


def _strategy(value: Any, source: Source) -> Written:
    name = str(value).upper()
    written: dict[str, Any] = {"sharding.stage": _STAGES[name]} if name in _STAGES else {}
    if not written:
        raise LackingError(f"expected one of {', '.join(list(_STAGES)[:5])}")
    if name.startswith("HYBRID") or name in ("4", "5"):
        written["parallelism.replicate"] = source.get("num_machines", 1)
    return written


def _resharded(value: Any, source: Source) -> Written:
    if isinstance(value, str) and value.upper() in _STAGES:
        return _strategy(value, source)
    return {} if value else {"sharding.reshard_after_forward": False}


def _wrap(value: Any, source: Source) -> Written:
    policy = str(value).upper()
    if policy == "TRANSFORMER_BASED_WRAP":
        return {}  # the model's blocks, or the class that another key names
    if policy == "SIZE_BASED_WRAP":
        return {"sharding.wrap": "size"}
    raise LackingError("the model's blocks are units; a model without blocks is one")


def _class(value: Any, source: Source) -> Written:
    names = str(value).split(",")
    if len(names) > 1:
        raise LackingError('`[sharding] wrap = "class:NAME"` takes one class; the model\'s blocks are the default')
    return {"sharding.wrap": f"class:{names[0].strip()}"}


def _to_host(target: str) -> Any:
    def make(value: Any, source: Source) -> Written:
        if value in (False, None, "none"):
            return {}
        if value not in (True, "cpu"):
            raise LackingError("nothing is offloaded to disks")
        return {f"sharding.{target}": True}

    return make


def _at_stage_3(make: Callable[[Any, Source], Written]) -> Callable[[Any, Source], Written]:
    """A rule for what only stage 3 has; in another stage nothing is written."""

    def made_there(value: Any, source: Source) -> Written:
        written = make(value, source)
        if written and _stage(source) not in (None, 3):
            raise LackingError("it goes with stage 3")
        return written

    return made_there


def _axis(name: str) -> Any:
    return lambda value, source: {f"parallelism.{name}": value} if value and value > 1 else {}


def _sharded(value: Any, source: Source) -> Written:
    has_own = any(source.get(key) for key in (_FSDP, _DEEPSPEED))
    return {"sharding.stage": 3} if value and value != 1 and not has_own else {}


RULES: list[Rule] = [
    only(
        "compute_environment",
        "LOCAL_MACHINE",
        "[hpctrain submit](launching.md#submitting) has Slurm, PBS, Flux, Kubernetes",
    ),
    made("distributed_type", "ranks find their devices; FSDP is `[sharding] stage = 3`", _kind),
    made("mixed_precision", "`[precision] mode`; `no` is `fp32`", _precision),
    made(
        "use_cpu", '`[communicator] device = "cpu"`', lambda value, _: {"communicator.device": "cpu"} if value else {}
    ),
    unneeded("debug", "`TORCH_DISTRIBUTED_DEBUG=DETAIL` in the environment compares collectives over gloo and NCCL"),
    made("num_processes", "`hpctrain run JOB.toml -n N`", _ranks),
    made("num_machines", "`hpctrain submit JOB.toml --nodes N`, or srun, mpiexec", _nodes),
    *(
        unneeded(key, _LAUNCHER)
        for key in ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network")
    ),
    unneeded("main_training_function", "the job names its parts"),
    unneeded("gpu_ids", "rank 0 deals the visible accelerators out"),
    unneeded("enable_cpu_affinity", "`[job] cpu_bind` does it by default"),
    only("downcast_bf16", "no", _TPU),
    *(lacking(f"tpu_{key}", _TPU) for key in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")),
    *(lacking(key, _TPU) for key in ("command_file", "commands")),
    made("dynamo_config.dynamo_backend", "`[compile] enabled` for INDUCTOR", _compiled),
    made("dynamo_config.dynamo_mode", "`[compile] mode`", _mode),
    unneeded("dynamo_config.dynamo_use_regional_compilation", "the model's blocks are what is compiled"),
    only("dynamo_config.dynamo_use_dynamic", False, "torch decides on dynamic shapes"),
    only("dynamo_config.dynamo_use_fullgraph", False, "communication is left out of graphs"),
    lacking("fp8_config", '`[precision] mode = "fp8"` is torchao\'s'),
    unneeded("ipex_config", "torch has Intel's accelerators"),
    unneeded("mpirun_config", "`mpiexec -n N hpctrain run JOB.toml` works as it is"),
    made(f"{_AXES}.{_AXES}_dp_replicate_size", "`[parallelism] replicate`", _axis("replicate")),
    made(f"{_AXES}.{_AXES}_dp_shard_size", "`[sharding] stage = 3`", _sharded),
    made(f"{_AXES}.{_AXES}_tp_size", "`[parallelism] tensor`", _axis("tensor")),
    made(f"{_AXES}.{_AXES}_cp_size", "`[parallelism] context`", _axis("context")),
    unneeded(f"{_AXES}.{_AXES}_cp_comm_strategy", "`[parallelism.context] method` is ring or ulysses"),
    unneeded(f"{_AXES}.{_AXES}_cp_backend", "ring attention on torch's kernels"),
    made(
        f"{_AXES}.{_AXES}_sp_size",
        '`[parallelism.context] method = "ulysses"`',
        lambda value, _: {"parallelism.context": {"size": value, "method": "ulysses"}} if value and value > 1 else {},
    ),
    unneeded(f"{_AXES}.{_AXES}_sp_backend", "one of its own"),
    made("tp_config.tp_size", "`[parallelism] tensor`", _axis("tensor")),
    made(
        f"{_FSDP}.fsdp_sharding_strategy",
        "`[sharding] stage`, HYBRID with `[parallelism] replicate` = nodes",
        _strategy,
    ),
    made(f"{_FSDP}.fsdp_reshard_after_forward", "`[sharding] reshard_after_forward`", _resharded),
    made(f"{_FSDP}.fsdp_auto_wrap_policy", "`[sharding] wrap` of stage 3", _at_stage_3(_wrap)),
    made(
        f"{_FSDP}.fsdp_transformer_layer_cls_to_wrap",
        '`[sharding] wrap = "class:NAME"` of stage 3',
        _at_stage_3(_class),
    ),
    made(
        f"{_FSDP}.fsdp_min_num_params",
        "`[sharding] min_parameters` of stage 3",
        _at_stage_3(lambda value, _: {"sharding.min_parameters": value}),
    ),
    made(
        f"{_FSDP}.fsdp_offload_params",
        "`[sharding] offload_parameters` of stage 3",
        _at_stage_3(_to_host("offload_parameters")),
    ),
    switch(f"{_FSDP}.fsdp_activation_checkpointing", {"activation_checkpointing.mode": "full"}),
    unneeded(f"{_FSDP}.fsdp_version", "stage 3 is built on FSDP 2"),
    *(
        unneeded(f"{_FSDP}.{key}", "`[sharding] prefetch` gathers ahead, in forward and backward")
        for key in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch")
    ),
    unneeded(f"{_FSDP}.fsdp_state_dict_type", "checkpoints are sharded and resume on any layout"),
    *(
        unneeded(f"{_FSDP}.{key}", "each rank makes what it holds")
        for key in ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states")
    ),
    unneeded(f"{_FSDP}.fsdp_use_orig_params", "parameters keep their names"),
    made(f"{_DEEPSPEED}.deepspeed_config_file", "its keys, [as above](from-deepspeed.md)", lambda value, _: {}),
    made(f"{_DEEPSPEED}.zero_stage", "`[sharding] stage`", stage),
    unneeded(
        f"{_DEEPSPEED}.gradient_accumulation_steps", "follows from `global_size`, `micro_size` and the number of ranks"
    ),
    made(
        f"{_DEEPSPEED}.gradient_clipping",
        "`[optimizer] clip_norm`",
        lambda value, _: {"optimizer.clip_norm": float(value)} if value else {},
    ),
    made(f"{_DEEPSPEED}.offload_optimizer_device", "`[sharding] offload_optimizer`", _to_host("offload_optimizer")),
    made(f"{_DEEPSPEED}.offload_param_device", "`[sharding] offload_parameters`", _to_host("offload_parameters")),
    *(
        lacking(f"{_DEEPSPEED}.{key}", "nothing is offloaded to disks")
        for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path")
    ),
    unneeded(f"{_DEEPSPEED}.zero3_init_flag", "models are built on the meta device"),
    unneeded(f"{_DEEPSPEED}.zero3_save_16bit_model", "`hpctrain checkpoint export` writes whole weights"),
    unneeded(f"{_DEEPSPEED}.deepspeed_multinode_launcher", _LAUNCHER),
    lacking(f"{_DEEPSPEED}.deepspeed_hostfile", "`hpctrain run --hostfile FILE` takes it"),
    *(
        lacking(f"{_DEEPSPEED}.deepspeed_{key}_filter", "leave hosts out of the host file")
        for key in ("exclusion", "inclusion")
    ),
    unneeded(f"{_DEEPSPEED}.deepspeed_moe_layer_cls_names", "units are the model's blocks"),
    made(f"{_MEGATRON}.megatron_lm_tp_degree", "`[parallelism] tensor`", _axis("tensor")),
    made(f"{_MEGATRON}.megatron_lm_pp_degree", "`[parallelism] pipeline`", _axis("pipeline")),
    unneeded(
        f"{_MEGATRON}.megatron_lm_num_micro_batches", "follows from `global_size`, `micro_size` and the number of ranks"
    ),
    lacking(
        f"{_MEGATRON}.megatron_lm_sequence_parallelism",
        "`[parallelism] tensor = { size = N, sequence_parallel = true }`",
    ),
    switch(f"{_MEGATRON}.megatron_lm_recompute_activations", {"activation_checkpointing.mode": "selective"}),
    key_of(f"{_MEGATRON}.megatron_lm_gradient_clipping", "optimizer.clip_norm"),
    switch(f"{_MEGATRON}.megatron_lm_use_distributed_optimizer", {"sharding.stage": 1}),
]
SECTIONS = {
    "mixed_precision": "precision", "downcast": "precision", "fp8": "precision", "fsdp": "sharding", "deepspeed": "sharding",
    "dynamo": "compile", "megatron": "parallelism", "parallelism": "parallelism", "tp_": "parallelism", "use_cpu": "communicator",
    "debug": "communicator",
}  # fmt: skip
"""The table of the job beside which a key without a counterpart is told, by the begin of the key."""


def defaults(source: Source) -> Written:
    """The values that Accelerate has where its file says nothing, and that differ here."""
    return {"precision.mode": "fp32"}
