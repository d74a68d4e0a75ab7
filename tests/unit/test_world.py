"""Who am I, from the variables that launchers set."""

from __future__ import annotations

import os
import sys

import pytest

from hpctrain.contracts.identity import Identity
from hpctrain.world.detection import detect, fallback_notice, launched
from hpctrain.world.launcher_channel import on_terminal
from hpctrain.world.meeting import compare_ranks, threads_per_rank
from hpctrain.world.meeting_place import MeetingPlace
from hpctrain.world.slurm import first_host

SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "node2", "SLURM_NTASKS": "4",
}  # fmt: skip


def test_alone() -> None:
    identity = detect({})
    assert (identity.rank, identity.size, identity.local_size, identity.source) == (0, 1, 1, "alone")
    assert not launched({})


def test_a_batch_script_is_no_task() -> None:
    """It has SLURM_NTASKS and SLURM_PROCID, and no step."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert detect(batch).source == "alone" and not launched(batch)


def test_srun_without_mpi_is_one_world() -> None:
    identity = detect(SRUN)
    assert identity == Identity(3, 4, 1, 2, "node2", "slurm")
    assert launched(SRUN)
    notice = fallback_notice(identity)
    assert notice is not None and "--mpi=pmi2" in notice and "4 tasks" in notice
    assert fallback_notice(Identity()) is None


@pytest.mark.parametrize(
    ("per_node", "node", "local"), [("3,1", "0", 3), ("3,1", "1", 1), ("2(x3),5", "3", 5), ("4", "0", 4)]
)
def test_tasks_per_node(per_node: str, node: str, local: int) -> None:
    assert detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}).local_size == local


def test_torchrun() -> None:
    variables = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    identity = detect(variables)
    assert (identity.rank, identity.size, identity.local_rank, identity.local_size) == (5, 8, 1, 4)
    assert identity.source == "torchrun" and launched(variables)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"), ("node[1-2]", "node1"), ("node[03-07,9],other1", "node03"), ("a1,b[2-3]", "a1"),
        ("rack[01-02]n[1-4]", "rack01n1"), ("gpu[7,9-11]x", "gpu7x"),
    ],
)  # fmt: skip
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_ports_are_everyones_and_differ_between_starts() -> None:
    def ports(token: str) -> list[int]:
        return list(MeetingPlace(token, "node1", one_node=False).ports())

    assert ports("slurm.7.0") == ports("slurm.7.0") != ports("slurm.7.1")
    assert len(set(ports("slurm.7.0"))) == 64 and all(1024 < port < 32768 for port in ports("slurm.7.0"))


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(Identity()) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert threads_per_rank(Identity(local_size=3)) == 5
    assert threads_per_rank(Identity(local_size=64)) == 1


def test_ranks_that_differ_are_named_with_their_nodes() -> None:
    """Two ranks in one process: the store is real."""
    import threading

    from torch.distributed import HashStore

    from hpctrain.errors import EnvironmentUnfitError, UsageError
    from hpctrain.world.launcher_channel import LauncherChannel
    from hpctrain.world.meeting import PeerError, World

    def verdicts(plugins: list[list[str]], errors: list[UsageError | None]) -> list[BaseException | None]:
        store, outcomes = HashStore(), [None] * len(plugins)
        channel = LauncherChannel(terminal=False)

        def rank(number: int) -> None:
            world = World(Identity(number, len(plugins), node=f"n{number}"), store, channel)
            try:
                compare_ranks(world, plugins[number], errors[number])
            except Exception as error:
                outcomes[number] = error

        threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(plugins))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return outcomes

    assert verdicts([["a 1"], ["a 1"], ["a 1"]], [None] * 3) == [None] * 3
    differing = verdicts([["a 1"], ["a 1"], ["a 2"]], [None] * 3)
    assert isinstance(differing[0], EnvironmentUnfitError)
    assert "rank 2 on n2: plugins: found a 2; rank 0 on n0 has a 1" in str(differing[0])
    assert all(isinstance(error, PeerError) and error.exit_code == 3 for error in differing[1:])
    everyone = UsageError("bad job")
    bad = verdicts([[], []], [everyone, everyone])
    assert str(bad[0]) == "bad job" and bad[1].exit_code == 2


def test_the_terminal_that_open_mpi_gives_a_rank_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = os.openpty()
    with open(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert on_terminal()
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert not on_terminal()
