"""The slot `scheduler`: where `hpctrain submit` sends a job, and how `hpctrain status`, `runs` and `cancel` ask about it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from hpctrain.contracts.plugin import Plugin

RECORD = "submissions.jsonl"
"""The file of a run's directory that says which jobs it was submitted as."""
JOB_FILE = "job.submitted.toml"
"""The job file in the directory of a submitted run."""
CANCELLED = "cancelled"
"""The file of a run's directory that `hpctrain cancel` makes and the next submission removes."""


@dataclass(frozen=True)
class SubmittedRun:
    """A run: its output directory, its job file there (both absolute), and the content of that file."""

    directory: Path
    job: Path
    text: str

    @property
    def record(self) -> Path:
        """The file with a line for each job of the run, such as {"target": "pbs", "id": "12"}. The last one is asked about. A
        script that submits itself again appends one."""
        return self.directory / RECORD


@dataclass(frozen=True)
class Launch:
    """An order to a scheduler: one run, or several that differ in one value (an array)."""

    name: str
    """The job's name, made of letters, digits, dots, dashes and underscores."""

    directory: Path
    """The directory of the script and the output: the run's, or the one above all runs of an array."""

    runs: tuple[SubmittedRun, ...]
    """The runs in the order of the array; more than one only for a scheduler that `takes_arrays`."""

    working_directory: Path
    """Relative paths of the job start here."""

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int | None
    seconds: int | None
    """The time limit; None for the site's own."""

    save_seconds: int
    """How long before the time limit the ranks are told to save."""

    program: tuple[str, ...]
    """The words of `hpctrain` on this machine. In a container it is just ("hpctrain",)."""

    mpi: Literal["MPICH", "Open MPI"] | None = None
    """The MPI that mpi4py finds here; MPICH stands for all its relatives."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of the job's [environment] that an mpiexec itself reads, such as PRTE_MCA_*: a script that starts the ranks
    with mpiexec exports those that are not set. The ranks set all others."""

    after: tuple[str, ...] = ()
    """The ids of jobs that must end without an error first."""


@dataclass(frozen=True)
class JobState:
    """word: "unknown" if the scheduler has forgotten the job. detail: the rest of the sentence, such as "on node[1-2]"."""

    word: Literal["pending", "running", "done", "failed", "cancelled", "unknown"]
    detail: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the job will still train."""
        return self.word in ("pending", "running")


class Scheduler(Plugin):
    """A kind of scheduler. `hpctrain submit` renders a script, writes it into the run's directory and submits it.

    Its options are the table `[scheduler.NAME]`. `missing` is not for a scheduler's commands: ranks ask it, too. The methods below
    raise EnvironmentUnfitError if this machine lacks a command, and UsageError with the scheduler's own sentence if it refuses.
    """

    script_name: ClassVar[str] = "submit.sh"
    """The name of the script in the run's directory."""

    takes_arrays: ClassVar[bool] = False
    """Whether one script starts several runs; else each gets a script and a job of its own."""

    @abstractmethod
    def render(self, launch: Launch) -> str:
        """The script. It must hold no value of the environment, and run the job again after exit code 75, or end with it. The ranks
        of a cancelled job that have saved exit with 143 instead."""

    @abstractmethod
    def submit(self, script: Path, launch: Launch) -> list[str]:
        """Submit the script that `render` made. Returns the id of each run's job, in the order of `launch.runs`.

        An id is a word of letters, digits and any of `_.:/@+=[]-`: it becomes an argument of the scheduler's commands.
        """

    @abstractmethod
    def state(self, id: str) -> JobState:
        """How the job is."""

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """How several jobs are, for `hpctrain runs`, which asks about each by `state` unless a scheduler overrides this method:
        where one command tells all. Jobs that it has forgotten may be absent."""
        return {id: self.state(id) for id in ids}

    @abstractmethod
    def cancel(self, id: str, directory: Path) -> None:
        """End the job of the run in `directory`; its ranks should get a signal first, so that they save."""
