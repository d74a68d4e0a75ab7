"""A node that is cut off, and a rank that is frozen on another node: named within the limit, and the job ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
from jobs import JobFile
from launching import Started, hpctrain, wait_until

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(200)

LIMIT = 5
"""[watchdog] timeout_seconds."""
LATE = 10
"""Seconds after it within which the node must be named."""
TWO = ["srun", "-K", "-N2", "-n2"]
with_and_without_mpi = pytest.mark.parametrize("mpi", [["--mpi=pmi2"], []], ids=["mpi", "gloo"])


@pytest.fixture
def endless(job: JobFile) -> JobFile:
    return job.set(job={"steps": 10**7}, watchdog={"timeout_seconds": LIMIT})


def set_link(cluster: Cluster, node: str, state: str) -> None:
    """Cut the link between a node and all others, or mend it."""
    words = [*cluster.enter(), "ip", "link", "set", f"to_{node}", state]
    subprocess.run(words, check=True, timeout=30, capture_output=True)


@pytest.fixture
def mended(cluster: Cluster) -> Iterator[None]:
    yield
    set_link(cluster, "node2", "up")
    wait_until(
        lambda: cluster.ask("sinfo", "-h", "-o", "%T %D") in ("idle 2", "allocated 2", "mixed 2"), 120, "two nodes"
    )


def told(job: Started, words: str, seconds: float) -> str:
    """What the job has printed on stderr, once `words` are in it."""
    assert job.process.stderr is not None
    text, give_up = "", time.monotonic() + seconds
    while words not in text:
        assert time.monotonic() < give_up, f"{words!r} not within {seconds} s: {text}"
        line = job.process.stderr.readline()
        assert line, f"the job ended without {words!r}: {text}"
        text += line
    return text


@pytest.mark.cases(thorough=["mpi"], rest="nightly")
@with_and_without_mpi
def test_a_node_that_is_cut_off_is_named(cluster: Cluster, endless: JobFile, mended: None, mpi: list[str]) -> None:
    job = cluster.start([*TWO, *mpi, *hpctrain("run", "job.toml")], endless.directory)
    try:
        wait_until(lambda: (endless.output / "metrics.jsonl").exists(), 60, "training")
        set_link(cluster, "node2", "down")
        text = told(job, "missing: rank 1 on node2 has sent no heartbeat", LIMIT + LATE)
        assert "watchdog: rank 1 sent no heartbeat for 5 s" in text, text
    finally:
        job.kill_all()


@pytest.mark.nightly
def test_a_frozen_rank_ends_the_job(cluster: Cluster, endless: JobFile) -> None:
    stop = (
        "import os, signal\n"
        "from hpctrain.api import hookimpl\n"
        "@hookimpl\n"
        "def hpctrain_step_end(step):\n"
        "    if step == 3 and os.environ['SLURM_PROCID'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    (endless.directory / "freezing.py").write_text(stop)
    endless.set(plugins={"load": ["freezing"]})
    begin = time.monotonic()
    done = cluster.run([*TWO, "--mpi=pmi2", *hpctrain("run", "job.toml")], endless.directory, timeout=120)
    assert done.code not in (0, 75), done
    assert "missing: rank 1 on node2 has sent no heartbeat" in done.err, done
    assert "waiting: rank 0 on node1" in done.err, done
    assert time.monotonic() - begin < 60 + LIMIT + LATE
