"""A Ray cluster of another user on this node, whose answers are code: nobody looks there who has not named it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import hpctrain, run, wait_until

STRANGER = 65533
ACTOR = """
import os, sys, time
import ray

class Evil:
    hit = sys.argv[2]

    def __reduce__(self):
        return exec, (f"import os; open({self.hit!r} + '/' + str(os.geteuid()), 'w').close()",)

@ray.remote(num_cpus=0)
class Actor:
    def look(self):
        return Evil()

ray.init(address=sys.argv[1], namespace="hpctrain", log_to_driver=False)
held = Actor.options(name="hpctrain-1f2e3d4c", lifetime="detached").remote()
time.sleep(2)
print("ready", flush=True)
"""
SUBMITTED = '{"time": 1.0, "target": "ray", "id": "hpctrain-1f2e3d4c@/nowhere"}\n'
JOB = '[job]\nname = "j"\nsteps = 1\n[scheduler.ray]\n'


def reads(python: str) -> bool:
    """Whether the other user can run this environment."""
    words = [
        "env",
        python,
        "-c",
        "import ray, hpctrain_ray",
    ]  # env: a python she can't reach is its error, not one here
    how: Any = {"user": STRANGER, "group": STRANGER, "extra_groups": [], "capture_output": True}
    return not subprocess.run(words, cwd="/", **how).returncode


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Path, str]]:
    """A directory of the other user's, and the address of her cluster."""
    if os.geteuid() or not reads(sys.executable):
        pytest.skip("needs root, and an environment that other users can read")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp", ignore_cleanup_errors=True) as name:
        home, address = Path(name), f"127.0.0.1:{port}"
        home.chmod(0o777)
        told = {"HOME": name, "USER": "stranger", "RAY_AUTH_MODE": "disabled", "PATH": os.environ["PATH"]}
        how: Any = {"cwd": name, "env": told, "user": STRANGER, "group": STRANGER, "extra_groups": [], "umask": 0}
        words = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=1"]
        words += [f"--temp-dir={name}/r", "--object-store-memory=80000000", "--block", "--disable-usage-stats"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        head = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True, **how)
        try:
            wait_until(lambda: answers(port), 90, "her head")
            (home / "hit").mkdir()
            (home / "hit").chmod(0o777)
            command = [sys.executable, "-c", ACTOR, address, str(home / "hit")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, **how)
            assert done.stdout.endswith("ready\n"), done
            yield home, address
        finally:
            for one in [*psutil.Process(head.pid).children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            head.wait(30)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("owner", ["ours", "hers"])
def test_her_cluster_is_not_asked(owner: str, place: tuple[Path, str], tmp_path: Path) -> None:
    """By what Ray notes in a directory of all users, or by the options of a run of hers."""
    home, address = place
    subprocess.run(["rm", "-rf", *(home / "hit").iterdir()], check=True)
    directory = tmp_path / "j"
    directory.mkdir(0o755)
    (directory / "submissions.jsonl").write_text(SUBMITTED)
    (directory / "job.submitted.toml").write_text(JOB + (f'address = "{address}"\n' if owner == "hers" else ""))
    noted = home / "ray" / "ray_current_cluster"
    noted.parent.mkdir(exist_ok=True)
    noted.write_text(address if owner == "ours" else "")
    theirs = [noted.parent, noted] if owner == "ours" else [noted.parent, noted, directory, *directory.iterdir()]
    for one in theirs:
        os.chown(one, STRANGER, STRANGER)
    for words in (("status", str(directory)), ("runs", str(tmp_path))):
        done = run(hpctrain(*words), tmp_path, env={"RAY_TMPDIR": str(home)})
        assert done.code in (0, 3), done
    assert not (home / "hit" / str(os.geteuid())).exists(), "code of hers ran"
