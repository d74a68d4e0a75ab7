"""Measures how long a job lives on after one of its four ranks has died: SIGKILL, an exception, a lack of memory.

    python benchmarks/failures.py [--launchers run mpiexec torchrun srun] [--rounds N]

Rank 2 dies in a forward of step 4, when its peers go on to wait for it in a sum of gradients. The seconds begin there and
end when no rank is left. `srun` starts the ranks without MPI and with --kill-on-bad-exit=0, so that nobody but hpctrain
ends them. The watchdog has its limit of ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

RANKS, FAILING, STEP = 4, 2, 4
BIN = Path(sys.executable).parent
RUN = [str(BIN / "hpctrain"), "run", "job.toml"]
LAUNCHERS = {
    "run": [*RUN, "-n", str(RANKS)],
    "mpiexec": [str(BIN / "mpiexec"), "-n", str(RANKS), *RUN],
    "torchrun": [str(BIN / "torchrun"), f"--nproc-per-node={RANKS}", "--no-python", *RUN],
    "srun": ["srun", f"--ntasks={RANKS}", "--mpi=none", "--kill-on-bad-exit=0", *RUN],
}
MODEL = f"""
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class Dying(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1)
        self.forwards = 0

    def forward(self, x):
        if dist.is_initialized() and self.training:
            if not self.forwards:
                Path(f"pid-{{os.getpid()}}").touch()
            self.forwards += torch.is_grad_enabled()
            if self.forwards == {STEP} and dist.get_rank() == {FAILING}:
                Path("died").write_text(str(time.time()))
                how = os.environ["DIES_BY"]
                if how == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "exception":
                    raise ValueError("planted")
                torch.empty(2**55)
        return self.layer(x).squeeze(-1)


class Noise:
    def __init__(self, split):
        pass

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((64,), index / 4096), torch.tensor(index / 4096)
"""
TABLES = {
    "job": {"name": "failures", "steps": 100_000, "output_dir": "out"},
    "model": {"name": "dying:Dying", "loss": "torch.nn.functional:mse_loss"},
    "dataset": {"name": "dying:Noise"},
    "optimizer": {"name": "sgd", "lr": 1e-3},
    "batch": {"global_size": 16, "micro_size": 4},
}


def seconds_to_end(launcher: str, how: str) -> float:
    """From the death of a rank to the end of the last one."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "job.toml").write_text(tomli_w.dumps(TABLES))
        (place / "dying.py").write_text(MODEL)
        environment = {**os.environ, "DIES_BY": how, "OMP_NUM_THREADS": "1", "PYTHONPATH": name}
        with (place / "output").open("wb") as output:
            started = subprocess.Popen(
                LAUNCHERS[launcher], cwd=name, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            ended = _ended(place, started, time.monotonic() + 700)
            started.wait(60)  # a launcher tidies up; a killed srun would leave its node busy
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        if ended is None:
            raise SystemExit(f"{launcher}, {how}: ranks are left after 700 s\n{(place / 'output').read_text()[-3000:]}")
        return ended - float((place / "died").read_text())


def _ended(place: Path, started: subprocess.Popen[bytes], give_up: float) -> float | None:
    while time.monotonic() < give_up:
        ranks = [int(path.name.removeprefix("pid-")) for path in place.glob("pid-*")]
        died = (place / "died").exists() and (place / "died").read_text()
        if died and not any(Path(f"/proc/{pid}").exists() and _lives(pid) for pid in ranks):
            return time.time()
        if not died and started.poll() is not None:
            raise SystemExit(f"the job ended before its rank died:\n{(place / 'output').read_text()[-3000:]}")
        time.sleep(0.02)
    return None


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", default=["run", "mpiexec", "torchrun"], choices=list(LAUNCHERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the seconds of all rounds")
    arguments = parser.parse_args()
    for launcher in arguments.launchers:
        for how in ("SIGKILL", "exception", "memory"):
            seconds = sorted(seconds_to_end(launcher, how) for _ in range(arguments.rounds))
            if arguments.json:
                print(json.dumps({"launcher": launcher, "dies by": how, "seconds": seconds}), flush=True)
            else:
                print(f"{launcher:10} {how:10} {seconds[0]:6.2f} - {seconds[-1]:6.2f} s", flush=True)


if __name__ == "__main__":
    main()
