"""`hpctrain submit --stage`: the ranks open files of an environment on their node's own disk, not on the shared file system."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import JobFile
from launching import hpctrain, run, wait_until
from packages import need_commands

from slurm.cluster import NODES, Cluster

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]

MOST = 50
"""Opens of shared files that a rank may need to start."""
STRACE = 'exec strace -f --seccomp-bpf -e trace=%file -o "trace.$SLURM_PROCID" "$@"'
TRACED = (
    'srun() { local words=(); for word in "$@"; do [ "$word" = "$staged/bin/python" ] && '
    f"words+=(bash -c '{STRACE}' traced); "
    'words+=("$word"); done; command srun "${words[@]}"; }'
)
"""A line of the script: srun starts hpctrain under strace."""


@pytest.fixture(autouse=True)
def emptied(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    yield
    cluster.empty()
    for image in tmp_path.glob("environment-*.tar"):  # gigabytes
        image.unlink()


def opened(trace: Path, shared: tuple[str, ...], calls: str = r"open(?:at)?") -> list[str]:
    """The files below `shared`, or relative to the job's directory there, that a process and its children have tried to open."""
    paths = re.findall(rf'(?:{calls})\([^"]*"([^"]*)"', trace.read_text())
    return [path for path in paths if path.startswith(shared) or not path.startswith("/")]


def test_ranks_open_few_shared_files(cluster: Cluster, tmp_path: Path, losses_alone: list[float]) -> None:
    job = JobFile(tmp_path)
    (tmp_path / "where.py").write_text(
        "import os, sys\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_job_end(result): open('prefix.' + os.environ['RANK'], 'w').write(sys.prefix)\n"
    )
    job.set(
        plugins={"load": ["where"]},
        scheduler={"slurm": {"nodes": 2, "ranks_per_node": 2, "time": "10m", "setup": [TRACED]}},
    )
    staged = ("--stage", "--set", f"scheduler.slurm.stage_directory={cluster.local}")
    done = cluster.hpctrain(tmp_path, "submit", "job.toml", *staged)
    assert done.code == 0, done
    number = done.out.split()[3].rstrip(",")
    wait_until(lambda: cluster.job(number).get("JobState") in ("COMPLETED", "FAILED"), 200, "the job ends")
    output = (job.output / f"slurm-{number}.out").read_text()
    assert cluster.job(number)["JobState"] == "COMPLETED", output
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)
    assert "4 (mpi)" in output, output
    prefixes = {(tmp_path / f"prefix.{rank}").read_text() for rank in range(4)}
    assert prefixes == {f"{cluster.local}/hpctrain-{number}"}
    # the test's own environment, and everything on the file system that the nodes share
    shared = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), str(tmp_path))
    for rank in range(4):
        found = opened(tmp_path / f"trace.{rank}", shared)
        if rank == 0:  # up to the first step: later ones and checkpoints open what they write
            found = found[: found.index("out/metrics.jsonl")]
        found = [path for path in found if "/checkpoints/" not in path]  # what it writes, and reads back
        print(f"rank {rank}: {len(found)} opens of shared files")
        assert 0 < len(found) < MOST, f"rank {rank}: {len(found)}\n" + "\n".join(found)
    for node in NODES:
        left = run([*cluster.inside(node), "ls", str(cluster.local)], tmp_path)
        assert left.code == 0 and "hpctrain" not in left.out, left


def test_a_cancelled_job_is_cleaned_up_by_the_next(cluster: Cluster, tmp_path: Path) -> None:
    """Without an environment: what the script does on each node before it unpacks anything."""
    job = JobFile(tmp_path)
    job.set(scheduler={"slurm": {"nodes": 2, "time": "10m", "stage_directory": str(cluster.local)}})
    script = cluster.hpctrain(tmp_path, "submit", "job.toml", "--stage", "--dry-run").out
    (prepare,) = [line for line in script.splitlines() if "mkdir -m 700" in line]
    prepare = prepare.removesuffix(" || return")
    for node in NODES:
        for name in ("hpctrain-4000000", "hpctrain-other"):
            assert run([*cluster.inside(node), "mkdir", f"{cluster.local}/{name}"], tmp_path).code == 0
    (tmp_path / "again.sh").write_text(
        f"#!/bin/bash\nstaged={cluster.local}/hpctrain-$SLURM_JOB_ID\nmkdir {cluster.local}/hpctrain-$SLURM_JOB_ID\n{prepare}\n"
        f"srun --mpi=none ls -l {cluster.local}\n"
    )
    done = cluster.run(["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--output=seen", "again.sh"], tmp_path)
    seen = (tmp_path / "seen").read_text()
    assert done.code == 0 and "4000000" not in seen and seen.count("hpctrain-other") == 2, seen
    number = done.out.split()[-1]
    assert len([line for line in seen.splitlines() if re.match(rf"drwx------.* hpctrain-{number}$", line)]) == 2, seen
    for node in NODES:
        run(
            [
                *cluster.inside(node),
                "rm",
                "-r",
                f"{cluster.local}/hpctrain-other",
                f"{cluster.local}/hpctrain-{number}",
            ],
            tmp_path,
        )


def test_alone_it_opens_thousands(tmp_path: Path) -> None:
    """What the figure is held against."""
    need_commands("strace")
    job = JobFile(tmp_path)
    traced = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-e",
        "trace=open,openat",
        "-o",
        str(tmp_path / "trace"),
        *hpctrain("run", "job.toml"),
    ]
    assert run(traced, job.directory).code == 0
    found = opened(tmp_path / "trace", (sys.prefix, sys.base_prefix))
    print(f"without: {len(found)} opens in the environment")
    assert len(found) > 1000
