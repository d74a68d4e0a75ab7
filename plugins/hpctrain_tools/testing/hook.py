"""A hook that keeps what a run of the kit trains, step by step: losses, gradients, parameters, and what ranks disagree on."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.api import (
    Control,
    Field,
    Hook,
    Job,
    LiveModel,
    Membership,
    Options,
    PluginState,
    Request,
    gather_values,
    hookimpl,
    version_of,
)
from hpctrain.contracts.model import tensors_in
from hpctrain.registry.discovery import new_manager, register
from hpctrain_tools.testing.collectives import wrong_collectives
from hpctrain_tools.testing.kept import Kept

DIRECTORY = "record"
"""The directory of a file for each step, which rank 0 writes; beside the run's."""


_Dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


_SETTINGS: dict[str, Callable[[], object]] = {
    "torch.set_grad_enabled": torch.is_grad_enabled,
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.set_num_threads": torch.get_num_threads,
}
_OF_STEPS = {"hpctrain_phase_begin", "hpctrain_phase_end", "hpctrain_outputs", "hpctrain_step_end"}
# a profiler may turn it on for a window
_SETTINGS_AT_END: dict[str, Callable[[], object]] = {
    **_SETTINGS,
    "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
    "torch.set_autocast_enabled": lambda: torch.is_autocast_enabled("cpu"),
    "torch.set_autocast_cache_enabled": torch.is_autocast_cache_enabled,
    "gc.isenabled": gc.isenabled,
}


class RecorderOptions(Options):
    diverges: bool = Field(default=False, description="whether ranks may hold different values between evaluations")
    stop: int = Field(default=0, description="the step after which the run is ended in order; 0 is never")
    still: bool = Field(
        default=False, description="whether dropout modules are turned off, whose draws depend on micro batches"
    )
    nudge: float = Field(
        default=0.0, ge=0, description="the share by which parameters are changed before the first step"
    )
    collectives: bool = Field(default=False, description="whether the operations of the communicator are tried, too")
    keeps: bool = Field(default=False, description="whether checkpoints get tensors and values of many types besides")
    leaves: bool = Field(default=False, description="whether parts that join the run must leave it")


class Recorder(Hook):
    """Keeps what the kit compares."""

    name = "record"
    Options = RecorderOptions
    options: RecorderOptions

    def start(self) -> _Recording:
        return _Recording(self.options)


class _Recording:
    """Recording of one run. Each rank takes part; rank 0 writes. A wrapper's `yield` calls the hooks of the other plugins."""

    def __init__(self, options: RecorderOptions) -> None:
        self._options, self._diverges, self._directory = options, options.diverges, Path()
        # promises that do not hold on this rank, and what was found
        self._notes: list[tuple[str, str]] = []
        # whether a forward has drawn random numbers; the states of the generator behind such forwards, and in which step
        self._draws, self._states = False, dict[int, int]()
        # the parts that have joined the run
        self._parts: list[object] = []
        self._kept = Kept() if options.keeps else None
        self._step = 0
        # the parameters before the evaluation
        self._before: dict[str, Tensor] = {}
        self._settings: dict[str, object] = {}

    @hookimpl
    def hpctrain_state(self) -> PluginState | None:
        return None if self._kept is None else self._kept.state(dist.get_rank(), dist.get_world_size())

    @hookimpl(wrapper=True)
    def hpctrain_job_start(
        self, job: Job, step: int, model: LiveModel, membership: Membership
    ) -> Generator[None, object, object]:
        self._watch(membership)
        self._settings = {name: setting() for name, setting in _SETTINGS_AT_END.items()}
        found = yield
        self._begin(job, step, model)
        if self._options.leaves:
            self._ask(membership, step, model)
        return found

    def _ask(self, membership: Any, step: int, model: LiveModel) -> None:
        """Ask for something that nobody knows."""
        request = Request("kit", {}, lambda values: None)
        if any(membership.call("hpctrain_request", request=request, step=step, model=model)):
            self._note("takes requests of its own name only", "took one for 'kit'")

    def _watch(self, membership: Any) -> None:
        """Note the parts that join and leave."""
        join, leave = membership.join, membership.leave

        def joins(part: object, after: int = 0) -> None:
            self._parts += [] if after else [part]  # later, it is called again
            join(part, after)

        def leaves(part: object) -> None:
            self._parts.remove(part)
            leave(part)

        membership.join, membership.leave = joins, leaves

    def _begin(self, job: Job, step: int, model: LiveModel) -> None:
        self._directory, self._step = job.output_dir.parent / DIRECTORY, step
        self._directory.mkdir(exist_ok=True)
        if self._kept is not None and step:
            self._notes += [("restores what a plugin has saved", f"restored {one}") for one in self._kept.wrong()]
        elif self._kept is not None:
            self._kept.fill()
        if self._options.still:
            for module in model.module.modules():
                if isinstance(module, _Dropout):
                    module.p = 0.0
        if self._options.nudge and step == 0:
            _nudge(model, self._options.nudge)
        if self._options.collectives:
            self._notes += [
                ("the operations of torch.distributed give the right numbers", one)
                for one in wrong_collectives(model.device)
            ]
        if not self._diverges:
            values = self._values(model)
            # a resume may begin with the weights that an optimizer has for evaluations
            self._write(step, {} if step else {"parameters": values})

    @hookimpl(wrapper=True)
    def hpctrain_outputs(self, step: int, batch: Any, outputs: Any) -> Generator[None, object, object]:
        # every micro batch is seeded: who draws has moved on
        fresh, state = torch.Generator().manual_seed(torch.initial_seed()).get_state(), torch.get_rng_state()
        if not torch.equal(state, fresh):
            self._draws = True
            if self._states.setdefault(_checksum(state), step) != step:
                self._note("forwards draw other numbers in each step", "let two steps draw the same random numbers")
        tensors = [one for one in tensors_in((outputs, batch)) if not one.is_inference()]
        before = [version_of(one) for one in tensors]
        found = yield
        if [version_of(one) for one in tensors] != before:
            self._note("looks at outputs and batches", "changed the model's outputs or the batch in hpctrain_outputs")
        return found

    @hookimpl(wrapper=True)
    def hpctrain_step_end(
        self, step: int, metrics: dict[str, Any], model: LiveModel, control: Control
    ) -> Generator[None, object, object]:
        gradients = {} if self._diverges else {name: model.gradient(name).cpu() for name in model.shapes}
        found = yield
        self._compare_settings(_SETTINGS)
        if not model.module.training:
            self._note("leaves the model in training mode", "left the module in evaluation mode")
        kept: dict[str, Any] = {"row": dict(metrics), "gradients": gradients}
        kept["buffers"] = {name: one.detach().cpu().clone() for name, one in model.module.named_buffers()}
        self._step = step
        if not self._diverges:
            kept["parameters"] = self._values(model)
        self._write(step, kept)
        if step == self._options.stop:
            control.stop("the kit resumes it")
        return found

    @hookimpl(wrapper=True)
    def hpctrain_evaluation_start(self, model: LiveModel) -> Generator[None, object, object]:
        self._before = {} if self._diverges else self._values(model)
        found = yield
        if not self._diverges:
            self._values(model)
        return found

    @hookimpl(wrapper=True)
    def hpctrain_evaluation_end(self, model: LiveModel) -> Generator[None, object, object]:
        found = yield
        now = {} if self._diverges else self._values(model)
        other = [name for name, value in now.items() if not torch.equal(value, self._before[name])]
        if other:
            self._note(
                "takes back after an evaluation what it changed for it",
                f"left {other[0]} with other values than before",
            )
        return found

    @hookimpl(trylast=True)
    def hpctrain_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        everyone = gather_values({key: one for key, one in metrics.items() if "second" not in key})
        for rank, other in enumerate(everyone):
            if not all(_same(other.get(key), one) for key, one in everyone[0].items()):
                self._note(
                    "an evaluation gives the same on all ranks", f"gave {other} on rank {rank}, {everyone[0]} on rank 0"
                )
        self._write(step, {"evaluation": dict(metrics)})

    @hookimpl(wrapper=True)
    def hpctrain_job_end(self) -> Generator[None, object, object]:
        found = yield
        self._compare_settings(_SETTINGS_AT_END)
        staying = [hook for part in self._parts for hook in hooks_of_steps(part)] if self._options.leaves else []
        if staying:
            self._note("leaves the run when its window is over", f"still has {staying[0]} called at the run's end")
        self._write(self._step, {})
        return found

    def _compare_settings(self, settings: dict[str, Callable[[], object]]) -> None:
        for name, setting in settings.items():
            if setting() != self._settings[name]:
                self._note("leaves torch's settings alone", f"left {name}({setting()}) behind")

    def _values(self, model: LiveModel) -> dict[str, Tensor]:
        """The full parameters; notes what the module has besides, and replicas that differ. Collective."""
        values = {name: model.value(name).cpu() for name in model.shapes}
        here = dict(model.module.named_parameters())
        for name, value in values.items():
            found = here.get(name)
            if found is None or isinstance(found, DTensor) or found.shape != value.shape:
                continue
            if not torch.equal(
                found.detach().cpu().to(value.dtype).nan_to_num(), value.to(found.dtype).to(value.dtype).nan_to_num()
            ):
                self._note(
                    "the module has the values of the pieces",
                    f"left {name} in the module with other values than its pieces have",
                )
        self._compare_replicas(model)
        return values

    def _compare_replicas(self, model: LiveModel) -> None:
        mine = [[one.name, list(one.offsets), list(one.tensor.shape), _checksum(one.tensor)] for one in model.pieces]
        first: dict[str, tuple[int, Any]] = {}
        for rank, pieces in enumerate(gather_values(mine)):
            for name, offsets, shape, checksum in pieces:
                owner, other = first.setdefault(f"{name} {offsets} {shape}", (rank, checksum))
                if other != checksum:
                    self._note(
                        "replicas hold the same numbers",
                        f"left {name} with other values on rank {rank} than on rank {owner}",
                    )

    def _note(self, promise: str, found: str) -> None:
        self._notes.append((promise, found))

    def _write(self, step: int, kept: dict[str, Any]) -> None:
        """Collective."""
        notes = [note for of_rank in gather_values(self._notes) for note in of_rank]
        self._notes = []
        if dist.get_rank() == 0:
            path = self._directory / f"{step:04}.pt"
            before = torch.load(path) if path.exists() else {}
            kept["notes"] = [*before.get("notes", []), *notes]
            kept["draws"] = self._draws
            torch.save({**before, **kept}, path)


def hooks_of_steps(part: object) -> list[str]:
    """The hooks of a module or an object that each step calls: these cost a run something in each of its steps."""
    manager = new_manager()
    register(manager, part, "kit")
    return sorted({caller.name for caller in manager.get_hookcallers(part) or ()} & _OF_STEPS)


def _nudge(model: LiveModel, share: float) -> None:
    """Change each number by its last bit, up or down."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for piece in model.pieces:
            signs = torch.randint(0, 2, piece.tensor.shape, generator=generator) * 2 - 1
            piece.tensor.mul_(1 + share * signs.to(piece.tensor))
    model.refresh()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _same(one: Any, other: Any) -> bool:
    return one == other or (
        isinstance(one, float) and isinstance(other, float) and abs(one - other) <= 1e-6 * abs(other)
    )


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Recorder]
