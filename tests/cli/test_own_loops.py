"""Loops of one's own on real ranks: each example against one process of itself."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import changing_loops
import pytest
import torch
from launching import Finished, Started, hpctrain, in_process, run, started, wait_until
from own_loops import NAMES

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
LOOPS = str(Path(__file__).parents[1] / "own_loops.py")


def write_job(directory: Path, stage: int, ranks: int, steps: int = 6, **more: dict[str, Any]) -> Path:
    """The job of the loops in `directory`. Stage 3 gathers each layer by itself."""
    sharding = {"stage": stage, **({"wrap": "size", "min_parameters": 1} if stage == 3 else {})}
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": "OUTPUT", "steps": steps, "output_dir": "OUTPUT"},
        "precision": {"mode": "fp64"},
        "sharding": sharding,
        **more,
    }
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    ]
    path = directory / "job.toml"
    path.write_text("\n".join(lines))
    (directory / "samples.toml").write_text(f"[batch]\nglobal_size = 24\nmicro_size = {24 // ranks}\n")
    return path


def loops(job: Path, ranks: int, *named: str) -> Finished:
    """Run the loops one after the other on so many ranks."""
    launcher = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
    done = run([*launcher, sys.executable, LOOPS, str(job), *named], job.parent, timeout=300)
    assert done.code == 0, done
    return done


def rows(directory: Path) -> list[dict[str, float]]:
    """The numbers of each step that don't depend on the machine."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    names = ("loss", "grad_norm", "lr", "reward")
    return [{key: value for key, value in json.loads(one).items() if key.startswith(names)} for one in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one process has run all loops."""
    directory = tmp_path_factory.mktemp("alone")
    loops(write_job(directory, stage=0, ranks=1), 1, *NAMES)
    return directory


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        pytest.param(3, 2),
        *(pytest.param(stage, ranks, marks=pytest.mark.nightly) for stage in range(4) for ranks in (2, 3)),
    ],
)
def test_ranks_train_as_one_process(alone: Path, tmp_path: Path, stage: int, ranks: int) -> None:
    loops(write_job(tmp_path, stage, ranks), ranks, *NAMES)
    for name in NAMES:
        expected, found = rows(alone / name), rows(tmp_path / name)
        assert len(expected) == len(found) == 6
        assert expected[0]["loss"] != expected[-1]["loss"], name
        for one, other in zip(expected, found, strict=True):
            assert other == pytest.approx(one, rel=1e-10, abs=1e-12), name


def changed(directory: Path, layout: str, ranks: int) -> list[dict[str, Any]]:
    """The results of the loops in changing_loops.py, a dict for each rank."""
    words = [MPIEXEC, "-n", str(ranks), sys.executable, str(Path(LOOPS).with_name("changing_loops.py")), layout, "out"]
    done = run(words, directory, timeout=280)
    assert done.code == 0, done
    return [torch.load(directory / f"out{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def changed_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results on one rank."""
    return changed(tmp_path_factory.mktemp("alone"), "0", 1)[0]


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("2", 2),
        *(pytest.param(one, ranks, marks=pytest.mark.nightly) for one in ("1", "3") for ranks in (1, 2, 3)),
        *(pytest.param(one, 3, marks=pytest.mark.nightly) for one in ("0", "2", "3w")),
    ],
)
def test_parameters_and_gradients_that_the_loop_changes(
    changed_alone: dict[str, Any], tmp_path: Path, layout: str, ranks: int
) -> None:
    """Clipping, averages, sharpness-aware minimization, dropped gradients and noise, against loops of torch alone."""
    found = changed(tmp_path, layout, ranks)
    for loop in changing_loops.LOOPS:
        name = loop.__name__
        if loop is changing_loops.each_clipped_outside and layout != "0" and ranks > 1:
            assert all("the gradient of body.0.weight" in rank[name] for rank in found)
            continue
        expected = changed_alone[name] if loop is changing_loops.noisy else changing_loops.plain(loop)
        for rank in found:
            torch.testing.assert_close(rank[name], expected, rtol=1e-10, atol=1e-12, msg=name)


DRIFT = """
import torch, hpctrain
with hpctrain.own_loop({"job": {"name": "drift", "steps": 14}}) as loop:
    made = []
    for name in ("a", "b"):
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 4)
        made.append(loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), name=name))
    for step in loop.steps():
        loop.backward(sum(net(torch.ones(2, 4)) for net, _ in made).square().mean())
        for _, optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        if step.number == 4 and loop.rank == 1:
            with torch.no_grad():
                made[1][0].weight.mul_(1.001)
"""


@pytest.mark.thorough
def test_replicas_that_drift_are_named(tmp_path: Path) -> None:
    (tmp_path / "drift.py").write_text(DRIFT)
    done = run([MPIEXEC, "-n", "3", sys.executable, "drift.py"], tmp_path, timeout=100)
    assert done.code == 4 and "Traceback" not in done.err, done
    assert "after 10 steps the replicas of b.weight differ: found the checksum " in done.err, done
    assert done.err.index(" on rank 1 on ") < done.err.index(" on rank 0 on "), done  # the odd one first
    assert "the last time after 2 steps" in done.err, done


def wait_for_rows(command: Started, file: Path, least: int) -> None:
    """Until so many rows are written."""

    def written() -> bool:
        assert command.process.poll() is None, "it has ended"
        return file.exists() and file.read_bytes().count(b"\n") >= least

    wait_until(written, 60, f"{least} rows")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loop", "signal_number"),
    [pytest.param("ppo", signal.SIGKILL, marks=pytest.mark.nightly), ("gan", signal.SIGTERM)],
    ids=["killed", "stopped"],
)
def test_a_second_start_goes_on_as_if_nothing_had_happened(tmp_path: Path, loop: str, signal_number: int) -> None:
    hook = "import time\nfrom hpctrain.api import hookimpl\n@hookimpl\ndef hpctrain_step_end(step):\n    time.sleep(0.05)\n"
    (tmp_path / "slow.py").write_text(hook)
    job = write_job(tmp_path, stage=3, ranks=2, steps=40, checkpoint={"every_steps": 5}, plugins={"load": ["slow"]})
    words = [MPIEXEC, "-n", "2", sys.executable, LOOPS, str(job)]
    with started([*words, f"{loop}:cut"], tmp_path) as command:
        wait_for_rows(command, tmp_path / "cut" / "metrics.jsonl", 12)
        for rank in command.members():
            rank.send_signal(signal_number)
        done = command.finish(60)
    assert done.code == 75 if signal_number == signal.SIGTERM else done.code, done
    assert 12 <= len(rows(tmp_path / "cut")) < 40
    loops(job, 2, f"{loop}:cut", f"{loop}:whole")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    last = [str(tmp_path / name / "checkpoints" / "latest") for name in ("cut", "whole")]
    assert in_process("checkpoint", "diff", *last, cwd=tmp_path).code == 0


@pytest.mark.nightly
def test_ranks_that_part_are_named(tmp_path: Path) -> None:
    """A rank that steps another optimizer, or none, ends the job; nothing is summed that does not belong together."""
    write_job(tmp_path, stage=0, ranks=2)
    text = (Path(LOOPS).parents[1] / "examples" / "own_loops" / "gan.py").read_text()
    stepping = "        of_d.step()\n"
    skipped = text.replace(stepping, f"        if loop.rank == 0 or step.number < 3:\n    {stepping}")
    assert skipped != text
    (tmp_path / "parted.py").write_text(skipped)
    (tmp_path / "job.toml").write_text(
        (tmp_path / "job.toml").read_text().replace("OUTPUT", "out") + (tmp_path / "samples.toml").read_text()
    )
    done = run([MPIEXEC, "-n", "2", sys.executable, "parted.py", "job.toml"], tmp_path)
    assert done.code == 4
    said = "rank 0 steps the optimizer of 'discriminator' in step 3, but rank 1 begins a backward in step 3"
    assert said in done.err, done
    assert len(rows(tmp_path / "out")) == 2


LANGUAGE_MODEL = """
import sys
from torch.nn.functional import cross_entropy
import hpctrain

with hpctrain.own_loop(sys.argv[1]) as loop:
    model, optimizer = loop.setup()
    for step in loop.steps():
        for batch in step:
            logits = model(batch["input_ids"], batch.get("positions"))
            loop.backward(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("axis", "stage", "ranks"),
    [
        ("tensor", 1, 2),
        pytest.param("tensor", 3, 4, marks=pytest.mark.nightly),
        pytest.param("context", 0, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_model_of_the_job_on_an_axis(tmp_path: Path, axis: str, stage: int, ranks: int) -> None:
    """Model, optimizer, schedule and clipping of the job, against `hpctrain run` of the same job on one rank."""
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "name": "gpt",
            "hidden_size": 32,
            "layers": 2,
            "attention_heads": 4,
            "vocab_size": 64,
            "max_seq_length": 16,
        },
        "dataset": {"name": "synthetic"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "schedule": {"name": "cosine", "warmup_steps": 2},
    }
    (tmp_path / "loop.py").write_text(LANGUAGE_MODEL)
    job = write_job(tmp_path, stage, ranks, 4, **tables, **{f"parallelism.{axis}": {"size": 2}})
    job.write_text(job.read_text().replace("OUTPUT", "own"))
    done = run([MPIEXEC, "-n", str(ranks), sys.executable, "loop.py", "job.toml"], tmp_path)
    assert done.code == 0, done
    job = write_job(tmp_path, 0, 1, 4, **tables)
    job.write_text(job.read_text().replace("OUTPUT", "whole"))
    done = run(hpctrain("run", "job.toml"), tmp_path)
    assert done.code == 0, done
    found, expected = rows(tmp_path / "own"), rows(tmp_path / "whole")
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        keys = ["loss", "grad_norm", "lr"]
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-10)


DROPPING = """
import sys
import torch
from torch import nn
import hpctrain

torch.manual_seed(0)
data = [(x, x.sum(0, keepdim=True).sin()) for x in torch.randn(64, 3)]
for name in ("dropping", "whole"):
    job = {"job": {"name": name, "steps": 6, "output_dir": name}}
    tables = {"dataset": {"name": data}, "batch": {"global_size": 8, "micro_size": 4}}
    with hpctrain.own_loop(job, **tables, compression={"name": "top-k", "ratio": 0.1}) as loop:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
        for step in loop.steps():
            for x, y in step:
                loop.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if name == "dropping":
                loop.backward(1000 * model(x).mean())
                optimizer.zero_grad()
"""


@pytest.mark.thorough
def test_dropped_gradients_leave_nothing_in_compression(tmp_path: Path) -> None:
    """As a critic's gradients are dropped that the generator's backward has made."""
    (tmp_path / "loop.py").write_text(DROPPING)
    done = run([MPIEXEC, "-n", "2", sys.executable, "loop.py"], tmp_path)
    assert done.code == 0, done
    assert rows(tmp_path / "dropping") == rows(tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_other_libraries_have_the_same_losses(name: str, tmp_path: Path) -> None:
    """The loops that the page counts beside ours, interrupted and resumed."""
    for library in ("accelerate", "lightning"):
        pytest.importorskip(library, reason=f"needs {library}")
    program = Path(__file__).parents[2] / "benchmarks" / "own_loops" / "same_losses.py"
    micro_size = [] if name == "ppo" else ["--micro-size", "8"]
    done = run([sys.executable, str(program), name, *micro_size], tmp_path, timeout=280)
    assert done.code == 0 and done.out.count("6 steps, largest difference") == 2, done
