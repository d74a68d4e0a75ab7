"""Runs steps of a job's ranks without values: its real plugins, on tensors that have shapes only, in groups without others.

Ranks that differ in their part of the model only run, one for each pipeline stage, each in a process of its own.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.errors import EnvironmentUnfitError, HpctrainError, UsageError, reason
from hpctrain.base.torch_private import fake_tensors, needs_values, without_modes
from hpctrain.checking.check import CheckedJob
from hpctrain.checkpoint.state import create_state
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import MetaModel, ModelSpec, tensors_in
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.model.build import InitialValues, build_on_meta
from hpctrain.model.mesh import Layout, Meshes, build_meshes, layout_of
from hpctrain.model.parameters import tie, tied_parameters
from hpctrain.planning.lone_group import TRAFFIC, lone_rank, note_functional
from hpctrain.planning.messages import Queue, messages_over
from hpctrain.planning.rank_plan import OTHERS, Exchange, RankPlan
from hpctrain.planning.watch import Watch
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.deadline import deadline_of
from hpctrain.training.feed import Feed
from hpctrain.training.guard.judging import Guard
from hpctrain.training.loop import update
from hpctrain.training.progress import Progress
from hpctrain.training.report import Report
from hpctrain.training.saving import open_store
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel

_FEW = 2, 3, 3
"""Micro batches of the steps that are run, for each pipeline stage. From the second one on, those of one rank need alike. A
pipeline's stages tell each other their shapes in a step with another number of micro batches, which the third one has not."""


class Shapes(InitialValues):
    """A model's parameters without values: from where they get their memory on, all tensors are fake."""

    are_real = False

    def __init__(self, stack: ExitStack, watch: Watch) -> None:
        self._stack, self._watch = stack, watch

    def build(self, spec: ModelSpec, seed: int) -> nn.Module:
        try:
            return build_on_meta(spec)
        except UsageError:
            if isinstance(spec, MetaModel):
                raise
            raise UsageError(
                f"[model] name = {spec.name!r} can't be built on torch's meta device, where a plan builds it; expected a module "
                "that makes its tensors with torch's own functions, without .numpy() or .item()"
            ) from None

    def fill(self, module: nn.Module, spec: ModelSpec, seed: int, home: torch.device) -> None:
        tied = tied_parameters(module)
        self._stack.enter_context(fake_tensors())
        self._stack.enter_context(self._watch)
        module.to_empty(device=home)
        tie(module, tied)


def simulate(checked: CheckedJob, size: int, per_node: int) -> list[RankPlan]:
    """The needs of one rank for each part of the model, where `size` ranks train, `per_node` on a node.

    Raises the errors of building the model and of its data, and EnvironmentUnfitError for a plugin that needs values.
    """
    ranks = different_ranks(layout_of(checked.job, checked.parts, size), checked)
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        queues = {rank: context.Queue() for rank in ranks}
        receivers = []
        for rank in ranks:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_report, args=(sender, checked, rank, size, per_node, len(ranks), queues), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            sender.close()
            receivers.append(stack.enter_context(receiver))
        found: dict[Any, RankPlan] = {}
        while len(found) < len(receivers):
            for ready in wait([one for one in receivers if one not in found]):
                found[ready] = _received(ready)
        return [found[one] for one in receivers]


def different_ranks(layout: Layout, checked: CheckedJob) -> list[int]:
    """The first rank with each part of the model."""
    parts_of = {
        one.traits.axis for one in checked.parts.parallelism.values() if one.traits.ranks_have == "other parameters"
    }
    ranks = [0]
    for axis, size in layout.axes.items():
        places = range(size) if axis in parts_of else range(1)
        ranks = [rank * size + place for rank in ranks for place in places]
    return ranks


def _received(ready: Any) -> RankPlan:
    try:
        outcome = ready.recv()
    except EOFError:
        raise EnvironmentUnfitError("a process that planned a rank has ended; is there memory left?") from None
    if isinstance(outcome, Exception):
        raise outcome
    found: RankPlan = outcome
    return found


def _report(
    sender: Any, checked: CheckedJob, rank: int, size: int, per_node: int, stages: int, queues: Mapping[int, Queue]
) -> None:
    """Send the rank's plan, or an error that tells why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with messages_over(queues):
            outcome: Any = plan_rank(checked, rank, size, per_node, stages)
    except HpctrainError as error:
        outcome = type(error)(str(error))
    except Exception as error:
        why = "; a plugin or the model needs the values of tensors, and a plan has their shapes only"
        where = "".join(traceback.format_exception(error)[-2:])
        outcome = EnvironmentUnfitError(
            f"this job can't be planned: {type(error).__name__}: {reason(error)}{why if needs_values(error) else ''}\n{where}"
        )
    sender.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def plan_rank(checked: CheckedJob, rank: int, size: int, per_node: int, stages: int = 1) -> RankPlan:
    """Run steps of one rank in this process, which has no torch.distributed. stages: parts of the model on different ranks."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
    job, parts, device = checked.job, checked.parts, torch.device("cpu")
    identity = Identity(rank=rank, size=size, local_rank=rank % per_node, local_size=min(size, per_node), node="plan")
    layout = layout_of(job, parts, size)
    with lone_rank(rank, size), ExitStack() as stack:
        meshes = build_meshes(layout, device)
        hooks = LifeCycle(checked.registry, identity, parts.hooks)
        stack.callback(hooks.close)
        watch = Watch(note_functional)
        model = TrainedModel(job, parts, meshes, identity.node, device, hooks, Shapes(stack, watch))
        with without_modes():
            session = _session(checked, identity, layout, meshes, model, hooks, device)
        stack.callback(session.close)
        loader = session.feed.training_loader(session.progress)
        stack.callback(loader.close)
        hooks.call("hpctrain_state", job=job, identity=identity, model=model)
        create_state(model.optimizer)
        start = watch.peak
        found: list[RankPlan] = []
        for few in _FEW if stages > 1 else _FEW[:2]:
            watch.begin()
            TRAFFIC.clear()
            given = _step(session, loader, few * stages)
            found.append(_figures(session, watch, meshes, per_node, start, given[: few * stages]))
        planned = found[-1].with_micro_batches(len(given), found[1], found[0])
        return replace(planned, inputs=_inputs(given))


def _session(
    checked: CheckedJob, identity: Identity, layout: Layout, meshes: Meshes, model: TrainedModel, hooks: LifeCycle,
    device: torch.device,
) -> Session:  # fmt: skip
    """A session as the loop needs it, with a report that nobody reads."""
    job, parts = checked.job, checked.parts
    feed = Feed(job, parts, meshes.data_rank, layout.data_ranks, identity.node, device, model.split)
    return Session(
        job, parts, identity, device, layout, hooks, Report(identity, RankChannel(False, False)), model, feed,
        store=open_store(job, parts, device), guard=Guard(job.guard), replicas=None,
        deadline=deadline_of(None, 0.0, identity), states=[], progress=Progress(max(feed.steps, len(_FEW))),
    )  # fmt: skip


def _step(session: Session, loader: Loader, most: int) -> list[MicroBatch]:
    """The step of training/loop.py that updates the model, without its figures, which ranks read and exchange.

    Of its micro batches, which are returned, at most `most` run.
    """
    model, step = session.model, session.progress.step
    whole, seen = loader.step()
    micro_batches = whole[:most]
    model.begin_sums(step)
    model.runner.train(micro_batches, 1, step)
    model.sharded.synchronize()
    gradients = model.take_gradients()
    model.totals.square(gradients)
    model.set_learning_rate(step, session.progress.steps)
    update(session, gradients, math.inf, None)
    session.progress.advance(seen)
    return whole


def _figures(
    session: Session, watch: Watch, meshes: Meshes, per_node: int, start: int, given: Sequence[MicroBatch]
) -> RankPlan:
    model = session.model
    parameters = [*model.module.parameters(), *(piece.tensor for piece in model.pieces)]
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    of = {
        "parameters": parameters,
        "gradients": [one.grad for one in parameters if one.grad is not None],
        "optimizer state": [one for one in states if isinstance(one, Tensor)],
    }
    return RankPlan(
        rank=session.identity.rank,
        **{name.replace(" ", "_"): watch.bytes_of(tensors) for name, tensors in of.items()},
        peak=watch.peak,
        at_peak=watch.at_peak(of, OTHERS),
        start=start,
        operators=dict(watch.operators),
        exchanges=_exchanges(meshes, per_node),
        micro_batches=len(given),
        inputs=_inputs(given),
        guesses=watch.guesses,
        axes=dict(session.layout.axes),
    )


def _inputs(micro_batches: Sequence[MicroBatch]) -> int:
    return sum(one.nbytes for micro in micro_batches for one in tensors_in(micro.batch))


def _exchanges(meshes: Meshes, per_node: int) -> list[Exchange]:
    axes = {str(group.group_name): axis for axis, group in meshes.groups().items()}
    calls, nbytes = Counter[tuple[str, str, int, bool]](), Counter[tuple[str, str, int, bool]]()
    for kind, count in TRAFFIC.calls.items():
        inside = len({rank // per_node for rank in kind.members}) == 1
        key = (
            axes.get(kind.group, "all ranks" if kind.ranks == dist.get_world_size() else "some ranks"),
            kind.operation,
            kind.ranks,
            inside,
        )
        calls[key] += count
        nbytes[key] += TRAFFIC.nbytes[kind]
    return [
        Exchange(axis, operation, ranks, count, nbytes[axis, operation, ranks, inside], inside)
        for (axis, operation, ranks, inside), count in calls.items()
        if ranks > 1
    ]
