"""Attacks of another user of the node. The victim is this process: root, whom no permissions keep from what others have made."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from besieging import PYTHON
from hpctrain_tools.launch.channel_directory import sweep
from hpctrain_tools.launch.channel_streams import Heard, Listener
from jobs import JobFile
from launching import hpctrain, in_process, run

from hpctrain.api import EnvironmentUnfitError
from hpctrain.base.safe_files import own_directory
from hpctrain.base.store.credentials import find_secret, make_credential
from hpctrain.ranks.rank_channel import PIPE, attach_to_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
STRANGER = 65533
"""The other user, who has no name."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp, in which every user may make files of their own."""
    with tempfile.TemporaryDirectory(prefix="shared-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def stranger(code: str, *words: str | Path) -> None:
    """Run a program as the other user, without a umask."""
    command = [PYTHON, "-c", code, *map(str, words)]
    subprocess.run(command, cwd="/", user=STRANGER, group=STRANGER, extra_groups=[], umask=0, check=True)


MAKES = "import os, sys; [os.mkdir(one, 0o777) for one in sys.argv[1:]]"
POISONS = """
import os, pathlib, sys
evil = "open(%r, 'a').write('x')\\n" % sys.argv[1]
for top in map(pathlib.Path, sys.argv[2:]):
    for old in [*top.glob("[!.]*")] if top.exists() and top.stat().st_uid == os.geteuid() else []:
        texts = {one.relative_to(old): one.read_text() for one in old.rglob("*.py")}
        if (top / f".{old.name}").exists():
            continue
        old.rename(top / f".{old.name}")  # its owner, in a directory of hers
        for name, text in texts.items():
            (top / old.name / name).parent.mkdir(parents=True, exist_ok=True)
            (top / old.name / name).write_text(evil + text)
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_kernels_of_another_user_do_not_run(job: JobFile, shared: Path) -> None:
    """Directories with the names of the caches, made before the first job, in which she replaces what it has compiled."""
    names = [shared / f"hpctrain-{os.geteuid()}-kernels", shared / "torchinductor_root", shared / "cache"]
    stranger(MAKES, *names, names[2] / "hpctrain", names[2] / "hpctrain" / "compilers")
    (taken := shared / "taken").touch()
    taken.chmod(0o666)
    job.set(compile={"enabled": True}, job={"steps": 2}, evaluation={"every_steps": 2})
    place = {"TMPDIR": str(shared), "XDG_CACHE_HOME": str(names[2]), "OMP_NUM_THREADS": "1"}
    for number in range(2):
        done = run(hpctrain("run", "job.toml", "--set", f"job.output_dir=r{number}"), job.directory, 180, place)
        assert done.code == 0, done
        stranger(POISONS, taken, *names, *(one / "inductor" for one in names))
    assert not taken.read_text(), "code of the stranger ran"


def test_names_that_another_user_has_taken_are_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~/.hpctrain where the home is shared, a starter's directory, and what Ray's nodes meet in."""
    monkeypatch.setenv("HOME", str(shared))
    monkeypatch.setenv("PATH", "/nowhere")  # no MUNGE
    stranger(MAKES, shared / ".hpctrain", shared / "hpctrain-abcdefgh")
    with pytest.raises(EnvironmentUnfitError, match="other users may use it"):
        make_credential("start", None)
    with pytest.raises(EnvironmentUnfitError, match="closed to others"):
        attach_to_directory(shared / "hpctrain-abcdefgh")
    (shared / ".hpctrain").rename(shared / "theirs")
    secret = make_credential("start", None).secret
    assert find_secret("start", None, b"") == secret
    [file] = (shared / ".hpctrain").iterdir()
    os.chown(file, STRANGER, STRANGER)
    assert find_secret("start", None, b"") is None


def test_directories_of_another_user_are_not_swept(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    ours = own_directory(shared / "job")
    os.mkfifo(ours / PIPE)
    code = "import os, sys; os.mkdir(sys.argv[1], 0o700); os.mkfifo(sys.argv[1] + '/alive'); os.symlink(sys.argv[3], sys.argv[2])"
    names = [shared / "hpctrain-abcdefgh", shared / "hpctrain-ijklmnop"]
    stranger(code, *names, ours)
    left = own_directory(shared / "hpctrain-qrstuvwx")
    os.mkfifo(left / PIPE)
    time.sleep(0.1)
    sweep("hpctrain-????????", 0.05)
    assert (names[0] / PIPE).exists() and names[1].is_symlink() and (ours / PIPE).exists() and not left.exists()


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_a_function_of_another_user_is_not_called(shared: Path) -> None:
    """horovod.run on a second host, which has no directory of this name until she makes it."""
    pytest.importorskip("hpctrain_horovod")
    content = pickle.dumps((print, (), {}))
    code = (
        "import os, sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/function', 'wb').write(bytes.fromhex(sys.argv[2]))"
    )
    stranger(code, shared / "hpctrain-abcdefgh", pickle.dumps(Evil(shared / "taken")).hex())
    digest = hashlib.sha256(content).hexdigest()
    words = [sys.executable, "-m", "hpctrain_horovod.runner.task", str(shared / "hpctrain-abcdefgh"), digest]
    done = run(words, shared)
    assert done.code == 1 and "another user has changed" in done.err and not (shared / "taken").exists(), done


CRAFTS = """
import os, sys
os.makedirs(sys.argv[1], 0o755)
open(sys.argv[1] + "/submissions.jsonl", "w").write('{"time": 1.0, "target": "ray", "id": "hpctrain-1f2e3d4c@/nowhere"}\\n')
open(sys.argv[1] + "/job.submitted.toml", "w").write(
    f'[job]\\nname = "j"\\nsteps = 1\\n[scheduler.ray]\\naddress = "127.0.0.1:{sys.argv[2]}"\\n'
)
"""


def test_a_run_of_another_user_is_not_asked_about_at_its_address(shared: Path) -> None:
    pytest.importorskip("hpctrain_ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        came: list[object] = []

        def listen() -> None:
            while True:
                try:
                    came.append(server.accept()[1])
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        stranger(CRAFTS, shared / "runs" / "j", server.getsockname()[1])
        for words in (("status", shared / "runs" / "j"), ("runs", shared / "runs")):
            in_process(*words, cwd=shared)
        assert not came


def test_long_lines_of_ranks_cost_little() -> None:
    """A line of 80,000 letters took 40 s, in which a starter answers nobody."""
    heard, line = Listener(Heard()), b"a" * 80_000 + b"\n"
    begin = time.process_time()
    heard.take(line)
    assert time.process_time() - begin < 2
