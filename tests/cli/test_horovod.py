"""Scripts in Horovod's style, unchanged, by every start; what the engine reports of ranks that do not come."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import Finished, hpctrain, run, started, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod"
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
SHORT = ["--epochs", "1", "--double"]
PYTHON = sys.executable


def start(how: str, ranks: int, *words: str) -> list[str]:
    if how == "horovodrun":
        return hpctrain("horovodrun", "-np", str(ranks), PYTHON, *words)
    return [MPIEXEC, "-n", str(ranks), PYTHON, "-m", "hpctrain.horovod", *words]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints on one process."""
    done = run([PYTHON, "-m", "hpctrain.horovod", str(EXAMPLE / "train.py"), *SHORT], tmp_path_factory.mktemp("alone"))
    assert done.code == 0 and done.out.startswith("epoch 0: loss "), done
    return done.out


@pytest.mark.parametrize("how", ["horovodrun", "module"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example_has_the_losses_of_one_process(alone: str, how: str, ranks: int, tmp_path: Path) -> None:
    done = run(start(how, ranks, str(EXAMPLE / "train.py"), *SHORT), tmp_path)
    assert done.code == 0 and done.out == alone, done


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
    assert done.code == 1 and "/bare/bin/python has no hpctrain; start the script with" in done.err, done


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-m", "hpctrain.horovod"], "gives hpctrain.horovod.torch, which is hpctrain's own; build one with"),
        ([], "no Horovod with PyTorch can be imported"),
    ],
    ids=["the shim", "none"],
)
def test_hpctrain_on_no_real_horovod(words: list[str], sentence: str, tmp_path: Path) -> None:
    if not words and importlib.util.find_spec("horovod"):
        pytest.skip("a Horovod is installed")
    _, *command = hpctrain("run", str(EXAMPLE / "job.toml"), "--set", "communicator.name=horovod")
    done = run([MPIEXEC, "-n", "2", PYTHON, *words, *command], tmp_path, env={"PYTHONPATH": str(EXAMPLE)})
    assert done.code == 3 and done.err.count(sentence) == 1 and "Traceback" not in done.err, done


def test_hpctrain_on_a_real_horovod(tmp_path: Path) -> None:
    pytest.importorskip("horovod.torch", reason="needs a Horovod with MPI and PyTorch")
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


def test_the_synthetic_benchmark(tmp_path: Path) -> None:
    done = run(start("horovodrun", 2, str(EXAMPLE / "benchmark.py"), "--num-iters", "1"), tmp_path)
    assert done.code == 0 and re.search(r"Total img/sec on 2 rank\(s\): \d+\.\d", done.out), done


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "script.py").write_text(
        "import sys, time\nimport torch\nimport horovod.torch as hvd\nhvd.init()\n" + text
    )
    return str(tmp_path / "script.py")


def ran(tmp_path: Path, text: str, *options: str, ranks: int = 2) -> Finished:
    return run(hpctrain("horovodrun", "-np", str(ranks), *options, PYTHON, script(tmp_path, text)), tmp_path)


def test_the_modules_that_scripts_import(tmp_path: Path) -> None:
    done = ran(
        tmp_path,
        "import horovod, horovod.torch.mpi_ops, horovod.torch.compression, horovod.torch.sync_batch_norm, hpctrain.horovod.torch\n"
        "import horovod.common.process_sets\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
        "from horovod.common.util import env, _cache, extension_available, gloo_built, mpi_built\n"
        "assert horovod.torch is hpctrain.horovod.torch is hvd and hvd.HorovodInternalError is HorovodInternalError\n"
        "assert tuple(map(int, horovod.__version__.split('.')[:2])) >= (0, 28)\n"
        "assert horovod.torch.mpi_ops.__spec__.name == 'hpctrain.horovod.torch.mpi_ops'\n"
        "try:\n    import horovod.tensorflow\nexcept ModuleNotFoundError:\n    print('no tensorflow\\n', end='')\n",
    )
    assert done.code == 0 and done.out == "no tensorflow\n" * 2, done


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


@pytest.mark.parametrize("options", [[], ["--mpi-args=-l"]], ids=["own start", "mpiexec"])
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


def test_ranks_under_mpiexec_end_with_a_signal_to_the_starter(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOST.format(end="open('ready', 'w')"))
    words = hpctrain("horovodrun", "-np", "3", "--mpi-args=-l", PYTHON, "script.py")
    with started(words, tmp_path) as command:
        wait_until((tmp_path / "ready").exists, 60, "the ranks")
        command.process.terminate()
        done = command.finish(30)  # fails if a process is left
    assert done.code == 128 + signal.SIGTERM and "horovodrun" not in done.err, done


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
    assert done.err == "hpctrain.horovod: the timeline pipe ends here: Broken pipe\n", done
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
        (["-np", "2", "-p", "2222", "python"], "found -p or -i for ranks under MPI"),
        (["-np", "2", "--config-file", __file__, "python"], "is not YAML"),
        (["-np", "2", "--config-file", sys.executable, "python"], "cannot be read"),
        (["-np", "2", "--fusion-threshold-mb", "nan", "python"], "--fusion-threshold-mb"),
        (["-np", "2", "--output-filename", "/proc/none", "python"], "the directory cannot be made"),
    ],
    ids=str,
)
def test_mistakes(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = run(hpctrain("horovodrun", *words), tmp_path)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err, done


def test_hosts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# mine\nlocalhost slots=2\n")
    text = script(tmp_path, "print(f'{hvd.local_rank()} of {hvd.size()}\\n', end='')\n")
    for words in (["--hostfile", "hosts"], ["-H", "localhost:2"], ["-np", "2", "--mpi-args=-l"]):
        done = run(hpctrain("horovodrun", *words, PYTHON, text), tmp_path)
        assert done.code == 0, done
        assert sorted(re.sub(r"\[\d\] ", "", done.out).splitlines()) == ["0 of 2", "1 of 2"], done


@pytest.mark.parametrize("how", [[], ["--gloo"], ["--mpi-args", "-l"]], ids=str)
def test_output_in_files(how: list[str], tmp_path: Path) -> None:
    text = script(tmp_path, "print('rank', hvd.rank())\nsys.exit(f'size {hvd.size()}')\n")
    words = hpctrain("horovodrun", "-np", "2", "--output-filename", "logs", *how, PYTHON, text)
    done = run(words, tmp_path, env={"SLURM_PROCID": "0"} if how == ["--gloo"] else None)  # as in a batch script
    assert done.code == 1 and "rank" not in done.out, done
    for name, ending in (("stdout", "rank {}"), ("stderr", "size 2")):
        found = sorted((tmp_path / "logs" / f"rank.{rank}" / name).read_text().strip() for rank in range(2))
        assert found == [ending.format(rank) for rank in range(2)], found


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
    assert sorted(done.err.splitlines()) == [f"horovodrun: {one} has no effect here" for one in useless], done


def test_a_wrong_number_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "horovod.yaml").write_text("params:\n  cache_capacity: -3\n")
    done = run(hpctrain("horovodrun", "-np", "2", "--config-file", "horovod.yaml", PYTHON, "script.py"), tmp_path)
    assert done.code == 2 and "params.cache_capacity: -3 is not in the range x>=0" in done.err, done


def test_check_build(tmp_path: Path) -> None:
    done = run(hpctrain("horovodrun", "--check-build"), tmp_path)
    assert done.code == 0 and re.search(r"\[X\] PyTorch 2\.", done.out) and "[X] MPI (MPICH)" in done.out, done
    assert "[ ] TensorFlow" in done.out


@pytest.mark.parametrize("words", [[], ["-m"], ["--flag"], ["missing.py"]], ids=str)
def test_mistakes_of_the_module(words: list[str], tmp_path: Path) -> None:
    done = run([PYTHON, "-m", "hpctrain.horovod", *words], tmp_path)
    assert done.code == 2 and len(done.err.splitlines()) == 1, done


def test_an_import_starts_no_mpi(tmp_path: Path) -> None:
    """Login nodes and data workers import scripts, too."""
    text = "import sys, hpctrain.horovod.torch as hvd; assert 'mpi4py.MPI' not in sys.modules; hvd.rank()"
    done = run([PYTHON, "-c", text], tmp_path)
    assert "ValueError: Horovod has not been initialized; use hvd.init()" in done.err, done


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


def test_operations_over_gloo(tmp_path: Path) -> None:
    text = f"hvd.shutdown()\nhvd.init(process_sets='dynamic')\n{OVER_GLOO}"
    done = ran(tmp_path, text, "--gloo", ranks=3)
    assert done.code == 0 and sorted(done.out.splitlines()) == ["fine 0", "fine 1", "fine 2"], done


def test_the_example_over_gloo(alone: str, tmp_path: Path) -> None:
    words = hpctrain("horovodrun", "-np", "2", "--gloo", PYTHON, str(EXAMPLE / "train.py"), *SHORT)
    done = run(words, tmp_path)
    assert done.code == 0 and done.out == alone, done


JOB = """
import functools
import threading

import horovod
import mine

if __name__ == "__main__":
    for options in ({"num_proc": 3}, {"np": 2, "use_gloo": True}):
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


def test_a_function_on_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(JOB)
    (tmp_path / "mine.py").write_text(MINE)
    done = run([PYTHON, "-m", "hpctrain.horovod", "script.py"], tmp_path, env={"PYTHONPATH": str(tmp_path)})
    lines = done.out.splitlines()
    assert lines[:2] == ["[(18, 0), (18, 1), (18, 2)]", "[(16, 0), (16, 1)]"], done
    assert lines[2].startswith("RuntimeError: horovod.run: the ranks ended with exit code 1") and "mine" in done.err, (
        done
    )
    assert lines[3].startswith("ValueError: horovod.run: found a function that cannot be sent"), done
