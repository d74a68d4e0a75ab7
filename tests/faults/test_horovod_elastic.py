"""Elastic training: workers that are killed, workers that come later, and a script that fails by itself.

More kills at random moments: `python -m pytest tests/faults/test_horovod_elastic.py -k killed_worker --draws 12`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import hpctrain, run, started, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod"
SCRIPT = """
import os, sys, time
import torch
import horovod.torch as hvd

BATCHES, SIZE = int(sys.argv[1]), 12
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
draw = torch.Generator().manual_seed(1)
inputs = torch.randn(BATCHES * SIZE, 4, generator=draw, dtype=torch.float64)
wanted = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64)
with torch.no_grad():
    model.weight.zero_()
    model.bias.zero_()


@hvd.elastic.run
def train(state):
    while state.batch < BATCHES:
        rows = torch.arange(state.batch * SIZE, (state.batch + 1) * SIZE)
        mine = rows[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = ((model(inputs[mine]) - wanted[mine]) ** 2).sum() * (hvd.size() / SIZE)
        loss.backward()
        optimizer.step()
        state.losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        state.seen += int(hvd.allreduce(torch.tensor(len(mine)), op=hvd.Sum, name="seen"))
        state.batch += 1
        with open("progress", "a") as file:
            file.write(f"{state.batch} {hvd.rank()} {hvd.size()} {os.getpid()}\\n")
        time.sleep(0.02)
        if state.batch % 4 == 0:
            state.commit()
    return state


state = train(hvd.elastic.TorchState(model, optimizer, batch=0, seen=0, losses=[]))
if hvd.rank() == 0:
    import json

    print(json.dumps({"losses": state.losses, "seen": state.seen, "size": hvd.size()}), flush=True)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process over 40 batches."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "script.py").write_text(SCRIPT)
    done = run([sys.executable, "-m", "hpctrain.horovod", "script.py", "40"], directory)
    assert done.code == 0, done
    losses: list[float] = json.loads(done.out)["losses"]
    return losses


def elastic(*options: str) -> list[str]:
    return hpctrain("horovodrun", *options, sys.executable, "script.py", "40")


def progress(directory: Path) -> list[list[int]]:
    """Batch, rank, size and process of each step that was made."""
    file = directory / "progress"
    lines = file.read_text().splitlines() if file.exists() else []
    return [[int(word) for word in line.split()] for line in lines if line.count(" ") == 3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--draws") or 3))


def test_a_killed_worker_is_replaced(undisturbed: list[float], seed: int, tmp_path: Path) -> None:
    """At a random moment; the losses are those of an undisturbed run, and each sample counts once."""
    draw = random.Random(seed)
    (tmp_path / "script.py").write_text(SCRIPT)
    with started(elastic("-np", "4", "--min-np", "2"), tmp_path) as command:
        after = draw.randrange(1, 25)
        wait_until(lambda: any(step[0] >= after for step in progress(tmp_path)), 60, f"batch {after}")
        time.sleep(draw.random() * 0.05)
        victims = {step[3]: step[1] for step in progress(tmp_path)}
        victim = draw.choice(sorted(victims))
        os.kill(victim, signal.SIGKILL)
        done = command.finish(120)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["seen"] == 40 * 12 and found["losses"] == pytest.approx(undisturbed, rel=1e-9), victims[victim]
    assert "ended with signal 9" in done.err and "Traceback" not in done.err, done
    assert len({step[3] for step in progress(tmp_path)}) == 5, "four workers and one in place of the killed one"


def test_a_lost_worker_that_nobody_can_replace_is_dropped(undisturbed: list[float], tmp_path: Path) -> None:
    """The host loses a slot together with the worker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "slots").write_text("3")
    (tmp_path / "hosts.sh").write_text('#!/bin/sh\necho "localhost:$(cat slots)"\n')
    (tmp_path / "hosts.sh").chmod(0o755)
    words = elastic("-np", "3", "--min-np", "1", "--host-discovery-script", "./hosts.sh")
    with started(words, tmp_path) as command:
        wait_until(lambda: any(step[0] >= 5 for step in progress(tmp_path)), 60, "batch 5")
        (tmp_path / "slots").write_text("2")
        time.sleep(1.5)
        os.kill(next(step[3] for step in progress(tmp_path) if step[1] == 1), signal.SIGKILL)
        done = command.finish(120)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["losses"] == pytest.approx(undisturbed, rel=1e-9) and found["seen"] == 480


def test_a_worker_that_does_not_come_back_is_replaced(undisturbed: list[float], tmp_path: Path) -> None:
    """One is stopped, and another one is killed: the third waits for both."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = elastic("-np", "3", "--min-np", "2")
    with started(words, tmp_path, env={"HOROVOD_ELASTIC_TIMEOUT": "15"}) as command:
        wait_until(lambda: any(step[0] >= 5 for step in progress(tmp_path)), 60, "batch 5")
        process = {step[1]: step[3] for step in progress(tmp_path)}
        os.kill(process[2], signal.SIGSTOP)
        os.kill(process[1], signal.SIGKILL)
        done = command.finish(120)
    assert done.code == 0, done
    assert done.err.count("did not come back to hvd.init within 15 s (HOROVOD_ELASTIC_TIMEOUT), and is ended") == 1, (
        done
    )
    assert sum(step[:2] == [1, 0] for step in progress(tmp_path)) == 1, "the third goes on where it was"
    found = json.loads(done.out)
    assert found["losses"] == pytest.approx(undisturbed, rel=1e-9) and found["seen"] == 480


def test_workers_that_come_later_join_at_a_commit(undisturbed: list[float], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(0.02)", "time.sleep(0.25)"))
    (tmp_path / "slots").write_text("1")
    (tmp_path / "hosts.sh").write_text('#!/bin/sh\necho "localhost:$(cat slots)"\n')
    (tmp_path / "hosts.sh").chmod(0o755)
    words = elastic("-np", "1", "--min-np", "1", "--max-np", "3", "--host-discovery-script", "./hosts.sh")
    with started(words, tmp_path) as command:
        wait_until(lambda: any(step[0] >= 2 for step in progress(tmp_path)), 60, "batch 2")
        (tmp_path / "slots").write_text("3")
        done = command.finish(120)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["losses"] == pytest.approx(undisturbed, rel=1e-9) and found["seen"] == 480
    assert found["size"] == 3 and {step[2] for step in progress(tmp_path)} >= {1, 3}


def test_a_script_that_fails_by_itself_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("state.batch += 1", "state.batch += 1; assert state.batch < 7, 'mine'")
    )
    done = run(elastic("-np", "2", "--min-np", "1"), tmp_path)
    assert done.code == 1 and "AssertionError" in done.err and "mine" in done.err, done


def test_a_fixed_number_of_workers_ends_with_the_first_that_is_lost(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with started(elastic("-np", "3", "--gloo"), tmp_path) as command:
        wait_until(lambda: any(step[0] >= 5 for step in progress(tmp_path)), 60, "batch 5")
        os.kill(progress(tmp_path)[-1][3], signal.SIGKILL)
        done = command.finish(60)
    assert done.code == 137 and "ended with signal 9" in done.err, done


def test_workers_leave_with_the_starter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(0.02)", "time.sleep(1)"))
    with started(elastic("-np", "2", "--min-np", "1"), tmp_path) as command:
        wait_until(lambda: any(step[0] >= 1 for step in progress(tmp_path)), 60, "batch 1")
        command.process.kill()
        done = command.finish(60)  # fails if a process is left
    assert done.code == -signal.SIGKILL


def test_the_example(tmp_path: Path) -> None:
    words = hpctrain(
        "horovodrun", "-np", "2", "--min-np", "1", sys.executable, str(EXAMPLE / "elastic.py"), "--epochs", "1"
    )
    done = run(words, tmp_path)
    assert done.code == 0 and re.search(r"done: 1920 samples, loss \d\.\d+ on 2 workers", done.out), done


def test_mistakes(tmp_path: Path) -> None:
    for options, sentence in [
        (["-np", "2", "--min-np", "3"], "--min-np 3 and -np 2"),
        (["--gloo"], "lacks -np N"),
        (["-np", "2", "--gloo", "--mpi"], "expected one kind"),
    ]:
        done = run(elastic(*options), tmp_path)
        assert done.code == 2 and sentence in done.err, done
