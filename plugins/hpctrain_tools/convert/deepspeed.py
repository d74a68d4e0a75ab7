"""The documented keys of DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/), and what each is here."""

from __future__ import annotations

from typing import Any

from hpctrain.api import UsageError
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

# A gradient's; DeepSpeed counts elements
_BYTES = 4
_NVME = "nothing is offloaded to disks"
_PEAK = "scheduler.params.warmup_max_lr"
_ZERO, _CHECKPOINTING = "zero_optimization", "activation_checkpointing"
_PARAMETERS, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _global_size(value: Any, source: Source) -> Written:
    micro, steps = source.get("train_micro_batch_size_per_gpu"), source.get("gradient_accumulation_steps", 1)
    if micro is not None or source.is_auto("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return {"batch.global_size": value}
    ranks = source.data_ranks("train_micro_batch_size_per_gpu is train_batch_size / accumulation steps / ranks")
    if value % (steps * ranks):
        raise UsageError(f"train_batch_size: {value} is not divisible by {steps} accumulation steps x {ranks} ranks")
    return {"batch.global_size": value, "batch.micro_size": value // (steps * ranks)}


def _micro_size(value: Any, source: Source) -> Written:
    given = source.get("train_batch_size")
    is_open = source.is_auto("gradient_accumulation_steps") or (
        source.ranks is None and source.is_auto("train_batch_size")
    )
    if given is not None or is_open:
        return {"batch.micro_size": value}
    steps = source.get("gradient_accumulation_steps", 1)
    ranks = source.data_ranks("train_batch_size is micro batch x accumulation steps x ranks")
    return {"batch.micro_size": value, "batch.global_size": value * steps * ranks}


def _optimizer(value: Any, source: Source) -> Written:
    given, name = source.get("optimizer.params", {}), str(value).lower()
    own: dict[str, Any] = {}
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or given.get("adam_w_mode", True)
        own["name"] = "adamw" if decoupled else "adam"
        if "weight_decay" not in given:  # DeepSpeed's own Adam has none unless it is given
            own["weight_decay"] = 0.01 if given.get("torch_adam") and decoupled else 0.0
        if "lr" not in given and _peak_key(source) is None and not source.is_auto(_PEAK):
            own["lr"] = 0.001
    elif name == "sgd":
        own["name"] = "sgd"
    elif name in ("lamb", "onebitadam", "onebitlamb", "zerooneadam", "muon", "muonwithauxadam", "lion"):
        raise LackingError(f'there is no {value}; name one of your own, as "package.module:callable"')
    else:
        own["name"] = f"torch.optim:{value}"
    return {f"optimizer.{key}": one for key, one in own.items()}


def _schedule(value: Any, source: Source) -> Written:
    if value not in _SCHEDULES:
        instead = {
            "OneCycle": 'the schedule "one-cycle" has other parameters',
            "LRRangeTest": 'the hook "lr-finder" does it',
        }
        raise LackingError(instead.get(value, "name one of torch's or your own in [schedule]"))
    given = source.get("scheduler.params", {})
    written: dict[str, Any] = {"schedule.name": _SCHEDULES[value]}
    if value == "WarmupCosineLR" and given.get("cos_min_ratio") != "auto":
        written["schedule.final_factor"] = given.get("cos_min_ratio", 0.0001)
    if given.get("warmup_num_steps") is None:
        written["schedule.warmup_steps"] = 1000
    if given.get("warmup_type") is None:
        source.lacks.append(
            ("scheduler.params.warmup_type", 'its default "log" has no counterpart: the warm-up is linear here')
        )
    if _peak_key(source) == _PEAK:
        written["optimizer.lr"] = given.get("warmup_max_lr", 0.001)
    return written


def _peak_key(source: Source) -> str | None:
    """The key that has the peak of the learning rate; None where nothing has, or a program fills it in."""
    kind = source.get("scheduler.type")
    if kind in ("WarmupLR", "WarmupDecayLR"):
        if source.is_auto(_PEAK):
            return None
        if kind == "WarmupDecayLR" or source.get(_PEAK) is not None:
            return _PEAK
    return "optimizer.params.lr" if source.get("optimizer.params.lr") is not None else None


def _rate(value: Any, source: Source) -> Written:
    return {"optimizer.lr": value} if _peak_key(source) == "optimizer.params.lr" else {}


def _warmup_type(value: Any, source: Source) -> Written:
    if value != "linear":
        raise LackingError("the warm-up is linear here")
    return {}


def _sent_as(value: Any, source: Source) -> Written:
    names = {"fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
    if value in (None, "fp32"):
        return {}
    if value not in names:
        raise LackingError("gradients travel as float32, or as `[compression]` says")
    return {"compression.name": names[value]}


def _bucket(target: str, stages: tuple[int, ...]) -> Any:
    def make(value: Any, source: Source) -> Written:
        stage = source.get("zero_optimization.stage", 0)
        return {f"sharding.{target}": int(value) * _BYTES} if stage in stages else {}

    return make


def _overlap(value: Any, source: Source) -> Written:
    if source.get("zero_optimization.stage", 0) in (0, 1, 2):
        return {"sharding.overlap_communication": value}
    if not value:
        raise LackingError("stage 3 always overlaps")
    return {}


def stage(value: Any, source: Source) -> Written:
    """ZeRO's stage."""
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError("expected 0, 1, 2 or 3")
    return {"sharding.stage": value}


def _offload(target: str, stages: tuple[int, ...]) -> Any:
    def make(value: Any, source: Source) -> Written:
        if value in (None, "none"):
            return {}
        if value != "cpu":
            raise LackingError(_NVME)
        if source.get("zero_optimization.stage", 0) not in stages:
            raise LackingError(f"it goes with stage {' or '.join(map(str, stages))}")
        return {f"sharding.{target}": True}

    return make


def _pinned(value: Any, source: Source) -> Written:
    devices = [source.get(f"zero_optimization.offload_{one}.device", "none") for one in ("param", "optimizer")]
    return {"sharding.pin_memory": value} if "cpu" in devices else {}


def _autocast(value: Any, source: Source) -> Written:
    names = {"bfloat16": "bf16", "float16": "fp16"}
    return {"precision.mode": names[source.get("torch_autocast.dtype", "bfloat16")]} if value else {}


def _partitioned(value: Any, source: Source) -> Written:
    if not value:
        return {}
    if source.get("tensor_parallel.autotp_size", 0) < 2:
        raise LackingError("it goes with tensor parallelism")
    return {"activation_checkpointing.mode": "full", "activation_checkpointing.partition_activations": True}


def _hybrid(value: Any, source: Source) -> Written:
    if value in (None, -1, 0):
        return {}
    ranks = source.data_ranks("replicate is data-parallel ranks / mics_shard_size")
    return {"parallelism.replicate": ranks // value} if ranks > value else {}


RULES: list[Rule] = [
    made("train_batch_size", "`[batch] global_size`", _global_size),
    made("train_micro_batch_size_per_gpu", "`[batch] micro_size`", _micro_size),
    unneeded("gradient_accumulation_steps", "follows from `global_size`, `micro_size` and the number of ranks"),
    only("managed_gradient_accumulation", True, "an own loop decides on its steps ([own-loop](own-loop.md))"),
    made("optimizer.type", '`[optimizer] name`; Adam is `"adamw"` unless `adam_w_mode` is false', _optimizer),
    made("optimizer.params.lr", "`[optimizer] lr`, unless a warm-up has the peak", _rate),
    *(key_of(f"optimizer.params.{key}", f"optimizer.{key}") for key in ("betas", "eps", "weight_decay", "momentum")),
    unneeded("optimizer.params.torch_adam", "the optimizers are torch's"),
    unneeded("optimizer.params.adam_w_mode", "chooses between `adam` and `adamw`"),
    only("optimizer.params.bias_correction", True, "Adam corrects its bias"),
    *(
        lacking(f"optimizer.params.{key}", "there is no Muon; name one of your own")
        for key in ("muon_lr", "adam_lr", "ns_method", "per_head_muon")
    ),
    made(
        "scheduler.type",
        "`[schedule] name`: WarmupLR is constant, WarmupDecayLR linear, WarmupCosineLR cosine",
        _schedule,
    ),
    made(
        "scheduler.params.warmup_min_lr", "the warm-up begins at lr / `warmup_steps`", lambda value, _: _no_start(value)
    ),
    made(_PEAK, "`[optimizer] lr`, written with the schedule", lambda value, _: {}),
    key_of("scheduler.params.warmup_num_steps", "schedule.warmup_steps"),
    made("scheduler.params.warmup_type", "linear; the logarithm, the default, has no counterpart", _warmup_type),
    key_of("scheduler.params.total_num_steps", "job.steps"),
    made(
        "scheduler.params.warmup_min_ratio",
        "the warm-up begins at lr / `warmup_steps`",
        lambda value, _: _no_start(value),
    ),
    unneeded("scheduler.params.cos_min_ratio", "`[schedule] final_factor`, written with the schedule"),
    made("communication_data_type", "`[compression] name`, inside of nodes, too", _sent_as),
    only("gradient_allreduce_op", "mean", "the loss of a step is a mean over its labels, on any number of ranks"),
    unneeded("prescale_gradients", "losses are divided before backward"),
    unneeded("gradient_predivide_factor", "losses are divided before backward"),
    switch("fp16.enabled", {"precision.mode": "fp16"}),
    unneeded("fp16.auto_cast", "autocast does it"),
    made("fp16.loss_scale", "`[precision] static_scale`; 0 is the dynamic one", lambda value, _: _static(value)),
    made(
        "fp16.initial_scale_power",
        "`[precision] initial_scale`, 2 to that power",
        lambda value, _: {"precision.initial_scale": float(2**value)},
    ),
    key_of("fp16.loss_scale_window", "precision.window"),
    key_of("fp16.hysteresis", "precision.hysteresis"),
    only("fp16.consecutive_hysteresis", False, "a step without overflow does not refill it"),
    made(
        "fp16.min_loss_scale", "`[precision] minimum_scale`", lambda value, _: {"precision.minimum_scale": float(value)}
    ),
    only("fp16.fp16_master_weights_and_grads", False, "parameters, gradients and state are float32"),
    switch("bf16.enabled", {"precision.mode": "bf16"}),
    only("bf16.bf16_master_weights_and_grads", False, "parameters, gradients and state are float32"),
    only("bf16.bf16_optimizer_states", False, 'the optimizer `"adamw-8bit"` keeps its state in 8 bits'),
    made("torch_autocast.enabled", '`[precision] mode = "bf16"` or `"fp16"`', _autocast),
    unneeded("torch_autocast.dtype", "chooses `[precision] mode`"),
    unneeded("torch_autocast.lower_precision_safe_modules", "autocast knows; stage 3 gathers in 16 bits"),
    made(
        "gradient_clipping", "`[optimizer] clip_norm`", lambda value, _: {"optimizer.clip_norm": value} if value else {}
    ),
    made(f"{_ZERO}.stage", "`[sharding] stage`", stage),
    unneeded(f"{_ZERO}.allgather_partitions", "parameters are gathered by collectives"),
    made(
        f"{_ZERO}.allgather_bucket_size",
        "`[sharding] allgather_bucket_size`, in bytes, at stages 1 and 2",
        _bucket("allgather_bucket_size", (1, 2)),
    ),
    unneeded(f"{_ZERO}.compute_grad_norm", "the norm is in each row, from one read of the device"),
    made(f"{_ZERO}.overlap_comm", "`[sharding] overlap_communication`; stage 3 always overlaps", _overlap),
    unneeded(f"{_ZERO}.reduce_scatter", "each stage takes the collective that it needs"),
    made(
        f"{_ZERO}.reduce_bucket_size",
        "`[sharding] reduce_bucket_size`, in bytes, at stages 0 to 2",
        _bucket("reduce_bucket_size", (0, 1, 2)),
    ),
    unneeded(f"{_ZERO}.contiguous_gradients", "buckets are contiguous"),
    unneeded(f"{_ZERO}.load_from_fp32_weights", "checkpoints hold float32"),
    unneeded(f"{_ZERO}.round_robin_gradients", "each rank copies what it owns"),
    unneeded(f"{_ZERO}.parameter_alignment", "parameters are aligned"),
    made(f"{_PARAMETERS}.device", "`[sharding] offload_parameters` at stage 3", _offload("offload_parameters", (3,))),
    made(f"{_PARAMETERS}.pin_memory", "`[sharding] pin_memory`", _pinned),
    *(lacking(f"{_PARAMETERS}.{key}", _NVME) for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")),
    made(
        f"{_OPTIMIZER}.device",
        "`[sharding] offload_optimizer` at stages 1 to 3",
        _offload("offload_optimizer", (1, 2, 3)),
    ),
    made(f"{_OPTIMIZER}.pin_memory", "`[sharding] pin_memory`", _pinned),
    only(f"{_OPTIMIZER}.ratio", 1, "all of the state is offloaded"),
    *(lacking(f"{_OPTIMIZER}.{key}", _NVME) for key in ("nvme_path", "buffer_count", "fast_init")),
    unneeded(f"{_ZERO}.stage3_max_live_parameters", "a unit is freed after its forward and backward"),
    lacking(
        f"{_ZERO}.stage3_max_reuse_distance",
        "`[sharding] reshard_after_forward = false` keeps all units until backward",
    ),
    lacking(f"{_ZERO}.stage3_prefetch_bucket_size", "`[sharding] prefetch` counts units instead"),
    lacking(f"{_ZERO}.stage3_param_persistence_threshold", "units are sharded whole; `wrap` chooses them"),
    unneeded(f"{_ZERO}.sub_group_size", "the optimizer's kernels work on lists of tensors"),
    unneeded(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", "`hpctrain checkpoint export` writes whole weights"),
    lacking(f"{_ZERO}.stage3_module_granularity_threshold", '`[sharding] wrap = "size"` with `min_parameters`'),
    only(
        f"{_ZERO}.zero_hpz_partition_size",
        1,
        "hybrid sharding is `[parallelism] replicate`, the gradient's sums included",
    ),
    only(f"{_ZERO}.zero_quantized_weights", False, "stage 3 gathers in the 16 bits of `[precision]`"),
    only(f"{_ZERO}.zero_quantized_gradients", False, "`[compression]` has bf16, fp16, top-k and PowerSGD"),
    unneeded(f"{_ZERO}.log_trace_cache_warnings", "units are known from the modules, not from a trace"),
    made(
        f"{_ZERO}.cpu_offload",
        "`[sharding] offload_optimizer` at stages 1 to 3",
        lambda value, source: _offload("offload_optimizer", (1, 2, 3))("cpu" if value else None, source),
    ),
    unneeded(f"{_ZERO}.elastic_checkpoint", "every checkpoint resumes on any layout"),
    unneeded(f"{_ZERO}.ignore_unused_parameters", "a parameter without a gradient has a gradient of zeros"),
    unneeded(f"{_ZERO}.save_muon_momentum_buffer_in_memory", "there is no Muon"),
    made(f"{_ZERO}.mics_shard_size", "`[parallelism] replicate`: ranks / that size", _hybrid),
    *(
        lacking(f"aio.{key}", _NVME)
        for key in ("block_size", "queue_depth", "thread_count", "single_submit", "overlap_events")
    ),
    made(
        "tensor_parallel.autotp_size",
        "`[parallelism] tensor`",
        lambda value, _: {"parallelism.tensor": value} if value > 1 else {},
    ),
    unneeded("tensor_parallel.preset_model", "the model or transformers has the plan, or trials find it"),
    only("tensor_parallel.tp_overlap_comm", False, "a tensor-parallel block waits for its sums"),
    unneeded("tensor_parallel.vocab_parallel_lm_head", "a head with the style `vocabulary` keeps its logits cut"),
    lacking("tensor_parallel.partition_config", "`[parallelism.tensor] plan` has styles by module patterns"),
    lacking("hybrid_engine", "nothing generates with kernels of its own while it trains"),
    lacking("expert_parallel", "an axis of a plugin may cut experts ([parallelism](plugins/parallelism.md))"),
    only("disable_python_gc", False, "Python decides when to collect garbage; a hook may take that over"),
    unneeded("steps_per_print", "the screen shows the newest step, metrics.jsonl has all"),
    unneeded("wall_clock_breakdown", "each row of [metrics.jsonl](metrics.md) has it"),
    unneeded("dump_state", "job.resolved.toml has all keys with their values"),
    lacking("autotuning", "`hpctrain plan --fit` searches settings ([planning](planning.md))"),
    unneeded("flops_profiler", "each row has FLOP/s; `hpctrain profile` shows operators"),
    made(f"{_CHECKPOINTING}.partition_activations", '`mode = "full"`, `partition_activations`', _partitioned),
    switch(
        f"{_CHECKPOINTING}.cpu_checkpointing",
        {"activation_checkpointing.mode": "full", "activation_checkpointing.offload": True},
        '`mode = "full"`, `offload`',
    ),
    *(
        unneeded(f"{_CHECKPOINTING}.{key}", "blocks are recomputed by torch")
        for key in (
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    lacking("data_efficiency", "the dataset [mixture](job-file.md#dataset) has phases by step; no layer drops tokens"),
    switch("tensorboard.enabled", {"logger:tensorboard": True}, '`[[logger]] name = "tensorboard"`'),
    *(unneeded(f"tensorboard.{key}", "the files are in output_dir/events") for key in ("output_path", "job_name")),
    switch("wandb.enabled", {"logger:wandb.mode": "online"}, '`[[logger]] name = "wandb"`, `mode = "online"`'),
    *(lacking(f"wandb.{key}", "`wandb` reads it from its own variables") for key in ("group", "team")),
    key_of("wandb.project", "logger:wandb.project"),
    lacking("comet", "tensorboard, csv, wandb, mlflow, prometheus, opentelemetry, or a logger of your own"),
    switch("csv_monitor.enabled", {"logger:csv": True}, '`[[logger]] name = "csv"`'),
    *(unneeded(f"csv_monitor.{key}", "output_dir/metrics.csv") for key in ("output_path", "job_name")),
    unneeded("comms_logger", "each row has the traffic of every axis"),
    unneeded("checkpoint.tag_validation", "rank 0 names a checkpoint"),
    unneeded("checkpoint.load_universal", "every checkpoint resumes on any layout"),
    only("checkpoint.use_node_local_storage", False, "checkpoints need a shared file system"),
    unneeded("checkpoint.parallel_write.pipeline_stage", "every rank writes what it holds"),
    lacking("compile", "`[compile] enabled = true` runs torch.compile on each block"),
    only("data_types.grad_accum_dtype", "fp32", "gradients are summed in float32"),
]
"""Rules in the order of DeepSpeed's page."""
OTHERS: list[Rule] = [
    unneeded("zero_allow_untested_optimizer", "every optimizer is tried before it trains"),
    unneeded("zero_force_ds_cpu_optimizer", "the optimizers are torch's"),
    lacking("amp", "`[precision]` has bf16 and fp16 by torch's autocast"),
    lacking("sparse_gradients", "gradients are dense"),
    lacking(
        "elasticity",
        "start the job on another number of ranks: it goes on from its checkpoint, and the global batch stays",
    ),
    lacking(
        "curriculum_learning",
        "the dataset [mixture](job-file.md#dataset) has phases with sequence lengths of their own",
    ),
]
"""Keys that configurations have, and the page no longer."""
SECTIONS = {
    "train": "batch", "gradient_accumulation": "batch", "optimizer": "optimizer", "gradient_clipping": "optimizer",
    "scheduler": "schedule", "fp16": "precision", "bf16": "precision", "torch_autocast": "precision", "zero": "sharding",
    "aio": "sharding", "tensor_parallel": "parallelism", "activation_checkpointing": "activation_checkpointing",
    "communication": "compression", "tensorboard": "logger", "wandb": "logger", "csv": "logger", "comet": "logger",
    "checkpoint": "checkpoint",
}  # fmt: skip
"""The table of the job beside which a key without a counterpart is told, by the begin of the key."""


def _no_start(value: Any) -> Written:
    if value:
        raise LackingError("the warm-up begins at lr / warmup_steps")
    return {}


def _static(value: Any) -> Written:
    return {"precision.static_scale": float(value)} if value else {}


def defaults(source: Source) -> Written:
    """The values that DeepSpeed has where its file says nothing, and that differ here."""
    auto = source.is_auto("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")
    return {} if auto else {"precision.mode": "fp32"}
