"""When a run saves, what it keeps, and what a failed save does to it: whole runs in this process."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hpctrain_plugins.checkpoint.hdf5 import Hdf5
from hpctrain_tools.checkpoint.conversion import import_weights
from jobs import TINY

import hpctrain
from hpctrain.base.errors import CheckpointError, EnvironmentUnfitError, HpctrainError, TrainingError, UsageError
from hpctrain.checkpoint.retention import Best, Retention
from hpctrain.checkpoint.state import create_state
from hpctrain.cli import execute
from hpctrain.job import output_lock
from hpctrain.toolkit.checkpoint.sealed import seal
from hpctrain.training.progress import BestSoFar
from hpctrain.training.report import Goodput, MetricsFile

BREAKS = """
import time
from pathlib import Path
from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    checkpoints, away = Path("out/checkpoints"), Path("out/away")
    if step == 4:  # from here on nothing can be written
        while not (checkpoints / "latest").exists():
            time.sleep(0.01)  # the save of step 2 is complete
        checkpoints.rename(away)
        checkpoints.write_text("no directory")
    if step > 4:
        time.sleep(0.05)  # the background save has failed by the next step
    if step == 7:
        checkpoints.unlink()
        away.rename(checkpoints)
"""

STOPS = """
import os
import signal
from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(**changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in changes.items():
        tables.setdefault(name, {}).update(table)
    return hpctrain.run(tables)


def steps_saved(directory: str = "out/checkpoints") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(directory).glob("step-*"))


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


@pytest.mark.cases(default=["table0-steps0"], rest="thorough")
@pytest.mark.parametrize(
    ("table", "steps"),
    [
        ({"every_epochs": 1}, [4, 7, 8]),  # 40 samples, 12 a step: 48 and 84 seen
        ({"every_epochs": 0.5}, [2, 4, 5, 7, 8]),
        ({"every_epochs": 1, "every_steps": 3}, [3, 4, 6, 7, 8]),
        ({}, [8]),
    ],
)
def test_epochs_and_steps_say_when(table: dict[str, Any], steps: list[int]) -> None:
    train(job={"steps": 8}, dataset={"samples": 40}, checkpoint=table)
    assert steps_saved() == steps


def test_epochs_go_on_to_their_end_with_another_batch() -> None:
    """40 samples: an epoch is 3 steps of 12 samples, and the 44 that are left of the second are 7 of 6."""
    tables = json.loads(json.dumps({**TINY, "dataset": {"name": "synthetic", "samples": 40}}))
    del tables["job"]["steps"]
    tables["job"]["epochs"] = 1
    assert hpctrain.run(tables)["step"] == 3
    tables["job"]["epochs"], tables["batch"] = 2, {"global_size": 6, "micro_size": 1}
    assert hpctrain.run(tables)["step"] == 3 + 7
    assert hpctrain.run(tables)["step"] == 3 + 7


@pytest.mark.thorough
def test_the_newest_every_nth_and_the_best_stay() -> None:
    table = {"every_steps": 1, "keep": 1, "keep_every": 5, "keep_best": 2}
    train(job={"steps": 6}, evaluation={"every_steps": 2}, optimizer={"lr": 0.5}, checkpoint=table)
    losses = {row["step"]: row["evaluation_loss"] for row in rows() if "evaluation_loss" in row}
    assert set(losses) == {2, 4, 6}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert steps_saved() == sorted({6, 5, *best})
    # and after a resume the older ones' losses are known
    train(job={"steps": 8}, evaluation={"every_steps": 2}, optimizer={"lr": 0.5}, checkpoint=table)
    losses = {row["step"]: row["evaluation_loss"] for row in rows() if "evaluation_loss" in row}
    best = [step for step in sorted(losses, key=lambda step: losses[step]) if step in {8, *best}][:2]
    assert steps_saved() == sorted({8, 5, *best})


@pytest.mark.thorough
def test_a_signal_saves_before_an_evaluation_and_the_resume_makes_up_for_it() -> None:
    Path("stops.py").write_text(STOPS)
    every: Any = {"every_steps": 2}
    assert train(evaluation=every, plugins={"load": ["stops"]})["exit_code"] == 75
    assert steps_saved() == [2] and not any("evaluation_loss" in row for row in rows())
    assert train(evaluation=every)["exit_code"] == 0
    resumed = rows()
    train(job={"output_dir": "straight"}, evaluation=every)
    straight = [json.loads(line) for line in Path("straight/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("evaluation_loss")) for row in resumed] == [
        (row["step"], row.get("evaluation_loss")) for row in straight
    ]


@pytest.mark.parametrize("background", [False, True])
def test_a_signal_while_a_step_is_saved_needs_no_other_step(background: bool) -> None:
    Path("saves.py").write_text(
        STOPS.replace("step_end(step)", "phase_end(phase)").replace("step == 1", "phase == 'save'")
    )
    table: Any = {"every_steps": 2, "asynchronous": background}
    assert train(checkpoint=table, plugins={"load": ["saves"]})["exit_code"] == 75
    assert steps_saved() == [2] and rows()[-1]["step"] == 2
    assert train(checkpoint=table)["exit_code"] == 0


def test_ctrl_c_saves_and_interrupts_the_program() -> None:
    Path("interrupts.py").write_text(STOPS.replace("SIGTERM", "SIGINT"))
    with pytest.raises(KeyboardInterrupt):
        train(plugins={"load": ["interrupts"]})
    assert steps_saved() == [2] and train()["exit_code"] == 0


def test_the_best_need_an_evaluation() -> None:
    with pytest.raises(HpctrainError, match=r"\[checkpoint\] keep_best: .*every_steps") as raised:
        train(checkpoint={"keep_best": 1})
    assert raised.value.exit_code == 2


def paths(*steps: int) -> list[Path]:
    return [Path(f"step-{step:08d}") for step in steps]


@pytest.mark.parametrize(
    ("newest", "every", "best", "stay"),
    [
        (None, None, None, [8, 7, 6, 5, 4, 9]),
        (2, None, None, [8, 7]),
        (None, 3, None, [8, 6]),
        (1, 2, None, [8, 6, 4]),
        (None, None, 2, [8, 5, 7]),  # 4 is NaN, 6 has none, 9 was left behind
        (6, None, 1, [8, 7, 6, 5, 4, 9]),
    ],
)
def test_what_stays(newest: int | None, every: int | None, best: int | None, stay: list[int]) -> None:
    losses = {8: 3.0, 7: 2.0, 5: 1.0, 4: float("nan"), 9: 0.5}
    known = {path: {"evaluation_loss": losses[step]} for step, path in zip(losses, paths(*losses), strict=True)}
    retention = Retention(newest, every, best and Best(best))
    kept, _ = retention.staying(lambda path: known.get(path, {}), paths(8, 7, 6, 5, 4, 9), {"step-00000009"})
    assert kept == set(paths(*stay))


@pytest.mark.cases(thorough=["True"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_told_and_training_goes_on(asynchronous: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Path("breaks.py").write_text(BREAKS)
    table = {"every_steps": 2, "on_error": "continue", "asynchronous": asynchronous}
    result = train(job={"steps": 8}, checkpoint=table, plugins={"load": ["breaks"]})
    out = capsys.readouterr().out
    assert result["exit_code"] == 0
    assert steps_saved() == [2, 8]
    for step in (4, 6):
        assert f"step {step} could not be saved, training goes on: " in out
    assert len(rows()) == 8


@pytest.mark.cases(thorough=["True"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_stops_the_training_at_once_or_at_a_next_step(asynchronous: bool) -> None:
    Path("breaks.py").write_text(BREAKS)
    table = {"every_steps": 4, "asynchronous": asynchronous}
    train(job={"steps": 3}, checkpoint={**table, "every_steps": 2})
    with pytest.raises(TrainingError, match=r"step 4 could not be saved: .*newest checkpoint: .*step-00000003"):
        train(job={"steps": 500}, checkpoint=table, plugins={"load": ["breaks"]})
    assert steps_saved("out/away" if Path("out/away").exists() else "out/checkpoints") == [2, 3]
    assert len(rows()) < 8  # not only when the next save waits for it


class FullDisk:
    """A file on a disk that takes `room` bytes, and no byte more."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.room = file, 100

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(content[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_rows_wait_for_room_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(Path("metrics.jsonl"), 0, Goodput(0.0), BestSoFar())
    metrics._file = disk = FullDisk(metrics._file)  # type: ignore[assignment]
    for step in range(1, 6):
        metrics.write({"step": step, "text": "x" * 50, "list": [1.0, math.nan]})
    assert (
        caplog.text.count(
            "metrics.jsonl can't be written; rows are kept in memory until it can: No space left on device"
        )
        == 1
    )
    disk.room = 10**6
    metrics.write({"step": 6})
    written = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6] and written[4]["list"] == [1.0, None]
    disk.room = 0
    metrics.write({"step": 7})
    metrics.close()
    assert "metrics.jsonl could not be written; its last 1 rows are missing: No space left on device" in caplog.text


@pytest.mark.cases(default=["full"], rest="thorough")
@pytest.mark.parametrize("kind", ["full", "pipe", "closed"])
def test_output_that_cannot_be_written_ends_no_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(OSError), open("/dev/full", "w") as full, open(writing, "w") as pipe:  # what they still hold
        monkeypatch.setattr(sys, "stdout", {"full": full, "pipe": pipe, "closed": None}[kind])
        assert train(evaluation={"every_steps": 2})["step"] == 4
    assert steps_saved() == [4]


def test_output_that_cannot_be_written_leaves_the_exit_code_as_it_is() -> None:
    program = "from hpctrain import cli\ncli.cli.main = lambda *_, **__: print('saved') or 75\ncli.main()"
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize("where", ["log", "close"])
def test_a_logger_that_fails_ends_no_training(where: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("failing.py").write_text(
        "from hpctrain.api import Logger, LogWriter, hookimpl\n"
        "class Failing(Logger):\n"
        "    name = 'failing'\n"
        "    def open(self, output_dir, resumed_step): return Writer()\n"
        "class Writer(LogWriter):\n"
        "    rows = 0\n"
        "    def log(self, row):\n"
        "        self.rows += 1\n"
        f"        if self.rows == 2 and '{where}' == 'log': raise ConnectionError('no server')\n"
        "        assert self.rows < 3 or 'log' != " + repr(where) + "\n"
        "    def close(self): raise ConnectionError('no server')\n"
        "@hookimpl\n"
        "def hpctrain_logger(): return [Failing]\n"
    )
    tables = json.loads(json.dumps(TINY))
    assert hpctrain.run({**tables, "logger": [{"name": "failing"}], "plugins": {"load": ["failing"]}})["step"] == 4
    assert len(rows()) == 4 and steps_saved() == [4]
    assert caplog.text.count("logger failing failed and gets no more rows: ConnectionError: no server") == 1


def test_a_row_that_a_crash_cut_short_is_dropped() -> None:
    path = Path("metrics.jsonl")
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\xff\xfe\0\n{"step": 2}\n{"step": 3}\n{"step": 4')
    MetricsFile(path, 3, Goodput(0.0), BestSoFar()).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize(("name", "is_file"), [("log", True), ("metrics.jsonl", False)])
def test_files_of_a_run_that_cannot_be_written_are_told(name: str, is_file: bool) -> None:
    path = Path("out", name)
    path.parent.mkdir()
    path.touch() if is_file else path.mkdir()
    with pytest.raises(UsageError, match=rf"\[job\] output_dir: out/{name}.* cannot be written: "):
        train()


def test_a_logger_whose_files_cannot_be_written_is_told() -> None:
    Path("out").mkdir()
    Path("out/events").touch()
    with pytest.raises(EnvironmentUnfitError, match=r"\[\[logger\]\] name = 'tensorboard': .*out/events"):
        hpctrain.run({**TINY, "logger": [{"name": "tensorboard"}]})


def test_a_background_save_is_announced_when_it_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    Path("announces.py").write_text(
        "from pathlib import Path\nfrom hpctrain.api import hookimpl\n\n\n@hookimpl\n"
        "def hpctrain_checkpoint_saved(step, path):\n"
        "    with open('saved', 'a') as file:\n"
        "        print(step, path.is_dir(), file=file)\n"
    )
    table = {"every_steps": 2, "asynchronous": True}
    train(job={"steps": 6}, checkpoint=table, plugins={"load": ["announces"]})
    assert Path("saved").read_text().splitlines() == ["2 True", "4 True", "6 True"]


def test_nothing_left_to_train_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        train(job={"steps": 1})
    out = capsys.readouterr().out
    assert out.count("done         step 1, loss 4.") == 1 and "done         step 1, nothing left to train" in out


@pytest.mark.thorough
def test_one_run_at_a_time_in_an_output_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output_lock, "PATIENCE_SECONDS", 0.2)
    train(job={"steps": 1})
    holds = "import fcntl, sys; f = open('out/lock', 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UsageError, match=rf"out is in use by process {os.getpid()} on .*delete out/lock"):
            train(job={"steps": 2})
        monkeypatch.setattr(output_lock, "PATIENCE_SECONDS", 20)
        threading.Timer(0.3, other.kill).start()  # as kill -9 does: it goes on once the other is gone
        assert train(job={"steps": 2})["step"] == 2
    assert "waiting for its end" in capsys.readouterr().err


def test_a_run_that_waited_for_another_job_to_end_does_not_go_on_with_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two that begin at once, none finds files of the other."""
    take = output_lock.OutputLock.take

    def later(lock: output_lock.OutputLock, directory: Path) -> None:
        monkeypatch.setattr(output_lock.OutputLock, "take", take)
        train(job={"steps": 1, "seed": 1})
        take(lock, directory)

    monkeypatch.setattr(output_lock.OutputLock, "take", later)
    with pytest.raises(UsageError, match=r"out holds another job \(job.seed was 1, is 2\)"):
        train(job={"steps": 2, "seed": 2})


@pytest.mark.thorough
def test_a_checkpoint_of_another_training_is_refused_though_its_tensors_fit() -> None:
    train(job={"steps": 2})
    Path("link").symlink_to("out/checkpoints/step-00000002")
    job = {**TINY, "job": {"name": "other", "steps": 3, "output_dir": "elsewhere"}}
    for table, key, value in (("model", "attention_heads", 4), ("job", "seed", 7)):
        with pytest.raises(UsageError, match=f"--resume link.*{table}.{key} was .*weights = "):
            hpctrain.run({**job, table: {**job[table], key: value}}, resume="link")
        assert not Path("elsewhere").exists()
    assert hpctrain.run(job, resume="link")["step"] == 3


@pytest.mark.thorough
def test_values_that_no_training_saved_are_refused_by_name() -> None:
    tables = {"precision": {"mode": "fp16"}, "optimizer": {"name": "sgd", "lr": 0.1}}
    train(job={"steps": 1}, **tables)
    path = Path("out/checkpoints/step-00000001/manifest.json")
    content = json.loads(path.read_bytes())
    del content["checksum"]
    crafted: list[tuple[str, Any]] = [
        ("step", -1), ("step", 2**70), ("samples_seen", "x"), ("samples_seen", None), ("samples_seen", -5),
        ("precision", [1]), ("optimizer_numbers", None), ("optimizer_numbers", {"wte.weight": 5}),
    ]  # fmt: skip
    for key, value in crafted:
        path.write_bytes(seal({**content, "values": {**content["values"], key: value}}))
        with pytest.raises(CheckpointError, match=rf"step-00000001: its .*{key}"):
            train(**tables)
    path.write_bytes(seal({**content, "values": {**content["values"], "precision": {"scale": "x"}}}))
    with pytest.raises(CheckpointError, match="loss scale of the checkpoint is malformed"):
        train(**tables)


def test_a_checkpoint_of_weights_only_is_nothing_to_go_on_from() -> None:
    tables = {"optimizer": {"name": "sgd", "lr": 0.1}}
    train(job={"steps": 1}, **tables)
    form = Hdf5()
    import_weights(Path("out/checkpoints/step-00000001"), [form], "", form, Path("imported"), lambda *_: None)
    says = r'imported holds weights only, .*lacks samples_seen, .* set \[model\] weights = "imported"'
    with pytest.raises(CheckpointError, match=says):
        hpctrain.run({**TINY, **tables}, resume="imported")


def test_tied_parameters_are_exported_under_all_their_names_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    train(job={"steps": 1}, model={"tie_embeddings": True})
    words = ["hpctrain", "checkpoint", "export", "out/checkpoints/step-00000001", "--to", "torch", "weights.pt"]
    monkeypatch.setattr(sys, "argv", words)
    assert execute() == 0
    content = torch.load("weights.pt")
    assert content["head.weight"].data_ptr() == content["token_embedding.weight"].data_ptr()
    model = {"tie_embeddings": True, "weights": "weights.pt"}
    assert train(job={"steps": 1, "name": "tuned", "output_dir": "tuned"}, model=model)["step"] == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_state_is_made_of_some_parameters_at_a_time(kind: type[torch.optim.Optimizer]) -> None:
    """So that a start needs less memory than a step. The state is that of one step of all, and no value changes."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(64, 64)] * 30 + [(3,), (0,), (64,)]
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    others = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
    parameters[0].grad = kept = torch.ones(64, 64)
    before, gradients = [one.detach().clone() for one in parameters], []
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer, other = kind(parameters, lr=0.1, **options), kind(others, lr=0.1, **options)

    def note(*_: Any) -> None:
        gradients.append(sum(one.grad.nbytes for one in parameters if one.grad is not None))

    optimizer.register_step_pre_hook(note)
    create_state(optimizer)
    for one in others:
        one.grad = torch.zeros_like(one)
    other.step()
    assert max(gradients) <= sum(one.nbytes for one in parameters) / 8
    assert all(torch.equal(one, value) for one, value in zip(parameters, before, strict=True))
    assert [one.grad is None for one in parameters] == [False] + [True] * 32 and parameters[0].grad is kept
    for one, of_one_step in zip(parameters, others, strict=True):
        mine, expected = optimizer.state[one], other.state[of_one_step]
        assert mine.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(expected[key])) for key in mine)
