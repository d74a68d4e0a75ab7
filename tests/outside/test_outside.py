"""A third party's package with a plugin for each slot, installed as a user installs it and trained on two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hpctrain_tools
import pytest
import torch
from jobs import JobFile
from launching import MARK, Finished, hpctrain, run, wait_until
from plain import batches_of, gpt_loss, module_of, train_gpt

PACKAGE = Path(__file__).parent / "package"
TEMPLATES = Path(hpctrain_tools.__path__[0]) / "templates" / "plugins"
EXAMPLES = {
    "checkpoint": "per_rank",
    "communicator": "communicator",
    "parallelism": "rows",
    "precision": "power_of_two",
    "sharding": "late_sums",
}
"""Modules of the package that `hpctrain plugins new` begins with."""
EVERY = 3
"""Steps from one average of local SGD to the next."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment with the package and with everything of this environment."""
    home = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    source = home / "source"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True, timeout=60)  # building writes into it
    for slot, module in EXAMPLES.items():
        shutil.copy(TEMPLATES / f"{slot}.txt", source / "acme_hpctrain" / f"{module}.py")
    subprocess.run([*pip, str(source)], check=True, timeout=300)
    (own,) = home.glob("lib/python*/site-packages")
    (own / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    return python


@pytest.fixture
def long_job(job: JobFile) -> JobFile:
    """Six steps of a model of four blocks."""
    job.set(
        job={"steps": 6, "seed": 5},
        model={"layers": 4},
        batch={"micro_size": 2},
        checkpoint={"every_steps": 2, "keep": 9},
    )
    return job


def train(job: JobFile, python: str, *words: str, env: dict[str, str] | None = None) -> Finished:
    done = run(hpctrain("run", "job.toml", "-n", "2", *words, python=python), job.directory, env=env)
    assert done.code == 0, done
    return done


def compare(job: JobFile, expected: list[tuple[float, float]], losses: float = 2e-6, norms: float = 1e-5) -> None:
    found = [(row["loss"], row["grad_norm"]) for row in job.rows()]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=losses)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=norms)


@pytest.mark.thorough
def test_it_imports_what_is_public_only_and_is_listed(python: str, tmp_path: Path) -> None:
    sources = sorted((PACKAGE / "acme_hpctrain").glob("*.py"))
    imported = {
        name for one in sources for name in re.findall(r"^(?:from|import) (hpctrain\S*)", one.read_text(), re.M)
    }
    assert {name for name in imported if not name.startswith("hpctrain.toolkit.")} == {"hpctrain.api"}
    done = run(hpctrain("plugins", "--json", python=python), tmp_path)
    acme = {(row["slot"], row["name"]) for row in json.loads(done.out) if row["distribution"] == "acme-hpctrain"}
    assert acme >= {
        ("command", "acme-rows"), ("scheduler", "background"),
        ("checkpoint", "per-rank"), ("communicator", "acme-gloo"), ("parallelism", "rows"), ("sharding", "late-sums"),
        ("sharding", "local-sgd"),        ("pipeline_schedule", "looped-bfs"), ("precision", "power-of-two"),
    }  # fmt: skip


@pytest.mark.nightly
def test_a_schedule_a_precision_a_format_and_a_communicator(long_job: JobFile, python: str) -> None:
    """A pipeline of four stages on two ranks, ended after two steps and resumed."""
    job = long_job.set(
        parallelism={"pipeline": {"size": 2, "schedule": "looped-bfs"}}, precision={"mode": "power-of-two"},
        communicator={"name": "acme-gloo"}, checkpoint={"format": "per-rank"},
    )  # fmt: skip
    done = train(job, python, "--set", "job.steps=2")
    assert "looped-bfs, 4 stages" in done.out and "acme-gloo communicator" in done.out
    assert "resuming     from step 2" in train(job, python).out
    plain = {key: value for key, value in job.tables.items() if key not in ("parallelism", "precision")}
    compare(job, train_gpt({**plain, "communicator": {}, "checkpoint": {}}, torch.float32)[1])
    newest = str(next(job.output.glob("checkpoints/step-*6")))
    assert run(hpctrain("checkpoint", "verify", newest, python=python), job.directory).code == 0


def test_a_command(python: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    done = run(hpctrain("acme-rows", ".", python=python), tmp_path)
    assert done.code == 0 and done.out == "2\n", done
    done = run(hpctrain("acme-rows", "nowhere", python=python), tmp_path)
    assert (
        done.code == 2 and done.err == "hpctrain: found no nowhere/metrics.jsonl, expected the directory of a run\n"
    ), done
    done = run(hpctrain("--help", python=python), tmp_path)
    assert done.code == 0 and "acme-rows   Count the rows that a run has written." in done.out, done


@pytest.mark.nightly
def test_an_axis(long_job: JobFile, python: str) -> None:
    job = long_job.set(parallelism={"rows": 2}, sharding={"stage": 2})
    train(job, python)
    compare(job, train_gpt({**job.tables, "parallelism": {}, "sharding": {}}, torch.float32)[1])
    done = run(hpctrain("check", "job.toml", "--set", "batch.micro_size=3", python=python), job.directory)
    assert done.code == 2 and "[batch] micro_size: rows = 2 cuts it; expected a multiple of 2, found 3" in done.err, (
        done
    )


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [{"name": "sgd", "lr": 0.3}, {"name": "adamw", "lr": 0.01}], ids=str)
def test_a_strategy_that_is_no_stage(long_job: JobFile, python: str, optimizer: dict[str, Any]) -> None:
    """Like a hand-written loop of two processes averaging every third step and at each save; a resume keeps each rank's moments."""
    long_job.tables["optimizer"] = optimizer
    job = long_job.set(sharding={"name": "local-sgd", "every": EVERY})
    train(job, python, "--set", "job.steps=4")
    train(job, python)
    found, expected = job.losses(), local_sgd({**job.tables, "sharding": {}})
    assert found == pytest.approx(expected, rel=2e-6)
    whole = train_gpt({**job.tables, "sharding": {}}, torch.float32)[1]
    assert found != pytest.approx([loss for loss, _ in whole], rel=1e-4), "it isn't data parallelism"


class PlainMuon(torch.optim.Optimizer):
    """Muon on whole matrices: its iteration is a polynomial of their singular values."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p))
                total.mul_(0.95).add_(p.grad)
                u, s, v = torch.linalg.svd(total.double(), full_matrices=False)
                s = s / (s.norm() + 1e-7)
                for _ in range(5):
                    s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
                scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - 0.1 * group["lr"]).sub_((u @ s.diag() @ v).to(p.dtype) * scale, alpha=group["lr"])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {}),
    "stage 1": (2, {"sharding": {"stage": 1}}),
    "stage 2 on three ranks": (3, {"sharding": {"stage": 2}}),
    "stage 3 on three ranks": (3, {"sharding": {"stage": 3}}),
    "tensor 2, stage 1": (4, {"sharding": {"stage": 1}, "parallelism": {"tensor": 2}}),
    "tensor 2, stage 3": (4, {"sharding": {"stage": 3}, "parallelism": {"tensor": 2}}),
    "pipeline 2, stage 2": (4, {"sharding": {"stage": 2}, "parallelism": {"pipeline": 2}}),
    "replicate 2, stage 2": (2, {"sharding": {"stage": 2}, "parallelism": {"replicate": 2}}),
}


@pytest.mark.cases(thorough=["stage 2 on three ranks", "tensor 2, stage 1"], rest="nightly")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_of_whole_matrices(long_job: JobFile, python: str, layout: str) -> None:
    """Muon, whose update of a matrix needs all of it, is the same on each layout, begun and ended by one process."""
    vectors = {"method": "adamw", "lr": 0.002}
    long_job.tables["optimizer"] = {
        "name": "muon", "lr": 0.02,
        "groups": [{"pattern": "*embedding*", **vectors}, {"max_dims": 1, **vectors}],
    }  # fmt: skip
    whole = json.loads(json.dumps(long_job.tables))
    ranks, tables = LAYOUTS[layout]
    for steps, n, changes in ((2, 1, {}), (4, ranks, tables), (6, 1, {})):
        long_job.tables = {**json.loads(json.dumps(whole)), **changes}
        job = long_job.set(job={"steps": steps})
        done = run(hpctrain("run", "job.toml", "-n", str(n), python=python), job.directory)
        assert done.code == 0, done
    module = module_of({**whole, "optimizer": {"name": "adamw", "lr": 1.0}}, torch.float32)
    by_rows = {name: p for name, p in module.named_parameters() if p.dim() < 2 or "embedding" in name}
    matrices = PlainMuon([p for name, p in module.named_parameters() if name not in by_rows], {"lr": 0.02})
    others = torch.optim.AdamW(by_rows.values(), lr=0.002, betas=(0.9, 0.95), weight_decay=0.1)
    expected = []
    for ids, labels in batches_of({**whole, "optimizer": {"name": "adamw", "lr": 1.0}}):
        module.zero_grad()
        expected.append(_step(partial(gpt_loss, module, ids, labels), matrices))
        others.step()
    assert job.losses() == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
def test_a_strategy_made_of_the_toolkit(long_job: JobFile, python: str) -> None:
    """Several buckets, micro batches, and compressed sums whose error feedback is by parameter."""
    job = long_job.set(sharding={"name": "late-sums", "bucket_size": "2KB"})
    train(job, python, "--set", "job.steps=3")
    train(job, python)
    compare(job, train_gpt({**job.tables, "sharding": {}}, torch.float32)[1])
    everything = {"name": "top-k", "ratio": 1.0}
    train(job.set(compression=everything, job={"output_dir": "compressed"}), python)
    compare(job, train_gpt({**job.tables, "sharding": {}, "compression": {}}, torch.float32)[1])


def local_sgd(tables: dict[str, Any]) -> list[float]:
    modules = [module_of(tables, torch.float32) for _ in range(2)]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[tables["optimizer"]["name"]]
    optimizers = [kind(module.parameters(), lr=tables["optimizer"]["lr"]) for module in modules]
    losses = []
    for step, (ids, labels) in enumerate(batches_of(tables), 1):
        halves = zip(modules, optimizers, ids.chunk(2), labels.chunk(2), strict=True)
        losses.append(
            sum(_step(partial(gpt_loss, module, *half), optimizer) for module, optimizer, *half in halves) / 2
        )
        saves = step % tables["checkpoint"]["every_steps"] == 0
        if step % EVERY == 0 or saves:
            _average([list(module.parameters()) for module in modules])
    return losses


def _step(loss_of: Any, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    return float(loss)


@torch.no_grad()
def _average(ranks: list[list[torch.Tensor]]) -> None:
    for one, other in zip(*ranks, strict=True):
        mean = (one + other) / 2
        one.copy_(mean)
        other.copy_(mean)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an HTTP server that keeps what it gets by PUT."""
    home = tmp_path / "server"
    home.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, directory=str(home), **kwargs)

        def do_PUT(self) -> None:
            path = Path(self.translate_path(self.path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.cases(thorough=["hdf5"], rest="nightly")
@pytest.mark.parametrize("format", ["hdf5", "dcp", "per-rank"])
def test_checkpoints_on_a_server(long_job: JobFile, python: str, server: str, format: str) -> None:
    """A run on two ranks whose directory is lost goes on from the server's copy, in any format."""
    long_job.tables["hook"] = [{"name": "mirror", "url": server}]
    job = long_job.set(checkpoint={"format": format})
    train(job, python, "--set", "job.steps=4")
    losses = job.losses()
    shutil.rmtree(job.output)
    assert "resuming     from step 4" in train(job, python).out
    plain = {key: value for key, value in job.tables.items() if key not in ("hook", "checkpoint")}
    expected = [loss for loss, _ in train_gpt(plain, torch.float32)[1]]
    assert losses + job.losses() == pytest.approx(expected, rel=2e-6)
    job.tables["hook"][0]["url"] = "http://127.0.0.1:9"
    gone = run(hpctrain("run", "job.toml", "--set", "job.output_dir=new", python=python), job.set().directory)
    assert gone.code == 2 and "mirror: http://127.0.0.1:9 doesn't answer: " in gone.err, gone


@pytest.mark.nightly
def test_a_life_cycle_plugin_keeps_state_and_ends_the_run(job: JobFile, python: str) -> None:
    job.set(job={"steps": 9})
    env = {"ACME_LIMIT": "100"}
    train(job, python, "--set", "job.steps=2", env=env)
    done = train(job, python, env=env)
    assert [row["below"] for row in job.rows()] == [1, 2, 3], "the third step of both runs together"
    assert "ended        after step 3: the loss was below 100 for 3 steps" in done.out


@pytest.mark.nightly
def test_a_scheduler(long_job: JobFile, python: str) -> None:
    """It submits a sweep of two, one script for each run; they train and are done. Its own sentence is shown."""
    job = long_job.set(scheduler={"background": {"niceness": 1, "ranks_per_node": 2, "time": "1h"}})

    def ask(*words: str) -> Finished:  # a job outlives the command, so it must not have its mark
        return run(["env", "-u", MARK, *hpctrain(*words, python=python)], job.directory)

    wrong = ask("submit", "job.toml", "--after", "17")
    assert wrong.code == 2 and wrong.err.startswith("hpctrain: [scheduler.background]: found several nodes"), wrong
    done = ask("submit", "job.toml", "--array", "optimizer.lr=0.01,0.02")
    assert done.code == 0 and "submitted    background job" in done.out, done
    runs = [job.output / f"optimizer.lr={rate}" for rate in ("0.01", "0.02")]
    wait_until(lambda: all((one / "ended").exists() for one in runs), 120, "both runs end")
    told = ask("status", "out").out.splitlines()
    assert [line.endswith(": done, step 6 of 6") for line in told] == [True, True], told
    assert all("nice -n 1" in (one / "background.sh").read_text() for one in runs)
    alone = {key: value for key, value in job.tables.items() if key != "scheduler"}
    expected = [loss for loss, _ in train_gpt(alone, torch.float32)[1]]
    assert job.losses("out/optimizer.lr=0.01") == pytest.approx(expected, rel=2e-6)


@pytest.mark.nightly
def test_a_cancelled_job_of_a_scheduler_is_not_run_again(long_job: JobFile, python: str) -> None:
    job = long_job.set(scheduler={"background": {"ranks_per_node": 2}}, job={"steps": 1_000_000})
    ended = job.output / "ended"

    def ask(*words: str) -> str:
        done = run(["env", "-u", MARK, *hpctrain(*words, python=python)], job.directory)
        assert done.code == 0, done
        return done.out

    group = int(re.findall(r"background job (\d+)@", ask("submit", "job.toml"))[0])
    try:
        job.wait_for_steps(1)
        assert "told to end" in ask("cancel", "out")
        wait_until(ended.exists, 60, "the cancelled job ends")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    told, printed = ask("status", "out"), Path(f"{ended}.out").read_text()
    assert "cancelled (exit code 143), step " in told and ", as it was cancelled, saved in " in printed, (told, printed)
    assert "again" not in printed and "continue with" not in printed, printed
