"""The starter of ranks: as processes, without MPI, and what it passes on; what signals do to a rank."""

from __future__ import annotations

import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hpctrain_tools.launch import start
from hpctrain_tools.launch.channel_directory import ChannelDirectory, sweep
from hpctrain_tools.launch.mpiexec import Mpiexec, UnderMpiexec
from hpctrain_tools.launch.output_relay import Unbannered, Unruled
from hpctrain_tools.launch.pmi import PmiBoard, PmiRelay, PmiServer
from hpctrain_tools.launch.processes import Processes, sweep_memory

from hpctrain.base.launcher_variables import RankNumbers
from hpctrain.ranks import signals
from hpctrain.ranks.signals import StopRequest


def test_ranks_that_do_not_follow_a_failed_one_are_ended() -> None:
    """Also for a starter that asks again and again, between looks for signals."""
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(4)\ntime.sleep(60)"
    ranks = Processes([sys.executable, "-S", "-c", program], [{"RANK": "0"}, {"RANK": "1"}], grace=0.3)
    for _ in range(100):
        try:
            assert ranks.wait(timeout=0.1) == 4 and ranks.failed_rank == 1, "not the signal that ended rank 0"
            return
        except subprocess.TimeoutExpired:
            continue
    ranks.kill()
    pytest.fail("a rank was left running")


def test_one_signal_that_comes_twice_is_one_request_and_a_later_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm signals all processes of a job: a rank gets its own, and what the starter passes on."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.level and not left
        monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert not left
        signal.raise_signal(signal.SIGINT)
        assert left == [128 + signal.SIGINT]


class Shell(Mpiexec):
    """In mpiexec's place, which ends its ranks when it can't write what they print."""

    def command(self, ranks: int) -> list[str]:
        return ["bash", "-c", f"for i in $(seq {ranks}); do echo $i || exit 255; echo $i >&2; done"]


def test_ranks_outlive_output_that_nobody_takes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = os.dup(1)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 1)
        monkeypatch.setattr(sys, "stdout", full)
        try:
            status = UnderMpiexec(Shell(Path("bash"), "MPICH"), [], 3).wait(10)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert status == 0 and capfd.readouterr().err == "1\n2\n3\n"


def test_what_open_mpi_adds_to_an_error_is_left_out() -> None:
    rule = "-" * 74 + "\n"
    aborted = f"{rule}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 4\n{rule}"
    ended = f'{rule}prterun has exited due to process rank 1 calling\n"abort". This may have\n{rule}'
    killed = f"{rule}prterun noticed that process rank 1 exited on signal 9\n{rule}"
    mine = f"a table\n{rule}\n"
    for text, shown in (
        (f"my error\n{aborted}{ended} \n", "my error\n \n"),
        (f"{killed}{ended}the end", f"{killed}the end"),
        (mine, mine),
        (mine + "x" * 5000, mine + "x" * 5000),
        ("no rule ---", "no rule ---"),
    ):
        for size in (1, 7, 10**5):
            unruled, content = Unruled(), text.encode()
            taken = b"".join(unruled.take(content[at : at + size]) for at in range(0, len(content), size))
            assert (taken + unruled.rest()).decode() == shown, (text, size)


def test_what_mpich_adds_about_ended_ranks_is_left_out() -> None:
    rule = "=" * 83 + "\n"
    banner = f"{rule}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n{rule}"
    banner += "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nPlease see the page for debugging suggestions\n"
    for text, shown in (
        (f"a = b\n{banner}==\n{banner}", "a = b\n==\n"),
        (f"{rule}mine\n{rule}", f"{rule}mine\n{rule}"),
        (f"{rule}=   BAD TERMINATION{'x' * 5000}", f"{rule}=   BAD TERMINATION{'x' * 5000}"),
        ("no banner ===", "no banner ==="),
    ):
        for size in (1, 7, 10**5):
            unbannered, content = Unbannered(), text.encode()
            taken = b"".join(unbannered.take(content[at : at + size]) for at in range(0, len(content), size))
            assert (taken + unbannered.rest()).decode() == shown, (text, size)


class PmiRank:
    """A rank's end of PMI, line by line, as an MPI library would speak it."""

    def __init__(self, server: PmiServer, rank: int) -> None:
        self._file = os.fdopen(os.dup(server.descriptors(rank)[0]), "r+b", buffering=0)

    def send(self, line: str) -> None:
        self._file.write(line.encode())

    def receive(self) -> str:
        return self._file.readline().decode()

    def ask(self, line: str) -> str:
        self.send(line + "\n")
        return self.receive()

    def leave(self) -> None:
        self._file.close()


@pytest.mark.timeout(20)
def test_a_pmi_server_tells_ranks_of_each_other() -> None:
    """What libraries of one node need (tests/cli trains over it), and the values that they put for others."""
    server = PmiServer(2)
    one, two = PmiRank(server, 0), PmiRank(server, 1)
    server.started()
    assert "rc=0" in one.ask("cmd=init pmi_version=1 pmi_subversion=1")
    assert one.ask("cmd=get kvsname=hpctrain key=PMI_process_mapping").endswith("value=(vector,(0,1,2))\n")
    assert one.ask("cmd=put kvsname=hpctrain key=address value=a=b#c") == "cmd=put_result rc=0 msg=success\n"
    assert "rc=-1" in two.ask("cmd=get kvsname=hpctrain key=other")
    assert "rc=-1" in two.ask("cmd=spawn nprocs=1")
    for line in ("cmd=bar", "rier_in\ncmd=get kvsname=hpctrain key=address\n"):  # in pieces, and two at once
        one.send(line)
    assert one.receive().endswith("value=a=b#c\n")  # not out of the barrier
    assert two.ask("cmd=barrier_in") == one.receive() == "cmd=barrier_out rc=0\n"
    assert two.ask("cmd=finalize") == "cmd=finalize_ack rc=0\n"
    one.send("x" * 2**17)  # lost: nobody waits for it
    two.leave()
    assert not server.join(5.0)
    assert server.left == [0], "it has not finalized"
    with pytest.raises(OSError):
        one.send("cmd=init\n")


@pytest.mark.timeout(20)
def test_ranks_on_two_nodes_reach_one_board_through_relays() -> None:
    board, lock = PmiBoard([1, 1]), threading.Lock()
    answers: list[queue.Queue[str]] = [queue.Queue(), queue.Queue()]

    def ask(rank: int, line: str) -> str:
        with lock:
            for other, answer in board.answers(rank, line):
                answers[other].put(answer)
        return answers[rank].get(timeout=10)

    relays = [PmiRelay(RankNumbers(rank, 2, 0, 1), partial(ask, rank)) for rank in range(2)]
    told = [one.environment({"SLURM_PROCID": "7", "HOME": "/home/me"}) for one in relays]
    assert told[1] == {
        "HOME": "/home/me", "HPCTRAIN_TRANSPORTS": "", "PMI_FD": told[1]["PMI_FD"], "PMI_RANK": "1", "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1",
    }  # fmt: skip
    ends = [os.dup(int(one["PMI_FD"])) for one in told]
    for one in relays:
        one.started()

    def asked(end: int, *lines: str) -> str:
        os.write(end, "".join(f"{line}\n" for line in lines).encode())
        return os.read(end, 1000).decode()

    assert asked(ends[0], "cmd=put kvsname=x key=a value=1") == "cmd=put_result rc=0 msg=success\n"
    assert asked(ends[1], "cmd=get kvsname=x key=PMI_process_mapping").endswith("value=(vector,(0,1,1),(1,1,1))\n")
    os.write(ends[0], b"cmd=barrier_in\n")
    assert asked(ends[1], "cmd=abort exitcode=1", "cmd=barrier_in") == "cmd=barrier_out rc=0\n"
    assert os.read(ends[0], 1000) == b"cmd=barrier_out rc=0\n"
    assert asked(ends[1], "cmd=get kvsname=x key=a").endswith("value=1\n")
    for end in ends:
        os.close(end)


def test_a_rank_that_leaves_a_barrier_holds_up_no_answer() -> None:
    server = PmiServer(2)
    one, two = PmiRank(server, 0), PmiRank(server, 1)
    server.started()
    one.send("cmd=barrier_in\n")
    one.leave()
    assert two.ask("cmd=barrier_in") == "cmd=barrier_out rc=0\n"
    assert "rc=0" in two.ask("cmd=finalize")
    two.leave()
    assert not server.join(5.0)


def test_the_starter_imports_no_torch() -> None:
    """It would take two seconds of a start, and 300 MB beside the ranks."""
    code = (
        "import sys, hpctrain.cli.run, hpctrain.cli.ranks, hpctrain_tools.launch.start; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n", done


@pytest.mark.parametrize("job", [{"name": float("nan")}, {"name": "nan", "output_dir": ""}])
def test_the_starter_leaves_a_job_of_wrong_types_to_the_ranks(job: dict[str, object]) -> None:
    assert start._checkpoints_of({"job": job}) == Path("runs/nan/checkpoints")
    assert start._checkpoints_of({"job": 3}) == start._checkpoints_of({})


def test_directories_that_killed_processes_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a starter that lives, what is new, or what is another program's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = (
        "import os, tempfile; from pathlib import Path; from hpctrain_tools.launch.channel_directory import ChannelDirectory\n"
        f"tempfile.tempdir = {str(tmp_path)!r}; link = ChannelDirectory(Path(tempfile.mkdtemp(prefix='hpctrain-')))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", left], timeout=60)
    killed = [*tmp_path.iterdir()]
    (tmp_path / "hpctrain-anothers").mkdir()
    link = ChannelDirectory(Path(mkdtemp(prefix="hpctrain-")))
    assert len(killed) == 1 and all(one.exists() for one in killed), "they may have begun just now"
    for one in tmp_path.iterdir():
        os.utime(one, (0, 0))
    sweep("hpctrain-????????")
    assert {*tmp_path.iterdir()} == {tmp_path / "hpctrain-anothers", link.directory}
    link.close()


def test_memory_of_ranks_that_were_killed_is_removed(tmp_path: Path) -> None:
    """Not what a process maps, what is new, or what another program has made."""
    for name in ("mpich_shm_1_0", "mpich_shm_mapped_0", "mpich_shm_new_0", "other_1"):
        (tmp_path / name).write_bytes(b"\0" * 4096)
        if "new" not in name:
            os.utime(tmp_path / name, (0, 0))
    with (tmp_path / "mpich_shm_mapped_0").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        sweep_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mpich_shm_mapped_0", "mpich_shm_new_0", "other_1"}
