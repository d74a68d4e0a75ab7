"""Who am I, from the variables that launchers set."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from hpctrain_tools.launch.pmi import PmiServer

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import by_srun, first_host, launched, launcher_name, set_variables, share_node
from hpctrain.base.transports import ADDED, forget, shared_memory
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.detection import detect, fallback_notice
from hpctrain.ranks.meeting import compare_ranks
from hpctrain.ranks.meeting_place import MeetingPlace
from hpctrain.ranks.rank_channel import on_terminal

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


def test_torchrun_that_srun_or_pals_started_is_the_launcher() -> None:
    """srun and mpiexec start one agent on each node: their ranks are the agents'."""
    worker = {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    for outer in (SRUN, {"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}):
        identity = detect({**outer, **worker})
        assert (identity.rank, identity.size, identity.source) == (5, 8, "torchrun")
        assert launcher_name({**outer, **worker}) == "torchrun" and not by_srun({**outer, **worker})


FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1"}


def test_flux_starts_tasks_also_inside_slurm_and_an_mpiexec_in_a_task_is_the_launcher() -> None:
    assert launched(FLUX) and launcher_name(FLUX) == "Flux"
    within = {**SRUN, **FLUX, "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert launcher_name(within) == "Flux" and not by_srun(within)
    assert launcher_name({**FLUX, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}) is None
    assert launcher_name({**FLUX, "OMPI_COMM_WORLD_SIZE": "4"}) is None
    assert detect({**FLUX, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}).source == "alone"


def test_scripts_over_mpi_find_the_variables_of_pals_and_flux() -> None:
    pals = {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"}
    set_variables(pals)
    assert (pals["RANK"], pals["WORLD_SIZE"], pals["LOCAL_RANK"]) == ("5", "8", "1")
    flux = dict(FLUX)
    set_variables(flux)
    assert (flux["RANK"], flux["WORLD_SIZE"], flux["LOCAL_RANK"]) == ("1", "2", "1")


@pytest.mark.parametrize(
    ("environment", "shared"),
    [
        ({}, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, False),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, True),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1"}, True),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2"}, False),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_HET_SIZE": "2"}, False),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1", "PALS_RANKID": "0"}, False),
        # of a shell in a step, from which a launcher with PMI starts more ranks
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "8"}, False),
        # Open MPI's or MPICH's mpiexec over two nodes, from a task on one
        ({**SRUN, "SLURM_STEP_NUM_NODES": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, False),
        # srun over two nodes, from a driver under mpirun -n 1
        (
            {**SRUN, "SLURM_STEP_NUM_NODES": "2", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            False,
        ),
        # mpiexec on this node, from a shell in a step
        (
            {
                **SRUN,
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NUM_TASKS": "1",
                "PMI_SIZE": "8",
                "MPI_LOCALNRANKS": "8",
            },
            True,
        ),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "PMI_SIZE": "2"}, True),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2", "PMI_SIZE": "2"}, False),
    ],
)
def test_ranks_are_on_one_node_only_where_their_launcher_says_so(environment: dict[str, str], shared: bool) -> None:
    assert share_node(environment) is shared


def test_the_transport_that_a_user_chose_stays() -> None:
    assert shared_memory({}) == {"UCX_TLS": "self,sm", "FI_PROVIDER": "shm", "OMPI_MCA_btl": "^tcp"}
    assert "UCX_TLS" not in shared_memory({"UCX_TLS": "tcp"}) | shared_memory({"UCX_NET_DEVICES": "mlx5_0:1"})
    assert shared_memory({"UCX_TLS": "", "FI_PROVIDER": "tcp", "OMPI_MCA_btl": "self,tcp"}) == {}


def test_the_ranks_pass_no_transport_on_that_the_starter_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of several nodes that a script submits would take it."""
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    server = PmiServer(1)
    environment = {**os.environ, **server.environment(0)}
    assert environment["UCX_TLS"] == "self,sm"
    forget(environment, {"OMPI_MCA_btl": "^tcp"})
    server.started()
    assert environment["FI_PROVIDER"] == "tcp" and not {"UCX_TLS", "OMPI_MCA_btl", ADDED} & environment.keys()


def test_pals_starts_ranks() -> None:
    assert launched({"PALS_RANKID": "0"}) and launcher_name({"PALS_RANKID": "0"}) == "PALS"


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


def test_ranks_that_differ_are_named_with_their_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Several ranks in one process: the store is real."""
    import threading

    from torch.distributed import HashStore

    from hpctrain.base.errors import UsageError
    from hpctrain.ranks.meeting import PeerError, World
    from hpctrain.ranks.rank_channel import RankChannel

    def verdicts(
        plugins: list[list[str]], errors: list[UsageError | None], nodes: int = 9
    ) -> list[BaseException | None]:
        store, outcomes = HashStore(), [None] * len(plugins)
        channel = RankChannel(terminal=False)

        def rank(number: int) -> None:
            world = World(Identity(number, len(plugins), node=f"n{number % nodes}"), store, channel)
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
    assert not caplog.messages
    assert verdicts([["a 1"]] * 4, [None] * 4, nodes=2) == [None] * 4
    assert "rank 0 is on n0, rank 1 on n1, and so on in turn: neighbours in the mesh talk" in caplog.messages[0]
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
        assert on_terminal(sys.stdout)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert not on_terminal(sys.stdout)


def test_ranks_on_other_hosts_learn_which_streams_a_terminal_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hpctrain_tools.launch.channel_streams import word

    from hpctrain.ranks.rank_channel import attach

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PMI_RANK", "1")  # rank 0 would take this process's standard input
    _, terminal = os.openpty()
    with open(terminal, "w") as shown, open(tmp_path / "err.log", "w") as file:
        for out, err in itertools.product((file, shown, None), repeat=2):
            monkeypatch.setattr(sys, "stdout", out)
            monkeypatch.setattr(sys, "stderr", err)
            text = word()
            channel = attach(Path(text))
            assert (channel.terminal, channel.error_terminal) == (out is shown, err is shown)
    assert "started 1" in capfd.readouterr().err
