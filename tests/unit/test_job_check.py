"""The whole check: layouts, batches, optimizer groups, callables of users, the schema, the resolved job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from hpctrain_tools.full_check import sizes
from jobs import TINY
from plain import module_of

from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.resolved import refuse_other_job, resolved_tables
from hpctrain.data.opening import open_data
from hpctrain.data.shapes import sequence_multiple
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

ROOT = Path(__file__).parent.parent.parent


def tables(**changes: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in changes.items():
        result.setdefault(name, {}).update(table) if isinstance(table, dict) else result.update({name: table})
    return result


def checked(world: int | None = None, **changes: Any) -> CheckedJob:
    return check(RawJob(tables(**changes), {}, "job.toml"), world)


def problems(world: int | None = None, **changes: Any) -> list[str]:
    with pytest.raises(JobError) as error:
        checked(world, **changes)
    return [problem.message for problem in error.value.problems]


def plan(entries: dict[str, Any]) -> dict[str, Any]:
    return {"parallelism": {"tensor": {"size": 2, "plan": entries}}}


MLP = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


def test_defaults_make_a_whole_job() -> None:
    parts = checked().parts
    names = [
        parts.schedule.name,
        parts.sharding.name,
        parts.precision.name,
        parts.checkpoint.name,
        parts.communicator.name,
    ]
    assert names == ["constant", "zero-0", "auto", "hdf5", "auto"]
    assert parts.activation_checkpointing.name == parts.compression.name == "none"


@pytest.mark.parametrize(
    ("compression", "changes", "sentence"),
    [
        (
            {"name": "top-k"},
            {"sharding": {"stage": 3}},
            "sharding zero-3 does not say which parameters are in a bucket",
        ),
        (
            {"name": "powersgd"},
            {"sharding": {"stage": 3}},
            "sharding zero-3 does not say which matrices are in a bucket",
        ),
        (
            {"name": "powersgd"},
            {"sharding": {"stage": 2}, "parallelism": {"replicate": 2}},
            "hybrid sharding sums slices of parameters over the replicas",
        ),
        ({"name": "top-k", "ratio": 0.0}, {}, "greater than 0"),
        ({"name": "powersgd", "ratio": 0.1}, {}, "unknown key 'ratio' in [compression]; an option of name = top-k"),
        (
            {"name": "none", "start_step": 3},
            {},
            "unknown key 'start_step' in [compression]; an option of name = bf16, fp16, powersgd, top-k",
        ),
    ],
)
def test_compression_is_refused(compression: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    found = problems(4, compression=compression, **changes)
    assert len(found) == 1 and sentence in found[0]


def test_options_of_the_communicator() -> None:
    assert checked(communicator={"name": "mpi", "shared_memory": False}).parts.communicator.options.hierarchical is None
    found = problems(communicator={"name": "mpi", "shared_memory": False, "hierarchical": True})
    assert len(found) == 1 and "hierarchical = true needs shared_memory = true, found false" in found[0]
    found = problems(communicator={"shared_memory": False})
    assert found == ["unknown key 'shared_memory' in [communicator]; an option of name = mpi"]


@pytest.mark.thorough
def test_every_compression_but_those_goes_with_every_stage() -> None:
    for stage in range(4):
        for name in ("none", "bf16", "fp16", *(("top-k", "powersgd") if stage < 3 else ())):
            checked(4, compression={"name": name}, sharding={"stage": stage})
    checked(4, compression={"name": "top-k"}, sharding={"stage": 2}, parallelism={"replicate": 2})


@pytest.mark.parametrize(
    ("table", "keys", "sentence"),
    [
        ("job", {"steps": "4"}, 'expected a valid integer, found "4"'),
        ("job", {"steps": 4.5}, "found 4.5"),
        ("job", {"seed": True}, "found true"),
        ("compile", {"enabled": "True"}, 'expected true or false, found "True"'),
        ("job", {"name": "a/b"}, "without '/'"),
        ("job", {"output_dir": ""}, 'expected a directory, "." for the current one, found ""'),
        ("optimizer", {"betas": [0.9]}, "betas: expected at least 2 values, found [0.9]"),
        ("optimizer", {"name": 3}, "expected a valid string, found 3"),
        ("optimizer", {"betas": [0.9, 1.5]}, "expected less than 1, found 1.5"),
        ("optimizer", {"lr": float("nan")}, "lr"),
        ("model", {"attention_heads": 3}, "expected attention_heads that divide hidden_size 16"),
        ("model", {"freeze": ["nothing.*"]}, "no parameter matches 'nothing.*'"),
        ("model", {"freeze": ["*"]}, "every parameter is frozen"),
        ("model", {"trainable": ["nothing.*"]}, "[model] trainable: no parameter matches 'nothing.*'"),
        ("sharding", {"reduce_bucket_size": "25 parsecs"}, '"500MB" or "64KiB"'),
        ("parallelism", {"replicate": 0}, "greater than or equal to 1"),
        ("precision", {"mode": "fp16", "initial_scale": 1.0, "minimum_scale": 2.0}, "minimum_scale 2 is above"),
        ("checkpoint", {"on_error": "ignore"}, "'stop' or 'continue'"),
        ("batch", {"micro_size": None, "micro_tokens": 9}, "found global_size, micro_tokens"),
    ],
)  # fmt: skip
def test_one_wrong_value(table: str, keys: dict[str, Any], sentence: str) -> None:
    (message,) = problems(**{table: keys})
    assert sentence in message and message.startswith(f"[{table}]"), message


def test_options_that_do_nothing_are_refused() -> None:
    (message,) = problems(optimizer={"name": "sgd", "nesterov": True})
    assert "nesterov needs momentum above 0" in message
    assert any(
        "groups.pattern: List should have at least 1 item" in m
        for m in problems(optimizer={"groups": [{"pattern": []}]})
    )
    assert "tensro" in problems(parallelism={"tensro": 1})[0]
    for axis in ({"tensor": {"size": 1, "foo": 1}}, {"replicate": {"size": 2, "foo": 1}}):
        assert problems(parallelism=axis)[0].startswith("unknown key 'foo' in [parallelism]")
    (message,) = problems(4, parallelism={"replicate": 2})
    assert "all 4 data-parallel ranks hold the same" in message
    for world, replicate, stage in ((4, 1, 0), (2, 2, 0), (4, 2, 1)):
        assert checked(world, parallelism={"replicate": replicate}, sharding={"stage": stage})


def test_sizes_have_units() -> None:
    for text, size in (("500MB", 500_000_000), ("64KiB", 65536), (7, 7), ("1.5 GB", 1_500_000_000)):
        assert checked(sharding={"reduce_bucket_size": text}).parts.sharding.options.reduce_bucket_size == size


def test_patterns_of_groups_that_match_nothing() -> None:
    (message,) = problems(optimizer={"groups": [{"pattern": ["*norm*", "lyers.*"], "weight_decay": 0.0}]})
    assert "no trained parameter matches the pattern 'lyers.*'; the names are like token_embedding.weight, " in message
    (message,) = problems(model={"freeze": ["head.*"]}, optimizer={"groups": [{"pattern": "head.*", "lr": 0.1}]})
    assert "no trained parameter matches the pattern 'head.*'" in message
    (message,) = problems(optimizer={"groups": [{"pattern": "head.*", "max_dims": 1, "lr": 0.1}]})
    assert "no trained parameter of at most max_dims = 1 dimensions matches the pattern 'head.*'" in message
    (message,) = problems(optimizer={"groups": [{"lr": 0.1}]})
    assert "expected pattern or max_dims, found neither" in message


def test_groups_inherit_what_they_do_not_change() -> None:
    groups = [{"pattern": "*.bias", "weight_decay": 0.0}, {"pattern": ["head*", "layers*"], "lr": 1.0}]
    first, second = checked(optimizer={"weight_decay": 0.3, "groups": groups}).parts.optimizer_groups
    assert (first["pattern"], first["weight_decay"], first["lr"]) == (["*.bias"], 0.0, 0.01)
    assert (second["pattern"], second["weight_decay"], second["lr"]) == (["head*", "layers*"], 0.3, 1.0)
    (message,) = problems(optimizer={"groups": [{"pattern": "x", "weight_decai": 1}]})
    assert "did you mean 'weight_decay'" in message


@pytest.mark.parametrize(("world", "good"), [(1, True), (2, True), (3, True), (4, True), (5, False), (8, False)])
def test_the_batch_divides_over_the_ranks_or_not(world: int, good: bool) -> None:
    if good:
        checked(world)
    else:
        (message,) = problems(world)
        assert f"over {world} data-parallel ranks" in message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallelism": {"pipeline": {"size": 2, "split": [1, 2]}}}, "split: found [1, 2], expected 2 numbers"),
        ({"parallelism": {"pipeline": 4}}, "[parallelism] pipeline: the model has 2 blocks, fewer than 4 pipeline stages"),
        (plan({"layers.*.mlp.up": "column"}), "[parallelism.tensor] plan: found the style 'column'"),
        (plan({"layer.*": "colwise"}), "[parallelism.tensor] plan: no module matches 'layer.*'; the names are like"),
        (plan({"layers.*.mlp": "colwise"}), "plan: layers.0.mlp is a MLP, and colwise cuts a Linear or an Embedding"),
        (plan({"layers.*.mlp.up": "colwise"}), "with layers.0.mlp.up as colwise each rank has a part of its outputs"),
        (plan({"layers.*.mlp.down": "rowwise"}), "layers.0.mlp.down as rowwise takes a part of its inputs, and no colwise"),
        (plan({"head": "colwise"}), 'with head as colwise each rank has a part of its outputs, and no rowwise'),
        (plan({**MLP, "head": "colwise"}), '"colwise_rep" to gather them, or "vocabulary" for a head whose outputs go to'),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_modules_show_is_refused_before_they_are_built(changes: dict[str, Any], sentence: str) -> None:
    (message,) = problems(4, **changes)
    assert sentence in message, message


def test_axes_that_share_the_heads_divide_them_together() -> None:
    axes = {"context": {"size": 2, "method": "ulysses"}, "tensor": 2}
    (message,) = problems(4, parallelism=axes)
    assert message.startswith("[parallelism]: context 2 x tensor 2 divide the model's 2 attention heads, but 2 is not")
    checked(4, parallelism={**axes, "context": 2})


ADAPTED = """
import torch
from torch import nn


class Linear(nn.Module):  # as peft's
    def __init__(self):
        super().__init__()
        self.base_layer, self.lora = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.base_layer(x) + self.lora(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = Linear(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.o_proj(self.q_proj(x) * self.k_proj(x))


def build():
    return nn.Sequential(Attention())
"""


def test_a_tensor_plan_for_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names and classes are not those of the model below the adapters."""
    (tmp_path / "adapted.py").write_text(ADAPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = tables()
    base["model"] = {"name": "adapted:build", "loss": "torch.nn.functional:mse_loss"}
    for entries, sentence in (
        ({}, "no attention or MLP was found in it to make one from"),
        (
            {"q_proj": "colwise"},
            "plan: no module matches 'q_proj'; the names are like 0, 0.q_proj, 0.q_proj.base_layer, ",
        ),
        (
            {"*.q_proj": "colwise"},
            "plan: 0.q_proj is a Linear that contains 0.q_proj.base_layer, 0.q_proj.lora, and colwise",
        ),
    ):
        with pytest.raises(JobError) as error:
            check(RawJob({**base, **plan(entries)}, {}, "j"), 2, tries=True)
        assert sentence in str(error.value), str(error.value)


@pytest.mark.parametrize("head", ["vocabulary", "colwise_rep"])
def test_a_plan_of_whole_pairs_is_taken(head: str) -> None:
    checked(2, **plan({**MLP, "head": head}))


SEQUENCE = {"size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("parallelism", "seq_length", "multiple"),
    [
        ({"tensor": SEQUENCE}, 7, 2),
        ({"tensor": 2}, 7, 1),
        ({"context": 2}, 6, 4),
        ({"context": {"size": 2, "method": "ulysses"}, "tensor": SEQUENCE}, 6, 4),
        ({"tensor": SEQUENCE, "context": 2}, 4, 4),  # ranks of context have 2 tokens each
    ],
    ids=str,
)
def test_the_axes_divide_a_sequence_or_not(parallelism: dict[str, Any], seq_length: int, multiple: int) -> None:
    found = checked(parallelism=parallelism, dataset={"seq_length": seq_length}, model={"attention_heads": 4})
    assert sequence_multiple(found.job, found.parts) == multiple
    if seq_length % multiple == 0:
        open_data(found.job, found.parts)
        return
    with pytest.raises(
        UsageError, match=f"have {seq_length} tokens, and .* expected a multiple of {multiple}, such as"
    ):
        open_data(found.job, found.parts)


INTERLEAVED = {"schedule": "interleaved-1f1b", "stages_per_rank": 2}
ZERO_BUBBLE = {"schedule": "zero-bubble"}


@pytest.mark.parametrize(
    ("size", "options", "count", "sentence"),
    [
        (2, {}, 1, '"1f1b" expects at least one for each of its 2 stages'),
        (2, {}, 2, None),
        (2, {"schedule": "gpipe"}, 1, None),
        (2, ZERO_BUBBLE, 5, '"zero-bubble" on 2 ranks cannot run that many in 2 equal rounds; expected a multiple of 2, such as 4'),
        (2, INTERLEAVED, 5, '"interleaved-1f1b" on 2 ranks cannot'),
        (2, INTERLEAVED, 3, None),
        (4, ZERO_BUBBLE, 10, None),
    ],
)  # fmt: skip
def test_a_pipeline_runs_so_many_micro_batches_or_not(
    size: int, options: dict[str, Any], count: int, sentence: str | None
) -> None:
    changes = {
        "model": {"layers": 4},
        "batch": {"global_size": count},
        "parallelism": {"pipeline": {"size": size, **options}},
    }
    if sentence is None:
        checked(size, **changes)
    else:
        (message,) = problems(size, **changes)
        assert message.startswith(f"[batch] micro_size: 1 makes {count} micro batch") and sentence in message


def test_what_cannot_be_computed_again() -> None:
    selective = {"activation_checkpointing": {"mode": "selective"}}
    pipeline = {"parallelism": {"pipeline": {"size": 2, **ZERO_BUBBLE}}}
    (message,) = problems(**pipeline, **selective)
    assert message.startswith("[activation_checkpointing] mode = 'selective': the schedule of pipeline splits"), message
    checked(**pipeline, activation_checkpointing={"mode": "full"})
    (message,) = problems(activation_checkpointing={"mode": "selective", "keep": ["mm", "matmuul"]})
    assert message.startswith("[activation_checkpointing] keep: torch has no operator matmuul;"), message


def test_what_cannot_be_compiled() -> None:
    compiled, selective = {"compile": {"enabled": True}}, {"activation_checkpointing": {"mode": "selective"}}
    (message,) = problems(parallelism={"pipeline": {"size": 2, **ZERO_BUBBLE}}, **compiled)
    assert message.startswith("[compile] enabled: pipeline: schedule = "), message
    (message,) = problems(parallelism={"context": 2}, **compiled, **selective)
    assert message.startswith("[compile] enabled: context: attention that communicates"), message
    checked(parallelism={"context": 2}, **compiled)
    checked(parallelism={"context": {"size": 2, "method": "ulysses"}}, **compiled, **selective)
    by_tokens = {"batch": {"global_size": None, "micro_size": None, "tokens": 60, "micro_tokens": 20}}
    (message,) = problems(parallelism={"tensor": 2}, **compiled, **by_tokens)
    assert message.startswith("[compile] enabled: tensor is compiled for micro batches of one shape"), message
    checked(parallelism={"tensor": 2}, **by_tokens)
    checked(**compiled, **by_tokens)


@pytest.mark.thorough
def test_callables_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def build(width): return torch.nn.Linear(width, 2)\n"
        "def data(split): return [(torch.zeros(3), torch.tensor(1))] if split == 'train' else None\n"
        "thing = 3\n"
        "def one(outputs): return outputs\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {
        "model": {"name": "mine:build", "width": 3, "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "mine:data"}, "optimizer": {"name": "torch.optim:Adagrad", "lr": 0.1, "lr_decay": 0.5},
    }  # fmt: skip
    base = {**tables(), **own}
    parts = check(RawJob(base, {}, "j"), 1).parts
    module = parts.model.build()
    optimizer = parts.optimizer.build([{"params": list(module.parameters())}])
    assert isinstance(optimizer, torch.optim.Adagrad) and optimizer.param_groups[0]["lr_decay"] == 0.5
    with pytest.raises(TrainingError, match="of the type Tensor, expected \\(input, target\\)"):
        parts.model.count(torch.zeros(2, 3))
    second_order = {"name": "torch.optim:LBFGS", "lr": 0.1}
    with pytest.raises(UsageError, match="several times a step"):
        again = check(RawJob({**base, "optimizer": second_order}, {}, "j"), 1)
        again.parts.optimizer.build([{"params": list(module.parameters())}])
    wrong = [
        ("model", "width", None, "missing a required argument: 'width'"),
        ("model", "name", "mine:bild", "did you mean 'build'"),
        ("model", "name", "mine:thing", "expected something callable"),
        ("model", "name", "minne:build", "No module named 'minne'"),
        ("model", "loss", None, "needs [model] loss"),
        ("model", "loss", "torch.nn:CrossEntropyLoss", "is a class, expected a function"),
        ("model", "loss", "mine:one", "it is called with outputs and target: too many positional arguments"),
        ("dataset", "spilt", 1, "takes no argument 'spilt'"),
        ("optimizer", "lr", None, "needs [optimizer] lr"),
        ("optimizer", "lr_decai", 1, "did you mean 'lr_decay'"),
    ]
    for table, key, value, sentence in wrong:
        changed = {**base, table: {**base[table], key: value}}
        if value is None:
            del changed[table][key]
        with pytest.raises(JobError) as error:
            check(RawJob(changed, {}, "j"), 1)
        assert sentence in str(error.value), (sentence, str(error.value))


def test_a_module_of_ones_own_in_a_pipeline_is_told_what_it_lacks() -> None:
    model = {
        "name": "torch.nn:Linear",
        "in_features": 3,
        "out_features": 2,
        "loss": "torch.nn.functional:cross_entropy",
    }
    parts = check(RawJob({**tables(parallelism={"pipeline": 2}), "model": model}, {}, "j"), None).parts
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UsageError, match=r"the model 'torch.nn:Linear' does not say where it can be cut; expected"):
        parts.parallelism["pipeline"].apply(parts.model.build(), parts.model, mesh)


def test_a_problem_of_the_whole_job_hides_nothing_and_has_no_stand_in() -> None:
    """Text that is no JSON: `read_job` lets none through."""
    with pytest.raises(JobError, match=r"the job: Invalid JSON"):
        check(RawJob(tables(job={"name": "\udcff"}), {}, "j"), None)


@pytest.mark.parametrize(
    "tables",
    [
        {"sharding": {"reduce_bucket_size": "1MB"}, "logger": [{"name": "tensorboard"}]},
        *({"sharding": {"stage": stage}} for stage in range(4)), {"sharding": {"stage": 3, "wrap": "size"}},
        {"communicator": {"name": "mpi", "shared_memory": False}}, {"hook": [{"name": "ema"}]},
        {"activation_checkpointing": {"mode": "full"}}, {"activation_checkpointing": {"mode": "selective"}},
        {"precision": {"mode": "fp16"}}, {"parallelism": {"tensor": 1, "pipeline": 1}},
        *({"compression": {"name": name}} for name in ("powersgd", "top-k", "bf16")),
        *({"schedule": {"name": name}} for name in ("cosine", "wsd", "one-cycle", "polynomial", "inverse-sqrt")),
        {"batch": {"global_size": None, "micro_size": None, "tokens": 64, "micro_tokens": 32}},
        {
            "checkpoint": {"every_steps": 1, "keep_best": {"metric": "accuracy", "mode": "max"}},
            "evaluation": {"every_steps": 1},
        },
    ],
    ids=str,
)  # fmt: skip
def test_the_resolved_job_is_the_same_job(tables: dict[str, Any]) -> None:
    first = checked(optimizer={"groups": [{"pattern": "*.bias", "weight_decay": 0.0}]}, **tables)
    text = tomli_w.dumps(resolved_tables(first))
    again = check(RawJob(tomli.loads(text), {}, "resolved"), 1)
    assert resolved_tables(again) == resolved_tables(first)
    assert again.parts.optimizer_groups == first.parts.optimizer_groups


def test_another_job_is_told_from_the_same_with_more_steps(tmp_path: Path) -> None:
    path = tmp_path / "job.resolved.toml"
    path.write_text(tomli_w.dumps(resolved_tables(checked())))
    refuse_other_job(path, resolved_tables(checked(model={"layers": 3})))  # it left no checkpoint
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for changes in ({"job": {"steps": 9}}, {"optimizer": {"lr": 1.0}}, {"dataset": {"workers": 2}}):
        refuse_other_job(path, resolved_tables(checked(**changes)))
    with pytest.raises(UsageError, match=r"\(model\.tie_embeddings was false, is true\)"):
        refuse_other_job(path, resolved_tables(checked(model={"tie_embeddings": True})))
    for changes in (
        {"job": {"seed": 1}},
        {"model": {"layers": 3}},
        {"dataset": {"samples": 9}},
        {"job": {"name": "b"}},
    ):
        with pytest.raises(UsageError, match="holds another job"):
            refuse_other_job(path, resolved_tables(checked(**changes)))


def test_an_unknown_name_in_block_is_refused() -> None:
    [found] = problems(plugins={"block": ["model.gpt2"]})
    assert found.startswith("[plugins] block: no installed or loaded plugin has the name 'model.gpt2'; expected")
    checked(plugins={"block": ["logger.tensorboard"]})


def test_several_schedules_of_a_pipeline() -> None:
    layers, batch = {"layers": 8}, {"global_size": 8}
    for schedule in ("zbv", "dualpipe-v", "interleaved-1f1b"):
        checked(2, model=layers, batch=batch, parallelism={"pipeline": {"size": 2, "schedule": schedule}})
    [found] = problems(2, model=layers, batch=batch, parallelism={"pipeline": {"size": 2, "schedule": "zb"}})
    assert found.startswith(
        "[parallelism] pipeline.schedule: no installed plugin provides the pipeline_schedule 'zb'"
    ), found
    [found] = problems(
        2, model=layers, batch={"global_size": 2}, parallelism={"pipeline": {"size": 2, "schedule": "dualpipe-v"}}
    )
    assert 'schedule = "dualpipe-v" expects at least one for each of its 4 stages' in found
    three = {"size": 2, "schedule": "zbv", "stages_per_rank": 3}
    assert (
        'schedule = "zbv" has 2 stages per rank, found stages_per_rank = 3'
        in problems(2, parallelism={"pipeline": three})[0]
    )


def test_every_mistake_of_a_pipeline_is_told_at_once() -> None:
    pipeline = {"size": 2, "schedule": "zero-bubble", "split": [3, 3]}
    found = problems(
        2, batch={"global_size": 20, "micro_size": 4}, parallelism={"pipeline": pipeline}, compile={"enabled": True}
    )
    assert [text.partition(":")[0] for text in found] == [
        "[parallelism.pipeline] split",
        "[batch] micro_size",
        "[compile] enabled",
    ]


def test_an_optimizer_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain_plugins.optimizer.adamw_8bit.find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"\[optimizer\] name = 'adamw-8bit': torchao is not installed") as error:
        check(RawJob(tables(optimizer={"name": "adamw-8bit"}), {}, "job.toml"), None, tries=True)
    assert error.value.exit_code == 3


def test_a_plugin_without_its_package_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match="the package tensorboard is not installed") as error:
        checked(logger=[{"name": "tensorboard"}])
    assert error.value.exit_code == 3
    checked()


def test_averages_of_weights_that_differ_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apart.py").write_text(
        "from hpctrain.api import hookimpl\nfrom hpctrain_plugins.sharding.zero0 import Zero0\n\n\n"
        "class Apart(Zero0):\n    'As local SGD.'\n\n    name = 'apart'\n    ranks_diverge = True\n\n\n"
        "@hookimpl\ndef hpctrain_sharding():\n    return [Apart]\n"
    )
    changes: dict[str, Any] = {"sharding": {"name": "apart"}, "plugins": {"load": ["apart"]}}
    checked(**changes)
    (message,) = problems(hook=[{"name": "ema"}], **changes)
    assert message.startswith("[hook] name = 'ema': with [sharding] apart each rank trains weights of its own"), message


def test_a_plugin_s_model_that_raises_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raises.py").write_text(
        "from hpctrain.api import hookimpl\nfrom hpctrain_plugins.model.gpt import GPT\n\n\n"
        "class Raises(GPT):\n    'Raises.'\n\n    name = 'raises'\n\n    def build(self):\n"
        "        raise ValueError('too wide')\n\n\n"
        "@hookimpl\ndef hpctrain_model():\n    return [Raises]\n"
    )
    changed = tables(
        model={"name": "raises", "weights": "gone"}, plugins={"load": ["raises"]}, batch={"global_size": 5}
    )
    with pytest.raises(JobError) as error:
        check(RawJob(changed, {}, "j"), 2, tries=True)
    first, *others = error.value.problems
    assert (
        "raised ValueError: too wide in Raises.build" in first.message
        or "raised ValueError: too wide in build" in first.message
    )
    assert [problem.key for problem in others] == [("batch", "global_size")]


@pytest.mark.thorough
def test_a_strategy_by_name_or_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's own strategy has a name; the stages have both."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_strategy.py").write_text(
        "from hpctrain.api import hookimpl\nfrom hpctrain_plugins.sharding.zero0 import Zero0\n\n\n"
        "class Own(Zero0):\n    'As ZeRO 0.'\n\n    name = 'own'\n\n\n"
        "@hookimpl\ndef hpctrain_sharding():\n    return [Own]\n"
    )
    assert checked(sharding={"name": "zero-2"}).parts.sharding.name == "zero-2"
    assert checked(sharding={"stage": 2}).parts.sharding.name == "zero-2"
    own = {"sharding": {"name": "own", "reduce_bucket_size": 5000}, "plugins": {"load": ["own_strategy"]}}
    job = checked(**own)
    assert job.parts.sharding.name == "own" and resolved_tables(job)["sharding"]["name"] == "own"
    assert "stage" not in resolved_tables(job)["sharding"] and resolved_tables(checked())["sharding"]["stage"] == 0
    both = problems(sharding={"name": "zero-2", "stage": 2})
    assert len(both) == 1 and both[0].startswith(
        "[sharding]: name and stage both choose the strategy; keep one of them"
    )
    assert "no installed plugin provides the sharding 'zero-7'" in problems(sharding={"stage": 7})[0]
    [found] = problems(model={"name": "meta-llama/Llama-3"})
    assert "names of the Hugging Face hub are not taken: name a function that loads it" in found
    assert problems(sharding={"name": 2}) and problems(sharding={"stage": True}) and problems(sharding={"stage": -1})


def test_a_buffer_that_nothing_gives_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device it would be what lies in memory."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "masked_gpt.py").write_text(
        "import torch\nfrom hpctrain.api import hookimpl\nfrom hpctrain_plugins.model.gpt import GPT\n\n\n"
        "class Masked(GPT):\n    'With a mask.'\n\n    name = 'masked'\n\n    def build(self):\n        module = super().build()\n"
        "        module.register_buffer('mask', torch.ones(3), persistent=False)\n        return module\n\n\n"
        "@hookimpl\ndef hpctrain_model():\n    return [Masked]\n"
    )
    found = problems(model={"name": "masked"}, plugins={"load": ["masked_gpt"]})
    assert (
        len(found) == 1 and "[model] masked: its buffer mask would have no values: a MetaModel initializes" in found[0]
    )


OWN_AXIS = """
from hpctrain.api import AppliedAxis, AxisTraits, Parallelism, hookimpl


class Own(Parallelism):
    'An axis that changes nothing.'

    name = 'own'
    traits = AxisTraits({axis!r}, 45, {ranks_have!r})

    def apply(self, module, spec, mesh):
        return AppliedAxis(module)


@hookimpl
def hpctrain_parallelism():
    return [Own]
"""


@pytest.mark.parametrize(
    ("axis", "ranks_have", "sentence"),
    [
        ("tp", "the same samples", "its mesh axis tp is that of tensor; expected a name of its own"),
        ("dp_shard", "the same samples", "its mesh axis dp_shard is that of the data ranks; expected a name of its own"),
        ("own", "nothing", "its traits say that ranks have 'nothing'; expected one of the same samples, parts of samples, "),
        ("own", "the same samples", None),
    ],
)  # fmt: skip
def test_an_axis_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str, ranks_have: str, sentence: str | None
) -> None:
    name = f"own_axis_{axis}_{len(ranks_have)}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(OWN_AXIS.format(axis=axis, ranks_have=ranks_have))
    changes = {"parallelism": {"tensor": 2, "own": 2}, "plugins": {"load": [name]}}
    if sentence is None:
        assert checked(4, **changes).parts.parallelism["own"].traits.axis == "own"
    else:
        with pytest.raises(HpctrainError, match=re.escape(sentence)):
            checked(4, **changes)


@pytest.mark.parametrize(("stage", "per_element"), [(0, 16), (1, 12), (2, 10), (3, 8)])
def test_sizes_of_a_job_on_two_ranks(stage: int, per_element: int) -> None:
    """AdamW in fp32: 4 bytes each for a parameter, its gradient and two moments."""
    made = tables(job={"seed": 1}, precision={"mode": "fp32"}, sharding={"stage": stage})
    elements = sum(one.numel() for one in module_of(made, torch.float32).parameters())
    assert sizes(check(RawJob(made, {}, "job"), 2)) == (f"{elements:,} parameters", elements * per_element)
    made["model"]["trainable"] = ["token_embedding.*"]
    assert sizes(check(RawJob(made, {}, "job"), None)) == (f"{elements:,} parameters, 1,024 of them trained", None)


@pytest.mark.parametrize(("steps", "fits"), [(20, True), (300, True), (1000, False), (1200, False), (1300, True)])
def test_the_best_of_a_job_that_is_cut_short_for_a_trial(steps: int, fits: bool) -> None:
    """The last step is both evaluated and saved; of many steps, one that is both has to be among them."""
    made = tables(
        job={"steps": steps}, evaluation={"every_steps": 300}, checkpoint={"every_steps": 400, "keep_best": 1}
    )
    if fits:
        check(RawJob(made, {}, "job"), 1)
        return
    with pytest.raises(JobError, match=rf"no step of {steps} but the last is both evaluated"):
        check(RawJob(made, {}, "job"), 1)
