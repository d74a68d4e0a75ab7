"""Another user of the machine at work on a job from before its start to its end: it trains as if nobody were there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from besieging import besieged, needs_root, open_job
from launching import hpctrain, run

pytestmark = [pytest.mark.timeout(400), needs_root]

WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=2", "-m", "hpctrain", "run", "job.toml"]


@pytest.mark.parametrize("launcher", ["MPICH", "gloo", "torchrun"])
def test_a_job_trains_as_if_nobody_were_there(launcher: str) -> None:
    """Not with Open MPI: its launcher dies of noise on its own port (SECURITY.md)."""
    words = TORCHRUN if launcher == "torchrun" else hpctrain("run", "job.toml", "-n", "2")
    env = WITHOUT_MPI if launcher == "gloo" else {}
    with open_job() as job:
        quiet = run([*words, "--set", "job.output_dir='quiet'"], job.directory, env=env)
        assert quiet.code == 0, quiet
        # torchrun's own store believes everybody; with -n nobody but the ranks' store listens
        with besieged(job, everywhere=launcher != "torchrun"):
            done = run(words, job.directory, timeout=200, env=env)
        assert done.code == 0, done
        assert job.losses() == job.losses("quiet")
        log = (job.output / "log" / "rank-00000.log").read_text()
        assert log.count("a connection from 127.0.0.1 port") == 1, log
