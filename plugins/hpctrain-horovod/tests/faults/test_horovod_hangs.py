"""A job whose own code waits in one of Horovod's operations: the watchdog names it, and the user's line."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from launching import hpctrain, run

CODE = """
import time

import horovod.torch as hvd
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        hvd.init()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, values):
        if hvd.rank() == 1:
            time.sleep(10_000)  # in a forward
        hvd.allreduce(torch.ones(3), name="scale")  # of the user's
        return self.inner(values)


def data(split):
    return [(torch.ones(3), torch.tensor(n % 2)) for n in range(12)] if split == "train" else None
"""


@pytest.mark.nightly
def test_a_rank_that_waits_in_an_operation_of_horovods_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    tables = {
        "job": {"name": "hangs", "steps": 2, "output_dir": "out"},
        "model": {"name": "mine:Net", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "mine:data"},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch": {"global_size": 4, "micro_size": 2},
        "watchdog": {"timeout_seconds": 5},
        "evaluation": {"every_steps": 0},
    }
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    done = run(hpctrain("run", "job.toml", "-n", "2"), tmp_path, 90)
    output = done.out + done.err
    assert done.code == 4, done
    assert "missing: rank 1 on" in output and "time.sleep(10_000)  # in a forward" in output, done
    waiting = next(line for line in output.splitlines() if line.startswith("  waiting: rank 0 on"))
    assert 'hvd.allreduce(torch.ones(3), name="scale")  # of the user\'s; waits for allreduce' in waiting, done
