"""A Ray cluster within a job of Slurm's, by one line of the batch script, with one task on each node:

    srun --ntasks-per-node=1 --cpus-per-task=$SLURM_CPUS_ON_NODE python -m hpctrain_ray.cluster -- \\
        python -m hpctrain_ray job.toml -n 8

The first task starts the head and the others join it; once all are there, the command runs on the first node and gets the step's
signals. When it ends, so does the cluster. The tasks meet over a directory of this user's in the home directory, which the nodes
share.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.child_python import python_code, python_module
from hpctrain.base.safe_files import closed_directory, own_directory, replacing
from hpctrain.toolkit.commands import EnvironmentUnfitError, UsageError, reason

_COUNT = """
import logging, ray
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
print(*(one["NodeManagerHostname"] for one in ray.nodes() if one["Alive"]))
"""
_LIMIT = 300.0
"""Seconds for all nodes to join: a Python environment on a busy file system loads slowly."""
_POLL = 0.5
_END = 15.0
"""Seconds for Ray's processes of a node to end."""
_TASK = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONGEST = 90 * 86400
"""Seconds: no job is that old."""
_START = python_module("ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


@dataclass(frozen=True)
class StepTask:
    """This task of the step. directory: where the step's tasks meet, in the home directory."""

    number: int
    count: int
    directory: Path

    @property
    def address_file(self) -> Path:
        """The file with the head's address; it is there as long as the cluster is."""
        return self.directory / "address.json"

    def sign(self) -> None:
        """Tell the first task that this one has started."""
        (self.directory / f"task-{self.number}").write_text(socket.gethostname())

    def missing(self) -> list[int]:
        """The tasks that have not started."""
        return [number for number in range(1, self.count) if not (self.directory / f"task-{number}").exists()]

    @property
    def token_file(self) -> Path:
        """The file with the cluster's secret: without it, anybody who reaches the head could run code on the nodes."""
        return self.directory / "token"


def this_task(environment: Mapping[str, str] = os.environ) -> StepTask:
    """The task that this process is. Raises UsageError outside of a step."""
    if any(name not in environment for name in _TASK):
        raise UsageError(
            "found no task of Slurm's, expected `srun --ntasks-per-node=1 --cpus-per-task=$SLURM_CPUS_ON_NODE python -m "
            "hpctrain_ray.cluster -- COMMAND`"
        )
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    step = "-".join(environment.get(name, "0") for name in names)
    directory = Path(environment.get("HOME", "/"), ".hpctrain", f"ray-{step}")
    return StepTask(int(environment[_TASK[0]]), int(environment[_TASK[1]]), directory)


def cluster_variables(task: StepTask, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of Ray's processes and of the command: with the secret's file, without other clusters' addresses."""
    kept = {name: value for name, value in environment.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(task.token_file)}


def lead(task: StepTask, command: Sequence[str]) -> int:
    """Be the first task: start the head, wait for the other nodes, run the command, end the cluster. The command's exit code."""
    _make_private(task)
    try:
        host, port = _own_address(), _free_port()
        environment = {**cluster_variables(task), "RAY_ADDRESS": f"{host}:{port}"}
        words = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
        with _node(words, cluster_variables(task)) as head:
            _await_port(host, port, head)
            temporary = task.address_file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"address": f"{host}:{port}"}))
            temporary.replace(task.address_file)
            _await_nodes(task, environment)
            code = _run(command, environment)
            task.address_file.unlink(missing_ok=True)  # the other nodes leave before the head does
            return code
    finally:
        shutil.rmtree(task.directory, ignore_errors=True)


def join(task: StepTask) -> int:
    """Be another task: a node of the cluster for as long as it is there. Raises EnvironmentUnfitError without a head."""
    until = time.monotonic() + _LIMIT
    while not task.address_file.exists():
        if time.monotonic() > until:
            raise EnvironmentUnfitError(
                f"task {task.number} on {socket.gethostname()} found no head of the Ray cluster within {_LIMIT:.0f} s (no file "
                f"{task.address_file}); look for the message of task 0, or set HOME to a directory that the nodes share"
            )
        time.sleep(_POLL)
    address = json.loads(task.address_file.read_text())["address"]
    task.sign()
    with _node([f"--address={address}"], cluster_variables(task)) as node:
        for number in _STOPPING:  # the first task passes them on, and ends the cluster
            signal.signal(number, lambda *_: None)
        while task.address_file.exists():
            if node.poll() is not None:
                raise EnvironmentUnfitError(
                    f"Ray's processes on {socket.gethostname()} ended with {_code(node.returncode)}; see the messages above"
                )
            time.sleep(_POLL)
    return 0


def _make_private(task: StepTask) -> None:
    try:
        _sweep(task.directory.parent)
        own_directory(task.directory, exist_ok=False)
        with suppress(OSError), replacing(task.directory / "owner") as file:  # without /proc
            file.write(json.dumps(_life_of(os.getpid())).encode())
        with replacing(task.token_file, 0o600) as file:
            file.write(secrets.token_hex(32).encode())
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{task.directory} could not be made ({error.strerror}); expected a home directory that the nodes share, without "
            "the rest of an earlier start of this step: remove it"
        ) from None


def _life_of(pid: int) -> list[str]:
    """A process as no other one is: the boot of its machine, its space of process ids, its id, its start. OSError without it."""
    born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return [_BOOT.read_text().strip(), os.readlink("/proc/self/ns/pid"), str(pid), born]


def _sweep(parent: Path) -> None:
    """Remove the directories of killed first tasks of this machine, and those that are older than any job. Those of other machines,
    which may belong to another cluster, give no sign of life."""
    for directory in parent.glob("ray-*"):
        with suppress(OSError, ValueError, TypeError):
            if time.time() - directory.stat().st_mtime > _LONGEST or _is_left(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    boot, space, pid, born = json.loads((directory / "owner").read_text())
    if [boot, space] != _life_of(os.getpid())[:2]:
        return False
    try:
        return _life_of(int(pid)) != [boot, space, pid, born]
    except FileNotFoundError:
        return True


@contextmanager
def _node(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's processes of this node. They end with the context, and with this process."""
    cpus = f"--num-cpus={len(os.sched_getaffinity(0))}"
    # Ray opens its directories to all users; this one, above them, is closed. A short path: sockets are below it
    directory = closed_directory("ray-", Path("/tmp"))
    own = [cpus, f"--temp-dir={directory / 'r'}"]
    # Slurm sends a step's signals to all of its processes: this one must not end Ray's, nor the workers that they start
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    node = subprocess.Popen([*_START, *own, *words], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGUSR1, before)
    try:
        yield node
    finally:
        node.terminate()
        with suppress(subprocess.TimeoutExpired):
            node.wait(_END)
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
    shutil.rmtree(directory, ignore_errors=True)  # after an error of the cluster's, its logs stay


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end; its exit code. It gets the signals that this process gets."""
    try:
        running = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise UsageError(f"the command {command[0]} could not be started: {error.strerror}") from None
    for number in _STOPPING:
        signal.signal(number, lambda number, _: running.send_signal(number))
    return _code(running.wait())


def _await_port(host: str, port: int, head: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _LIMIT
    while True:
        with suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        if head.poll() is not None or time.monotonic() > until:
            raise EnvironmentUnfitError(
                f"the head of the Ray cluster did not start on {host} port {port}; its logs are in /tmp/hpctrain-ray-*/r of that "
                "node"
            )
        time.sleep(_POLL)


def _await_nodes(task: StepTask, environment: Mapping[str, str]) -> None:
    """Wait until every task's node is in the cluster. Raises EnvironmentUnfitError that tells which are."""
    until = time.monotonic() + _LIMIT
    while True:
        there: list[str] = []
        with suppress(subprocess.TimeoutExpired):
            words = python_code(_COUNT)
            asked = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_LIMIT)
            there = asked.stdout.split()
        if len(there) >= task.count:
            return
        if time.monotonic() > until:
            missing = ", ".join(map(str, task.missing()))
            why = (
                f"task {missing} of the step has not started" if missing else "look for the messages of the other tasks"
            )
            raise EnvironmentUnfitError(
                f"{len(there)} of {task.count} nodes joined the Ray cluster within {_LIMIT:.0f} s ({', '.join(there)}); {why}"
            )
        time.sleep(_POLL)


def _own_address() -> str:
    """The address at which the other nodes reach this one: that of its name."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise EnvironmentUnfitError(
            f"the name of this node, {socket.gethostname()}, has no address ({error.strerror}); expected one that the nodes share"
        ) from None


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


def main(words: Sequence[str]) -> int:
    """Run this task; its exit code."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UsageError("found no command, expected `srun ... python -m hpctrain_ray.cluster -- COMMAND`")
    task = this_task()
    try:
        own_directory(task.directory.parent)  # else somebody may say where the head is
    except OSError as error:
        raise EnvironmentUnfitError(reason(error)) from None
    return lead(task, command) if task.number == 0 else join(task)


if __name__ == "__main__":
    for number in _STOPPING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that Ray's processes are ended
    try:
        code = main(sys.argv[1:])
    except (EnvironmentUnfitError, UsageError) as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
