"""The parts of hpctrain for a program's own loop: models, optimizers, samples, metrics, checkpoints."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hpctrain.base.devices import forked_random_state
from hpctrain.base.errors import EXIT_CANCELLED, EXIT_DONE, EXIT_STOPPED, TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checking.check import CheckedJob
from hpctrain.contracts.parallelism import AppliedAxis
from hpctrain.contracts.runner import MicroBatch
from hpctrain.job.tables import Job
from hpctrain.model.mesh import Meshes
from hpctrain.model.parameters import named_tensors
from hpctrain.own_loops.agreement import BACKWARD, END_OF_LOOP, PARAMETERS, Agreement
from hpctrain.own_loops.gradients import parameters_behind, refuse_strangers
from hpctrain.own_loops.jobs import FIRST, check_model, job_tables, refuse_tables
from hpctrain.own_loops.module import OwnModule, OwnOptimizer, own
from hpctrain.own_loops.parameters import LaidOut, Parameters, WholeParameters, changed_models, kept_state, parts_of
from hpctrain.own_loops.steps import OwnSteps, Step
from hpctrain.own_loops.trained import Trained
from hpctrain.ranks import prints
from hpctrain.ranks.detection import detect
from hpctrain.ranks.rank_channel import own_channel
from hpctrain.training.assembly import build, build_frozen
from hpctrain.training.rank import job_of_python
from hpctrain.training.start import TRAINING, Start, started


@contextmanager
def own_loop(
    job: Job | Mapping[str, Any] | str | Path, /, resume: str = "auto", **tables: Mapping[str, Any]
) -> Iterator[Loop]:
    """Start `job` for a loop of your own: on one of the ranks of mpiexec, srun or torchrun, else on the only rank.

    job: a file, tables, or the result of `hpctrain.load_job`. [job] is enough: models and optimizers may come from `Loop.setup`.
    resume: "auto", "never", or a checkpoint. tables: replace keys of the job's tables, such as `dataset={"name": data}`; they may
    hold objects, as in `hpctrain.run`.

    After a signal that asked the job to stop, the context ends with SystemExit(75), or KeyboardInterrupt after Ctrl-C. Errors that
    a user can fix are HpctrainErrors. With several ranks, an error on one rank ends the processes of all.
    """
    identity = detect()
    with (
        job_of_python(job_tables(job, tables, identity.size), "hpctrain.own_loop") as raw,
        started(identity, lambda: raw, own_channel(), TRAINING, resume) as start,
        start.alarmed(),
    ):
        loop, leaving = Loop(start), None
        try:
            try:
                yield loop
            except SystemExit as leave:  # sys.exit() leaves the loop as `break` does
                if leave.code:
                    raise
                leaving = leave
            start.exit_code = loop.end()  # not after an error: other ranks may be elsewhere
        finally:
            loop.close()
    if leaving is not None and start.exit_code == EXIT_DONE:
        raise leaving  # now that all is saved and closed
    if start.exit_code != EXIT_DONE:
        raise KeyboardInterrupt if loop.is_interrupted else SystemExit(start.exit_code)


class Loop:
    """The program's loop on this rank. `own_loop` makes it."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._agreement = Agreement(start.device, alone=start.world.identity.size == 1)
        self._trained: dict[str, Trained] = {}
        # the models of all parameters that were set up; weak, since setup replaces parameters
        self._owners = WeakTensorKeyDictionary()
        # all models that were set up, the frozen ones included
        self._models: dict[str, LaidOut] = {}
        # the step in which the program has last opened parameters, and how often before in that step: a part of their seed
        self._opened = (0, 0)
        self._registered: dict[str, Any] = {}
        self._steps: OwnSteps | None = None

    @property
    def rank(self) -> int:
        """This rank among all, from 0."""
        return self._start.world.identity.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._start.world.identity.size

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._start.device

    @property
    def step(self) -> int:
        """Completed steps; after a resume those of the checkpoint."""
        return 0 if self._steps is None else self._steps.session.progress.step

    @property
    def data_rank(self) -> int:
        """This rank's place, from 0, among the ranks with different samples; ranks that share one copy of the first model have the
        same place. Known after that model's setup."""
        return self._meshes().data_rank

    @property
    def data_size(self) -> int:
        """The number of places that `data_rank` counts."""
        return self._meshes().data_size

    def _meshes(self) -> Meshes:
        if not self._trained:
            raise UsageError(
                "data_rank, data_size: no model is trained yet; expected them after setup(model, optimizer)"
            )
        return next(iter(self._trained.values())).model.meshes

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or the one that the steps began from."""
        return None if self._steps is None else self._steps.session.newest_checkpoint

    @property
    def stopped(self) -> bool:
        """Whether a signal, the job's time limit or `hpctrain cancel` has ended the steps before the last one."""
        return self._steps is not None and self._steps.stopped

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has ended them."""
        return self._steps is not None and self._steps.is_interrupted

    def setup(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        name: str | None = None,
        clip_norm: float | None = None,
        methods: Sequence[str] = (),
        **tables: Mapping[str, Any],
    ) -> Any:
        """Lay a model out over the ranks; returns it and its optimizer, or a frozen model alone. Collective.

        Use the returned model from then on. model: None takes the job's [model]; a model whose parameters all have requires_grad =
        False is frozen. optimizer: one over the model's parameters; the returned one has its class, groups and options. None takes
        the job's [optimizer]. name: in checkpoints and metrics; needed from the second model on. clip_norm: for its gradients, in
        place of the job's. methods: the model's methods besides forward that the loop calls, such as `["encode"]`. tables: those of
        sharding, precision, schedule, compile, compression and activation_checkpointing in which this model differs from the job,
        such as `sharding={"stage": 3}`.
        """
        if self._steps is not None:
            raise UsageError(
                "setup: the loop's steps have begun already; expected every model to be set up before steps()"
            )
        name = name or FIRST
        if name in self._models:
            raise UsageError(f"setup: there is a model {name!r} already; give this one another name=...")
        self._refuse_second_owner(name, model)  # before `build`, which changes the module
        refuse_tables(tables, optimizer)
        if model is not None:
            model.zero_grad()  # gradients from before the loop would be added to the first step's
        if clip_norm is not None:
            tables["optimizer"] = {"clip_norm": clip_norm}
        # a job of its own: the same checks and builders as for `hpctrain run` (docs/decisions/0087)
        checked = check_model(self._start.checked.raw.tables, self.world_size, name, model, optimizer, tables)
        if model is not None and not any(parameter.requires_grad for parameter in model.parameters()):
            if optimizer is not None:
                raise UsageError(f"setup: {name!r} has an optimizer and no parameter with requires_grad = True")
            frozen, meshes = build_frozen(self._start, checked)
            self._models[name] = LaidOut(name, frozen.sharded, meshes, None)
            return self._module(name, frozen.sharded.module, frozen.axes, checked, None, methods)
        built = build(self._start, checked)
        built.refuse_optimizer()
        # else the program, or a scheduler of torch, sets the rates
        by_job = "schedule" in {**self._start.checked.raw.tables, **tables}
        trained = self._trained[name] = Trained(name, built, by_job, self._agreement)
        self._models[name] = LaidOut(name, built.sharded, built.meshes, trained)
        module = self._module(name, built.module, built.axes, checked, trained, methods)
        return module, OwnOptimizer(trained)

    def _module(
        self,
        name: str,
        module: nn.Module,
        axes: Sequence[AppliedAxis],
        checked: CheckedJob,
        trained: Trained | None,
        methods: Sequence[str],
    ) -> OwnModule:
        precision = checked.parts.precision

        @contextmanager
        def calling() -> Iterator[Callable[[Tensor], None] | None]:
            trains = trained is not None and trained.is_training
            if trained is not None and trains:
                trained.forwarding(self.step, self._steps is None or self._steps.is_last)
            with ExitStack() as stack:
                for axis in axes:
                    stack.enter_context(axis.context())
                stack.enter_context(self._start.hooks.phase("forward", self.step))
                stack.enter_context(precision.forward(self.device))
                yield trained.reached if trained is not None and trains else None
            if trained is not None:
                trained.forwarded(trains)

        drop = None if trained is None else trained.zero_grad  # a frozen model has no gradients
        return own(name, module, precision.parameter_dtype, calling, drop, methods)

    def _refuse_second_owner(self, name: str, model: nn.Module | None) -> None:
        for key, parameter in [] if model is None else model.named_parameters():
            if parameter in self._owners:
                raise UsageError(
                    f"setup: {key} of {name!r} is a parameter of {self._owners[parameter]!r}, too: two optimizers would change it; "
                    "set up one module that holds both"
                )
            self._owners[parameter] = name

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in the job's precision, for what the program computes outside its models' forwards."""
        return self._start.checked.parts.precision.forward(self.device)

    def register_for_checkpointing(self, **objects: Any) -> None:
        """Keep objects in checkpoints. A resume gives them back when the steps begin.

        Each has `state_dict` and `load_state_dict`, of numbers, texts, lists, dicts and tensors that are equal on all ranks, or
        is a frozen model that setup returned.
        """
        for name, stateful in objects.items():
            laid_out = self._laid_out(stateful)
            if laid_out is not None and laid_out.trained is not None:
                raise UsageError(
                    f"register_for_checkpointing: {laid_out.name!r} is trained: checkpoints have it already"
                )
            if self._steps is not None or name in self._registered or name in self._trained:
                raise UsageError(
                    f"register_for_checkpointing: expected a new name before steps() begins, found {name!r}"
                )
            self._registered[name] = laid_out or stateful

    def steps(self) -> Iterator[Step]:
        """Yield the job's remaining steps, each with its micro batches. Between two steps, metrics are written, checkpoints saved,
        and requests to stop taken. Collective."""
        if self._steps is not None:
            raise UsageError("steps: the loop's steps have begun already; expected one call")
        if not self._trained:
            raise UsageError("steps: no model is trained; expected setup(model, optimizer) before")
        states = [kept_state(name, stateful) for name, stateful in self._registered.items()]
        registered = set(map(id, self._registered.values()))
        unkept = [model for model in self._models.values() if model.trained is None and id(model) not in registered]
        states += [changed_models(unkept)] if unkept else []
        self._steps = OwnSteps(self._start, self._trained, states, self._agreement)
        yield from self._steps

    def backward(self, loss: Tensor, divisor: float | None = None, **named: Any) -> None:
        """Add the loss's gradients to those of the models that it follows from, which the ranks sum. Collective.

        loss: a mean over this rank's micro batch. Its gradients are averaged over the ranks with different samples and over the
        step's micro batches. divisor: divides the gradients instead, for a loss that is a sum, such as the number of tokens of the
        whole batch. named: keywords of Tensor.backward.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainingError(f"backward: found a loss of {kind}, expected a scalar tensor")
        if not loss.requires_grad:
            raise TrainingError(
                "backward: the loss has no gradient, expected one that follows from trained parameters; look for detach(), item() "
                "or no_grad between a model's outputs and the loss"
            )
        steps, models = self._begun("backward"), self._trained.values()
        if steps.is_last:  # this backward sums: the ranks agree that all of them are in it
            self._agreement.on(BACKWARD, self.step)
        # of the global batch: the micro batches of all ranks with different samples, or with parts of the same ones
        parts = steps.session.model.batch_group.size() * steps.dealt
        share = 1 / steps.dealt if divisor is None else parts / steps.dealt / divisor
        scale = max(trained.model.scaler.scale for trained in models)  # models that scale share a scaler, others have 1
        behind = parameters_behind(loss) if steps.is_first else []  # in one step only: the walk takes time
        with self._start.hooks.phase("backward", self.step):
            for trained in models:
                trained.backwarding()
            # strategies sum gradients over ranks and micro batches: divided by the number of parts, the sum is a mean
            (loss * (scale / (parts if divisor is None else divisor))).backward(**named)
        if behind:
            refuse_strangers(behind, [trained.model.module for trained in models])
        for trained in models:  # all of them before any: `backwarded` is collective
            trained.refuse_strays()
        for trained in models:
            trained.backwarded(loss.detach() * share)

    def clip_grad_norm_(self, model: OwnModule, max_norm: float) -> float:
        """Scale the model's gradients to a norm over all ranks of at most `max_norm`; returns the norm before. Collective."""
        laid_out = self._laid_out(model)
        if laid_out is None or laid_out.trained is None:
            raise UsageError(
                "clip_grad_norm_: found a model that is not trained here, expected one that setup returned"
            )
        return laid_out.trained.clip(max_norm)

    @contextmanager
    def parameters(self, model: OwnModule, names: str = "*", whole: bool = True) -> Iterator[Parameters]:
        """A context to read and change a model's parameters and their gradients, on every layout. Collective.

        The context gives pairs of name and parameter, as `named_parameters` does: whole parameters on every rank, or, with whole =
        False, the parts that this rank updates, which need no memory of their own. `grad` is the gradient that the ranks have
        summed, or None; set it to None to leave a parameter alone. Changes take effect when the context ends. names: a pattern;
        open a large model in parts, or some parameters at a time. Random numbers drawn while you iterate are the same on every
        layout for whole parameters, and on every rank that has the same part.
        """
        laid_out = self._laid_out(model)
        if laid_out is None:
            raise UsageError("parameters: found a model that is not set up here, expected one that setup returned")
        chosen, trained, with_gradients = laid_out.named(names), laid_out.trained, set[str]()
        detail = zlib.crc32(repr((laid_out.name, names, whole)).encode())  # `hash` of a text differs between processes
        if trained is not None:
            with_gradients = trained.open_gradients(self.step, detail)
        else:
            self._agreement.on(PARAMETERS, self.step, detail=detail)
        laid_out.sharded.adopt()  # changes that the program has made outside this context
        if whole:
            laid_out.sharded.consolidate()
        with torch.no_grad(), forked_random_state(self.device):  # the loop's own draws go on as without this context
            if whole:
                copies = WholeParameters(laid_out, chosen, with_gradients, self.device)
                entries: list[tuple[str, Tensor, tuple[int, ...]]]
                entries = [(name, parameter, (0,) * parameter.dim()) for name, parameter in copies.named.items()]
            else:
                entries = [(piece.name, piece.tensor, piece.offsets) for piece in parts_of(laid_out, chosen)]
            self._opened = (self.step, self._opened[1] + 1 if self._opened[0] == self.step else 0)
            seed = derive_seed(self._start.checked.job.job.seed, "parameters", laid_out.name, *self._opened)
            yield Parameters(entries, seed, self.device)
            if whole:
                copies.write_back()
        laid_out.sharded.refresh()  # the pieces have changed
        if trained is not None:
            trained.show_gradients()

    def get_state_dict(self, model: OwnModule) -> dict[str, Tensor]:
        """The full parameters and buffers of a model by name, on every rank. Collective."""
        laid_out = self._laid_out(model)
        trained = None if laid_out is None else laid_out.trained
        if trained is not None:
            trained.model.sharded.adopt()
            trained.model.consolidate()
        values = {}
        for name, tensor in named_tensors(model):
            if trained is not None and name in trained.model.shapes:
                values[name] = trained.model.value(name)
            else:
                values[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        return values

    def _laid_out(self, module: Any) -> LaidOut | None:
        return next((model for model in self._models.values() if model.sharded.module is module), None)

    def _begun(self, method: str) -> OwnSteps:
        if self._steps is None:
            raise UsageError(f"{method}: the loop has no step yet; expected it inside of `for step in loop.steps()`")
        return self._steps

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to this step's row of metrics, which has their means over the ranks."""
        self._begun("log").log(values)

    def save(self) -> None:
        """Save this step when it ends, whatever [checkpoint] says; `checkpoint` is complete when the next step begins.

        A save that fails ends the training. One rank's call is enough.
        """
        self._begun("save").saves = True

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors of one shape (rows, ...) into (world_size * rows, ...). Collective."""
        mine: Tensor = torch.atleast_1d(tensor.detach()).contiguous()
        everyone = mine.new_empty(self.world_size * mine.shape[0], *mine.shape[1:])
        dist.all_gather_single(everyone, mine)
        return everyone

    def reduce(self, tensor: Tensor, reduction: str = "mean") -> Tensor:
        """The "sum" or "mean" of the ranks' tensors. Collective."""
        if reduction not in ("sum", "mean"):
            raise UsageError(f'reduce: found reduction = {reduction!r}, expected "sum" or "mean"')
        total = tensor.detach().clone()
        if reduction == "mean" and not (total.is_floating_point() or total.is_complex()):
            total = total.float()
        dist.all_reduce(total)
        return total / self.world_size if reduction == "mean" else total

    def validation(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro batches of the validation data, the same number on every rank: one whose `counts` is false is
        padding, and no part of the result. Collective."""
        yield from self._begun("validation").validation()

    def print(self, *values: object) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            print(*values, file=prints.own(sys.stdout), flush=True)

    def end(self) -> int:
        """The program has left its loop; the exit code. Collective."""
        if self._steps is not None:
            self._steps.leave()
        self._agreement.on(END_OF_LOOP, self.step)  # a rank that leaves the loop alone is an error on all
        code = EXIT_DONE
        if self.stopped:
            code = EXIT_CANCELLED if self._start.is_cancelled() else EXIT_STOPPED  # a stopped job is to go on
        if self._steps is not None:
            self._steps.finish(code)
        return code

    def close(self) -> None:
        """End background work."""
        if self._steps is not None:
            self._steps.close()
            self._steps.session.close()
        else:
            for trained in self._trained.values():  # no session has taken them
                trained.model.sums.close()
