"""Scripts in Horovod's style, unchanged, by every start; what the engine reports of ranks that do not come."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pickle
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hpctrain_horovod.commands import horovodrun
from launching import Finished, hpctrain, in_process, run, started, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples"
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
SHORT = ["--epochs", "1", "--double"]
PYTHON = sys.executable


def start(how: str, ranks: int, *words: str) -> list[str]:
    if how == "horovodrun":
        return hpctrain("horovodrun", "-np", str(ranks), PYTHON, *words)
    return [MPIEXEC, "-n", str(ranks), PYTHON, "-m", "hpctrain_horovod", *words]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints on one process."""
    done = run([PYTHON, "-m", "hpctrain_horovod", str(EXAMPLE / "train.py"), *SHORT], tmp_path_factory.mktemp("alone"))
    assert done.code == 0 and done.out.startswith("epoch 0: loss "), done
    return done.out


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("how", ["horovodrun", pytest.param("module", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_the_example_has_the_losses_of_one_process(alone: str, how: str, ranks: int, tmp_path: Path) -> None:
    done = run(start(how, ranks, str(EXAMPLE / "train.py"), *SHORT), tmp_path)
    assert done.code == 0 and done.out == alone, done


@pytest.mark.thorough
def test_the_job_file_that_replaces_the_example(tmp_path: Path) -> None:
    """Other initial weights and another order of samples: about as good after as many epochs."""
    script = run(hpctrain("horovodrun", "-np", "2", PYTHON, "train.py"), EXAMPLE)
    job = run(hpctrain("run", "job.toml", "-n", "2", "--set", f"job.output_dir={tmp_path / 'run'}"), EXAMPLE)
    assert script.code == 0 and job.code == 0, (script, job)
    pattern = r"accuracy (\d\.\d+)"
    [of_script, of_job] = [float(re.findall(pattern, done.out)[-1]) for done in (script, job)]
    assert of_script > 0.4 and of_job == pytest.approx(of_script, abs=0.2)


def test_another_python_is_told(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=120)
    (tmp_path / "script.py").write_text("import horovod.torch\n")
    done = run(hpctrain("horovodrun", "-np", "2", str(tmp_path / "bare" / "bin" / "python"), "script.py"), tmp_path)
    assert done.code == 1 and "/bare/bin/python has no hpctrain-horovod; start the script with" in done.err, done


@pytest.mark.cases(nightly=["as a job"], rest="thorough")
@pytest.mark.parametrize("words", [["-m", "hpctrain_horovod"], []], ids=["as a script", "as a job"])
def test_hpctrain_on_no_real_horovod(words: list[str], tmp_path: Path) -> None:
    """A job that names modules of its own finds the shim, too."""
    if not words and _has_horovod():
        pytest.skip("a Horovod is installed")
    _, *command = hpctrain("run", str(EXAMPLE / "job.toml"), "--set", "communicator.name=horovod")
    done = run([MPIEXEC, "-n", "2", PYTHON, *words, *command], tmp_path, env={"PYTHONPATH": str(EXAMPLE)})
    sentence = "gives hpctrain_horovod.torch, which is hpctrain's own; build one with"
    assert done.code == 3 and done.err.count(sentence) == 1 and "Traceback" not in done.err, done


def _has_horovod() -> bool:
    """Whether a real one is installed. An import may give hpctrain's own here, since another test took it."""
    return any(one.metadata["Name"] == "horovod" for one in importlib.metadata.distributions())


def test_hpctrain_on_a_real_horovod(tmp_path: Path) -> None:
    if not _has_horovod():
        pytest.skip("needs a Horovod with MPI and PyTorch")
    losses = []
    for name, ranks, stage in (("mpi", 1, 0), *(("horovod", 2, stage) for stage in range(4))):
        output = tmp_path / f"{name}-{stage}"
        changes = [
            f"communicator.name={name}",
            f"sharding.stage={stage}",
            f"job.output_dir={output}",
            "batch.micro_size=12",
        ]
        command = hpctrain("run", "job.toml", *(word for change in changes for word in ("--set", change)))
        done = run([MPIEXEC, "-n", str(ranks), *command], EXAMPLE)
        assert done.code == 0 and f"{name} communicator" in done.out, done
        losses.append([json.loads(line).get("loss", 0.0) for line in (output / "metrics.jsonl").open()])
    assert len(losses[0]) == 123 and all(of_run == pytest.approx(losses[0], rel=1e-4) for of_run in losses)


@pytest.mark.thorough
def test_the_synthetic_benchmark(tmp_path: Path) -> None:
    done = run(start("horovodrun", 2, str(EXAMPLE / "benchmark.py"), "--num-iters", "1"), tmp_path)
    assert done.code == 0 and re.search(r"Total img/sec on 2 rank\(s\): \d+\.\d", done.out), done


def script(tmp_path: Path, text: str) -> str:
    whole_lines = "sys.stdout.reconfigure(line_buffering=True, write_through=False)"  # the ranks share a pipe
    (tmp_path / "script.py").write_text(
        f"import sys, time\n{whole_lines}\nimport torch\nimport horovod.torch as hvd\nhvd.init()\n{text}"
    )
    return str(tmp_path / "script.py")


def ran(tmp_path: Path, text: str, *options: str, ranks: int = 2) -> Finished:
    return run(hpctrain("horovodrun", "-np", str(ranks), *options, PYTHON, script(tmp_path, text)), tmp_path)


def test_the_modules_that_scripts_import(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        "import horovod, horovod.torch.mpi_ops, horovod.torch.compression, horovod.torch.sync_batch_norm, hpctrain_horovod.torch\n"
        "import horovod.common.process_sets, horovod.torch.elastic.sampler, horovod.torch.elastic.state\n"
        "from horovod.torch.optimizer import _DistributedOptimizer, _DistributedAdasumOptimizer\n"
        "from horovod.runner.launch import run_commandline\n"
        "assert horovod.torch.elastic.state.TorchState is hvd.elastic.TorchState\n"
        "assert horovod.torch.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
        "from horovod.common.util import env, _cache, extension_available, gloo_built, mpi_built\n"
        "assert horovod.torch is hpctrain_horovod.torch is hvd and hvd.HorovodInternalError is HorovodInternalError\n"
        "assert tuple(map(int, horovod.__version__.split('.')[:2])) >= (0, 28)\n"
        "assert horovod.torch.mpi_ops.__spec__.name == 'hpctrain_horovod.torch.mpi_ops'\n"
        "try:\n    import horovod.tensorflow\nexcept ModuleNotFoundError:\n    print('no tensorflow\\n', end='')\n",
    )
    assert done.code == 0 and done.out == "no tensorflow\n" * 2, done


@pytest.mark.nightly
def test_a_stall_names_the_operation_and_the_missing_ranks(tmp_path: Path) -> None:
    """Rank 0 is among those that wait, and then among those that are missing."""
    text = (
        "for late in (2, 0):\n"
        "    if hvd.rank() == late:\n        time.sleep(6)\n"
        "    hvd.allreduce(torch.ones(1), name=f'without{late}')\n"
    )
    done = ran(tmp_path, text, "--stall-check-warning-time-seconds", "1", ranks=3)
    assert done.code == 0, done
    assert re.search(r"stalled for more than 1 s.*\n\s+allreduce.without2\n\s+Missing ranks: 2\n", done.err), done
    assert re.search(r"allreduce.without0\n\s+Missing ranks: 0\n", done.err), done


@pytest.mark.nightly
def test_a_stall_ends_the_job_if_asked(tmp_path: Path) -> None:
    text = (
        "if hvd.rank() == 1:\n    time.sleep(8)\n"
        "try:\n    hvd.allreduce(torch.ones(1), name='a')\n"
        "except hvd.HorovodInternalError as error:\n    print(str(error) + '\\n', end='')\n"
    )
    options = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "3")
    done = ran(tmp_path, text, *options)
    assert done.code == 0 and len(done.out.splitlines()) == 2, done
    for line in done.out.splitlines():
        assert "allreduce.a has stalled for more than 3 s. Missing ranks: 1" in line, done


@pytest.mark.thorough
def test_a_rank_that_ends_early_fails_the_others_at_once(tmp_path: Path) -> None:
    text = (
        "if hvd.rank() == 0:\n    sys.exit(0)\n"
        "begin = time.monotonic()\n"
        "try:\n    hvd.allreduce(torch.ones(1), name='a')\n"
        "except hvd.HorovodInternalError as error:\n"
        "    print(f'{error}: {time.monotonic() - begin < 5}\\n', end='')\n"
    )
    done = ran(tmp_path, text, ranks=3)
    assert done.code == 0, done
    expected = "Horovod has been shut down: rank 0 called shutdown() or has ended: True"
    assert done.out.splitlines() == [expected] * 2, done


@pytest.mark.cases(nightly=["gloo"], rest="thorough")
@pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpi", "gloo"])
def test_handles_that_nobody_waits_for(options: list[str], tmp_path: Path) -> None:
    """The first rank ends long before the other one submits the same operations."""
    text = (
        "time.sleep(3 * hvd.rank())\n"
        "handles = [hvd.allreduce_async(torch.ones(4), name=f'grad.{n}') for n in range(5)]\n"
        "if hvd.rank() == 1:\n    print(hvd.synchronize(handles[-1]).tolist())\n"
    )
    done = ran(tmp_path, text, *options)
    assert done.code == 0 and done.out == "[1.0, 1.0, 1.0, 1.0]\n" and not done.err, done


@pytest.mark.thorough
def test_an_exception_ends_all_ranks(tmp_path: Path) -> None:
    done = ran(tmp_path, "if hvd.rank() == 1:\n    raise RuntimeError('my mistake')\nhvd.allreduce(torch.ones(1))\n")
    assert done.code == 1 and "my mistake" in done.err, done


LOST = """
import os, signal, sys, time
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    {end}
time.sleep(60)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [[], pytest.param(["--mpi-args=-l"], marks=pytest.mark.nightly)], ids=["own start", "mpiexec"]
)
def test_a_lost_rank_is_told_and_its_code_is_the_commands(options: list[str], tmp_path: Path) -> None:
    for end, code, words in (
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (Killed)"),
        ("os._exit(3)", 3, "exit code 3"),
        (
            "os._exit(0)",
            9 if options else 1,
            "exit code 0 before MPI_Finalize, so that the others would wait for it forever",
        ),
    ):
        (tmp_path / "script.py").write_text(LOST.format(end=end))
        done = run(hpctrain("horovodrun", "-np", "3", *options, PYTHON, "script.py"), tmp_path, timeout=50)
        assert done.code == code and not done.out.strip(), done
        if options and "Finalize" in words:  # only mpiexec notices, and does not tell which rank
            assert "unless one left before MPI_Finalize" in done.err, done
        else:
            assert done.err.count(f"horovodrun: rank 1 on {platform.node()} ended with {words}\n") == 1, done


@pytest.mark.thorough
def test_ranks_under_mpiexec_end_with_a_signal_to_the_starter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOST.format(end="open('ready', 'w')"))
    words = hpctrain("horovodrun", "-np", "3", "--mpi-args=-l", PYTHON, "script.py")
    with started(words, tmp_path) as command:
        wait_until((tmp_path / "ready").exists, 60, "the ranks")
        command.process.terminate()
        done = command.finish(30)  # fails if a process is left
    assert done.code == 128 + signal.SIGTERM and "horovodrun" not in done.err, done


@pytest.mark.thorough
def test_the_timeline(tmp_path: Path) -> None:
    text = (
        "for step in range(3):\n"
        "    handles = [hvd.allreduce_async(torch.ones(4), name=f'grad.{n}') for n in range(5)]\n"
        "    [hvd.synchronize(handle) for handle in handles]\n"
        "hvd.broadcast(torch.ones(1), 0, name='start')\n"
        "if hvd.rank() == 0:\n"
        "    import json, os\n"
        "    found = json.loads(open('trace.json').read().rstrip(',\\n') + ']')\n"
        "    print(sorted({event['name'] for event in found if event.get('ph') == 'X' and 'MPI' in event['name']}))\n"
        "    os.mkfifo('pipe')\n    read = os.open('pipe', os.O_RDONLY | os.O_NONBLOCK)\n"
        "    hvd.start_timeline('pipe')\n    os.close(read)\n"
        "for step in range(2):\n    hvd.allreduce(torch.ones(1))\n"
    )
    done = ran(tmp_path, text, "--timeline-filename", "trace.json", "--timeline-mark-cycles")
    assert done.code == 0 and done.out == "['MPI_ALLREDUCE', 'MPI_BROADCAST']\n", "in the file while the script runs"
    assert done.err == "hpctrain_horovod: the timeline pipe ends here: Broken pipe\n", done
    events = json.loads((tmp_path / "trace.json").read_text())
    names = [event.get("name") for event in events]
    for name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE"):
        assert names.count(name) == 15, name
    assert {"NEGOTIATE_BROADCAST", "BROADCAST", "CYCLE_START"} <= set(names)
    rows = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    [moment] = [event["args"]["value"] for event in events if event.get("name") == "start_time_since_epoch_in_micros"]
    assert abs(moment / 1e6 - time.time()) < 60
    assert sorted(rows.values()) == [*(f"allreduce.grad.{n}" for n in range(5)), "broadcast.start"]
    assert all(event["dur"] >= 0 and event["pid"] in rows for event in events if event.get("ph") == "X")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["python", "train.py"], "the number of ranks"),
        (["-np", "2"], "a command such as"),
        (["-np", "2", "no-such-program"], "found no program no-such-program"),
        (["-np", "3", "-H", "localhost:2", "python"], "the hosts have 2 slots"),
        (["-np", "2", "-H", "a b:2", "python"], "expected HOST:SLOTS"),
        (["-np", "2", "--timeline-file", "x", "python"], "No such option"),
        (["-np", "2", "--jsrun", "python"], "jsrun -n N python -m hpctrain_horovod train.py"),
        (["-np", "2", "-p", "2222", "python"], "found -p or -i for ranks under MPI"),
        (["-np", "2", "--config-file", __file__, "python"], "is not YAML"),
        (["-np", "2", "--config-file", sys.executable, "python"], "cannot be read"),
        (["-np", "2", "--fusion-threshold-mb", "nan", "python"], "--fusion-threshold-mb"),
        (["-np", "2", "--output-filename", "/proc/none", sys.executable], "the directory cannot be made"),
    ],
    ids=str,
)
def test_mistakes(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = in_process("horovodrun", *words, cwd=tmp_path)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err, done


@pytest.mark.thorough
def test_hosts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# mine\nlocalhost slots=2\n")
    text = script(tmp_path, "print(f'{hvd.local_rank()} of {hvd.size()}\\n', end='')\n")
    for words in (["--hostfile", "hosts"], ["-H", "localhost:2"], ["-np", "2", "--mpi-args=-l"]):
        done = run(hpctrain("horovodrun", *words, PYTHON, text), tmp_path)
        assert done.code == 0, done
        assert sorted(re.sub(r"\[\d\] ", "", done.out).splitlines()) == ["0 of 2", "1 of 2"], done


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how",
    [[], *(pytest.param(words, marks=pytest.mark.nightly) for words in (["--gloo"], ["--mpi-args", "-l"]))],
    ids=str,
)
def test_output_in_files(how: list[str], tmp_path: Path) -> None:
    text = script(tmp_path, "print('rank', hvd.rank())\nsys.exit(f'size {hvd.size()}')\n")
    words = hpctrain("horovodrun", "-np", "2", "--output-filename", "logs", *how, PYTHON, text)
    done = run(words, tmp_path, env={"SLURM_PROCID": "0"} if how == ["--gloo"] else None)  # as in a batch script
    assert done.code == 1 and "rank" not in done.out, done
    for name, ending in (("stdout", "rank {}"), ("stderr", "size 2")):
        found = sorted((tmp_path / "logs" / f"rank.{rank}" / name).read_text().strip() for rank in range(2))
        assert found == [ending.format(rank) for rank in range(2)], found


@pytest.mark.thorough
def test_options_from_a_file(tmp_path: Path) -> None:
    """The command line's own come first; what has no effect is told."""
    (tmp_path / "horovod.yaml").write_text(
        "params:\n  fusion_threshold_mb: 32\n  cache_capacity: 7\n  cycle_time_ms: 5\n"
        "autotune:\ntimeline:\n  filename: history.json\nstall_check:\n  enabled: false\n"
    )
    text = (
        "import os\nnames = 'FUSION_THRESHOLD', 'CACHE_CAPACITY', 'STALL_CHECK_DISABLE'\n"
        "print(*(os.environ.get('HOROVOD_' + name) for name in names))\n"
    )
    options = ["--config-file", "horovod.yaml", "--cache-capacity", "0", "--autotune", "--log-level", "INFO"]
    done = ran(tmp_path, text, *options, ranks=1)
    assert done.code == 0 and done.out == f"{32 * 2**20} 0 1\n" and (tmp_path / "history.json").exists(), done
    useless = ["--autotune", "--log-level", "params.cycle_time_ms of horovod.yaml"]
    found = [line.removeprefix("horovodrun: ").partition(" has no effect here") for line in done.err.splitlines()]
    assert sorted(name for name, _, _ in found) == useless and all(middle for _, middle, _ in found), done


FLAGS = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather
--torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
--autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np
--max-num-proc --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename
--timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts -hostfile --hostfile
--host-discovery-script --gloo --mpi --jsrun
"""


def test_every_flag_of_the_original(capsys: pytest.CaptureFixture[str]) -> None:
    known = {name for option in horovodrun.command.params for name in (*option.opts, *option.secondary_opts)}
    assert set(FLAGS.split()) <= known
    words = [
        "--no-autotune",
        "--no-mpi-threads-disable",
        "--blacklist-cooldown-range",
        "1",
        "2",
        "-prefix-timestamp",
        "-cb",
    ]
    assert horovodrun.command.main(words, standalone_mode=False) == 0
    told = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert sorted(told) == ["--blacklist-cooldown-range", "--prefix-output-with-timestamp"]


def test_the_stall_check_of_the_command_line_comes_before_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "horovod.yaml").write_text("timeline:\n  mark_cycles: true\nstall_check:\n  enabled: false\n")
    text = "import os\nprint([os.environ.get('HOROVOD_' + name) for name in ('STALL_CHECK_DISABLE', 'TIMELINE_MARK_CYCLES')])"
    options = ["--config-file", "horovod.yaml", "--stall-check", "--no-timeline-mark-cycles"]
    done = run(hpctrain("horovodrun", "-np", "1", *options, PYTHON, "-c", text), tmp_path)
    assert done.code == 0 and done.out == "['0', None]\n", done


def test_the_program_horovodrun_is_a_real_ones_where_there_is_one(tmp_path: Path) -> None:
    program = str(Path(sys.executable).parent / "horovodrun")
    done = run([program, "-v"], tmp_path)
    assert done.code == 0 and done.out.startswith("0.28.1+hpctrain."), done
    (tmp_path / "real.py").write_text("import sys\n\ndef main():\n    print('real', sys.argv[1:])\n    return 5\n")
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    (tmp_path / "horovod-0.28.1.dist-info" / "entry_points.txt").write_text(
        "[console_scripts]\nhorovodrun = real:main\n"
    )
    done = run([program, "-np", "2"], tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 5 and done.out == "real ['-np', '2']\n", done


def test_a_wrong_number_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "horovod.yaml").write_text("params:\n  cache_capacity: -3\n")
    done = in_process("horovodrun", "-np", "2", "--config-file", "horovod.yaml", PYTHON, "script.py", cwd=tmp_path)
    assert done.code == 2 and "params.cache_capacity: -3 is not in the range x>=0" in done.err, done


def test_check_build(tmp_path: Path) -> None:
    done = in_process("horovodrun", "--check-build", cwd=tmp_path)
    assert done.code == 0 and re.search(r"\[X\] PyTorch 2\.", done.out) and "[X] MPI (MPICH)" in done.out, done
    assert "[ ] TensorFlow" in done.out


@pytest.mark.parametrize("words", [[], ["-m"], ["--flag"], ["missing.py"]], ids=str)
def test_mistakes_of_the_module(words: list[str], tmp_path: Path) -> None:
    done = run([PYTHON, "-m", "hpctrain_horovod", *words], tmp_path)
    assert done.code == 2 and len(done.err.splitlines()) == 1, done


@pytest.mark.thorough
def test_an_import_starts_no_mpi_and_sets_nothing(tmp_path: Path) -> None:
    """Login nodes and data workers import scripts, too; other libraries look for torchrun's variables."""
    text = (
        "import os, sys; before = dict(os.environ); import hpctrain_horovod.torch as hvd\n"
        "assert 'mpi4py.MPI' not in sys.modules and dict(os.environ) == before\nhvd.rank()\n"
    )
    done = run([PYTHON, "-c", text], tmp_path, env={"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"})
    assert "ValueError: Horovod has not been initialized; use hvd.init()" in done.err, done


CHILDREN = """
import os
import pickle

import torch

import horovod.torch as hvd

NAMES = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER"

def known():
    return [os.environ.get(f"HOROVOD_{name}") for name in NAMES]

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, place):
        print(f"{hvd.__name__} in worker of {os.environ['HOROVOD_RANK']}\\n", end="", flush=True)
        return torch.ones(3), torch.tensor(place)

def work():
    before = known()
    hvd.init()
    assert os.environ["HOROVOD_HOSTNAME"] and known() == before, (before, known())
    for method in "spawn", "forkserver":
        loader = torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context=method)
        assert len(list(loader)) == 2
    return known()

def model():
    hvd.init()
    return torch.nn.Linear(3, 2)

def samples(split):
    return Samples()
"""
CHILDREN_JOB = """
[job]
name = "children"
steps = 1
[model]
name = "children:model"
loss = "torch.nn.functional:cross_entropy"
[dataset]
name = "children:samples"
workers = 1
start_method = "METHOD"
[batch]
global_size = 2
micro_size = 1
[optimizer]
name = "sgd"
lr = 0.1
"""


def children(tmp_path: Path, *words: str) -> str:
    """What ranks print whose DataLoaders import Horovod in children of spawn and forkserver."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "script.py").write_text(
        "import children\nif __name__ == '__main__':\n    print(f'{children.work()}\\n', end='')\n"
    )
    done = run([*words, "script.py"], tmp_path)
    assert done.code == 0 and "Traceback" not in done.err, done
    assert done.out.count("hpctrain_horovod.torch in worker of 0\n") == 4, done
    assert done.out.count("hpctrain_horovod.torch in worker of 1\n") == 4, done
    return done.out


@pytest.mark.cases(thorough=["horovodrun"], rest="nightly")
@pytest.mark.parametrize(
    ("words", "controller"),
    [
        (hpctrain("horovodrun", "-np", "2", PYTHON), "mpi"),
        (hpctrain("horovodrun", "-np", "2", "--gloo", PYTHON), "gloo"),
        ([MPIEXEC, "-n", "2", PYTHON, "-m", "hpctrain_horovod"], "mpi"),
    ],
    ids=["horovodrun", "gloo", "module"],
)
def test_children_find_horovod_and_workers_know_who_they_are(words: list[str], controller: str, tmp_path: Path) -> None:
    out = children(tmp_path, *words)
    for rank in "01":
        assert str([rank, "2", rank, "2", "0", "1", controller]) in out.splitlines(), out


@pytest.mark.nightly
def test_children_of_a_function_on_several_ranks(tmp_path: Path) -> None:
    """It is in a module beside the script, which is run from elsewhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "children.py").write_text(CHILDREN)
    (tmp_path / "home" / "job.py").write_text(
        "import children, horovod\nif __name__ == '__main__':\n    print(horovod.run(children.work, np=2))\n"
    )
    done = run([PYTHON, "-m", "hpctrain_horovod", "home/job.py"], tmp_path)
    expected = [[rank, "2", rank, "2", "0", "1", "mpi"] for rank in "01"]
    assert done.code == 0 and str(expected) in done.out and done.out.count(" in worker of ") == 8, done


@pytest.mark.cases(nightly=["forkserver"], rest="thorough")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_of_a_job(method: str, tmp_path: Path) -> None:
    """Modules of a job may still import Horovod."""
    (tmp_path / "children.py").write_text(CHILDREN)
    (tmp_path / "job.toml").write_text(CHILDREN_JOB.replace("METHOD", method))
    done = run(hpctrain("run", "job.toml", "-n", "2"), tmp_path)
    assert done.code == 0 and {f"[rank {rank}] hpctrain_horovod.torch in worker of {rank}" for rank in "01"} <= set(
        done.out.splitlines()
    ), done


def test_variables_without_effect_are_told_once(tmp_path: Path) -> None:
    variables = {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CACHE_CAPACITY": "9",
    }
    text = script(tmp_path, "hvd.shutdown()\nhvd.init()\nimport os\nprint(os.environ['HOROVOD_CONTROLLER'])\n")
    done = run(hpctrain("horovodrun", "-np", "2", PYTHON, text), tmp_path, env=variables)
    assert done.code == 0 and done.out.split() == ["mpi", "mpi"], done
    expected = ["HOROVOD_CONTROLLER=gloo", "HOROVOD_CYCLE_TIME=5"]
    assert sorted(re.findall(r"^horovod: (\S+) has no effect here: \w", done.err, re.MULTILINE)) == expected, done


OVER_GLOO = """
r, n = hvd.rank(), hvd.size()
assert hvd.gloo_enabled() and not hvd.mpi_enabled() and (hvd.local_rank(), hvd.local_size()) == (r, n)
total = sum(range(1, n + 1))
for kind in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
    mine = torch.full((5,), r + 1).to(kind)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [total] * 5, kind
    assert hvd.allreduce(mine).tolist() == [2] * 5, kind
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [n] * 5, kind
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [6] * 5, kind
    assert hvd.reducescatter(torch.full((4, 2), r + 1).to(kind), op=hvd.Sum).tolist() == [[total] * 2] * (2 if r == 0 else 1), kind
for kind in (torch.uint8, torch.int8, torch.int16, torch.int64, torch.bfloat16, torch.float64):
    rows = torch.full((r, 2), r).to(kind)
    assert hvd.allgather(rows).tolist() == [[q] * 2 for q in range(n) for _ in range(q)], kind
    assert hvd.broadcast(torch.full((3,), r).to(kind), 1).tolist() == [1] * 3, kind
    sent = torch.arange(n).repeat_interleave(torch.arange(n) + r).to(kind)
    found, counts = hvd.alltoall(sent, torch.arange(n, dtype=torch.int32) + r)
    assert counts.tolist() == [r + q for q in range(n)] and found.tolist() == [r] * int(counts.sum()), kind
pair = hvd.add_process_set([0, 2])
if pair.included():
    assert hvd.allreduce(torch.tensor([r]), op=hvd.Sum, process_set=pair).item() == 2
assert hvd.broadcast_object({"rank": r}, 2) == {"rank": 2} and hvd.allgather_object(r) == list(range(n))
for step in range(r):
    hvd.allreduce(torch.ones(2), name="data")
assert hvd.allgather_object(hvd.join()) == [n - 1] * n
hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n
print(f"fine {r}\\n", end="")
"""


@pytest.mark.thorough
def test_operations_over_gloo(tmp_path: Path) -> None:
    text = f"hvd.shutdown()\nhvd.init(process_sets='dynamic')\n{OVER_GLOO}"
    done = ran(tmp_path, text, "--gloo", ranks=3)
    assert done.code == 0 and sorted(done.out.splitlines()) == ["fine 0", "fine 1", "fine 2"], done


@pytest.mark.thorough
def test_the_example_over_gloo(alone: str, tmp_path: Path) -> None:
    words = hpctrain("horovodrun", "-np", "2", "--gloo", PYTHON, str(EXAMPLE / "train.py"), *SHORT)
    done = run(words, tmp_path)
    assert done.code == 0 and done.out == alone, done


JOB = """
import functools
import sys
import threading

import horovod
import mine

MORE = {
    "start_timeout": 60, "cooldown_range": (1, 2), "disable_cache": True, "output_filename": "logs", "verbose": True,
    "network_interface": "lo", "executable": sys.executable, "ssh_port": 2222, "host_discovery_script": None,
}
if __name__ == "__main__":
    for options in ({"num_proc": 3}, {"np": 2, "use_gloo": True, **MORE}):
        print(horovod.run(mine.work, (10,), {"add": 5}, **options), flush=True)
    for bad, error in ((mine.fails, RuntimeError), (functools.partial(mine.work, threading.Lock()), ValueError)):
        try:
            horovod.run(bad, num_proc=2)
        except error as failure:
            print(f"{error.__name__}: {failure}", flush=True)
"""
MINE = """
def work(base, add):
    import horovod.torch as hvd
    import torch

    hvd.init()
    return base + add + hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum).item(), hvd.rank()

def fails():
    raise RuntimeError("mine")
"""


@pytest.mark.thorough
def test_a_function_that_another_user_has_put_there_is_not_called(tmp_path: Path) -> None:
    content = pickle.dumps((print, ("called",), {}))
    digest = hashlib.sha256(content).hexdigest()
    for there, code, out in ((b"other", 1, ""), (None, 1, ""), (content, 0, "called\n")):
        (tmp_path / "function").unlink(missing_ok=True)
        if there is not None:
            (tmp_path / "function").write_bytes(there)
        done = run([sys.executable, "-m", "hpctrain_horovod.runner.task", str(tmp_path), digest], tmp_path)
        assert (done.code, done.out) == (code, out) and "Traceback" not in done.err, done


@pytest.mark.nightly
def test_a_function_on_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(JOB)
    (tmp_path / "mine.py").write_text(MINE)
    done = run([PYTHON, "-m", "hpctrain_horovod", "script.py"], tmp_path)
    lines = done.out.splitlines()
    assert lines[:2] == ["[(18, 0), (18, 1), (18, 2)]", "[(16, 0), (16, 1)]"], done
    assert lines[2].startswith("RuntimeError: horovod.run: the ranks ended with exit code 1") and "mine" in done.err, (
        done
    )
    assert lines[3].startswith("ValueError: horovod.run: found a function that cannot be sent"), done
    assert (tmp_path / "logs" / "rank.1" / "stderr").exists(), done
    for name in ("--disable-cache", "--network-interface", "--blacklist-cooldown-range"):
        assert f"horovodrun: {name} has no effect here: " in done.err, done
