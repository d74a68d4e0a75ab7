"""`hpctrain bench step`, `scaling` and `peers`: what they measure adds up, what is compared is the same, mistakes are told."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import JobFile
from launching import hpctrain, in_process, run

TURNED = """
import torch
from torch import nn
from torch.nn import functional

calls = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


def loss(outputs, target):
    global calls
    calls += CHANGE
    return functional.cross_entropy(outputs, target) * (1 + calls)


def samples(split):
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=draw), torch.tensor(n % 4)) for n in range(48)] if split == "train" else None
"""
"""A model of a user's own whose forward draws; its loss may change with each call of the process."""


def own(job: JobFile, change: float) -> JobFile:
    (job.directory / "own.py").write_text(TURNED.replace("CHANGE", str(change)))
    job.tables.update(
        model={"name": "own:Net", "loss": "own:loss", "freeze": ["layers.0.bias"]}, dataset={"name": "own:samples"},
        evaluation={"every_steps": 1}, checkpoint={"every_steps": 1}, logger=[{"name": "csv"}],
        hook=[{"name": "ema", "decay": 0.9}],
    )  # fmt: skip
    return job.set(sharding={"stage": 3}, batch={"global_size": 12, "micro_size": 3})


def measured(job: JobFile, *words: str, code: int = 0) -> dict[str, Any]:
    """The JSON of a benchmark, which must leave nothing behind."""
    scratch = job.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    before = sorted(job.directory.iterdir())
    done = run(hpctrain("bench", *words, "--json"), job.directory, 200, {"TMPDIR": str(scratch)})
    assert done.code == code, done
    left = [path for path in job.directory.iterdir() if path not in before and path.name != "__pycache__"]
    assert not left and not list(scratch.glob("hpctrain-bench-*")), left
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.nightly
def test_a_step_and_its_parts(job: JobFile) -> None:
    begin = time.monotonic()
    found = measured(job, "step", "job.toml", "--steps", "6", "--set", "batch.micro_size=3")
    assert found["ranks"] == 2 and found["job"] == "tiny" and found["steps"] == 6
    assert 0 < found["low"] <= found["seconds"] <= found["high"]
    assert found["seconds"] * found["steps"] < time.monotonic() - begin
    parts = found["parts"]
    assert {"data", "communication", "other"} <= parts.keys() and "step" not in parts
    off = sum(part["seconds"] for part in parts.values()) - found["seconds"]
    assert abs(off) <= sum(part["high"] - part["low"] for part in parts.values()) + found["high"] - found["low"]
    reference, ratio = found["reference"], found["ratio"]
    assert found["note"] == "" and 0 < reference["low"] <= reference["seconds"] <= reference["high"]
    assert found["low"] / reference["high"] / 2 < ratio["ratio"] < 2 * found["high"] / reference["low"]


@pytest.mark.nightly
def test_other_trainers_have_the_same_losses(job: JobFile) -> None:
    """The forward draws, some parameters are frozen, and hpctrain cuts all of them."""
    found = measured(own(job, 0), "peers", "job.toml", "--steps", "2", "--only", "ddp,fsdp2,deepspeed")
    mine, *others = found["trainers"]
    installed = importlib.util.find_spec("deepspeed") is not None
    assert mine["name"] == "hpctrain" and mine["ratio"]["ratio"] == 1 and mine["difference"] == 0
    assert [one["name"] for one in others] == ["ddp", "fsdp2", *(["deepspeed"] if installed else [])]
    assert installed or found["left_out"] == {"deepspeed": "deepspeed is not installed (pip install deepspeed)"}
    for one in others:
        assert one["losses"] == pytest.approx(mine["losses"], rel=1e-5) and one["difference"] < 1e-5
        assert one["low"] <= one["seconds"] <= one["high"] and one["ratio"]["ratio"] > 0
    assert len(set(mine["losses"])) == len(mine["losses"]) > 1


@pytest.mark.nightly
def test_a_trainer_of_something_else_is_told(job: JobFile) -> None:
    found = measured(own(job, 0.01), "peers", "job.toml", "--steps", "2", "--only", "ddp", code=1)
    assert found["trainers"][1]["difference"] > found["tolerance"]
    told = run(hpctrain("bench", "peers", "job.toml", "--steps", "2", "--only", "ddp"), job.directory)
    assert told.code == 1 and "ddp trains something else: its first losses are" in told.out, told


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["accelerate", "lightning", "deepspeed"])
def test_libraries_have_the_same_losses(job: JobFile, library: str) -> None:
    pytest.importorskip(library, reason=f"needs {library}")
    words = ("--only", library, "--set", "optimizer.clip_norm=0.1", "--set", "batch.micro_size=3")
    found = measured(job, "peers", "job.toml", "--steps", "2", *words)
    assert [one["name"] for one in found["trainers"]] == ["hpctrain", library] and found["left_out"] == {}
    assert found["trainers"][1]["difference"] < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("weak", [False, True])
def test_the_efficiency_of_several_ranks(job: JobFile, weak: bool) -> None:
    words = ["job.toml", "-n", "2,1", "--steps", "1", "--set", "batch.micro_size=6", *(["--weak"] if weak else [])]
    found = measured(job, "scaling", *words)
    first, second = found["places"]
    assert (first["ranks"], second["ranks"]) == (1, 2) and found["scaling"] == ("weak" if weak else "strong")
    assert (first["batch"], second["batch"]) == (12, 24 if weak else 12)
    assert first["efficiency"] == 1 and first["ideal"] == first["seconds"]
    assert second["ideal"] == pytest.approx(first["seconds"] * (1 if weak else 0.5))
    assert second["efficiency"] * second["seconds"] == pytest.approx(second["ideal"])
    for one in found["places"]:
        assert one["low"] <= one["seconds"] <= one["high"] and one["ratio"]["ratio"] > 0


@pytest.mark.nightly
def test_the_efficiency_is_drawn(job: JobFile) -> None:
    pytest.importorskip("matplotlib", reason="needs hpctrain[plots]")
    words = ("scaling", "job.toml", "-n", "1,2", "--steps", "1", "--plot", "scaling.svg")
    done = run(hpctrain("bench", *words), job.directory)
    assert done.code == 0 and "100.0% ####" in done.out, done
    assert "<svg" in (job.directory / "scaling.svg").read_text()


@pytest.mark.nightly
def test_ranks_of_a_launcher(job: JobFile) -> None:
    launched = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", *hpctrain("bench", "step", "job.toml")]
    done = run([*launched, "--steps", "1", "--json"], job.directory)
    assert done.code == 0 and json.loads(done.out)["ranks"] == 2, done
    done = run([*launched, "-n", "3"], job.directory)
    assert done.code == 2 and "-n 3: the launcher started 2 ranks" in done.err and "Traceback" not in done.err, done


@pytest.mark.nightly
def test_a_job_without_a_reference(job: JobFile) -> None:
    found = measured(job, "step", "job.toml", "--steps", "1", "--set", "parallelism.tensor=2")
    assert found["reference"] is None and found["ratio"] is None and "[parallelism] tp cuts the model" in found["note"]
    scratch = job.directory / "scratch"
    words = ("bench", "peers", "job.toml", "--set", "parallelism.tensor=2")
    done = in_process(*words, cwd=job.directory, env={"TMPDIR": str(scratch)})
    assert done.code == 2 and "[parallelism] tp cuts the model" in done.err and "Traceback" not in done.err, done
    assert not list(scratch.glob("hpctrain-bench-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_trainers_add_to_a_small_step(job: JobFile, ranks: int) -> None:
    words = ("overhead", "-n", str(ranks), "--only", "plain,own-loop,run", "--steps", "10", "--rounds", "1")
    found = measured(job, *words)
    assert list(found) == ["plain", "own-loop", "run"]
    for loop, of_batch in found.items():
        assert list(of_batch) == ["32", "1024"], loop
        assert all(0.1 < each < 1000 for each in of_batch.values()), (loop, of_batch)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("scaling", "job.toml", "-n", "1,5"), "12 does not divide over 5 data-parallel ranks"),
        (("scaling", "job.toml", "-n", "1,x"), "-n 1,x: expected numbers of ranks with commas, such as 1,2,4"),
        (("scaling", "job.toml", "-n", "5,7", "--weak"), "-n 7: with --weak [batch] global_size = 12 on 5 ranks grows to 16.8"),
        (("scaling", "job.toml", "--plot", "no/a.svg"), "--plot no/a.svg: there is no directory no"),
        (("scaling", "job.toml", "--plot", "a.txt"), "--plot a.txt: expected a name that ends in .svg, .png, .pdf"),
        (("peers", "job.toml", "--only", "ddp,horovod"), "--only: unknown horovod; expected some of ddp, fsdp2"),
        (("overhead", "--only", "plain,torch"), "--only: unknown torch; expected some of plain, own-loop, run, accelerate"),
        (("step", "none.toml"), "none.toml: there is no such file"),
        (("step", "job.toml", "-n", "5"), "12 does not divide over 5 data-parallel ranks"),
    ],
    ids=["divides", "numbers", "grows", "directory", "ending", "trainer", "loop", "job", "ranks"],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_measured(job: JobFile, words: tuple[str, ...], sentence: str) -> None:
    done = in_process("bench", *words, cwd=job.directory)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err and not done.out, done
