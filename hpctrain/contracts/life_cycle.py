"""The slots `hook` and `profile`, and the objects that life-cycle hooks give to plugins and take from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Plugin


class Hook(Plugin):
    """Code that a job turns on with `[[hook]] name = ...`, and that takes part in its life cycle."""

    @abstractmethod
    def start(self) -> object:
        """The object of one run, whose methods marked with `hookimpl` are the life-cycle hooks.

        Called on every rank; all must return the same hooks, since some of them communicate.
        """


class Profiler(Hook):
    """Records the work of ranks, as the table `[profile]` says or when `hpctrain profile RUN_DIR --now` asks a running job.

    Every job starts its profiler, whose default options must record nothing: then `start()` returns an object that costs
    a step nothing. Hooks that are needed in a window of steps join for that time (`Membership`).
    """


class LiveModel(Protocol):
    """The model in training as it lies on this rank: the same object in every hook of a run."""

    @property
    def module(self) -> nn.Module:
        """The module. Depending on layout and strategy, its parameters are whole, parts (DTensors), or empty between forwards."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces of the trained parameters that this rank's optimizer updates. After a step, `piece.tensor.grad` is its
        gradient: clipped, and without the loss scale."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the pieces' tensors. A resume may replace it after `hpctrain_state`."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    @property
    def place(self) -> Mapping[str, tuple[int, int]]:
        """This rank's place on each axis of the mesh, from 0, and the size of the axis; outermost first."""

    @property
    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """The groups of several ranks by the names of their axes, in the same order on all ranks."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The name and the shape of every trained parameter of the full model, equal on all ranks."""

    def refresh(self) -> None:
        """Bring the module up to date after values of the pieces were changed. Collective."""

    def value(self, name: str) -> Tensor:
        """A copy of the full value of a trained parameter, on this rank's device. Collective over all ranks."""

    def gradient(self, name: str) -> Tensor:
        """A copy of the full gradient of a trained parameter after a step; zeros where a program's loop has dropped it. Collective
        over all ranks."""


@dataclass
class Control:
    """A plugin's way to end a training in order."""

    reasons: list[str] = field(default_factory=list)
    """The reasons of this rank's plugins to end it."""
    saves: bool = True
    """Whether this rank's plugins want the last step to be saved."""

    def stop(self, reason: str, save: bool = True) -> None:
        """End the run after this step: the step is saved, `reason` is on the screen, and the exit code is 0.

        One rank's call is enough. save: False for a run whose model nobody wants, such as a measurement. To end a run as a
        failure, raise hpctrain.api.TrainingError instead.
        """
        self.reasons.append(reason)
        self.saves = self.saves and save


class Membership(Protocol):
    """A plugin's way to take part for a while, and to report that it is at work."""

    def join(self, part: object, after: int = 0) -> None:
        """Call the life-cycle hooks of `part`, too: from now on, or after `after` more steps, which costs a step nothing until
        then. All ranks join the same hooks."""

    def leave(self, part: object) -> None:
        """Call the hooks of `part` no more."""

    def busy(self, doing: str) -> None:
        """Tell the watchdog and `hpctrain where` what this rank does. A hook that takes long calls it repeatedly: a rank that has
        not moved for `[watchdog] timeout_seconds` counts as hanging."""


@dataclass(frozen=True)
class Request:
    """A request of another terminal to the running job, through files in the run's directory.

    name: its kind, such as "profile". values: JSON of the asking side, which a plugin has to check. answer: gives the terminal a
    JSON object, which replaces an earlier one; it does nothing on ranks other than 0, and if nobody waits any more.
    """

    name: str
    values: Mapping[str, Any]
    answer: Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PluginState:
    """State that a plugin keeps in checkpoints, under a name that no other of the job has.

    pieces: live tensors, filled at a resume. values: gives small JSON values at each save, equal on all ranks. restore: gets
    them back at a resume. A checkpoint need not have any of it: then the tensors stay as they are, and restore isn't called.
    """

    name: str
    pieces: Sequence[Piece] = ()
    values: Callable[[], dict[str, Any]] = dict
    restore: Callable[[dict[str, Any]], None] = lambda _: None
