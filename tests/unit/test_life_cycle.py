"""Hooks of a training: a plugin ends it, keeps state in its checkpoints, sees its phases, and fails."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY

import hpctrain
from hpctrain.base.errors import CheckpointError, HpctrainError, TrainingError, UsageError
from hpctrain.contracts.life_cycle import Control
from hpctrain.registry.registry import build_registry

PATIENCE = """
import torch
from hpctrain.api import Piece, PluginState, hookimpl


class Patience:
    '''Ends the run when the evaluation is over a bound for the second time; its average of the losses is a tensor.'''

    def __init__(self):
        self.evaluations, self.average = 0, torch.zeros(3)

    @hookimpl
    def hpctrain_state(self):
        return PluginState("patience", [Piece.whole("average", self.average)], self.values, self.restore)

    def values(self):
        return {"evaluations": self.evaluations}

    def restore(self, values):
        self.evaluations = values["evaluations"]

    @hookimpl
    def hpctrain_job_start(self, step, control):
        self.control = control
        print("began after", step, self.evaluations, self.average.tolist())

    @hookimpl
    def hpctrain_step_end(self, step, metrics):
        self.average.mul_(0.5).add_(metrics["loss"])

    @hookimpl
    def hpctrain_evaluation(self, step, metrics, control):
        self.evaluations += 1
        if self.evaluations == 2:
            control.stop(f"{self.evaluations} evaluations are enough")


_patience = Patience()
for name in ("hpctrain_state", "hpctrain_job_start", "hpctrain_step_end", "hpctrain_evaluation"):
    globals()[name] = getattr(_patience, name)
"""

PHASES = """
from hpctrain.api import hookimpl


def note(*words):
    with open("phases", "a") as file:
        print(*words, file=file)


@hookimpl
def hpctrain_phase_begin(phase, step):
    note("begin", phase, step)


@hookimpl
def hpctrain_phase_end(phase, step):
    note("end", phase, step)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def train(plugin: str | None = None, **changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in changes.items():
        tables.setdefault(name, {}).update(table)
    if plugin is not None:
        tables["plugins"] = {"load": [plugin]}
    return hpctrain.run(tables)


def write(name: str, text: str) -> str:
    Path(f"{name}.py").write_text(text)
    return name


def losses(directory: str = "out") -> list[float]:
    rows = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.thorough
def test_a_plugin_ends_a_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    name = write("patience_ends", PATIENCE)
    tables = {"evaluation": {"every_steps": 2}, "job": {"steps": 9}}
    result = train(name, **tables)
    assert (result["step"], result["losses"], result["exit_code"]) == (4, losses(), 0)
    out = capsys.readouterr().out
    assert "ended        after step 4: 2 evaluations are enough" in out and "done         step 4" in out
    assert [path.name for path in Path("out/checkpoints").glob("step-*")] == ["step-00000004"]
    train(evaluation={"every_steps": 2}, job={"steps": 9, "output_dir": "whole"})
    assert losses() == losses("whole")[:4]


def test_a_plugin_that_ends_a_run_before_its_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    name = write(
        "ends_at_once", "from hpctrain.api import hookimpl\n\n\n@hookimpl\n"
        "def hpctrain_job_start(control):\n    control.stop('no need')\n",
    )  # fmt: skip
    assert train(name)["step"] == 0
    out = capsys.readouterr().out
    assert "ended        after step 0: no need" in out and "nan" not in out and "raise [job] steps" not in out


def test_a_plugin_ends_a_run_that_nobody_wants_to_keep(capsys: pytest.CaptureFixture[str]) -> None:
    name = write(
        "ends_unsaved", "from hpctrain.api import hookimpl\n\n\n@hookimpl\n"
        "def hpctrain_step_end(step, control):\n    if step == 3:\n        control.stop('seen', save=False)\n",
    )  # fmt: skip
    result = train(name, job={"steps": 9}, checkpoint={"every_steps": 2, "asynchronous": True})
    assert (result["step"], result["exit_code"]) == (3, 0) and len(losses()) == 3
    assert [path.name for path in Path("out/checkpoints").glob("step-*")] == ["step-00000002"]
    assert "ended        after step 3: seen" in (out := capsys.readouterr().out) and "metrics.jsonl, None" not in out


@pytest.mark.thorough
def test_a_plugin_gets_back_what_it_kept(capsys: pytest.CaptureFixture[str]) -> None:
    straight, halves = write("patience_straight", PATIENCE), write("patience_halves", PATIENCE)
    evaluation = {"every_steps": 3}
    train(straight, job={"steps": 5}, evaluation=evaluation)
    train(straight, job={"steps": 5}, evaluation=evaluation)
    ended = capsys.readouterr().out.splitlines()[-4:]
    train(write("patience_first", PATIENCE), job={"steps": 4, "output_dir": "halves"}, evaluation=evaluation)
    train(halves, job={"steps": 5, "output_dir": "halves"}, evaluation=evaluation)
    began = [line for line in capsys.readouterr().out.splitlines() if line.startswith("began")]
    average = 0.0
    for loss in losses("halves")[:4]:
        average = average / 2 + loss
    words = began[-1].split(" ", 4)
    assert words[:4] == ["began", "after", "4", "2"], (began, ended)  # it had evaluated after steps 3 and 4
    assert json.loads(words[4]) == pytest.approx([average] * 3, rel=1e-6)


@pytest.mark.thorough
def test_a_checkpoint_without_a_plugin_s_state_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    train(job={"steps": 2})
    train(write("patience_later", PATIENCE), job={"steps": 3})
    out = capsys.readouterr().out
    assert "plugins      1 of its tensors are not in out/checkpoints/step-00000002; they begin as in a new run" in out
    assert "began after 2 0 [0.0, 0.0, 0.0]" in out
    train(job={"steps": 4})  # and one with it, where the plugin is gone
    assert len(losses()) == 4


def test_two_plugins_with_one_name_for_their_state() -> None:
    write("patience_one", PATIENCE)
    both = PATIENCE + "\nimport patience_one\n"
    with pytest.raises(UsageError, match="two plugins keep state in checkpoints under the name 'patience'"):
        hpctrain.run({**TINY, "plugins": {"load": ["patience_one", write("patience_two", both)]}})


def test_phases_are_told_in_order() -> None:
    tables = {"job": {"steps": 2}, "evaluation": {"every_steps": 2, "batches": 1}, "batch": {"micro_size": 6}}
    train(write("notes_phases", PHASES), **tables)
    lines = [line.split() for line in Path("phases").read_text().splitlines()]
    step = [(which, phase) for which, phase, number in lines if number == "0"]
    expected = ["build", "data", *["forward", "backward"] * 2, "optimizer"]
    assert step == [(which, phase) for phase in expected for which in ("begin", "end")]
    assert [(phase, number) for which, phase, number in lines if which == "end"][-2:] == [
        ("evaluation", "2"), ("save", "2"),
    ]  # fmt: skip


@pytest.mark.cases(thorough=["checkpoint_saved", "job_end"])
@pytest.mark.parametrize(
    "hook", ["state", "job_start", "step_end", "evaluation", "checkpoint_saved", "phase_begin", "job_end"]
)
def test_an_error_in_a_plugin_is_told_with_its_name(hook: str) -> None:
    name = write(
        f"breaks_{hook}", "from hpctrain.api import hookimpl\n\n\ndef inner():\n    raise ValueError('boom')\n\n\n"
        f"@hookimpl\ndef hpctrain_{hook}():\n    inner()\n",
    )  # fmt: skip
    with pytest.raises(TrainingError) as found:
        train(name, evaluation={"every_steps": 2})
    first, *frames = str(found.value).splitlines()
    assert first == f"the plugin {name} ([plugins] load) raised ValueError: boom in hpctrain_{hook}"
    assert [line.split(", in ")[1] for line in frames if ", in " in line] == [f"hpctrain_{hook}", "inner"]
    assert "Traceback" in Path("out/log/rank-00000.log").read_text()


def test_an_error_in_a_package_names_the_module_that_was_called() -> None:
    """Not the package's first plugin."""
    Path("house").mkdir()
    for module, method in (("first", "hpctrain_job_end"), ("second", "hpctrain_optimizer")):
        Path("house", f"{module}.py").write_text(
            "import torch\nfrom hpctrain.api import Optimizer, OptimizerOptions, hookimpl\n\n\nclass Fails(torch.optim.SGD):\n"
            "    def step(self, closure=None):\n        raise ValueError('boom')\n\n\nclass Own(Optimizer):\n    name = 'fails'\n"
            "    Options = OptimizerOptions\n\n    def build(self, groups):\n        return Fails(groups, lr=0.1)\n\n\n@hookimpl\n"
            f"def {method}():\n    return [Own]\n"
        )  # fmt: skip
    plugins, optimizer = {"load": ["house.first", "house.second"]}, {"name": "fails", "lr": 0.1}
    with pytest.raises(TrainingError, match=r"^the plugin house\.second .* raised ValueError: boom in Fails\.step"):
        hpctrain.run({**TINY, "plugins": plugins, "optimizer": optimizer})


HANDS_OVER = """
import torch
from hpctrain.api import PluginState, hookimpl

@hookimpl
def hpctrain_state():
    return {state}

@hookimpl
def hpctrain_step_end(metrics):
    metrics["mine"] = torch.ones({elements})
"""


@pytest.mark.thorough
def test_tensors_that_hooks_hand_over_are_numbers_or_refused() -> None:
    train(write("hands_one", HANDS_OVER.format(state=None, elements=1)))
    assert json.loads(Path("out/metrics.jsonl").read_text().splitlines()[0])["mine"] == 1.0
    mine = 'PluginState("mine", values=lambda: {"mean": torch.ones(1)})'
    for state, elements, says in (
        (None, 2, "a hook has put 'mine' into the metrics of step 1: found a Tensor of shape (2,), expected a number"),
        (mine, 1, "the state 'mine' can't be saved: values.mean is a torch.Tensor; "),
    ):
        name = write(f"hands_{elements}_over", HANDS_OVER.format(state=state, elements=elements))
        with pytest.raises(TrainingError) as found:
            train(name, job={"output_dir": name})
        assert says in str(found.value)


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    write("rates", "import torch\n\n\nclass Own(torch.optim.Optimizer):\n    def __init__(self, groups, lr):\n"
          "        super().__init__(groups, {'rate': lr})\n\n    def step(self, closure=None):\n        pass\n")  # fmt: skip
    with pytest.raises(UsageError, match="its parameter groups or its defaults have no 'lr', which the schedule sets"):
        hpctrain.run({**TINY, "optimizer": {"name": "rates:Own", "lr": 0.1}})


def test_a_hook_that_leaves_evaluation_mode_is_named() -> None:
    name = write(
        "evaluates", "from hpctrain.api import hookimpl\n\n\n@hookimpl\n"
        "def hpctrain_step_end(model):\n    model.module.eval()\n",
    )  # fmt: skip
    told = "^the plugin evaluates .*left the model in evaluation mode in hpctrain_step_end, where dropout"
    with pytest.raises(TrainingError, match=told):
        train(name)


def test_an_hpctrain_error_of_a_plugin_is_told_as_it_is() -> None:
    name = write(
        "refuses", "from hpctrain.api import CheckpointError, hookimpl\n\n\n@hookimpl\n"
        "def hpctrain_job_start():\n    raise CheckpointError('the table is gone')\n",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"^the table is gone$"):
        train(name)


@pytest.mark.thorough
def test_early_stopping_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    """Its page is to be true: also where a checkpoint is saved before the first evaluation, and after a resume."""
    page = (Path(__file__).parent.parent.parent / "docs" / "plugins" / "hook.md").read_text()
    code = next(block for block in page.split("```python\n") if 'name = "stops"' in block).split("```")[0]
    tables = {
        "evaluation": {"every_steps": 2, "batches": 1},
        "checkpoint": {"every_steps": 1},
    }

    def run(name: str, steps: int) -> dict[str, Any]:
        job = {**TINY, **tables, "job": {**TINY["job"], "steps": steps}, "optimizer": {"name": "adamw", "lr": 1e-30}}
        return hpctrain.run({**job, "plugins": {"load": [write(name, code)]}, "hook": [{"name": "stops"}]})

    run("stops_early", 6)  # nothing is learned: 2 evaluations without a better one
    result = run("stops_early_again", 20)
    assert result["step"] == 8 and result["exit_code"] == 0
    assert "ended        after step 8: the evaluation loss has not fallen for 3 evaluations" in capsys.readouterr().out


EARLY = {"evaluation": {"every_steps": 1, "batches": 1}, "optimizer": {"name": "adamw", "lr": 1e-30}}


@pytest.mark.thorough
def test_early_stopping_by_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    job = {**TINY, **EARLY, "job": {**TINY["job"], "steps": 9}}
    result = hpctrain.run({**job, "hook": [{"name": "early-stopping", "patience": 2}]})
    assert result["step"] == 3, "the first evaluation is the best"
    ended = "step 3: the evaluation loss has not fallen below "
    assert f"ended        after {ended}" in capsys.readouterr().out
    assert hpctrain.run({**job, "hook": [{"name": "early-stopping", "patience": 2}]})["step"] == 3, "it stays ended"
    assert f"ended        after {ended}" in capsys.readouterr().out
    assert hpctrain.run({**job, "hook": [{"name": "early-stopping", "patience": 4}]})["step"] == 5, "more patience"
    again = hpctrain.run({**job, "job": {**job["job"], "output_dir": "without"}})
    assert again["step"] == 9, "a job that does not name it is left alone"
    two = [{"name": "early-stopping", "patience": 2}, {"name": "early-stopping"}]
    with pytest.raises(HpctrainError, match=r"\[\[hook\]\] name = 'early-stopping' is listed twice; expected once"):
        hpctrain.run({**job, "hook": two, "job": {**job["job"], "output_dir": "two"}})


def test_early_stopping_by_a_metric_that_is_to_grow(capsys: pytest.CaptureFixture[str]) -> None:
    job = {**TINY, **EARLY, "metric": [{"name": "accuracy"}], "job": {**TINY["job"], "steps": 9}}
    by = {"name": "early-stopping", "patience": 2, "metric": "accuracy", "mode": "max"}
    assert hpctrain.run({**job, "hook": [by]})["step"] == 3
    assert "step 3: the evaluation accuracy has not risen above " in capsys.readouterr().out
    with pytest.raises(HpctrainError, match=r"early-stopping: evaluations measure loss, accuracy, and not 'acuracy'"):
        hpctrain.run({**job, "hook": [{**by, "metric": "acuracy"}], "job": {**job["job"], "output_dir": "misspelt"}})


def test_early_stopping_without_evaluations_is_refused() -> None:
    with pytest.raises(HpctrainError, match=r"\[hook\] name = 'early-stopping': it needs the evaluation loss"):
        hpctrain.run({**TINY, "hook": [{"name": "early-stopping"}]})


@pytest.mark.thorough
def test_learning_rate_finder(capsys: pytest.CaptureFixture[str]) -> None:
    job = {
        **TINY,
        "job": {**TINY["job"], "steps": 60},
        "guard": {"non_finite": "skip"},
        "batch": {"global_size": 8, "micro_size": 8},
    }
    job["schedule"] = {"name": "cosine", "warmup_steps": 10}
    job["optimizer"] = {"name": "sgd", "lr": 0.5, "groups": [{"pattern": "*.bias", "lr": 1.0}]}
    hook = {"name": "lr-finder", "lowest": 1e-3, "highest": 1e5, "steps": 60}
    result = hpctrain.run({**job, "hook": [hook]})
    said = capsys.readouterr().out
    assert result["exit_code"] == 0 and 5 < result["step"] < 60
    found = re.search(r"lr-finder: the loss fell fastest at lr (\S+), and the loss diverged at lr (\S+)", said)
    assert found is not None, said
    fastest, diverged = map(float, found.groups())
    assert 1e-3 < fastest < diverged < 1e5
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == pytest.approx([1e-3 * 1e8 ** (step / 59) for step in range(len(rows))])
    # a rate near the found one trains; the one at which the loss diverged doesn't
    curves = [hpctrain.run(at_rate(job, rate))["losses"] for rate in (fastest, diverged * 10)]
    means = [sum(curve[-5:]) for curve in curves]
    assert means[0] < sum(curves[0][:5]) and not means[1] < means[0], (fastest, diverged, curves)
    hpctrain.run({**job, "hook": [hook]})
    assert "lr-finder needs a new run" in capsys.readouterr().out
    short = {**job, "job": {"name": "short", "epochs": 0.1}}
    assert hpctrain.run({**short, "hook": [hook]})["step"] == 6
    assert "the job ended after 6 of the test's 60 steps" in capsys.readouterr().out


def at_rate(job: dict[str, Any], rate: float) -> dict[str, Any]:
    named = {**job["job"], "steps": 20, "output_dir": f"rate-{rate}"}
    guard = {"non_finite": "skip", "limit": 20}
    return {
        **job, "job": named, "guard": guard, "schedule": {"name": "constant"}, "optimizer": {"name": "sgd", "lr": rate},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ({}, r'expected \[guard\] non_finite = "skip", found "stop"'),
        ({"steps": 10, "lowest": 2.0, "highest": 1.0}, "expected highest above lowest, found 1 and 2"),
        ({"steps": 5}, "steps"),
    ],
)
def test_what_the_finder_refuses(hook: dict[str, Any], says: str) -> None:
    with pytest.raises(HpctrainError, match=says):
        hpctrain.run({**TINY, "hook": [{"name": "lr-finder", **hook}]})


def test_moving_average_begins_with_the_weights_of_the_job_and_is_left_out_of_skipped_steps() -> None:
    """An average of a run without steps of its own is what [model] weights gave it."""
    first = hpctrain.run(TINY)
    job = {
        **TINY,
        "job": {**TINY["job"], "output_dir": "averaged", "steps": 1},
        "hook": [{"name": "ema", "decay": 0.5}],
    }
    job["model"] = {**TINY["model"], "weights": str(first["checkpoint"].resolve())}
    averaged = hpctrain.run(job)
    before = hpctrain.load(first["checkpoint"]).state_dict()
    after = hpctrain.load(averaged["checkpoint"]).state_dict()
    mean = hpctrain.load(averaged["checkpoint"], weights_of="ema").state_dict()
    for name, value in before.items():
        torch.testing.assert_close(mean[name], (value + after[name]) / 2)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_moving_average_that_warms_up() -> None:
    """Its decay is the smaller one of (1 + n) / (10 + n) and the option, also after a resume."""
    seen: list[dict[str, torch.Tensor]] = []
    for steps in (1, 2, 3):
        tables = {**TINY, "job": {**TINY["job"], "output_dir": "warm", "steps": steps}}
        done = hpctrain.run({**tables, "hook": [{"name": "ema", "decay": 0.2, "warmup": True}]})
        seen.append(hpctrain.load(done["checkpoint"]).state_dict())
    mean = hpctrain.load(done["checkpoint"], weights_of="ema").state_dict()
    begin = hpctrain.run(
        {
            **TINY,
            "job": {**TINY["job"], "output_dir": "begin", "steps": 1},
            "optimizer": {**TINY["optimizer"], "lr": 0.0},
        }
    )
    for name, expected in hpctrain.load(begin["checkpoint"]).state_dict().items():
        for weights, decay in zip(seen, (2 / 11, 0.2, 0.2), strict=True):
            expected = decay * expected + (1 - decay) * weights[name]
        torch.testing.assert_close(mean[name], expected)


STRATEGY = """
from hpctrain.api import hookimpl
from hpctrain_plugins.sharding.zero0 import Zero0, Zero0Model


class Model(Zero0Model):
    def begin(self, last, interleaved=False):
        raise ValueError("boom")


class Own(Zero0):
    '''Fails.'''

    name = "own"

    def shard(self, module, spec, mesh, sums):
        return Model(module, sums, self.options)


class Checked(Zero0):
    '''Fails while a job is checked.'''

    name = "checked"

    def problems(self, plan):
        return [plan.nothing]


class Made(Zero0):
    '''Fails while it is made.'''

    name = "made"

    def __init__(self, options):
        raise KeyError("no such thing")


@hookimpl
def hpctrain_sharding():
    return [Own, Checked, Made]
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own", "the plugin fails_{} ([plugins] load) raised ValueError: boom in Model.begin"),
        ("checked", "[sharding] name = 'checked': the plugin fails_{} ([plugins] load) raised AttributeError: 'Plan' object has"),
        ("made", "[sharding] name = 'made': the plugin fails_{} ([plugins] load) raised KeyError: 'no such thing' in Made.__init"),
    ],
)  # fmt: skip
def test_what_a_plugin_raises_is_told_with_its_name(name: str, sentence: str) -> None:
    """While a job is checked, and in training; the exit code is 4."""
    load = write(f"fails_{name}", STRATEGY)
    with pytest.raises(HpctrainError) as found:
        hpctrain.run({**TINY, "sharding": {"name": name}, "plugins": {"load": [load]}})
    assert sentence.format(name) in str(found.value) and found.value.exit_code == 4


def test_an_evaluation_that_is_no_number_is_none_that_is_better() -> None:
    entry = build_registry().find("hook", "early-stopping")
    watch = entry.cls(entry.cls.Options(patience=2, minimum_change=0.1)).start()
    control = Control()
    for loss in (3.0, math.nan, 2.95):
        assert not control.reasons
        watch.hpctrain_evaluation({"evaluation_loss": loss}, control)
    assert control.reasons == ["the evaluation loss has not fallen by more than 0.1 below 3.0000 for 2 evaluations"]
