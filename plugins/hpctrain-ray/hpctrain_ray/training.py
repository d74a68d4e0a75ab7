"""A training on a Ray cluster that a program steps from outside: `Training`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.api import HpctrainError, Job, TrainingError, UsageError
from hpctrain.job.reading import read_job
from hpctrain_ray.connection import connected
from hpctrain_ray.learner import Learner
from hpctrain_ray.learner_group import LearnerGroup, LostRankError
from hpctrain_ray.options import read_options
from hpctrain_ray.placement import place
from hpctrain_ray.rank import Position
from hpctrain_ray.rows import mean, split
from hpctrain_ray.running import order_of, output_directory, say, table_of
from hpctrain_ray.seats import LostStartError

Found = TypeVar("Found")


@dataclass(frozen=True)
class State:
    """A training as it was after a step, for `Training.set_state`. name: of the checkpoint; files: its files by name."""

    name: str
    files: Mapping[str, bytes]

    @property
    def step(self) -> int:
        """The completed steps."""
        return int(self.name.rpartition("-")[2])


class Training:
    """A training whose ranks are actors of a Ray cluster. A context manager: it gives their resources back.

    Every call waits for all ranks, an hour at most. After a loss of ranks, they are placed anew, go on from the newest checkpoint,
    and the call is made again: `step` then goes back. After any other error of a rank, which a TrainingError tells, the training is
    closed.
    """

    def __init__(
        self,
        learner: Callable[[], Learner],
        job: Job | Mapping[str, Any] | str | Path,
        ranks: int | None = None,
        overrides: Sequence[str] = (),
        resume: str = "auto",
        **options: Any,
    ) -> None:
        """Place the ranks, and let them enter the loop.

        learner: makes the learner of each rank: a subclass of Learner, or a function. job, ranks, overrides, resume, options: as of
        `hpctrain_ray.run`; the job needs [job] only. Raises EnvironmentUnfitError without a cluster or room on it, UsageError, and
        TrainingError with what a rank says.
        """
        tables = dict(_tables_of(job, overrides))
        chosen = read_options({**table_of(tables), **options})
        self._order = order_of(tables, chosen, ranks, Path("job"), (), resume)
        if self._order.over_mpi:
            raise UsageError(
                '[communicator] name = "mpi": the ranks of a training that is stepped from outside are processes of Ray, '
                "which MPI does not know; expected gloo or nccl"
            )
        hooks = tables.get("hook", [])
        self._tables = {**tables, "hook": [*hooks, {"name": "ray-learner"}] if isinstance(hooks, list) else hooks}
        self._directory = output_directory(tables)
        self._make = learner
        self._group: LearnerGroup | None = None
        self._position = Position(0, None)
        self._trained = False
        """Whether the newest step is trained and not complete."""
        self._resume, self._restarts = resume, 0
        self._entered_from: Path | None = None
        """The checkpoint from which the ranks went on when they entered the loop."""
        self._connection = connected(chosen.address, shows=True)
        self._connection.__enter__()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The steps that are trained."""
        return self._position.step

    @property
    def nodes(self) -> list[str]:
        """Ray's name of the node of each rank."""
        return [one.node.id for one in self._ranks().seats]

    def train_step(self, batch: Any) -> dict[str, float]:
        """Train a step on a batch, whose rows are split over the ranks with different samples; the mean of what they tell, and
        `step`.

        batch: (rows, ...) tensors or arrays, in dicts, lists and tuples; or a list of Ray's references, one for each rank with
        different samples.
        """
        found = self._call("train", self._parts(batch))
        self._trained = True
        return {**mean(found), "step": float(self.step)}

    def evaluate(self, batch: Any) -> dict[str, float]:
        """The mean over the ranks of what the learner measures on a batch, which is split as that of `train_step`."""
        return mean(self._call("evaluate", self._parts(batch)))

    def weights(self, name: str = "model") -> Any:
        """A reference of Ray's to the full weights of a model, {name: tensor} on the CPU: one copy for any number of actors.

        name: the learner's attribute. The copy is gone when the ranks are.
        """
        return self._call("weights", [name] * self._ranks().data_size)[0][0]

    def save(self) -> Path:
        """Save a checkpoint of the newest step; its directory."""
        if self._position.checkpoint is None and not self._trained:
            raise UsageError("save: there is no checkpoint yet; expected a step that is trained before")
        self._call("save")
        self._trained = False
        if self._position.checkpoint is None:
            raise TrainingError("save: the ranks were lost before their first checkpoint; the training has begun anew")
        return self._position.checkpoint

    def get_state(self) -> State:
        """The whole state, as a checkpoint has it: models, optimizers, step, and what the learner has registered."""

        def read(_: LearnerGroup) -> State:
            newest = self.save()  # which may have placed other ranks
            return State(newest.name, self._ranks().first("read_checkpoint", newest))

        return self._again(read)

    def set_state(self, state: State) -> None:
        """Go on from a state of this training, or of another one of the same job. Steps that are not saved are lost."""
        directory = self._directory / "states" / secrets.token_hex(4) / state.name
        self._again(lambda ranks: ranks.first("write_checkpoint", directory, dict(state.files)))
        self._end()
        self._resume, self._position, self._entered_from = str(directory), Position(state.step, None), None
        self._start()

    def close(self) -> None:
        """Complete and save the newest step, let the ranks leave the loop, and give the cluster's resources back."""
        group, self._group = self._group, None
        try:
            if group is not None:
                group.call("leave")
        finally:
            if group is not None:
                group.end()
            self._connection.__exit__(None, None, None)

    def _ranks(self) -> LearnerGroup:
        if self._group is None:
            raise TrainingError("the training is closed; make another one, which goes on from the newest checkpoint")
        return self._group

    def _parts(self, batch: Any) -> list[Any]:
        """The parts of a batch, one for each place among the ranks with different samples."""
        import ray

        ranks = self._ranks()
        parts, copies = split(batch, ranks.data_size), len(ranks.seats) // ranks.data_size
        if copies > 1:  # one copy in the object store for the ranks that get the same
            parts = [one if isinstance(one, ray.ObjectRef) else ray.put(one) for one in parts]
        return parts

    def _start(self) -> None:
        """Place the ranks and let them enter the loop; after losses, as often as they may start again."""
        while True:
            placed = place(self._order, lambda: False, say)
            assert placed is not None  # nobody asks it to stop
            try:
                self._group = LearnerGroup(placed, self._make)
                self._position = self._group.enter(self._tables, self._order.directory, self._resume)
                self._trained, self._entered_from = False, self._position.checkpoint
                return
            except (LostRankError, LostStartError) as error:
                self._note_loss(error)
            except BaseException:
                self._end()
                raise

    def _note_loss(self, error: HpctrainError) -> None:
        """Count a loss of ranks. Raises TrainingError if they may not start again."""
        self._end()
        self._restarts += 1
        if self._restarts > self._order.restarts:
            raise TrainingError(f"{error}; [scheduler.ray] restarts = {self._order.restarts} are used up") from None
        say(f"{error}; restart {self._restarts} of {self._order.restarts}")
        if (
            self._position.checkpoint != self._entered_from
        ):  # else a path stays: newer checkpoints may be of another course
            self._resume = "auto"

    def _call(self, method: str, parts: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of every rank; their answers. parts: one for each place among the ranks with different samples, or None."""

        def call(ranks: LearnerGroup) -> list[Any]:
            return ranks.call(method, None if parts is None else [parts[place] for place in ranks.data_ranks])

        told = self._again(call)
        self._position = told[0][0]
        return [found for _, found in told]

    def _again(self, action: Callable[[LearnerGroup], Found]) -> Found:
        """Do something with the ranks, and after a loss of ranks again with new ones."""
        while True:
            try:
                return action(self._ranks())
            except LostRankError as error:
                self._note_loss(error)
                self._start()
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None


def _tables_of(job: Job | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(job, (str, Path)):
        return read_job(Path(job), overrides).tables
    if overrides:
        raise UsageError("overrides: found some for tables, expected them for a job file: change the tables instead")
    return job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else job
