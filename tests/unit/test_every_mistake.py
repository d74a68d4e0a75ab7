"""Every mistake of a job is reported at once: mistakes drawn from a list, two or three in a job."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from hpctrain.checking.check import check
from hpctrain.checking.trial import open_outside
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

Tables = dict[str, Any]


def put(*keys: str) -> Callable[[Any], Callable[[Tables], None]]:
    def with_value(value: Any) -> Callable[[Tables], None]:
        def change(tables: Tables) -> None:
            for key in keys[:-1]:
                tables = tables.setdefault(key, {})
            if value is None:
                tables.pop(keys[-1])
            else:
                tables[keys[-1]] = value

        return change

    return with_value


MISTAKES: dict[str, tuple[Callable[[Tables], None], str]] = {
    # by its place in the job, as no two of one place go into a job: the mistake, and what its sentence has
    "optimizer.lr": (put("optimizer", "lr")(-1), "[optimizer] lr: expected greater than 0, found -1"),
    "optimizer.lr ": (put("optimizer", "lr")(None), "[optimizer] lacks the key 'lr'"),
    "optimizer.clip": (put("optimizer", "clip")(1.0), "unknown key 'clip' in [optimizer]"),
    "optimizer.groups": (
        put("optimizer", "groups")([{"pattern": "*.biass"}]),
        "no trained parameter matches '*.biass'",
    ),
    "precision": (
        put("precision", "mode")("fp17"),
        "[precision] mode: no installed plugin provides the precision 'fp17'",
    ),
    "model.layerz": (put("model", "layerz")(2), "unknown key 'layerz' in [model]"),
    "model.name": (
        put("model", "name")("gtp"),
        "[model] name: no installed plugin provides the model 'gtp'; did you mean",
    ),
    "model.name ": (put("model", "name")("resnet"), "[model] name: no installed plugin provides the model 'resnet' ("),
    "model.heads": (put("model", "attention_heads")(3), "[model]: expected attention_heads that divide hidden_size 16"),
    "dataset.name": (put("dataset", "name")("imagenet"), "no installed plugin provides the dataset 'imagenet'"),
    "optimizer.name": (put("optimizer", "name")("lion"), "no installed plugin provides the optimizer 'lion'"),
    "optimizer.name ": (put("optimizer", "name")("adamm"), "the optimizer 'adamm'; did you mean 'adam'?"),
    "model.weights": (
        put("model", "weights")("gone.pt"),
        "[model] weights: there are none at gone.pt, or no permission to read them; expected a path (names of the Hugging Face",
    ),
    "model.freeze": (put("model", "freeze")(["nothing.*"]), "[model] freeze: no parameter matches 'nothing.*'"),
    "dataset": (put("dataset")({"name": "text", "files": ["gone.txt"]}), "gone.txt"),
    "job.steps": (put("job", "steps")("many"), "[job] steps: expected a valid integer"),
    "job.seed": (put("job", "seed")(-3), "[job] seed: expected greater than or equal to 0"),
    "parallelism": (
        put("parallelism", "tensor")({"size": 2, "plam": 1}),
        "unknown key 'plam' in [parallelism] tensor",
    ),
    "parallelism ": (put("parallelism", "tensr")(2), "[parallelism] tensr: no installed plugin provides"),
    "batch": (put("batch", "global_size")(5), "[batch] global_size: 5 does not divide over"),
    "checkpoint": (
        put("checkpoint", "format")("hdf"),
        "[checkpoint] format: no installed plugin provides the checkpoint 'hdf'",
    ),
    "keep_best": (put("checkpoint", "keep_best")(2), "[checkpoint] keep_best: it needs evaluations"),
    "logger": (put("logger")([{"name": "wand"}]), "[logger] name: no installed plugin provides the logger 'wand'"),
    "hook": (put("hook")([{"name": "ema", "decay": 2}]), "decay: expected less than 1, found 2"),
    "metric": (put("metric")([{"name": "accuracy"}]), "[[metric]] name = 'accuracy': it needs evaluations"),
    "schedule": (put("schedule")({"name": "cosine", "warmup": 3}), "unknown key 'warmup' in [schedule]"),
    "sharding": (put("sharding")({"stage": 3, "min_parameters": 3}), 'min_parameters goes with wrap = "size"'),
    "stray": (put("optimiser")({"lr": 1}), "unknown key 'optimiser'"),
}
APART = [
    {"parallelism", "parallelism ", "batch"},
    {"optimizer.lr", "optimizer.lr ", "optimizer.name", "optimizer.name "},
    {"optimizer.clip", "optimizer.name"},
    {"checkpoint", "keep_best"},
    {"model.name", "model.name ", "model.heads"},
    *(
        {one, other}
        for one in ("model.name ", "model.heads")
        for other in ("model.layerz", "model.freeze", "optimizer.groups")
    ),
    {"dataset", "dataset.name"},
]
"""Of these only one goes into a job: the one hides the other, or changes what it says."""


def drawn(number: int) -> list[str]:
    draw = random.Random(number)
    while True:
        chosen = draw.sample(sorted(MISTAKES), draw.choice([2, 3]))
        if not any(len(group & set(chosen)) > 1 for group in APART):
            return chosen


@pytest.mark.parametrize("number", range(60))
def test_all_are_named_in_one_go(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables, chosen = copy.deepcopy(TINY), drawn(number)
    for name in chosen:
        MISTAKES[name][0](tables)
    raw = RawJob(tables, {}, "job.toml")
    with pytest.raises(JobError) as error:  # as the command does it
        checked = check(raw, 2, tries=True)
        raise JobError(raw, open_outside(checked.job, checked.parts)[1])
    said = str(error.value).splitlines()
    for name in chosen:
        assert any(MISTAKES[name][1] in line for line in said), (name, chosen, said)
    assert len(said) == len(chosen), (chosen, said)
