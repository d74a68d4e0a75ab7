"""A sweep from Python: jobs of one process, interrupted and continued; its memory does not grow with the jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import INTERRUPT, run, started, wait_until

SWEEP = """
import json, os, sys
import psutil, torch
from torch import nn
import hpctrain

STEPS = int(sys.argv[1])


class Ring(torch.utils.data.Dataset):
    # defined in the script itself, as in a notebook
    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.randn(16)
        return x, (x.sum() > 0).long()


for number in range(8):
    result = hpctrain.run({
        "job": {"name": f"job-{number}", "steps": STEPS, "seed": number},
        "model": {
            "name": lambda: nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 2)),
            "loss": nn.functional.cross_entropy,
        },
        "dataset": {"name": Ring(), "workers": int(sys.argv[2])},
        "optimizer": {"name": torch.optim.AdamW, "lr": 10 ** -(1 + number / 4)},
        "batch": {"global_size": 32, "micro_size": 8},
        "checkpoint": {"keep": 1},
    })
    rss = psutil.Process().memory_info().rss
    if int(os.environ.get("RANK", 0)) == 0:
        with open("sweep.jsonl", "a") as file:
            print(json.dumps([number, result["step"], result["loss"], len(result["losses"]), rss]), file=file)
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    (tmp_path / "sweep.py").write_text(SWEEP)
    return tmp_path


def rows_of(directory: Path) -> list[list[float]]:
    path = directory / "sweep.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(directory: Path, job: int) -> int:
    path = directory / "runs" / f"job-{job}" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.thorough
def test_memory_does_not_grow(sweep: Path) -> None:
    done = run([sys.executable, "sweep.py", "12", "0"], sweep, timeout=180)
    assert done.code == 0, done
    memory = [row[-1] for row in rows_of(sweep)]
    assert len(memory) == 8 and memory[7] < 1.05 * memory[1], memory


LEFT = """
import gc, json, os
from pathlib import Path
import torch
import hpctrain

for stage in range(4):
    hpctrain.run({
        "job": {"name": f"job-{stage}", "steps": 2},
        "model": {"name": "gpt", "vocab_size": 256, "hidden_size": 32, "layers": 2, "attention_heads": 2, "max_seq_length": 16},
        "dataset": {"name": "synthetic", "samples": 64, "seq_length": 16},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "batch": {"global_size": 8, "micro_size": 2},
        "sharding": {"name": f"zero-{stage}"},
    })
    parameters = sum(type(one) is torch.nn.Parameter for one in gc.get_objects())
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print("left " + json.dumps([parameters, [name for name in threads if "gloo" in name]]))
raise RuntimeError("mine")
"""


@pytest.mark.nightly
def test_a_job_leaves_no_model_and_no_threads_behind(tmp_path: Path) -> None:
    """What a thread of gloo still held when Python ends would abort the process."""
    (tmp_path / "left.py").write_text(LEFT)
    done = run([sys.executable, "left.py"], tmp_path, timeout=180)
    left = [json.loads(line.removeprefix("left ")) for line in done.out.splitlines() if line.startswith("left ")]
    assert left == [[0, []]] * 4, done
    assert done.code == 1 and "\nRuntimeError: mine" in done.err, done


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [(), ("mpiexec", "-n", "2")], ids=["alone", "two ranks"])
def test_ctrl_c_ends_a_sweep_which_goes_on_where_it_was(sweep: Path, launcher: tuple[str, ...]) -> None:
    here = str(Path(sys.executable).parent / launcher[0]) if launcher else ""
    words = [*([here, *launcher[1:]] if launcher else []), sys.executable, "sweep.py", "200", "0"]
    with started(words, sweep) as running:
        wait_until(lambda: len(rows_of(sweep)) == 2 and steps_of(sweep, 2) > 20, 120, "the third job trains")
        running.process.send_signal(INTERRUPT)
        stopped = running.finish(60)
    assert stopped.code != 0 and "KeyboardInterrupt" in stopped.err, stopped
    assert "stopped at step" in stopped.out and len(rows_of(sweep)) == 2, stopped
    taken = steps_of(sweep, 2)
    assert 20 < taken < 200 and steps_of(sweep, 3) == 0
    done = run(words, sweep, timeout=240)
    assert done.code == 0 and f"resuming     from step {taken}" in done.out, done
    before, after = rows_of(sweep)[:2], rows_of(sweep)[2:]
    assert [row[:2] for row in after] == [[job, 200] for job in range(8)]
    assert [row[3] for row in after] == [0, 0, 200 - taken, *[200] * 5]
    assert [row[2] for row in after[:2]] == [row[2] for row in before], "finished jobs give their last loss"
