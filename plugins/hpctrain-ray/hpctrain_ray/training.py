"""A training on a Ray cluster that a program steps from outside: `Training`."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.api import HpctrainError, Job, TrainingError, UsageError
from hpctrain.toolkit.jobs import read_job
from hpctrain.toolkit.starting import RankNumbers
from hpctrain_ray.attendant import Place
from hpctrain_ray.connection import connected
from hpctrain_ray.group import LostStartError, actor_options, first_line, numbers_by_node, places_of
from hpctrain_ray.learner import Learner
from hpctrain_ray.options import read_options
from hpctrain_ray.placement import Placed, place
from hpctrain_ray.rank import Entry, LearnerRank
from hpctrain_ray.rows import data_parts, mean, split
from hpctrain_ray.running import order_of, output_directory, say, table_of
from hpctrain_ray.sentences import last_sentences

_ENTER = 600.0
"""Seconds for all ranks to enter the loop: they meet, build the models and read a checkpoint."""
_CALL = 3600.0
"""Seconds for a call to all ranks. A rank that hangs is found before by the job's watchdog."""
_OTHERS, _LOSS, _POLL = 2.0, 60.0, 0.5
"""Seconds for the errors of other ranks to come after a first one; for Ray to notice a lost node; between two looks."""
_OF_OTHERS = re.compile(r"connect|reset|closed|broken pipe|timed out|remote error|nccl", re.IGNORECASE)
"""The words of a communication that fails because another rank is gone."""
_ASK = 30.0
"""Seconds for what needs one actor or node."""


@dataclass(frozen=True)
class State:
    """A training as it was after a step, for `Training.set_state`. name: of the checkpoint; files: its files by name."""

    name: str
    files: Mapping[str, bytes]

    @property
    def step(self) -> int:
        """The completed steps."""
        return int(self.name.rpartition("-")[2])


class _LostRankError(TrainingError):
    """A rank's process or node is gone."""


class Training:
    """A training whose ranks are actors of a Ray cluster. A context manager: it gives their resources back.

    Every call waits for all ranks. After an error of a rank, which a TrainingError tells, the training is closed.
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
        self._tables = dict(_tables_of(job, overrides))
        chosen = read_options({**table_of(self._tables), **options})
        self._order = order_of(self._tables, chosen, ranks, Path("job"), (), resume)
        if self._order.least is not None:
            raise UsageError(
                "[elastic]: a training that is stepped from outside keeps its number of ranks; leave it out"
            )
        hooks = self._tables.get("hook", [])
        self._tables["hook"] = [*hooks, {"name": "ray-learner"}]
        self._directory = output_directory(self._tables)
        self._parts = data_parts(self._tables, len(self._order.bundles))
        self._make = learner
        self._placed: Placed | None = None
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._numbers: list[RankNumbers] = []
        self._logs: list[str] = []
        self._step, self._saved, self._trained = 0, False, False
        self._restarts = 0
        self._connection = connected(chosen.address, shows=True)
        self._connection.__enter__()
        try:
            self._start(resume)
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
        return self._step

    @property
    def nodes(self) -> list[str]:
        """Ray's name of the node of each rank."""
        return [one.node for one in self._places]

    def train_step(self, batch: Any) -> dict[str, float]:
        """Train a step on a batch, whose rows are split over the data-parallel ranks; the mean of what they tell, and `step`.

        batch: (rows, ...) tensors or arrays, in dicts, lists and tuples; or a list of Ray's references, one for each data-parallel
        rank. After a loss of ranks they are placed anew and go on from the newest checkpoint: `step` then goes back.
        """
        given = self._deal(batch)
        while True:
            try:
                told = self._call("train", given)
                break
            except _LostRankError as error:
                self._replace(error)
        self._step, self._trained, self._saved = told[0][0], True, False
        return {**mean([found for _, found in told]), "step": float(self._step)}

    def evaluate(self, batch: Any) -> dict[str, float]:
        """The mean over the ranks of what the learner measures on a batch, which is split as that of `train_step`."""
        return mean(self._call("evaluate", self._deal(batch)))

    def weights(self, name: str = "model") -> Any:
        """A reference of Ray's to the full weights of a model, {name: tensor} on the CPU: many actors may read the one copy.

        name: the learner's attribute.
        """
        return self._call("weights", [name] * len(self._actors))[0][0]

    def save(self) -> Path:
        """Save a checkpoint of the newest step; its directory. The ranks leave the loop for it and enter it again."""
        if self._trained and not self._saved:
            self._call("leave")
            self._enter("auto")
            self._saved, self._trained = True, False
        return self._checkpoints / str(self._first("newest_checkpoint", self._checkpoints))

    def get_state(self) -> State:
        """The whole state, as a checkpoint has it: models, optimizers, step, and what the learner has registered."""
        self.save()
        return State(*self._first("read_checkpoint", self._checkpoints))

    def set_state(self, state: State) -> None:
        """Go on from a state of this training, or of another one of the same job."""
        directory = self._directory / "states" / secrets.token_hex(4) / state.name
        self._first("write_checkpoint", directory, dict(state.files))
        self._end()
        self._start(str(directory))

    def close(self) -> None:
        """Save the newest step if it is trained and not saved, and give the cluster's resources back."""
        try:
            if self._actors and self._trained and not self._saved:
                self._trained = False
                self._call("leave")
        finally:
            self._end()
            self._connection.__exit__(None, None, None)

    @property
    def _checkpoints(self) -> Path:
        return self._directory / "checkpoints"

    def _deal(self, batch: Any) -> list[Any]:
        """Each rank's part of a batch: those of one copy of the model get the same."""
        import ray

        parts, copies = split(batch, self._parts), len(self._order.bundles) // self._parts
        if copies > 1:
            parts = [one if isinstance(one, ray.ObjectRef) else ray.put(one) for one in parts]
        return [part for part in parts for _ in range(copies)]

    def _start(self, resume: str) -> None:
        import ray

        self._placed = place(self._order, _none, lambda: False, say)
        assert self._placed is not None  # nobody asks it to stop
        actors = [
            ray.remote(LearnerRank).options(**actor_options(self._placed, index)).remote(self._make)
            for index in range(len(self._placed.bundles))
        ]
        self._actors = actors
        places = places_of(actors)
        self._numbers = numbers_by_node(places)
        by_rank = sorted(range(len(actors)), key=lambda index: self._numbers[index].rank)
        self._actors, self._places = [actors[index] for index in by_rank], [places[index] for index in by_rank]
        self._numbers = [self._numbers[index] for index in by_rank]
        self._logs = ray.get([one.log_file.remote() for one in self._actors], timeout=_ASK)
        self._enter(resume)
        self._trained, self._saved = False, False

    def _enter(self, resume: str) -> None:
        token, secret = secrets.token_hex(8), secrets.token_bytes(32)
        host, directory = self._places[0].address, self._order.directory
        entries = [Entry(number, token, secret, host, self._tables, directory, resume) for number in self._numbers]
        self._step = self._call("enter", entries, _ENTER)[0]

    def _replace(self, error: HpctrainError) -> None:
        """Place the ranks anew after a loss, as often as they may start again. Raises TrainingError."""
        while True:
            self._restarts += 1
            if self._restarts > self._order.restarts:
                raise TrainingError(f"{error}; [scheduler.ray] restarts = {self._order.restarts} are used up") from None
            say(f"{error}; restart {self._restarts} of {self._order.restarts}")
            try:
                self._start("auto")
                return
            except (_LostRankError, LostStartError) as another:
                self._end()
                error = another

    def _call(self, method: str, arguments: Sequence[Any] | None = None, seconds: float = _CALL) -> list[Any]:
        """Every rank's answer. After an error of one, all are ended. Raises TrainingError or the rank's own HpctrainError."""
        import ray

        if not self._actors:
            raise TrainingError("the training is closed; make another one, which goes on from the newest checkpoint")
        given = [()] * len(self._actors) if arguments is None else [(one,) for one in arguments]
        asked = [getattr(actor, method).remote(*one) for actor, one in zip(self._actors, given, strict=True)]
        left = list(asked)
        try:
            while left:
                ready, left = ray.wait(left, timeout=seconds)
                if not ready:
                    late = ", ".join(str(asked.index(one)) for one in left)
                    raise TrainingError(f"rank {late} did not finish {method} within {seconds:.0f} s")
                for one in ready:
                    ray.get(one)
            return list(ray.get(asked))
        except (ray.exceptions.RayError, TrainingError) as error:
            found = self._error(method, asked, error)
            self._end()
            raise found from None

    def _error(self, method: str, asked: Sequence[Any], error: Exception) -> HpctrainError:
        """The events of a call, as one sentence: a rank's own error, what one said before it ended, or the loss of one."""
        import ray

        if isinstance(error, TrainingError):
            return error
        errors = self._errors(asked, _OTHERS, everybody=method == "enter")
        if not _ended(errors) and any(_OF_OTHERS.search(str(one)) for one in errors.values()):
            errors = self._errors(asked, _LOSS, everybody=False)
        for rank, found in errors.items() if not _ended(errors) or method == "enter" else ():
            if isinstance(found, ray.exceptions.RayTaskError):
                cause = getattr(found, "cause", None)
                if isinstance(cause, HpctrainError):
                    return cause
                where = self._places[rank].address
                return TrainingError(
                    f"rank {rank} failed in {method} on {where}: {type(cause).__name__}: {first_line(found)}"
                )
        said = [f"rank {rank}: {'; '.join(words)}" for rank in errors if (words := self._said(rank))]
        if said and method == "enter":  # where a rank refuses the job, and would again
            return TrainingError(said[0])
        lost = ", ".join(f"rank {rank} on {self._places[rank].address}" for rank in errors) or "a rank"
        why = said[0] if said else "killed, out of memory, or its node left the cluster"
        return _LostRankError(f"{lost} was lost in {method}: {why}")

    def _errors(self, asked: Sequence[Any], seconds: float, everybody: bool) -> dict[int, Exception]:
        """The errors of ranks within `seconds`; unless of everybody, the end of one rank's process is enough."""
        import ray

        until = time.monotonic() + seconds
        while True:
            ready, left = ray.wait(list(asked), num_returns=len(asked), timeout=_POLL)
            found = {rank: error for rank, one in enumerate(asked) if one in ready and (error := _error_of(one))}
            if not left or (_ended(found) and not everybody) or time.monotonic() > until:
                return found

    def _said(self, rank: int) -> list[str]:
        """The last words of a rank that has ended; nothing if its node is gone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self._places[rank].node, soft=False)
        with suppress(ray.exceptions.RayError, TimeoutError):
            read = ray.remote(last_sentences).options(num_cpus=0, scheduling_strategy=where)
            found: Any = read.remote(self._logs[rank])
            return list(ray.get(found, timeout=_ASK))
        return []

    def _first(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer."""
        import ray

        if not self._actors:
            raise TrainingError("the training is closed")
        try:
            return ray.get(getattr(self._actors[0], method).remote(*arguments), timeout=_CALL)
        except (ray.exceptions.RayError, TimeoutError) as error:
            cause = getattr(error, "cause", None)
            raise (
                cause if isinstance(cause, HpctrainError) else TrainingError(f"{method}: {first_line(error)}")
            ) from None

    def _end(self) -> None:
        import ray

        for actor in self._actors:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        self._actors = []
        if self._placed is not None:
            with suppress(ray.exceptions.RayError):
                self._placed.remove()
            self._placed = None


def _none(least: int, most: int) -> Any:
    raise AssertionError("not elastic")


def _ended(errors: Mapping[int, Exception]) -> bool:
    """Whether the process of one of these ranks has ended."""
    import ray

    return any(isinstance(one, ray.exceptions.RayActorError) for one in errors.values())


def _error_of(reference: Any) -> Exception | None:
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        return error
    return None


def _tables_of(job: Job | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(job, (str, Path)):
        return read_job(Path(job), overrides).tables
    if overrides:
        raise UsageError("overrides: found some for tables, expected them for a job file: change the tables instead")
    return job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else job
