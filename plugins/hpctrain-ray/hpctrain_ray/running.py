"""Runs a job on a Ray cluster from a program: `hpctrain_ray.run`."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from hpctrain.api import Job, UsageError
from hpctrain.base.safe_files import read_bytes, scratch_directory
from hpctrain.job.reading import read_job
from hpctrain.toolkit.commands import EXIT_CANCELLED, EXIT_DONE, EXIT_STOPPED
from hpctrain_ray.connection import connected
from hpctrain_ray.errors import error_of
from hpctrain_ray.options import RayOptions, read_options
from hpctrain_ray.order import Order
from hpctrain_ray.supervisor import Supervisor

_MOST = 2**32
"""Bytes of a run's metrics."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Result:
    """How a job has ended. exit_code: 0, or 75 or 143 for one that has saved and stopped. restarts: those after a loss."""

    exit_code: int
    restarts: int
    directory: Path

    @property
    def losses(self) -> list[float]:
        """The loss of each step of the run, those before a resume included, as metrics.jsonl has them."""
        return [row["loss"] for row in self._rows()]

    @property
    def step(self) -> int:
        """The steps that are complete."""
        return int(max((row["step"] for row in self._rows()), default=0))

    @property
    def loss(self) -> float | None:
        """The loss of the last step; None before the first one."""
        return next(iter(self.losses[::-1]), None)

    def _rows(self) -> list[dict[str, Any]]:
        try:
            lines = read_bytes(self.directory / "metrics.jsonl", _MOST).splitlines()
        except FileNotFoundError:
            return []
        return [row for row in map(json.loads, lines) if "grad_norm" in row]


def run(
    job: Job | Mapping[str, Any] | str | Path,
    ranks: int | None = None,
    overrides: Sequence[str] = (),
    resume: str = "auto",
    **options: Any,
) -> Result:
    """Train a job on the ranks of a Ray cluster, and return when it has ended.

    job: a file that all nodes see, what `hpctrain.load_job` gives, or tables of plain values. ranks: None for as many as the job's
    [scheduler.ray] says. overrides: "table.key=value". resume: "auto", "never" or a checkpoint. options: those of [scheduler.ray],
    on top of the job's.

    Raises EnvironmentUnfitError without a cluster or room on it, and the error that belongs to the exit code of a job that fails
    for good. After a signal that asks to stop, the ranks save, and `exit_code` is 75.
    """
    with _job_file(job) as (path, is_sent):
        tables = read_job(path, overrides).tables
        if not is_sent:
            path = path.absolute()
        chosen = read_options({**table_of(tables), **options})
        order = order_of(tables, chosen, ranks, path, overrides, resume, path.read_text() if is_sent else None)

        def tell(rank: int, stream: str, text: str) -> None:
            print(text, file=sys.stdout if stream == "out" else sys.stderr, flush=True)

        with connected(chosen.address):
            supervisor = Supervisor(order, tell, say)
            with _stopping(supervisor.stop):
                code = supervisor.run()
    if code not in (EXIT_DONE, EXIT_STOPPED, EXIT_CANCELLED) and not supervisor.was_stopped:
        said = supervisor.error or "they said nothing"
        raise error_of(code, f"the ranks on the Ray cluster ended with exit code {code}: {said}")
    return Result(code, supervisor.restarts, output_directory(tables))


def say(sentence: str) -> None:
    """Print a sentence of the supervisor's."""
    print(f"hpctrain: ray: {sentence}", file=sys.stderr, flush=True)


def order_of(
    tables: Mapping[str, Any],
    options: RayOptions,
    ranks: int | None,
    job: Path,
    overrides: Sequence[str] = (),
    resume: str = "auto",
    text: str | None = None,
) -> Order:
    """The order of a job's tables; what the ranks themselves refuse may be of any type here. Raises UsageError."""
    table, communicator = table_of(tables), tables.get("communicator")
    numbers = [table.get(name, 1) for name in ("nodes", "ranks_per_node")]
    if (ranks is not None and ranks < 1) or any(type(one) is not int or one < 1 for one in numbers):
        raise UsageError(
            f"found {ranks} ranks, {numbers[0]!r} nodes and {numbers[1]!r} ranks per node, expected 1 or more"
        )
    count = ranks or options.count or numbers[0] * numbers[1]
    return Order(
        job=job,
        directory=Path.cwd(),
        output=output_directory(tables),
        bundles=options.bundles(count),
        strategy=options.strategy,
        placement_limit=options.placement_limit,
        restarts=options.restarts,
        overrides=tuple(overrides),
        text=text,
        resume=resume,
        over_mpi=isinstance(communicator, Mapping) and communicator.get("name") == "mpi",
    )


def output_directory(tables: Mapping[str, Any]) -> Path:
    """The directory of the run of a job's tables."""
    table = tables.get("job")
    given = table if isinstance(table, Mapping) else {}
    return Path(str(given.get("output_dir") or Path("runs") / str(given.get("name")))).absolute()


def table_of(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table [scheduler.ray] of a job; empty if there is none."""
    targets = tables.get("scheduler")
    table = targets.get("ray", {}) if isinstance(targets, Mapping) else {}
    return table if isinstance(table, Mapping) else {}


@contextmanager
def _job_file(job: Job | Mapping[str, Any] | str | Path) -> Iterator[tuple[Path, bool]]:
    """The job as a file, and whether the file is this program's own, so that the nodes get its content."""
    if isinstance(job, (str, Path)):
        yield Path(job), False
        return
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    try:
        text = tomli_w.dumps(tables)
    except TypeError as error:
        raise UsageError(
            f"hpctrain_ray.run: the job's tables hold a value that other processes can't get ({error}); expected plain values: "
            'name a function or a class as "package.module:name"'
        ) from None
    with scratch_directory("job-") as directory:
        path = directory / "job.toml"
        path.write_text(text)
        yield path, True


@contextmanager
def _stopping(stop: Callable[[int], None]) -> Iterator[None]:
    """Pass on the signals that ask to stop, in the main thread, where Python can take them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: stop(number)) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
