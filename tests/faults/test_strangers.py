"""Another user of the machine attacks a job from before its start to its end. The job must train undisturbed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from besieging import besieged, needs_root, open_job
from launching import hpctrain, run

pytestmark = [pytest.mark.timeout(400), needs_root]

WITHOUT_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=2", "-m", "hpctrain", "run", "job.toml"]

FLUX = [sys.executable, str(Path(__file__).parent / "programs" / "as_flux.py"), "run", "job.toml"]
STARTED = {"torchrun": TORCHRUN, "Flux": FLUX}


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """Runs a command in a separate network, because the stranger knocks at every port, also at those of other tests."""
    holder = subprocess.Popen(
        ["unshare", "--net", "bash", "-c", "ip link set lo up && echo up && read"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
    yield ["nsenter", "--target", str(holder.pid), "--net"]
    holder.communicate(timeout=30)  # ends its standard input


@pytest.mark.parametrize("launcher", ["MPICH", "gloo", "torchrun", "Flux"])
def test_a_job_trains_as_if_nobody_were_there(launcher: str, inside: list[str]) -> None:
    """Not with Open MPI: its launcher dies of noise on its own port (SECURITY.md)."""
    words = [*inside, *STARTED.get(launcher, hpctrain("run", "job.toml", "-n", "2"))]
    env = WITHOUT_MPI if launcher in ("gloo", "Flux") else {}
    with open_job() as job:
        quiet = run([*words, "--set", "job.output_dir='quiet'"], job.directory, env=env)
        assert quiet.code == 0, quiet
        # torchrun's own store trusts everyone; with -n only the ranks' store listens
        with besieged(job, enter=inside, everywhere=launcher != "torchrun"):
            done = run(words, job.directory, timeout=200, env=env)
        assert done.code == 0, done
        assert job.losses() == job.losses("quiet") and (launcher != "Flux" or "2 (flux)" in done.out), done
        log = (job.output / "log" / "rank-00000.log").read_text()
        assert log.count("a connection from 127.0.0.1 port") == 1, log
