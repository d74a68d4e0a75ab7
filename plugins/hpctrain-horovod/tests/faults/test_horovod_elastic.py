"""Elastic training: workers that are killed, hosts that change, and a script that fails by itself.

More kills at random moments: `python -m pytest plugins/hpctrain-horovod -k killed_worker --draws 12`.
Each change of hosts and workers five times: `-k hosts_or_workers --draws 5`.
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

EXAMPLE = Path(__file__).parents[2] / "examples"
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
    done = run([sys.executable, "-m", "hpctrain_horovod", "script.py", "40"], directory)
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


def discovery(directory: Path, hosts: str) -> list[str]:
    """The options of a script that prints the file `hosts`, which `announce` changes."""
    (directory / "hosts").write_text(hosts)
    (directory / "hosts.sh").write_text("#!/bin/sh\necho >> looks\ncat hosts\n")
    (directory / "hosts.sh").chmod(0o755)
    return ["--host-discovery-script", "./hosts.sh"]


def announce(directory: Path, hosts: str | None) -> None:
    """Change the hosts, None for a script that fails, and return when the starter sees it."""
    if hosts is None:
        (directory / "hosts").unlink()
    else:
        (directory / "new").write_text(hosts)
        (directory / "new").rename(directory / "hosts")
    looks = len((directory / "looks").read_text()) + (
        2 if hosts is None else 1
    )  # the second one begins when the first has ended
    wait_until(lambda: len((directory / "looks").read_text()) >= looks, 30, "a look for hosts")


def slots(hosts: str) -> int:
    return sum(int(line.split(":")[1]) for line in hosts.splitlines())


CHANGES = {
    "exchanged": ("localhost:2", ["127.0.0.1:2"]),
    "shrunk": ("localhost:2\n127.0.0.1:1", ["localhost:2", "127.0.0.1:1", "localhost:1\n127.0.0.1:1"]),
    "grown": ("localhost:1", ["localhost:1\n127.0.0.1:2", "localhost:3"]),
    "killed": ("localhost:3", ["localhost:3"]),
}
"""Hosts before, and those that there may be afterwards."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    draws = metafunc.config.getoption("--draws")
    if "change" in metafunc.fixturenames:
        metafunc.parametrize(
            ("change", "seed"),
            [(one, n) for one in CHANGES for n in range(draws)] if draws else [("grown", 0), ("killed", 0)],
        )
    elif "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(draws or 1))


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_lost_worker_that_nobody_can_replace_is_dropped(undisturbed: list[float], tmp_path: Path) -> None:
    """The host has lost a slot; before a commit, only the lost worker tells the others."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("% 4 == 0", "% 100 == 0"))
    words = elastic("-np", "3", "--min-np", "1", *discovery(tmp_path, "localhost:3"))
    with started(words, tmp_path) as command:
        wait_until(lambda: any(step[0] >= 5 for step in progress(tmp_path)), 60, "batch 5")
        os.kill(first := progress(tmp_path)[0][3], signal.SIGSTOP)  # the others wait for it
        announce(tmp_path, "localhost:2")
        os.kill(first, signal.SIGKILL)
        done = command.finish(120)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert found["losses"] == pytest.approx(undisturbed, rel=1e-9) and found["seen"] == 480
    assert found["size"] == 2 and len({step[3] for step in progress(tmp_path)}) == 3, "no worker came"


NO_STATE = (
    r"horovodrun: no worker that holds the training state (.*): others would train from the beginning, so the job ends"
)


@pytest.mark.nightly
def test_hosts_that_shrink_and_are_exchanged(tmp_path: Path) -> None:
    """A slot that is lost is given up at the next commit; no job begins anew without the state; a script may fail at times."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(0.02)", "time.sleep(0.1)"))
    words = hpctrain("horovodrun", "-np", "2", "--min-np", "1", *discovery(tmp_path, "localhost:1\n127.0.0.1:1"))
    with started([*words, sys.executable, "script.py", "1000"], tmp_path) as command:
        wait_until(lambda: any(step[0] >= 2 for step in progress(tmp_path)), 60, "batch 2")
        announce(tmp_path, None)
        announce(tmp_path, "127.0.0.1:1")
        wait_until(lambda: progress(tmp_path)[-1][2] == 1, 30, "a smaller set of workers")
        announce(tmp_path, "localhost:1")
        done = command.finish(60)
    assert done.code == 4 and done.err.count("ended with exit code 1, expected 0") == 1, done
    assert re.search(NO_STATE, done.err)[1] == "has a slot (127.0.0.1 had it, slots are on localhost)", done
    assert re.search(r"worker \d on localhost leaves: the hosts have no slot for it", done.err), done
    of_rank_0 = [step for step in progress(tmp_path) if step[1] == 0]
    assert [step[0] for step in of_rank_0] == list(range(1, len(of_rank_0) + 1)), "each batch once, in order"
    assert {(step[1], step[2]) for step in progress(tmp_path)} == {(0, 2), (1, 2), (0, 1)}


@pytest.mark.nightly
def test_a_worker_that_has_not_got_the_state_does_not_lead(tmp_path: Path) -> None:
    """One is replaced, and the other one is lost while it gives its state to the new one."""
    sync = "        if os.path.exists('progress'):\n            open(f'syncs-{os.getpid()}', 'w')\n            time.sleep(2)\n"
    slow = f"class State(hvd.elastic.TorchState):\n    def sync(self):\n{sync}        super().sync()\n\n\n"
    script = SCRIPT.replace("state = train(hvd.elastic.TorchState(", f"{slow}state = train(State(")
    (tmp_path / "script.py").write_text(script)
    with started(elastic("-np", "2", "--min-np", "1"), tmp_path) as command:
        wait_until(lambda: any(step[0] >= 6 for step in progress(tmp_path)), 60, "batch 6")
        [first, second] = [next(step[3] for step in progress(tmp_path) if step[1] == rank) for rank in range(2)]
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: len(list(tmp_path.glob("syncs-*"))) == 2, 60, "a new worker")
        os.kill(first, signal.SIGKILL)
        done = command.finish(60)
    assert done.code == 137 and re.search(NO_STATE, done.err)[1] == "is left", done
    assert sum(step[:2] == [1, 0] for step in progress(tmp_path)) == 1, "the new one does not begin anew"


@pytest.mark.nightly
def test_hosts_or_workers_that_change(change: str, seed: int, undisturbed: list[float], tmp_path: Path) -> None:
    """At a random moment: the losses are those of an undisturbed run, or the job ends and says why."""
    draw = random.Random(seed)
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(0.02)", "time.sleep(0.25)"))
    before, after = CHANGES[change][0], draw.choice(CHANGES[change][1])
    words = elastic("-np", str(slots(before)), "--min-np", "1", "--max-np", "3", *discovery(tmp_path, before))
    with started(words, tmp_path) as command:
        batch = draw.randrange(1, 12)
        wait_until(lambda: any(step[0] >= batch for step in progress(tmp_path)), 60, f"batch {batch}")
        time.sleep(draw.random() * 0.25)
        if change == "killed":
            for process in sorted({step[3] for step in progress(tmp_path)}):
                os.kill(process, signal.SIGKILL)
                time.sleep(draw.random() * 0.25)
        else:
            announce(tmp_path, after)
        done = command.finish(120)
    assert "Traceback" not in done.err, done
    if change in ("shrunk", "grown"):
        found = json.loads(done.out)
        assert done.code == 0 and found["losses"] == pytest.approx(undisturbed, rel=1e-9) and found["seen"] == 480, done
        assert found["size"] == slots(after) and {step[2] for step in progress(tmp_path)} >= {
            slots(before),
            slots(after),
        }, done
    else:
        assert done.code == (4 if change == "exchanged" else 137) and not done.out, done
        assert re.search(NO_STATE, done.err), done
        assert sum(step[:2] == [1, 0] for step in progress(tmp_path)) == 1, "nobody begins anew"


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_script_that_fails_by_itself_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("state.batch += 1", "state.batch += 1; assert state.batch < 7, 'mine'")
    )
    done = run(elastic("-np", "2", "--min-np", "1"), tmp_path)
    assert done.code == 1 and "AssertionError" in done.err and "mine" in done.err, done


@pytest.mark.nightly
def test_a_fixed_number_of_workers_ends_with_the_first_that_is_lost(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with started(elastic("-np", "3", "--gloo"), tmp_path) as command:
        wait_until(lambda: any(step[0] >= 5 for step in progress(tmp_path)), 60, "batch 5")
        os.kill(progress(tmp_path)[-1][3], signal.SIGKILL)
        done = command.finish(60)
    assert done.code == 137 and "ended with signal 9" in done.err, done


@pytest.mark.thorough
def test_workers_leave_with_the_starter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(0.02)", "time.sleep(1)"))
    with started(elastic("-np", "2", "--min-np", "1"), tmp_path) as command:
        wait_until(lambda: any(step[0] >= 1 for step in progress(tmp_path)), 60, "batch 1")
        command.process.kill()
        done = command.finish(60)  # fails if a process is left
    assert done.code == -signal.SIGKILL


@pytest.mark.thorough
def test_the_example(tmp_path: Path) -> None:
    words = hpctrain(
        "horovodrun", "-np", "2", "--min-np", "1", sys.executable, str(EXAMPLE / "elastic.py"), "--epochs", "1"
    )
    done = run(words, tmp_path)
    assert done.code == 0 and re.search(r"done: 1920 samples, loss \d\.\d+ on 2 workers", done.out), done


@pytest.mark.nightly
def test_mistakes(tmp_path: Path) -> None:
    for options, sentence in [
        (["-np", "2", "--min-np", "3"], "--min-np 3 and -np 2"),
        (["--gloo"], "lacks -np N"),
        (["-np", "2", "--gloo", "--mpi"], "expected one kind"),
        (
            ["-np", "2", "--min-np", "1", "--host-discovery-script", "/bin/false"],
            "/bin/false ended with exit code 1, expected 0",
        ),
        (["-np", "2", "--min-np", "1", "--host-discovery-script", "/bin/pwd"], "expected HOST:SLOTS"),
    ]:
        done = run(elastic(*options), tmp_path)
        assert done.code == 2 and sentence in done.err, done
