"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, all inside one directory.

Everything runs in a separate PID, network, mount, UTS and IPC namespace, the "login node". Inside it, each node has a network,
mount, UTS and IPC namespace. So the nodes have their own hostname, address and /dev/shm, and ranks on two nodes talk TCP. /tmp is
their shared file system. The machine's own network, /etc and munge are never touched. The login node's first process is the
cluster: when it ends, the kernel ends every daemon, step and rank.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import MARK, Finished, Started, hpctrain, wait_until
from packages import need_commands

NODES = ("node1", "node2")
_COMMANDS = ("slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "nsenter", "bash")
_START = 60.0  # seconds until both nodes are idle; one or two on a quiet machine

_HOSTS = """127.0.0.1 localhost
10.77.0.254 login
10.77.0.1 node1
10.77.0.2 node2
::ffff:127.0.0.1 localhost
::ffff:10.77.0.1 node1
::ffff:10.77.0.2 node2
"""
"""The last three are here because torch looks up IPv4 addresses in their IPv6 form, and there is no DNS."""

# Bash, because process 1 must reap orphans, which its `read` does. It lives as long as its standard input, which
# the tests hold open: even a killed test run leaves no cluster behind.
_LOGIN = """
set -e
hostname login
mount --bind hosts /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
ip link set lo up
ip link add bridge type bridge
ip address add 10.77.0.254/24 dev bridge
ip link set bridge up
mkdir -p /run/munge
mount -t tmpfs -o mode=755 munge /run/munge
munged --force --pid-file=$PWD/munged.pid --key-file=$PWD/munge.key --seed-file=$PWD/munge.seed --log-file=$PWD/munged.log
slurmctld -i -f slurm.conf
for number in 1 2; do
    unshare --net --mount --uts --ipc bash -c "$NODE" node $number </dev/null >node$number.out 2>&1 &
done
while read -r _; do :; done
"""

_NODE = """
set -e
hostname node$1
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs disk local
ip link set lo up
ip link add eth0 type veth peer name to_node$1 netns 1
nsenter --target 1 --net ip link set to_node$1 master bridge up
ip address add 10.77.0.$1/24 dev eth0
ip link set eth0 up
echo $$ >node$1.pid
slurmd -D -f $PWD/slurm.conf || true
while :; do sleep 1000; done  # it may be killed
"""

_CONF = """
ClusterName=hpctrain
SlurmctldHost=login(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job may start again cred_expire seconds after it ended: 120 unless said
AuthInfo=cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
# the PMIx plugin writes below TmpFS, and the nodes share /tmp
TmpFS={directory}/tmp.%n
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# nodes may claim more CPUs than this machine has
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
JobRequeue=1
# a node without its slurmd is down after so long, and idle again when its slurmd is back
SlurmdTimeout={node_timeout}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MessageTimeout=30
TCPTimeout=10
NodeName=node1 NodeAddr=10.77.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeAddr=10.77.0.2 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """The reason why this machine cannot run its own Slurm, or None."""
    if os.geteuid() != 0:
        return "a Slurm with two nodes needs root (namespaces, munged)"
    probe = ["unshare", "--fork", "--pid", "--mount-proc", "--net", "--uts", "--ipc", "true"]
    if subprocess.run(probe, capture_output=True, timeout=30).returncode:
        return "this machine does not let root make namespaces (a container without CAP_SYS_ADMIN?)"
    return None


@contextmanager
def temporary_cluster(node_timeout: int = 300) -> Iterator[Cluster]:
    """A Slurm of two nodes. If that is impossible, the tests are skipped; on CI, which must not skip them, they fail.

    node_timeout: as for `Cluster`.
    """
    need_commands(*_COMMANDS)
    reason = why_not()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no Slurm to test with: {reason}")
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    directory.chmod(0o755)
    cluster = Cluster(directory, node_timeout)
    yield cluster
    cluster.stop()
    shutil.rmtree(directory)


class Cluster:
    """A running Slurm; commands are run on its login node."""

    def __init__(self, directory: Path, node_timeout: int = 300) -> None:
        """Starts it below `directory`, which must be empty and have a short path, for munge's unix socket.

        node_timeout: seconds after which a silent node is down.
        """
        self._directory = directory
        self.local = directory / "local"
        for name in ("state", "tmp.node1", "tmp.node2", "local"):
            (directory / name).mkdir()
        (directory / "hosts").write_text(_HOSTS)
        (directory / "slurm.conf").write_text(_CONF.format(directory=directory, node_timeout=node_timeout))
        # slurmd always loads a cgroup plugin, and guesses wrong without a mounted cgroup tree
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self._conf = {"SLURM_CONF": str(directory / "slurm.conf")}
        with (directory / "login.out").open("w") as out:
            self._outside = subprocess.Popen(
                ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts", "--ipc",
                 "bash", "-c", _LOGIN],
                cwd=directory, env={**os.environ, **self._conf, "NODE": _NODE},
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, and everything that runs in it."""
        assert self._outside.stdin is not None
        self._outside.stdin.close()
        try:
            self._outside.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._outside.kill()  # and with it, by --kill-child, the first process
            self._outside.wait(timeout=10)

    def start(self, words: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> Started:
        """Start a command on the login node; the caller ends it (`finish`, `kill_all`)."""
        return Started([*self.enter(cwd), *words], cwd, {**self._conf, **(env or {})})

    def run(self, words: Sequence[str], cwd: Path, timeout: float = 90, env: dict[str, str] | None = None) -> Finished:
        """Run a command on the login node to its end."""
        command = self.start(words, cwd, env)
        try:
            return command.finish(timeout)
        finally:
            command.kill_all()

    def ask(self, *words: str) -> str:
        """The output of a Slurm command; empty while the controller does not answer."""
        return self._short(words, self._directory, {}).stdout.strip()

    def inside(self, node: str) -> list[str]:
        """The prefix for a command to run on `node` without Slurm."""
        first = (self._directory / f"{node}.pid").read_text().strip()
        return [*self.enter(Path("/")), "nsenter", "--target", first, "--net", "--mount", "--uts", "--ipc"]

    def kill_node(self, node: str) -> None:
        """SIGKILL to the slurmd of a node, and to all that its jobs run there."""
        slurmd = (self._directory / f"slurmd.{node}.pid").read_text().strip()
        own = (self._directory / f"{node}.pid").read_text().strip()
        # all processes of the node's network, but for the first one, which holds the node together
        script = (
            'kill -9 "$1"; for p in /proc/[0-9]*; do '
            '[ "$(readlink "$p/ns/net")" = "$(readlink "/proc/$2/ns/net")" ] && [ "$(cat "$p/comm")" != sleep ] && '
            '[ "${p#/proc/}" != "$2" ] && kill -9 "${p#/proc/}"; done; true'
        )
        subprocess.run(
            [*self.enter(), "bash", "-c", script, "kill", slurmd, own], check=True, timeout=60, capture_output=True
        )

    def revive_node(self, node: str) -> None:
        """Start the slurmd of a node again."""
        words = [*self.inside(node), "slurmd", "-f", str(self._directory / "slurm.conf")]
        subprocess.run(words, env={**os.environ, **self._conf}, check=True, timeout=60, capture_output=True)

    def hpctrain(self, cwd: Path, *words: str) -> Finished:
        """`hpctrain WORDS` on the login node. sbatch gives its environment to the job, so the mark of `Started` is left out of it:
        a job outlives the command that submits it."""
        return self.run(["env", "-u", MARK, *hpctrain(*words)], cwd, timeout=120)

    def job(self, number: str) -> dict[str, str]:
        """scontrol's fields of a job: JobState, ExitCode, Restarts..."""
        pairs = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def empty(self) -> None:
        """Cancel every job, and wait until all are gone."""
        for number in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", number)
        wait_until(lambda: not self.ask("squeue", "-h"), 60, "an empty queue")

    def enter(self, cwd: Path = Path("/")) -> list[str]:
        """The prefix for a command to run on the login node without Slurm."""
        first = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children").read_text().split()[0]
        return ["nsenter", "--target", first, "--pid", "--mount", "--net", "--uts", "--ipc", f"--wd={cwd}"]

    def _short(self, words: Sequence[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter(cwd), *words], env={**os.environ, **self._conf, **env},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def _wait_until_idle(self) -> None:
        give_up = time.monotonic() + _START
        while self._outside.poll() is None and time.monotonic() < give_up:
            if (self._directory / "slurmctld.pid").exists() and self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2":
                return
            time.sleep(0.1)
        said = "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}"
            for path in sorted(self._directory.glob("*"))
            if path.suffix in (".out", ".log")
        )
        raise RuntimeError(f"the nodes are not idle after {_START:.0f} s\n{said}")
