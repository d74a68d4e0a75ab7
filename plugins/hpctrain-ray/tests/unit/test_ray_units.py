"""The parts that need no cluster: options, orders, numbers of ranks, ids, rows, the environment of a rank, the Slurm line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hpctrain_ray import connection
from hpctrain_ray.cluster import cluster_variables, this_task
from hpctrain_ray.connection import connected
from hpctrain_ray.errors import error_of
from hpctrain_ray.ids import JobId, read_end, write_end
from hpctrain_ray.options import RayOptions, read_options
from hpctrain_ray.order import Bundle, listed
from hpctrain_ray.private_directories import make_private_directory, take_ending
from hpctrain_ray.rows import mean, split
from hpctrain_ray.running import order_of
from hpctrain_ray.seats import Node, numbers_by_node
from hpctrain_tools.launch.channel_directory import ChannelDirectory, Ending

from hpctrain.api import EnvironmentUnfitError, TrainingError, UsageError
from hpctrain.base.launcher_variables import RankNumbers, started_variables


def test_ranks_are_numbered_node_by_node() -> None:
    nodes = [Node(name, f"10.0.0.{name}") for name in "babca"]
    assert numbers_by_node(nodes) == [
        RankNumbers(0, 5, 0, 2),
        RankNumbers(2, 5, 0, 2),
        RankNumbers(1, 5, 1, 2),
        RankNumbers(4, 5, 0, 1),
        RankNumbers(3, 5, 1, 2),
    ]


def test_bundles() -> None:
    options = read_options({"nodes": 2, "workers": [{"gpus": 0.5, "count": 2}, {"cpus": 4, "resources": {"tpu": 1}}]})
    bundles = options.bundles(3)
    assert [one.as_ray() for one in bundles] == [{"CPU": 1, "GPU": 0.5}, {"CPU": 1, "GPU": 0.5}, {"CPU": 4, "tpu": 1}]
    assert listed(bundles) == "2 x (1 CPU, 0.5 GPU), 1 x (4 CPU, 1 tpu)"
    assert options.count == 3 and RayOptions().bundles(2) == [Bundle()] * 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"strategy": "LOOSE"}, "strategy"),
        ({"cpus": 0}, "above 0"),
        ({"cpus": 2, "workers": [{}]}, "either workers"),
        ({"colour": 1}, "colour"),
        ({"placement_limit": 0}, "placement_limit"),
        ({"resources": {"CPU": 2}}, "a name of the cluster's own"),
        ({"resources": {"fast": -1}}, "more than 0"),
        ({"gpus": 1.5}, "a part of one, or a whole number"),
    ],
)
def test_wrong_options(table: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_options(table)


def test_ids_hold_any_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a run=1 é"
    directory.mkdir()
    id = JobId.new(directory)
    assert JobId.of(str(id)) == id and " " not in str(id) and read_end(id) is None
    write_end(id, 4, "no room")
    end = read_end(id)
    assert end is not None and (end.code, end.why) == (4, "no room")
    assert read_end(JobId.new(directory)) is None
    with pytest.raises(UsageError, match="expected one of a job on Ray"):
        JobId.of("17")


def test_batches_are_split_by_rows() -> None:
    rows = torch.arange(8.0)
    first, second = split({"x": rows[:, None], "y": (rows, rows.numpy())}, 2)
    assert first["x"].tolist() == [[0], [1], [2], [3]] and second["y"][1].tolist() == [4, 5, 6, 7]
    for wrong, said in (
        (rows[:7], "7 rows, expected a multiple of 2"),
        ([rows, rows[:4]], "4, 8 rows"),
        (3, "a int in"),
    ):
        with pytest.raises(UsageError, match=said):
            split(wrong, 2)
    assert mean([{"a": 1.0}, {"a": 3.0}]) == {"a": 2.0}
    with pytest.raises(UsageError, match="different names"):
        mean([{"a": 1.0}, {"b": 3.0}])


@pytest.mark.parametrize(("ranks", "table"), [(0, {}), (None, {"nodes": "two"}), (None, {"ranks_per_node": 0})])
def test_numbers_of_ranks(ranks: int | None, table: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected 1 or more"):
        order_of({"scheduler": {"ray": table}}, RayOptions(), ranks, Path("job.toml"))


def test_a_rank_gets_none_of_another_launchers_variables(tmp_path: Path) -> None:
    shell = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "PMI_RANK": "3", "LOCAL_RANK": "9"}
    found = started_variables(RankNumbers(1, 3, 0, 1), tmp_path, "10.0.0.1", {**shell, "HOME": "/home/me"})
    assert found == {
        "HOME": "/home/me", "SLURM_JOB_ID": "17", "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "HPCTRAIN_STARTED_IN": str(tmp_path),
    }  # fmt: skip


def test_the_secret_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = make_private_directory("ab12", 3, b"\x01" * 32)
    assert directory.name == "hpctrain-ray-ab12.3" and directory.stem == "hpctrain-ray-ab12"
    assert directory.stat().st_mode & 0o777 == 0o700 and (directory / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        make_private_directory("ab12", 3, b"\x01" * 32)


def test_directories_of_killed_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a rank that runs stays, and for a while that of one that was killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    attended = (
        "import os, sys; from pathlib import Path; from hpctrain_tools.launch.channel_directory import ChannelDirectory\n"
        "channel = ChannelDirectory(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    for name, seconds in (("old", 4000), ("new", 100)):
        directory = make_private_directory(name, 0, b"")
        subprocess.run([sys.executable, "-c", attended, str(directory)], timeout=60)
        os.utime(directory, (time.time() - seconds,) * 2)
    channel = ChannelDirectory(make_private_directory("runs", 0, b""))
    os.utime(channel.directory, (0, 0))
    make_private_directory("next", 0, b"")
    channel.close()
    assert {one.name for one in tmp_path.iterdir()} == {f"hpctrain-ray-{name}.0" for name in ("new", "runs", "next")}


def test_a_rank_that_has_ended_by_itself_has_left_its_code_and_its_error(tmp_path: Path) -> None:
    directory = tmp_path / "start.1"
    directory.mkdir()
    assert take_ending(directory) == Ending(None, "") and not directory.exists()
    directory.mkdir()
    (directory / "exit-code").write_text("2")
    (directory / "error").write_text("no such key")
    found = take_ending(directory)
    assert found == Ending(2, "no such key") and type(error_of(found.code, found.error)) is UsageError
    assert type(error_of(4, "x")) is type(error_of(None, "x")) is TrainingError


def test_a_cluster_that_is_gone_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes at the address of the last cluster on this node, which it has written down."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(EnvironmentUnfitError, match=r"found no Ray cluster at '127\.0\.0\.1:1'"), connected("auto"):
        pass


def test_the_slurm_line_knows_its_task() -> None:
    task = this_task({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "17", "HOME": "/home/me"})
    assert (task.number, task.count) == (1, 2) and str(task.directory) == "/home/me/.hpctrain/ray-17-0-0"
    told = cluster_variables(task, {"RAY_ADDRESS": "other:1", "PATH": "/bin"})
    assert told == {
        "PATH": "/bin", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/home/me/.hpctrain/ray-17-0-0/token",
    }  # fmt: skip
    with pytest.raises(UsageError, match="found no task"):
        this_task({})


@pytest.mark.thorough
def test_plugins_are_light() -> None:
    """Loading them must not load Ray, which takes a second, nor start MPI; what attends a rank must not load torch."""
    code = (
        "import sys, json\n"
        "import hpctrain_ray, hpctrain_ray.attendant, hpctrain_ray.detached, hpctrain_ray.cluster\n"
        "first = [name for name in ('torch', 'ray', 'mpi4py.MPI') if name in sys.modules]\n"
        "import hpctrain_ray.scheduler, hpctrain_ray.hook\n"
        "then = [name for name in ('ray', 'mpi4py.MPI', 'torch._dynamo') if name in sys.modules]\n"
        "print(json.dumps([first, then]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [[], []], done


def test_the_directory_of_a_killed_step_goes_with_the_next_one_of_its_machine(tmp_path: Path) -> None:
    """In a home directory that clusters share, only what is known to be dead."""
    code = "from hpctrain_ray import cluster\ncluster._make_private(cluster.this_task())\nprint(flush=True)\ninput()"

    def task(job: str) -> subprocess.Popen[str]:
        variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": job, "HOME": str(tmp_path)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **variables}, **pipes)
        assert started.stdout is not None and started.stdout.readline() == "\n"
        return started

    def there() -> set[str]:
        return {one.name.split("-")[1] for one in (tmp_path / ".hpctrain").iterdir()}

    tasks = [task("killed"), task("alive"), task("elsewhere"), task("old")]
    for one in (0, 2, 3):
        tasks[one].kill()
        tasks[one].wait()
    for name in ("elsewhere", "old"):
        owner = tmp_path / ".hpctrain" / f"ray-{name}-0-0" / "owner"
        owner.write_text(json.dumps(["another boot", *json.loads(owner.read_text())[1:]]))
    os.utime(owner.parent, (time.time() - 91 * 86400,) * 2)
    (tmp_path / ".hpctrain" / "ray-unknown-0-0").mkdir()
    tasks.append(task("killed"))  # the same step again, which would have been refused
    assert there() == {"killed", "alive", "elsewhere", "unknown"}
    for one in (1, 4):
        tasks[one].communicate("\n", timeout=20)


@pytest.mark.parametrize("found", ["another user's", "open to others", "a link", "another user listens", "ours"])
def test_auto_is_a_cluster_of_this_user(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a cluster are pickles."""
    if os.geteuid() and found in ("another user's", "another user listens"):
        pytest.skip("needs root: a second user")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if found == "another user listens":
            os.fchown(listening.fileno(), 12345, 12345)
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        note.write_text(address)
        if found == "another user's":
            os.chown(note, 12345, 12345)
        elif found == "open to others":
            note.chmod(0o666)
        elif found == "a link":
            note.rename(tmp_path / "note")
            note.symlink_to(tmp_path / "note")
        if found == "ours":
            assert connection._noted() == address
            return
        with pytest.raises(EnvironmentUnfitError, match=r"another user|symbolic link"):
            connection._noted()
