"""The slot `scheduler`: the target of `hpctrain submit`, which `hpctrain status`, `runs` and `cancel` ask about a job."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from hpctrain.contracts.plugin import Plugin

RECORD = "submissions.jsonl"
"""The file in a run's directory with the jobs that it was submitted as."""
JOB_FILE = "job.submitted.toml"
"""The job file in the directory of a submitted run."""
CANCELLED = "cancelled"
"""The file in a run's directory that `hpctrain cancel` creates and the next submission removes."""


@dataclass(frozen=True)
class SubmittedRun:
    """A run: its output directory, its job file there (both absolute), and the content of that file."""

    directory: Path
    job: Path
    text: str

    @property
    def record(self) -> Path:
        """The file with a line for each job of the run, such as {"target": "pbs", "id": "12"}. Commands ask about the last one. A
        script that submits itself again appends a line."""
        return self.directory / RECORD


@dataclass(frozen=True)
class Launch:
    """An order to a scheduler: one run, or several runs that differ in one value (an array)."""

    name: str
    """The job's name, made of letters, digits, dots, dashes and underscores."""

    directory: Path
    """The directory of the script and the output: the run's, or the one above all runs of an array."""

    runs: tuple[SubmittedRun, ...]
    """The runs in the order of the array; more than one only for a scheduler that `takes_arrays`."""

    working_directory: Path
    """The directory that relative paths of the job start from."""

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int | None
    seconds: int | None
    """The time limit; None for the site's own."""

    save_seconds: int
    """The time before the limit at which the ranks get the signal to save."""

    program: tuple[str, ...]
    """The words of the command `hpctrain` on this machine; in a container just ("hpctrain",)."""

    mpi: Literal["MPICH", "Open MPI"] | None = None
    """The MPI that mpi4py finds here; MPICH stands for all its relatives."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of the job's [environment] that an mpiexec itself reads, such as PRTE_MCA_*: a script that starts the ranks
    with mpiexec exports those that are not set. The ranks set all others."""

    after: tuple[str, ...] = ()
    """The ids of the jobs that must end without an error before this one begins."""


@dataclass(frozen=True)
class JobState:
    """A job's state. word: "unknown" if the scheduler has forgotten it. detail: the sentence's rest, such as "on node[1-2]"."""

    word: Literal["pending", "running", "done", "failed", "cancelled", "unknown"]
    detail: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the job will still train."""
        return self.word in ("pending", "running")


class Scheduler(Plugin):
    """A kind of scheduler. `hpctrain submit` renders a script, writes it into the run's directory and submits it.

    Its options are the table `[scheduler.NAME]`. `missing` must not look for the scheduler's commands: ranks ask it, too. The
    methods below raise EnvironmentUnfitError if this machine lacks a command, and UsageError with the scheduler's own sentence if
    it refuses.
    """

    script_name: ClassVar[str] = "submit.sh"
    """The name of the script in the run's directory."""

    takes_arrays: ClassVar[bool] = False
    """Whether one script starts several runs; else each gets a script and a job of its own."""

    @abstractmethod
    def render(self, launch: Launch) -> str:
        """The script. It must hold no value of the environment, and run the job again after exit code 75, or end with that code.
        The ranks of a cancelled job that have saved exit with 143 instead."""

    @abstractmethod
    def submit(self, script: Path, launch: Launch) -> list[str]:
        """Submit the script that `render` made. Returns the id of each run's job, in the order of `launch.runs`.

        An id is a word of letters, digits and any of `_.:/@+=[]-`: it becomes an argument of the scheduler's commands.
        """

    @abstractmethod
    def state(self, id: str) -> JobState:
        """The state of a job."""

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """The states of several jobs, for `hpctrain runs`. Override it where one command tells all of them. Jobs that the scheduler
        has forgotten may be absent."""
        return {id: self.state(id) for id in ids}

    @abstractmethod
    def cancel(self, id: str, directory: Path) -> None:
        """End the job of the run in `directory`; its ranks should get a signal first, so that they save."""
