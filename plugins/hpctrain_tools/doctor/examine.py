"""The order of the checks on a rank: start, node, output directory, communication. Rank 0 shows each part's rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpctrain.base.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentUnfitError, HpctrainError, UsageError, reason
from hpctrain.base.launcher_variables import by_srun
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.accelerators import Agreed, agree_on_communicator
from hpctrain.ranks.binding import Binding, bound
from hpctrain.ranks.failure import ignore_terminate, limited, world_of_ranks
from hpctrain.ranks.meeting import World, start_communication, take_device
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.registry.registry import Registry, build_registry
from hpctrain_tools.doctor import communication, directory, launch, node
from hpctrain_tools.doctor.findings import Finding, FindingOfRanks, merged, row_of, tried
from hpctrain_tools.doctor.variables import settings

# shorter than a job's: nobody waits for data or a queue here
_MEETING = timedelta(seconds=120)
_STAGE_SECONDS = 180.0
_MESSAGE_SECONDS = 60.0

Show = Callable[[list[FindingOfRanks], int], None]
"""Takes the rows of a part and the number of ranks; called on rank 0."""


def examine(identity: Identity, channel: RankChannel, path: Path, ranks: int | None, show: Show) -> int:
    """All checks on this rank, with the output directory `path`; the exit code, the same on all ranks.

    ranks: the number that the user expects, if any; UsageError if it is another. EnvironmentUnfitError if the ranks do not
    meet. Between ranks, an error of one ends all.
    """
    variables = settings(os.environ)  # before the meeting, which sets some
    with ExitStack() as stack:
        with limited("the meeting of the ranks", 2 * _MEETING.total_seconds(), channel, identity):
            world = stack.enter_context(world_of_ranks(identity, channel, _MEETING))
        world.share("doctor/ranks", lambda: _expect(ranks, identity))
        code = _Examination(world, show, variables).run(path)
        channel.report_exit(code)
    return code


def _expect(ranks: int | None, identity: Identity) -> None:
    if ranks is not None and ranks != identity.size:
        raise UsageError(
            f"-n {ranks}: the launcher started {identity.size} ranks; expected the same number (or leave -n out)"
        )


class _Examination:
    """The checks on this rank, part by part."""

    def __init__(self, world: World, show: Show, variables: dict[str, str]) -> None:
        """variables: of MPI, networks and other libraries, as this rank was started with."""
        self._variables = variables
        self.world, self.identity, self._show = world, world.identity, show
        self._nodes: list[str] = []  # of each rank; known to rank 0 after the first part
        self._failed = False

    def run(self, path: Path) -> int:
        registry = build_registry()
        self._start(registry)
        with bound(self.world, "auto") as binding:  # as a job's ranks will be
            self._node(binding)
            self._directory(path)
            self._communication(registry)
        code = self.world.share("doctor/code", lambda: EXIT_ENVIRONMENT if self._failed else EXIT_DONE)
        if by_srun():
            ignore_terminate()  # srun ends the other ranks with the first that exits with a failure
        self._collect("end", [], None)  # rank 0 serves the store until all have read the code
        return int(code)

    def _start(self, registry: Registry) -> None:
        identity = self.identity
        mine = launch.software(registry, identity)
        told = {"software": mine, "environment": self._variables, "node": identity.node}
        first = self.world.share("doctor/software", lambda: told)
        findings = launch.compare_software(mine, first["software"], first["node"]) + launch.broken_plugins(registry)
        findings += launch.compare_environment(self._variables, first["environment"], first["node"])
        reports = self._collect("start", findings, identity.node)
        if reports is not None:
            self._nodes = [fact for _, fact in reports]
            found = tried("launcher", lambda: launch.launcher(identity, len(set(self._nodes))))
            everybody = range(identity.size)
            self._tell([row_of(found, everybody, self._nodes), *self._merged(reports)])

    def _node(self, binding: Binding) -> None:
        identity = self.identity
        with self._limited("the checks of the node"):
            findings = [
                tried("devices", node.accelerators),
                tried("open files", lambda: node.open_files(identity)),
                tried("process_vm_readv", lambda: node.neighbours(identity)),
            ]
            if identity.local_rank == 0:
                findings += [tried("locked memory", node.locked_memory), tried("shared memory", node.shared_memory)]
                findings += node.surroundings(node.device(identity))
        reports = self._collect("node", findings, node.cores(binding))
        if reports is not None:
            rows = node.judge_cores([fact for _, fact in reports], self._nodes) + self._merged(reports)
            self._tell(rows + [row_of(one, [0], self._nodes) for one in node.proxies(self._nodes)])

    def _directory(self, path: Path) -> None:
        stage = f"the checks of the directory {path.absolute()} (does its file system answer?)"
        with ExitStack() as stack:

            def make() -> dict[str, Any]:
                with self._limited(stage):
                    return asdict(stack.enter_context(directory.scratch_of_first(path)))

            scratch = directory.TrialDirectory(**self.world.share("doctor/scratch", make))
            with self._limited(stage):
                findings = directory.directory_checks(self.identity, path, scratch)
            reports = self._collect("directory", findings, None)
        if reports is not None:
            self._tell(self._merged(reports))

    def _communication(self, registry: Registry) -> None:
        """The communicator that `auto`, a job's default, takes for all ranks."""
        installed = registry.instances("communicator")
        auto = next((one for one in installed if one.name == "auto"), None)
        agreed, found = (
            None,
            Finding("communicator", "fail", "no communicator `auto` is installed", "reinstall hpctrain"),
        )
        if auto is not None:
            try:
                agreed = agree_on_communicator(self.world, auto, installed, "auto")
                found = Finding("communicator", "ok", agreed.communicator.name)
            except HpctrainError as error:
                advice = "install an MPI (pip install 'hpctrain[mpich]') or torch with gloo"
                found = Finding("communicator", "fail", str(error), advice)
        unused = [] if agreed is None or not agreed.remark else [Finding("devices", "warn", agreed.remark, "")]
        self._tell(
            [row_of(one, range(self.identity.size), self._nodes) for one in (found, *unused)] if self._nodes else []
        )
        if agreed is not None:
            self._talk(agreed)

    def _talk(self, agreed: Agreed) -> None:
        communicator = agreed.communicator
        try:
            with self._limited("the checks of communication"):
                device = take_device(self.world, communicator, agreed.accelerator)
                start_communication(self.world, communicator, _MESSAGE_SECONDS)
                links = communication.measure_links(device)
                speeds = communication.work_speeds(device)
        except RuntimeError as error:  # torch's, and the MPI backend's
            where = f"rank {self.identity.rank} on {self.identity.node}"
            raise EnvironmentUnfitError(
                f"{where} could not communicate over {communicator.name}: {reason(error)}; check the firewall and the "
                "network between the nodes"
            ) from error
        if self._nodes:
            self._tell(communication.judge_links(links, self._nodes) + communication.judge_work(speeds, self._nodes))

    def _collect(self, part: str, findings: Sequence[Finding], fact: Any) -> list[tuple[list[Finding], Any]] | None:
        """Every rank's findings and fact, on rank 0; None elsewhere. EnvironmentUnfitError names ranks that do not answer.

        A rank that waits here has no limit of its own: the rank that it waits for says where it stands.
        """
        key = f"doctor/{part}"
        self.world.tell(key, {"findings": [asdict(one) for one in findings], "fact": fact})
        if self.identity.rank:
            return None
        reports = self.world.collect(key)
        return [([Finding(**one) for one in report["findings"]], report["fact"]) for report in reports]

    def _merged(self, reports: list[tuple[list[Finding], Any]]) -> list[FindingOfRanks]:
        return merged([findings for findings, _ in reports], self._nodes)

    def _tell(self, rows: list[FindingOfRanks]) -> None:
        if self.identity.rank == 0:
            self._failed = self._failed or any(row.state == "fail" for row in rows)
            self._show(rows, self.identity.size)

    def _limited(self, stage: str) -> AbstractContextManager[None]:
        return limited(stage, _STAGE_SECONDS, self.world.channel, self.identity)
