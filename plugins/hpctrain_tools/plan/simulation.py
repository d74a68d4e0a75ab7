"""Runs steps and a save of one rank without values: the job's real plugins, on tensors that have shapes only, in groups without
others."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.devices import is_accelerator
from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checkpoint.state import create_state
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.model import MetaModel, ModelSpec, map_tensors, tensors_in
from hpctrain.contracts.pieces import State
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.model.build import InitialValues, build_on_meta
from hpctrain.model.mesh import Layout, Meshes, layout_of, unconnected_meshes
from hpctrain.model.parameters import tie, tied_parameters
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.deadline import deadline_of
from hpctrain.training.feed import Feed
from hpctrain.training.meters.meters import Meters, ModelFlops
from hpctrain.training.model_state import pieces_to_save
from hpctrain.training.progress import Progress
from hpctrain.training.report import Report
from hpctrain.training.saving import open_store, plugin_states
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel
from hpctrain_tools.plan.ledger import bytes_of
from hpctrain_tools.plan.lone_group import TRAFFIC, lone_rank, note_functional
from hpctrain_tools.plan.rank_plan import OTHERS, Exchange, RankPlan, Save
from hpctrain_tools.plan.torch_fake import fake_tensors, foreach_of_fakes, shapes_of_dtensors, without_modes
from hpctrain_tools.plan.watch import Watch

# micro batches of the steps that are run. A further micro batch takes what the second step has more than the first; the peak
# stays, since each micro batch ends before the next.
_FEW = 1, 2
# micro batches of a pipeline, for each stage. Stages tell each other their shapes in a step with another number of micro batches,
# which the third one has not.
_FEW_IN_FLIGHT = 2, 3, 3
_CPU = torch.device("cpu")


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


def plan_rank(
    checked: CheckedJob,
    rank: int,
    size: int,
    per_node: int,
    stages: int = 1,
    device: torch.device | None = None,
    quick: bool = False,
) -> RankPlan:
    """Run steps of one rank in this process, which has no torch.distributed. stages: parts of the model on different ranks.
    device: None for the CPU. quick: a pipeline runs a step less: the shapes that stages tell each other are
    counted, too."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
    device = device or _CPU
    layout = layout_of(checked.job, checked.parts, size)
    identity = Identity(rank=rank, size=size, local_rank=rank % per_node, local_size=min(size, per_node), node="plan")
    with lone_rank(rank, size, device.type), ExitStack() as stack:
        watch = Watch(device.type, note_functional)
        session = _session(checked, identity, layout, device, watch, stack)
        loader = session.feed.training_loader(session.progress)
        stack.callback(loader.close)
        stack.enter_context(foreach_of_fakes())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # the compiler takes no tensors without values
        stack.enter_context(shapes_of_dtensors())
        session.hooks.call("hpctrain_state", job=session.job, identity=identity, model=session.model)
        create_state(session.model.optimizer)
        start = watch.device.peak
        found: list[RankPlan] = []
        loading = math.inf  # of a micro batch: the fastest one had this process for itself
        steps = (_FEW_IN_FLIGHT[:2] if quick else _FEW_IN_FLIGHT) if stages > 1 else _FEW
        for few in steps:
            watch.begin()
            TRAFFIC.clear()
            given = _step(session, loader, few * stages)
            loading = min(loading, *(one.load_seconds for one in given))
            found.append(_figures(session, watch, per_node, start, given[: few * stages]))
        idle = session.model.runner.idle_share(len(given))
        fewer, more = found[:2] if stages > 1 else found[-2:]
        planned = found[-1].with_micro_batches(len(given), more, fewer, peak_grows=stages > 1)
        seen = _inputs(given[: found[-1].micro_batches]) if is_accelerator(device) else 0
        uneven = len({_inputs([micro]) for micro in given}) > 1
        return replace(
            planned, inputs=_inputs(given), waiting_inputs=_inputs(given) - seen, save=_save(session, watch), idle=idle,
            uneven=uneven, loading=len(given) * loading,
        )  # fmt: skip


def _session(
    checked: CheckedJob, identity: Identity, layout: Layout, device: torch.device, watch: Watch, stack: ExitStack
) -> Session:
    """A session as the loop needs it, with a report that nobody reads. Its model has no values; its samples have."""
    job, parts = checked.job, checked.parts
    meshes = unconnected_meshes(layout, device)
    hooks = LifeCycle(checked.registry, identity, parts.hooks)
    stack.callback(hooks.close)
    model = TrainedModel(job, parts, meshes, device, hooks, Shapes(stack, watch))
    watch.name_modules(model.module)
    with without_modes():
        feed = Feed(job, parts, meshes.data_rank, layout.data_ranks, identity.node, _CPU, model.split)
        session = Session(
            job, parts, identity, device, layout, hooks, Report(identity, RankChannel(False, False)), model, feed,
            store=open_store(job, parts, _CPU), replicas=[],
            deadline=deadline_of(None, 0.0, identity), states=[], progress=Progress(max(feed.data.steps, 3)),
            meters=Meters(_CPU, parts.precision, [], {}, ModelFlops(1, countable=False, is_forward=bool)),
        )  # fmt: skip
    stack.callback(session.close)
    return session


def _step(session: Session, loader: Loader, most: int) -> list[MicroBatch]:
    """The step of training/loop.py that updates the model, without its figures, which ranks read and exchange.

    Of its micro batches, which are returned, at most `most` run.
    """
    model, step = session.model, session.progress.step
    whole, seen = loader.step()
    whole = sorted(whole, key=lambda micro: -_inputs([micro]))  # those that need the most
    micro_batches = whole[:most]
    if is_accelerator(session.device):
        here = partial(map_tensors, lambda tensor: tensor.to(session.device))
        micro_batches = [replace(one, batch=here(one.batch)) for one in micro_batches]
    model.begin_sums(step)
    model.runner.train(micro_batches, 1, step)
    model.sharded.synchronize()
    gradients = model.take_gradients()
    model.totals.square(gradients)
    model.set_learning_rate(*session.schedule_place(model))
    model.update(step, gradients, math.inf)
    session.progress.advance(seen)
    return whole


def _figures(session: Session, watch: Watch, per_node: int, start: int, given: Sequence[MicroBatch]) -> RankPlan:
    of = _kept(session)
    here = {name: [one for one in tensors if one.device.type == session.device.type] for name, tensors in of.items()}
    origins = watch.device.origins_at_peak(here)
    return RankPlan(
        rank=session.identity.rank,
        parameters=bytes_of(here["parameters"]),
        gradients=bytes_of(here["gradients"]),
        optimizer_state=bytes_of(here["optimizer state"]),
        peak=watch.device.peak,
        at_peak=watch.device.at_peak(here, OTHERS),
        origins={f"{one.module}: {one.operator}".removeprefix(": "): nbytes for one, nbytes in origins.items()},
        host=watch.host.peak,
        start=start,
        operators=list(watch.operators.items()),
        exchanges=_exchanges(session.model.meshes, per_node),
        micro_batches=len(given),
        inputs=_inputs(given),
        waiting_inputs=0,
        guesses=watch.guesses,
        axes=dict(session.layout.axes),
    )


def _kept(session: Session) -> dict[str, list[Tensor]]:
    """The tensors that stay between steps."""
    model = session.model
    parameters = [*model.module.parameters(), *(piece.tensor for piece in model.pieces)]
    states = [value for state in model.optimizer.state.values() for value in state.values()]
    return {
        "parameters": parameters,
        "gradients": [one.grad for one in parameters if one.grad is not None],
        "optimizer state": [one for one in states if isinstance(one, Tensor)],
    }


def _save(session: Session, watch: Watch) -> Save:
    """The memory that a save takes, until its pieces are written."""
    watch.begin()
    model = session.model
    model.sums.consolidate()
    model.consolidate()
    pieces = pieces_to_save(model, model.optimizer, plugin_states(session))
    nbytes, kept = sum(one.tensor.nbytes for one in pieces), None
    if session.job.checkpoint.asynchronous:
        kept = session.parts.checkpoint.writer().snapshot(State(pieces, {}))
    host = watch.host.peak if is_accelerator(session.device) else 0
    found = Save(nbytes, watch.device.peak, host)
    del kept
    return found


def _inputs(micro_batches: Sequence[MicroBatch]) -> int:
    return sum(one.nbytes for micro in micro_batches for one in tensors_in(micro.batch))


def _exchanges(meshes: Meshes, per_node: int) -> list[Exchange]:
    axes = {str(group.group_name): axis for axis, group in meshes.groups().items()}
    calls, nbytes = Counter[tuple[str, str, int, int]](), Counter[tuple[str, str, int, int]]()
    for kind, count in TRAFFIC.calls.items():
        key = (
            axes.get(kind.group, "all ranks" if kind.ranks == dist.get_world_size() else "some ranks"),
            kind.operation,
            kind.ranks,
            _in_node(kind.members, per_node),
        )
        calls[key] += count
        nbytes[key] += TRAFFIC.nbytes[kind]
    return [
        Exchange(axis, operation, ranks, count, nbytes[axis, operation, ranks, in_node], in_node)
        for (axis, operation, ranks, in_node), count in calls.items()
        if ranks > 1
    ]


def _in_node(members: Sequence[int], per_node: int) -> int:
    """The ranks of this group of an axis, and of all others like it, that share a node: of the node with the fewest."""
    if dist.get_world_size() <= per_node or len(members) == 1:
        return len(members)
    spacing = members[1] - members[0]
    if per_node % (len(members) * spacing) == 0:
        return len(members)
    return max(1, min(per_node // spacing, len(members) - 1))
