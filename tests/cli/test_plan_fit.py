"""`hpctrain plan --fit`: the list, what does not fit, the job file that it writes; and `hpctrain bench machine`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
from jobs import JobFile
from launching import hpctrain, in_process, run

MODEL = {"hidden_size": 64, "layers": 4, "attention_heads": 4, "vocab_size": 512, "max_seq_length": 32}
CPUS: dict[str, Any] = {
    "accelerator": False, "memory": 6e6, "bandwidth": 1e10, "flops": {"float32": 1e11}, "inside": 1e9, "across": 1e9,
    "latency": 1e-4, "per_node": 4,
}  # fmt: skip


def machine(directory: Path, **figures: Any) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in (CPUS | figures).items() if name != "flops"]
    (directory / "machine.toml").write_text("\n".join(["[machine]", *lines, "flops = { float32 = 1e11 }", ""]))
    return str(directory / "machine.toml")


@pytest.mark.nightly
def test_a_job_that_does_not_fit_becomes_one_that_does(job: JobFile) -> None:
    job.set(model=MODEL, batch={"global_size": 32, "micro_size": 16}, precision={"mode": "fp32"})
    of, fitted = machine(job.directory), job.directory / "fits" / "fitted.toml"
    fitted.parent.mkdir()
    naive = run(hpctrain("plan", "job.toml", "-n", "2", "--machine", of), job.directory)
    assert naive.code == 1 and "does not fit" in naive.out, naive
    done = run(hpctrain("plan", "job.toml", "-n", "2", "--machine", of, "--fit", str(fitted)), job.directory, 200)
    assert done.code == 0 and "settings do not fit:\n  lacks " in done.out, done
    assert "1 settings tried; " in done.err and " settings tried; best so far: " in done.err, done
    listed = [line.split(maxsplit=2) for line in done.out.splitlines()[1:] if line[:9].strip()[:1].isdigit()]
    listed = listed[: next((i for i, one in enumerate(listed) if one[1] == "settings"), len(listed))]
    seconds, needs = [float(one[0]) for one in listed], [float(one[1]) for one in listed]
    assert seconds == sorted(seconds) and needs == sorted(needs, reverse=True) and max(needs) <= 6e6 / 1e9
    assert tomli.loads(fitted.read_text())["extends"] == "../job.toml"
    chosen = run(hpctrain("plan", str(fitted), "-n", "2", "--machine", of), job.directory)
    assert chosen.code == 0 and "memory        fits" in chosen.out, chosen
    trained = run(hpctrain("run", str(fitted), "-n", "2", "--set", "job.steps=2"), job.directory, 120)
    assert trained.code == 0, trained


@pytest.mark.thorough
def test_a_model_without_blocks_and_overrides(job: JobFile) -> None:
    """Nothing can be recomputed there; and FILE has what the command line has changed."""
    (job.directory / "own.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(40_000, 2)\n\n\n"
        "def samples(split):  # large enough for several threads\n"
        "    return [(torch.zeros(40_000), torch.zeros(2))] * 24 if split == 'train' else None\n"
    )
    job.tables.update(
        model={"name": "own:build", "loss": "torch.nn.functional:mse_loss"},
        dataset={"name": "own:samples"},
        hook=[{"name": "ema", "decay": 0.9}],
    )
    job.write()
    words = ["plan", "job.toml", "--machine", machine(job.directory, memory=1e8), "--fit", "fitted.toml"]
    done = run(hpctrain(*words, "--set", "hook.0.decay=0.5"), job.directory, 200)
    assert done.code == 0, done
    told = tomli.loads((job.directory / "fitted.toml").read_text())
    assert told["hook"] == [{"name": "ema", "decay": 0.5}] and told["model"]["name"] == "own:build"
    checked = run(hpctrain("check", "fitted.toml"), job.directory)
    assert checked.code == 0, checked


@pytest.mark.nightly
def test_where_nothing_fits_each_says_what_it_lacks(job: JobFile) -> None:
    job.set(model=MODEL, batch={"global_size": 2, "micro_size": 2}, precision={"mode": "fp32"})
    of, fitted = machine(job.directory, memory=3e6), job.directory / "fitted.toml"
    done = run(hpctrain("plan", "job.toml", "--machine", of, "--fit", str(fitted), "--json"), job.directory, 200)
    assert done.code == 1 and not fitted.exists(), done
    told = json.loads(done.out)
    assert told["others"] and not told["fitting"] and all(one["lacks_bytes"] > 0 for one in told["others"])
    assert "  4 ranks instead of 1, and [batch] global_size = 4, which changes the training: 0.00" in "\n".join(
        told["advice"]
    )
    assert "activations and buffers of one sample take 0.00" in told["advice"][-2], told
    again = run(hpctrain("plan", "job.toml", "--machine", of, "--fit", "job.toml"), job.directory)
    assert again.code == 2 and "found a file that exists, expected the name of a new file" in again.err, again


@pytest.mark.cases(thorough=["2-False"], rest="nightly")
@pytest.mark.parametrize(("ranks", "fits"), [(2, False), (4, True)])
def test_the_number_of_ranks_that_is_advised_is_the_least(job: JobFile, ranks: int, fits: bool) -> None:
    job.set(
        model=MODEL, batch={"global_size": ranks, "micro_size": 1}, precision={"mode": "fp32"}, sharding={"stage": 3},
        activation_checkpointing={"mode": "full"},
    )  # fmt: skip
    words = ["plan", "job.toml", "--machine", machine(job.directory, memory=3e6), "-n", str(ranks)]
    done = run(hpctrain(*words), job.directory, 100)
    assert done.code == (0 if fits else 1) and f"memory        {'fits' if fits else 'does not fit'}" in done.out, done


@pytest.mark.nightly
def test_on_a_terminal_a_line_renews(job: JobFile) -> None:
    """Where nothing fits on the ranks, offload is advised on an accelerator."""
    job.set(model=MODEL, batch={"global_size": 32, "micro_size": 16})
    of, (ours, theirs) = machine(job.directory, memory=1.8e6, accelerator=True), os.openpty()
    words = hpctrain("plan", "job.toml", "-n", "2", "--machine", of, "--fit", "fitted.toml")
    done = subprocess.run(words, cwd=job.directory, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=300)
    os.close(theirs)
    seen = os.read(ours, 2**16).decode()
    assert seen.count("\r\x1b[K") > 1 and seen.count("\n") <= 2 and "2 settings tried; " in seen, seen
    assert done.returncode == 1 and "[sharding] offload_parameters = true" in done.stdout, done.stdout


_TOKENS = "batch.global_size=", "batch.micro_size=", "batch.tokens=64", "batch.micro_tokens=16"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--fit: found no --machine, whose figures tell which settings are the fastest; give one, such as h100"),
        (
            ["--machine", "h100", *(word for one in _TOKENS for word in ("--set", one))],
            "--fit: [batch] tokens: found batches by a budget of tokens, expected global_size and micro_size",
        ),
    ],
    ids=["machine", "tokens"],
)
def test_mistakes_are_told(job: JobFile, words: list[str], sentence: str) -> None:
    done = in_process("plan", "job.toml", "-n", "2", "--fit", "fitted.toml", *words, cwd=job.directory)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err, done


@pytest.mark.nightly
def test_a_measured_machine_plans(job: JobFile) -> None:
    done = run(hpctrain("bench", "machine", "-n", "2", "--output", "measured.toml"), job.directory, 200)
    assert done.code == 0, done
    told = tomli.loads((job.directory / "measured.toml").read_text())
    assert told == tomli.loads(done.out) and told["machine"]["per_node"] == 2
    assert told["machine"]["flops"]["float32"] > 1e8 and told["machine"]["inside"] > 1e6
    assert {"flops", "launch", "overhead", "latency", "inside"} <= {*told["machine"]["measured"]}
    done = run(hpctrain("plan", "job.toml", "-n", "2", "--machine", "measured.toml"), job.directory)
    assert done.code == 0 and "  measured: flops, bandwidth, inside, across, efficiency, latency, launch" in done.out, (
        done
    )


SMALL: dict[str, Any] = {"name": "own:mlp", "width": 64, "loss": "torch.nn.functional:cross_entropy"}
SIZES: dict[str, dict[str, Any]] = {
    "a small MLP": {"model": SMALL, "dataset": {"name": "own:rows"}},
    "a larger MLP": {"model": {**SMALL, "width": 1024}, "dataset": {"name": "own:rows"}},
    "a small GPT": {"model": MODEL},
    "a larger GPT": {"model": {**MODEL, "hidden_size": 256, "max_seq_length": 128}},
}
OWN = """
import torch
from torch import nn

def mlp(width):
    inner = [one for _ in range(3) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), *inner, nn.Linear(width, 10))

def rows(split):
    made = torch.randn(1024, 784), torch.zeros(1024, dtype=torch.int64)
    return torch.utils.data.TensorDataset(*made) if split == "train" else None
"""


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("size", SIZES)
def test_a_plan_with_measured_figures_is_within_twice_of_a_run(job: JobFile, size: str, ranks: str) -> None:
    """In the quickest quarter of steps, and the best of three tries, since the machine has other work, too."""
    (job.directory / "own.py").write_text(OWN)
    tables = SIZES[size]
    if "dataset" in tables:
        job.tables.update(tables)
    job.set(
        model=tables["model"], batch={"global_size": 16, "micro_size": 8}, precision={"mode": "fp32"}, job={"steps": 24}
    )
    off, tries = [], 3
    while tries and not any(one < 2 for one in off):
        tries -= 1
        done = run(hpctrain("bench", "machine", "-n", ranks, "--output", "measured.toml"), job.directory, 200)
        assert done.code == 0, done
        trained = run(hpctrain("run", "job.toml", "-n", ranks, "--resume", "never"), job.directory, 200)
        assert trained.code == 0, trained
        step = statistics.quantiles([row["step_seconds"] for row in job.rows()][4:], n=4)[0]
        words = ["plan", "job.toml", "-n", ranks, "--machine", "measured.toml", "--json"]
        planned = json.loads(run(hpctrain(*words), job.directory).out)["step_seconds"]
        off.append(max(step / planned, planned / step))
    assert min(off) < 2, off


DATA_SIZE = """
import re

from hpctrain.api import hookimpl

@hookimpl
def hpctrain_step_end():
    with open("/proc/self/status") as file:
        size = re.search(r"VmData:\\s+(\\d+) kB", file.read())[1]
    with open("data-size", "w") as file:
        file.write(size)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limit of a process's data")
def test_the_plan_s_choice_trains_under_a_limit_that_ends_the_job(job: JobFile) -> None:
    (job.directory / "sizes.py").write_text(DATA_SIZE)
    trained = run(
        hpctrain("run", "job.toml", "--set", "plugins.load=['sizes']", "--set", "job.output_dir=tiny"),
        job.directory,
        120,
    )
    assert trained.code == 0, trained
    without = 1000 * int((job.directory / "data-size").read_text())
    model = {"hidden_size": 256, "layers": 4, "attention_heads": 4, "vocab_size": 8192, "max_seq_length": 256}
    job.set(model=model, batch={"global_size": 16, "micro_size": 16}, precision={"mode": "fp32"})
    told = run(
        hpctrain("plan", "job.toml", "--machine", machine(job.directory, memory=1e12), "--json"), job.directory, 120
    )
    assert told.code == 0, told
    needs = json.loads(told.out)["peak_bytes"]
    memory = needs / 2
    words = ["plan", "job.toml", "--machine", machine(job.directory, memory=memory), "--fit", "fitted.toml"]
    assert run(hpctrain(*words), job.directory, 280).code == 0
    limited = ["bash", "-c", f'ulimit -d {int((without + 1.2 * memory) / 1000)}; exec "$@"', "limited"]
    naive = run([*limited, *hpctrain("run", "job.toml", "--resume", "never")], job.directory, 200)
    assert naive.code == 4 and "ran out of memory in step 1" in naive.err, naive
    fitted = run([*limited, *hpctrain("run", "fitted.toml", "--resume", "never")], job.directory, 200)
    assert fitted.code == 0 and "step 4/4" in fitted.out, fitted
