"""`hpctrain submit` as typed, without a scheduler: scripts by content and syntax, and the sentences for mistakes.

tests/slurm submits to a real Slurm. The script for PBS is run here without PBS, with MPICH's mpiexec.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hpctrain_tools.submit.asking import Submitted
from hpctrain_tools.submit.record import Submission
from jobs import JobFile
from launching import Finished, Started, hpctrain, in_process, run

from hpctrain.base.child_python import python_module

pytestmark = pytest.mark.timeout(200)

BIN = Path(sys.executable).parent
PROGRAM = python_module("hpctrain")
TWO = ("--nodes", "2", "--ranks-per-node", "2", "--time", "1h30m")
SECRET = "a-key-that-no-script-may-hold"


def submit(job: JobFile, *words: str, env: dict[str, str] | None = None) -> Finished:
    return in_process("submit", "job.toml", *words, cwd=job.directory, env={"WANDB_API_KEY": SECRET, **(env or {})})


def script(job: JobFile, *words: str) -> str:
    """What --dry-run prints. It must be no more than that."""
    done = submit(job, *words, "--dry-run")
    assert done.code == 0 and done.err == "", done
    assert sorted(path.name for path in job.directory.iterdir()) == ["job.toml"]
    assert SECRET not in done.out
    return done.out


def lines(text: str) -> list[str]:
    """The lines of a script; bash must accept it."""
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    return text.splitlines()


@pytest.fixture
def spacious(tmp_path: Path) -> JobFile:
    """A job in a directory whose name needs quotes."""
    (tmp_path / "my runs").mkdir()
    return JobFile(tmp_path / "my runs")


def test_slurm_with_all_options(spacious: JobFile) -> None:
    given = {
        "partition": "gpu", "account": "abc", "qos": "high", "gres": "gpu:4", "constraint": "a100|h100", "cpus_per_rank": 8,
        "modules": ["gcc", "my mpi"], "setup": ["export A='b c'"], "extra": ["--exclusive"], "container": "image.sif",
        "save_seconds": 300,
    }  # fmt: skip
    spacious.set(job={"name": "a job $HOME"}, scheduler={"slurm": given})
    found = lines(script(spacious, *TWO, "--after", "17"))
    options = {line.removeprefix("#SBATCH ") for line in found if line.startswith("#SBATCH")}
    here = spacious.directory
    assert options >= {
        "--job-name=a-job--HOME", f"--chdir='{here}'", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=8",
        "--time=01:30:00", "--partition=gpu", "--account=abc", "--qos=high", "--gres=gpu:4", "--constraint='a100|h100'",
        "--signal=USR1@300", "--requeue", "--open-mode=append", f"--output='{here}/out/slurm-%j.out'", "--exclusive",
        "--dependency=afterok:17", "--kill-on-invalid-dep=yes",
    }  # fmt: skip
    (module,) = [line for line in found if line.startswith("module load gcc 'my mpi' || ")]
    failing = f"module() {{ return 1; }}\n{module}\necho went on"
    stopped = subprocess.run(["bash", "-c", failing], capture_output=True, text=True, timeout=30, check=False)
    assert (stopped.returncode, stopped.stdout) == (3, "") and "can't be loaded" in stopped.stderr
    assert "export A='b c'" in found and "export OMP_NUM_THREADS=8" in found
    (srun,) = [line for line in found if line.startswith("srun")]
    assert " apptainer exec " in srun and srun.endswith(' image.sif hpctrain run "$job"') and "--mpi=pmi2" in srun
    assert f"job='{here}/out/job.submitted.toml'" in found


@pytest.mark.thorough
def test_slurm_takes_the_mpi_of_mpi4py(job: JobFile, openmpi_python: str) -> None:
    done = run(hpctrain("submit", "job.toml", "--to", "slurm", "--dry-run", python=openmpi_python), job.directory)
    assert f"srun --mpi=pmix --kill-on-bad-exit=1 {shlex.join([openmpi_python, *PROGRAM[1:]])} run" in done.out, done
    hidden = submit(job, "--to", "slurm", "--dry-run", env={"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert "srun --mpi=none" in hidden.out, hidden
    assert "srun --mpi=cray_shasta" in script(job, "--to", "slurm", "--set", "scheduler.slurm.mpi=cray_shasta")


def test_an_array_has_a_directory_for_each_value(job: JobFile) -> None:
    found = lines(script(job, "--to", "slurm", "--array", "optimizer.name=adamw, torch.optim:Adagrad"))
    assert "#SBATCH --array=0-1" in found
    base = job.directory / "out"
    first = found.index("jobs=(")
    assert found[first + 1 : first + 4] == [
        f"    {base}/optimizer.name=adamw/job.submitted.toml",
        f"    {base}/optimizer.name=torch.optim_Adagrad/job.submitted.toml",
        ")",
    ]
    one_by_one = script(job, "--to", "pbs", "--array", "job.seed=1,2").count("#!/bin/bash")
    assert one_by_one == 2


def test_pbs(job: JobFile) -> None:
    job.set(scheduler={"pbs": {"queue": "prod", "account": "abc", "gpus_per_rank": 2, "cpus_per_rank": 4}})
    found = lines(script(job, *TWO, "--set", "scheduler.pbs.select=system=polaris"))
    assert {
        "#PBS -N tiny", "#PBS -l select=2:ncpus=8:mpiprocs=2:ngpus=4:system=polaris", "#PBS -l walltime=01:30:00",
        "#PBS -q prod", "#PBS -A abc", "#PBS -r y", f"#PBS -o {job.directory}/out", f"cd {job.directory} || exit",
    } <= set(found)  # fmt: skip
    ranks = f"mpiexec -n 4 --ppn 2 {shlex.join(PROGRAM)} run {job.directory}/out/job.submitted.toml"
    at = found.index(f"    {ranks}")
    assert found[at - 1] == "timeout --foreground --preserve-status --signal=USR1 5280 \\"  # 90 minutes less 120 s
    own = script(job, "--set", "scheduler.pbs.mpiexec=['aprun', '-n', '1']")
    assert f"\naprun -n 1 {shlex.join(PROGRAM)} run" in own


def test_flux(job: JobFile) -> None:
    job.set(scheduler={"flux": {"queue": "pbatch", "bank": "guests", "gpus_per_rank": 1, "cpus_per_rank": 4}})
    found = lines(script(job, *TWO))
    assert {
        "#FLUX: --job-name=tiny", "#FLUX: --nodes=2", "#FLUX: --time-limit=5400s", "#FLUX: --queue=pbatch",
        "#FLUX: --bank=guests", f"#FLUX: --cwd={job.directory}", f"#FLUX: --output='{job.directory}/out/flux-{{{{id}}}}.out'",
    } <= set(found)  # fmt: skip
    (ranks,) = [line for line in found if line.startswith("ranks=")]
    assert "flux submit --nodes=2 --ntasks=4 --cores-per-task=4 --gpus-per-task=1 " in ranks
    assert any(line.startswith("(sleep 5280 && flux job kill --signal=SIGUSR1") for line in found)


@pytest.fixture
def without_scheduler(job: JobFile, tmp_path: Path) -> dict[str, str]:
    """PATH with a `qsub` that only notes what it is given, beside MPICH's mpiexec."""
    commands = tmp_path.parent / f"{tmp_path.name}-commands"
    commands.mkdir()
    (commands / "qsub").write_text(
        f'#!/bin/sh\necho "$@" >>{commands}/given\necho "$(wc -l <{commands}/given).server"\n'
    )
    (commands / "qsub").chmod(0o755)
    return {"PATH": f"{commands}:{BIN}:{os.environ['PATH']}", "COMMANDS": str(commands)}


@pytest.mark.nightly
def test_the_script_for_pbs_saves_before_its_time_limit_and_goes_on(
    job: JobFile, without_scheduler: dict[str, str]
) -> None:
    """Twice as PBS would start it: the first start is told to save after its time, and submits the second."""
    (job.directory / "slow.py").write_text(
        "import os, time\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step, metrics): time.sleep(not os.path.exists('fast'))\n"
    )
    job.set(job={"steps": 40}, plugins={"load": ["slow"]})  # more than fit into the time, few for a busy machine
    path = {"PATH": without_scheduler["PATH"]}
    words = ["--to", "pbs", "--ranks-per-node", "2", "--time", "40s", "--set", "scheduler.pbs.save_seconds=5"]
    done = submit(job, *words, env=path)
    assert done.out == f"submitted    pbs job 1.server, in {job.directory}/out\n", done
    started = ["bash", str(job.output / "submit.pbs")]
    stopped = run(started, job.directory, timeout=240, env=path)
    assert stopped.code == 75 and "stopped at step" in stopped.out, stopped
    record = [json.loads(line) for line in (job.output / "submissions.jsonl").read_text().splitlines()]
    assert [(row["target"], row["id"]) for row in record] == [("pbs", "1.server"), ("pbs", "2.server")]
    given = (Path(without_scheduler["COMMANDS"]) / "given").read_text().splitlines()
    assert given == [str(job.output / "submit.pbs")] * 2
    (job.directory / "fast").touch()
    again = run(started, job.directory, timeout=240, env=path)
    assert again.code == 0 and "resuming" in again.out and len(job.losses()) == 40, again


@pytest.mark.thorough
def test_the_rank_of_an_indexed_job_is_its_pods(job: JobFile) -> None:
    """Two processes with the variables of the manifest train as two ranks. Only the name of rank 0's pod is this machine's."""
    import yaml

    job.set(job={"output_dir": "runs"}, scheduler={"kubernetes": {"image": "i", "claim": "c", "kind": "Job"}})
    documents = list(yaml.safe_load_all(script(job, "--nodes", "2")))
    (pod,) = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Job"]
    (config,) = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    (job.directory / "submitted.toml").write_text(config["job.toml"])
    env = {one["name"]: one.get("value", "") for one in pod["containers"][0]["env"]}
    assert env["MASTER_ADDR"].endswith(f"-0.{pod['subdomain']}")
    env |= {"MASTER_ADDR": "localhost", "HOME": str(job.directory)}
    ranks = [Started(hpctrain("run", "submitted.toml"), job.directory, {**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        ends = [rank.finish(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill_all()
    assert [end.code for end in ends] == [0, 0], "\n".join(map(str, ends))
    assert "2 (torchrun)" in ends[0].out and len(job.losses("runs")) == 4, ends[0]


@pytest.mark.parametrize("target", ["slurm", "pbs", "flux"])
def test_a_line_end_in_a_path_is_no_line_of_the_script(job: JobFile, target: str) -> None:
    job.set(job={"output_dir": "runs/a\ntouch taken"})
    done = submit(job, "--dry-run", "--to", target, *TWO)
    assert done.code == 2 and "expected printable text without line ends" in done.err and not done.out, done


def test_a_run_that_was_never_submitted(job: JobFile) -> None:
    for words, found in ((("status", "nowhere"), "no directory"), (("cancel", "."), "no submissions.jsonl in it")):
        done = in_process(*words, cwd=job.directory)
        assert done.code == 2 and f"{words[1]}: found {found}, expected the directory of a run" in done.err, done
    nothing = in_process("status", ".", cwd=job.directory)
    assert nothing.code == 2 and ".: found no run in it, expected the directory of a run" in nothing.err, nothing
    (job.directory / "submissions.jsonl").write_text('{"target": "sl')
    torn = in_process("status", ".", cwd=job.directory)
    assert torn.code == 2 and "has no line that `hpctrain submit` wrote" in torn.err, torn
    assert "Traceback" not in torn.err


CRAFTED = {
    "an option": '{"target": "slurm", "id": "--user=root"}',
    "a line of a script": '{"target": "slurm", "id": "1\\ntouch evil\\n"}',
    "a command": '{"target": "slurm", "id": "$(touch evil)"}',
    "another object": '{"target": "kubernetes", "id": "namespace/prod"}',
    "a directory above": '{"target": "slurm", "runs": [".."]}',
    "another directory": '{"target": "slurm", "runs": ["../other"]}',
    "itself": '{"target": "slurm", "runs": ["loop"]}',
    "a number": "1" * 5000,
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_crafted_record_reaches_no_scheduler(job: JobFile, crafted: str) -> None:
    (job.directory / "submissions.jsonl").write_text(CRAFTED[crafted] + "\n")
    (job.directory / "loop").symlink_to(job.directory)
    for command in (
        ["status", "."],
        ["cancel", "."],
        ["submit", "job.toml", "--to", "slurm", "--dry-run", "--after", "."],
    ):
        done = in_process(*command, cwd=job.directory)
        assert done.code == 2 and done.out == "" and "Traceback" not in done.err, done
        assert done.err.startswith("hpctrain: ") and done.err.count("\n") == 1, done


def test_asking_about_a_run_loads_no_code_from_it(job: JobFile) -> None:
    (job.directory / "evil.py").write_text("from pathlib import Path\nPath('loaded').touch()\n")
    (job.directory / "submissions.jsonl").write_text('{"target": "slurm", "id": "1"}\n')
    (job.directory / "job.submitted.toml").write_text('[plugins]\nload = ["evil"]\n')
    for command in ("status", "cancel"):
        done = in_process(command, ".", cwd=job.directory, env={"PATH": str(BIN)})
        assert done.code == 3 and "found no command scontrol" in done.err, done
    assert not (job.directory / "loaded").exists()
    (job.directory / "job.submitted.toml").unlink()
    os.mkfifo(job.directory / "job.submitted.toml")
    done = in_process("status", ".", cwd=job.directory)
    assert done.code == 2 and "job.submitted.toml cannot be read" in done.err, done


def test_options_of_another_person_s_directory_are_not_used(job: JobFile) -> None:
    """They could name a cluster of hers, whose answers are code."""
    (job.directory / "job.submitted.toml").write_text(
        "[scheduler.ray]\naddress = 'theirs:1'\n[plugins]\nblock = ['x']\n"
    )
    job.directory.chmod(0o755)
    asked = Submitted(job.directory, Submission(target="ray", id="1"))
    assert asked.choice() == ({"address": "theirs:1"}, ["x"])
    for path in (job.directory, job.directory / "job.submitted.toml"):
        path.chmod(path.stat().st_mode | 0o022)
        assert asked.choice() == ({}, [])
        path.chmod(path.stat().st_mode & ~0o022)
    (job.directory / "job.submitted.toml").chmod(0o664)  # as a umask of 002 makes it
    job.directory.chmod(0o700)
    assert asked.choice()[1] == ["x"]


ODD = """
from hpctrain.api import JobState, Scheduler, Options, UsageError, hookimpl

class Odd(Scheduler):
    name = "odd"
    Options = Options
    script_name = "odd.sh"
    def render(self, launch):
        return ""
    def submit(self, script, launch):
        return RETURNED
    def state(self, id):
        return JobState(WORD)
    def cancel(self, id, directory):
        if launch_of(id) == 0:
            raise UsageError(f"not yours: {directory}")

def launch_of(id):
    return int(id.rpartition(".")[2])

@hookimpl
def hpctrain_scheduler():
    return [Odd]
"""


def odd(job: JobFile, returned: object, word: str = "running") -> None:
    """A scheduler that does nothing."""
    (job.directory / "odd.py").write_text(ODD.replace("RETURNED", repr(returned)).replace("WORD", repr(word)))
    job.set(plugins={"load": ["odd"]}, scheduler={"odd": {}})


@pytest.mark.parametrize("returned", [["--all"], ["17\n18"], [], [17]])
def test_a_scheduler_that_returns_no_id(job: JobFile, returned: list[object]) -> None:
    odd(job, returned)
    done = submit(job)
    assert done.code == 4 and done.err.startswith("hpctrain: the scheduler odd submitted"), done
    assert f"returned {returned!r}; expected 1 ids of letters" in done.err and "Traceback" not in done.err, done
    assert not (job.output / "submissions.jsonl").exists()


def test_one_job_of_an_array_that_cannot_be_cancelled(job: JobFile) -> None:
    odd(job, ["job.0"])
    assert submit(job, "--array", "optimizer.lr=0.1,0.2").code == 0
    record = job.output / "optimizer.lr=0.2" / "submissions.jsonl"
    record.write_text(record.read_text().replace("job.0", "job.1"))
    done = in_process("cancel", "out", "--load", "odd", cwd=job.directory)
    assert done.code == 2 and done.out == "out/optimizer.lr=0.2: odd job job.1: told to end\n", done
    assert done.err == f"hpctrain: not yours: {job.output.absolute() / 'optimizer.lr=0.1'}\n", done
    assert [(one / "cancelled").exists() for one in sorted(job.output.glob("optimizer*"))] == [False, True]
    (record.parent / "cancelled").unlink()
    (record.parent / "cancelled").symlink_to("/etc/hostname")
    done = in_process("cancel", str(record.parent), "--load", "odd", cwd=job.directory)
    assert done.code == 0 and "warning" in done.err and "cancelled cannot be made (it is a symbolic link" in done.err, (
        done
    )
    assert done.out == f"{record.parent}: odd job job.1: told to end\n", done


def test_after_a_job_that_the_scheduler_has_forgotten(job: JobFile) -> None:
    odd(job, ["job.0"], "unknown")
    job.output.mkdir()
    (job.output / "cancelled").touch()
    assert submit(job).code == 0 and not (job.output / "cancelled").exists()
    done = submit(job, "--set", "job.output_dir=next", "--after", "out")
    assert done.code == 2 and "knows nothing any more; expected a job that runs or is done" in done.err, done
    done = submit(job, "--set", "job.output_dir=next", "--after", "17")
    assert done.code == 2 and "--after 17: odd knows no such job, expected one that waits, runs or is done" in done.err
    assert not (job.directory / "next").exists()
