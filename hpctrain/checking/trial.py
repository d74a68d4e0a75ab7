"""What `hpctrain check` tries out on top of the job's check: what `hpctrain run` would meet once its ranks have started."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch
from torch import nn

from hpctrain.checking.choices import choices, lacking
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plan import Machine, Plan
from hpctrain.devices import device_of_rank
from hpctrain.errors import EXIT_TRAINING, HpctrainError
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.tables import Job
from hpctrain.plugins.blame import raised_in
from hpctrain.plugins.registry import Registry

BUILDING_SECONDS = 20.0
"""How long a model of the user's own may take. One with values can be as large as the job's nodes."""


class _TooSlow(BaseException):
    """No Exception: the user's code is not to catch it."""


def build_outline(spec: ModelSpec, problems: list[PlacedProblem], tries: bool) -> nn.Module | None:
    """The model's modules, on the meta device where they can be built there.

    tries: build a model of the user's own, too; None where that takes longer than BUILDING_SECONDS.
    """
    try:
        if spec.meta:
            return spec.build_on_meta()
        if tries:
            with _no_longer_than(BUILDING_SECONDS):
                return _built(spec)
    except HpctrainError as error:
        problems.append(PlacedProblem(("model", "name"), str(error), error.exit_code))
    except _TooSlow:
        pass  # `notes` tells
    return None


def try_optimizer(optimizer: Optimizer, problems: list[PlacedProblem], registry: Registry) -> None:
    """Build an optimizer of one parameter."""
    try:
        optimizer.build([{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    except HpctrainError as error:
        if isinstance(error.__cause__, (TypeError, ValueError, type(None))):  # else it may want a GPU
            problems.append(PlacedProblem(("optimizer", "name"), str(error), error.exit_code))
    except Exception as error:  # a third party's code: its failure is told with its name
        why = f"[optimizer] name = {optimizer.name!r}: {raised_in(error, registry)}"
        problems.append(PlacedProblem(("optimizer", "name"), why, EXIT_TRAINING))


def notes(job: Job, parts: Parts, plan: Plan, registry: Registry, ranks: int | None) -> list[str]:
    """What is no mistake in the job, in sentences: what this machine lacks, and what was not looked at."""
    machine = Machine(Identity(source="mpi" if ranks is not None and ranks > 1 else "alone"), device_of_rank(0))
    said = [
        f"hpctrain run would refuse this machine: {sentence}"
        for sentence in lacking(choices(job, parts), machine, registry)
    ]
    if plan.outline is None:
        said.append(
            f"[model] name = {parts.model.name!r} was not built within {BUILDING_SECONDS:g} s: its modules are not checked"
        )
    return said


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Raises _TooSlow in the block. Signals, and so this limit, are for the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin, handler = time.monotonic(), signal.signal(signal.SIGALRM, _stop)
    earlier, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if earlier:  # somebody else's limit goes on
            signal.setitimer(signal.ITIMER_REAL, max(earlier - (time.monotonic() - begin), 0.001))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _TooSlow


def _built(spec: ModelSpec) -> nn.Module:
    """On the meta device; with values, as a rank builds it, where the model's own code does not take that."""
    with torch.random.fork_rng(devices=[]):
        try:
            return spec.build_on_meta()
        except HpctrainError:
            return spec.build()
