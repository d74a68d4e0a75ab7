"""Another user on another node attacks a job that srun started without MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from besieging import besieged, needs_root, open_job
from launching import hpctrain

from slurm.cluster import Cluster

pytestmark = [pytest.mark.timeout(240), needs_root]

WORDS = ["srun", "-K", "-N2", "-n2", *hpctrain("run", "job.toml")]


@pytest.mark.nightly
@pytest.mark.parametrize("carrier", ["MUNGE", "a file"])
def test_a_job_over_two_nodes_trains_as_if_nobody_were_there(cluster: Cluster, carrier: str, tmp_path: Path) -> None:
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    env = {"HOME": str(home)}
    if carrier == "a file":  # MUNGE is there, and does not answer
        programs.mkdir()
        for name in ("munge", "unmunge"):
            (programs / name).write_text("#!/bin/sh\nexit 1\n")
            (programs / name).chmod(0o755)
        env["PATH"] = f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
    with open_job() as job:
        quiet = cluster.run([*WORDS, "--set", "job.output_dir='quiet'"], job.directory, env=env)
        assert quiet.code == 0, quiet
        with besieged(job, ["10.77.0.1:20000-32000"], cluster.inside("node2")) as tried:
            done = cluster.run(WORDS, job.directory, env=env)
        assert done.code == 0 and "2 (slurm)" in done.out, done
        assert job.losses() == job.losses("quiet")
        log = (job.output / "log" / "rank-00000.log").read_text()
        assert log.count("a connection from 10.77.0.2 port") == 1, log
        assert all(address.startswith("10.77.0.1:") for address in tried["addresses"])
        # the file is removed after all ranks have come; with MUNGE there is none
        assert [path.name for path in home.rglob("*")] == ([".hpctrain"] if carrier == "a file" else [])


@pytest.mark.nightly
def test_nothing_listens_on_all_addresses(cluster: Cluster) -> None:
    """While the job trains, rank 0's node listens with the store on its address, and nowhere else."""
    with open_job() as job:
        running = cluster.start(WORDS, job.directory)
        try:
            seen = set()
            while running.process.poll() is None:
                shown = subprocess.run(
                    [*cluster.inside("node1"), "ss", "-Hltnp"], capture_output=True, text=True, timeout=30
                )
                seen |= {line.split()[3] for line in shown.stdout.splitlines() if "python" in line}
            done = running.finish(60)
        finally:
            running.kill_all()
    assert done.code == 0, done
    assert seen and all(address.startswith("10.77.0.1:") for address in seen), seen
