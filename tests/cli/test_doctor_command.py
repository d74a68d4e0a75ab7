"""`hpctrain doctor`, healthy and with a planted fault of each kind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jsonschema
import psutil
import pytest
from launching import Finished, Started, hpctrain, run, started

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
BOTH = ["launcher", "versions", "plugins", "MPI", "environment", "cores", "devices", "open files", "process_vm_readv",
        "locked memory", "shared memory", "output directory", "write speed", "free space", "file locks",
        "communicator", "links in nodes", "matrix product"]  # fmt: skip
"""The checks of two ranks on one node, in order."""
FOUND_ONLY = ["loopback", "home directory", "temporary files", "compiler", "proxies"]
"""Checks that are told only where something is wrong."""
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "check": {"enum": BOTH + FOUND_ONLY},
            "state": {"enum": ["ok", "warn", "fail"]},
            "found": {"type": "string", "minLength": 1},
            "remedy": {"type": "string"},
            "ranks": {"type": "array", "items": {"type": "integer"}},
            "nodes": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["check", "state", "found", "remedy", "ranks", "nodes"],
        "additionalProperties": False,
    },
}


def rows(done: Finished) -> list[dict[str, Any]]:
    """The findings of --json, of the schema; each problem has a remedy."""
    found: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    jsonschema.validate(found, SCHEMA)
    assert all(bool(row["remedy"]) == (row["state"] != "ok") for row in found), done
    assert (done.code == 3) == any(row["state"] == "fail" for row in found), done
    return found


def problem(done: Finished, check: str) -> dict[str, Any]:
    """The only row of `check` that is not ok."""
    bad = [row for row in rows(done) if row["check"] == check and row["state"] != "ok"]
    assert len(bad) == 1, done
    return bad[0]


def on_two(rank_1: list[str], *words: str) -> list[str]:
    """The command on two ranks under mpiexec, with a prefix for rank 1's."""
    return [MPIEXEC, "-n", "1", *hpctrain("doctor", *words), ":", "-n", "1", *rank_1, *hpctrain("doctor", *words)]


def test_alone(tmp_path: Path) -> None:
    done = run(hpctrain("doctor"), tmp_path)
    assert done.code == 0 and done.err == "", done
    for check in BOTH:
        assert (f" {check} " in done.out) == (check != "links in nodes"), done
    assert "\nfail" not in done.out and done.out.splitlines()[-1].startswith("doctor       0 failed"), done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_node_on_which_compilers_and_caches_fail(tmp_path: Path) -> None:
    for name in ("temporary", "home"):
        (tmp_path / name).mkdir()
    mounts = 'mount -t tmpfs -o noexec none temporary; mount -t tmpfs -o ro none home; exec "$@"'
    surroundings = {"TMPDIR": str(tmp_path / "temporary"), "HOME": str(tmp_path / "home"), "CXX": "/none/c++ -O2",
                    "http_proxy": "http://user:word@proxy:1", "no_proxy": "localhost"}  # fmt: skip
    words = ["unshare", "--mount", "bash", "-c", mounts, "bash", *hpctrain("doctor", "--json")]
    done = run(words, tmp_path, env=surroundings)
    told = {row["check"]: row["found"] for row in rows(done) if row["check"] in FOUND_ONLY}
    assert done.code == 0 and list(told) == FOUND_ONLY[1:4] + ["proxies"] * bool(
        {"mlflow", "ray", "wandb"} & packages()
    ), done
    assert "home can't be written to (Read-only file system)" in told["home directory"]
    assert "temporary is mounted noexec" in told["temporary files"] and "C++ compiler (/none/c++)" in told["compiler"]
    assert "word" not in done.out, "a proxy's password"
    surroundings |= {"CXX": sys.executable, "no_proxy": "*"}
    done = run(hpctrain("doctor", "--json"), tmp_path, env=surroundings)
    assert not [row for row in rows(done) if row["check"] in FOUND_ONLY], "nothing is mounted here"


def packages() -> set[str]:
    return {name for name in ("mlflow", "ray", "wandb") if find_spec(name)}


@pytest.mark.cases(rest="thorough")
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
@pytest.mark.parametrize("words", [(), pytest.param(("-n", "2"), marks=pytest.mark.nightly)])
def test_a_node_without_any_network(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Not even with itself."""
    done = run(["unshare", "--net", *hpctrain("doctor", "--json", *words)], tmp_path)
    (row,) = rows(done)
    assert done.code == 3 and row["check"] == "loopback" and "Network is unreachable" in row["found"], done
    assert done.err == "" and "ip link set lo up" in row["remedy"], done


@pytest.mark.thorough
def test_two_ranks(tmp_path: Path) -> None:
    done = run(hpctrain("doctor", "-n", "2", "--json"), tmp_path)
    assert done.code == 0, done
    found = rows(done)
    assert list(dict.fromkeys(row["check"] for row in found)) == BOTH
    of_both = {row["check"]: row for row in found if row["ranks"] == [0, 1]}
    assert of_both["launcher"]["found"].startswith("2 ranks on 1 node over MPI")
    assert of_both["communicator"]["found"] == "mpi" and of_both["links in nodes"]["state"] == "ok"
    assert next(row for row in found if row["check"] == "file locks")["found"] == "rank 0's lock holds"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_the_number_of_ranks_is_the_launchers(tmp_path: Path) -> None:
    done = run([MPIEXEC, "-n", "2", *hpctrain("doctor", "-n", "3")], tmp_path)
    assert done.code == 2 and done.err.count("-n 3: the launcher started 2 ranks") == 1, done


@pytest.mark.thorough
def test_too_few_open_files(tmp_path: Path) -> None:
    words = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash", *hpctrain("doctor", "-n", "2", "--json")]
    done = run(words, tmp_path)
    found = {tuple(row["ranks"]): row for row in rows(done) if row["check"] == "open files"}
    assert found[0,]["state"] == found[1,]["state"] == "fail", done
    assert "at most 128" in found[0,]["found"] and "2 ranks" in found[0,]["found"], done
    assert "ulimit -n" in found[0,]["remedy"], done


@pytest.mark.cases(thorough=["file/below"], rest="nightly")
@pytest.mark.parametrize("place", ["/proc", "missing", "file/below"])
def test_a_directory_that_cannot_be_written_to(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    done = run(hpctrain("doctor", "--json", "--directory", place), tmp_path)
    bad = problem(done, "output directory")
    assert bad["state"] == "fail" and f"can't write in {place}" in bad["found"], done
    assert "write speed" not in {row["check"] for row in rows(done)}
    lines = run(hpctrain("doctor", "--directory", place), tmp_path)
    assert lines.code == 3 and f"fail  output directory   rank 0 can't write in {place}" in lines.out, lines


@pytest.mark.thorough
def test_a_rank_with_another_directory(tmp_path: Path) -> None:
    """As on nodes that do not share it: a relative path, and rank 1 in a mount namespace with another file system there."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    (tmp_path / "out").mkdir()
    other = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs none out; exec "$@"', "bash"]
    done = run(on_two(other, "--json", "--directory", "out"), tmp_path)
    # both ranks are on one node, and only its first one checks the directory; so does rank 1 where it tries the lock
    bad = problem(done, "file locks")
    assert bad["ranks"] == [1], done


@pytest.mark.thorough
def test_versions_that_differ(tmp_path: Path) -> None:
    """Rank 1 finds another numpy's metadata first, and a plugin of its own."""
    for name, version, points in (("numpy", "1.0.0", ""), ("odd", "7", "[hpctrain]\nhook.odd = odd\n")):
        info = tmp_path / "more" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points)
    (tmp_path / "more" / "odd.py").write_text(
        "from hpctrain.api import hookimpl\n\n@hookimpl\ndef hpctrain_hook():\n    return []\n"
    )
    done = run(on_two(["env", f"PYTHONPATH={tmp_path / 'more'}"], "--json"), tmp_path)
    node = rows(done)[0]["nodes"][0]
    for check, expected in (("versions", "numpy 1.0.0"), ("plugins", "odd 7")):
        bad = problem(done, check)
        assert (
            bad["state"] == "fail" and bad["ranks"] == [1] and f"found {expected}; rank 0 on {node} has" in bad["found"]
        ), done


@pytest.mark.nightly
def test_a_slow_rank(tmp_path: Path) -> None:
    """Rank 1 runs a fifth of the time."""
    with started(on_two(["env", "SLOW=1"], "--json"), tmp_path) as command:
        over = Event()
        slowing = Thread(target=_slow_down, args=(command, over))
        slowing.start()
        try:
            done = command.finish(120)
        finally:
            over.set()
            slowing.join()
    bad = problem(done, "matrix product")
    assert bad["state"] == "warn" and bad["ranks"] == [1] and "the fast ranks have" in bad["found"], done


def _slow_down(command: Started, over: Event) -> None:
    while not over.is_set():
        slow = [
            p for p in command.members() if _has(p, "SLOW") and "mpiexec" not in p.name() and "hydra" not in p.name()
        ]
        for _ in range(20 if slow else 0):
            if over.is_set():
                break
            try:
                for process in slow:
                    process.send_signal(signal.SIGSTOP)
                time.sleep(0.08)
            finally:
                for process in slow:
                    if process.is_running():
                        process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
        time.sleep(0.02)


def _has(process: psutil.Process, variable: str) -> bool:
    try:
        return variable in process.environ()
    except psutil.Error:
        return False


@pytest.mark.thorough
def test_a_rank_that_never_starts(tmp_path: Path) -> None:
    """MPI_Init of the other rank waits for it. Two minutes would be too long for a test."""
    impatient = (
        "from hpctrain.cli import main\nfrom hpctrain_tools.commands import doctor\ndoctor._START_SECONDS = 2.0\nmain()"
    )
    words = [MPIEXEC, "-n", "1", sys.executable, "-c", impatient, "doctor", ":", "-n", "1", "sleep", "60"]
    done = run(words, tmp_path, 30)
    # mpiexec's code is the rank's 3 or that of the process that it killed, whichever it heard first.
    assert done.code in (3, 9) and "did not finish the start of MPI within 2 s" in done.err, done


@pytest.mark.thorough
def test_an_unfit_launcher(tmp_path: Path) -> None:
    """As srun's or another MPI's: it announces two ranks, and MPI finds one."""
    done = run(hpctrain("doctor", "--json"), tmp_path, env={"OMPI_COMM_WORLD_SIZE": "2"})
    bad = problem(done, "launcher")
    assert bad["state"] == "fail" and "sees only one process" in bad["found"], done


def test_an_allocation_without_srun(tmp_path: Path) -> None:
    done = run(hpctrain("doctor", "--json"), tmp_path, env={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    bad = problem(done, "launcher")
    assert bad["state"] == "warn" and "srun hpctrain doctor" in bad["remedy"], done
