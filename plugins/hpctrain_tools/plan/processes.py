"""Plans the ranks of a job whose part of the model differs, one for each pipeline stage, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any

import torch

from hpctrain.base.errors import EnvironmentUnfitError, HpctrainError, reason
from hpctrain.checking.check import CheckedJob
from hpctrain.model.mesh import Layout, layout_of
from hpctrain_tools.plan.accelerator import planned_accelerator
from hpctrain_tools.plan.messages import Queue, messages_over
from hpctrain_tools.plan.rank_plan import RankPlan
from hpctrain_tools.plan.simulation import plan_rank
from hpctrain_tools.plan.torch_fake import needs_values


def plan_ranks(
    checked: CheckedJob, size: int, per_node: int, on_cpu: bool = False, quick: bool = False
) -> list[RankPlan]:
    """The needs of one rank for each part of the model, where `size` ranks train, `per_node` on a node, on accelerators or CPUs.
    quick: see plan_rank.

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
                target=_report,
                args=(sender, queues, on_cpu, (checked, rank, size, per_node, len(ranks)), quick),
                daemon=True,
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
    """A rank with each part of the model. Of ranks with parts of samples it is the last, whose tokens see those of the others."""
    traits = {one.traits.axis: one.traits for one in checked.parts.parallelism.values()}
    ranks = [0]
    for axis, size in layout.axes.items():
        places = range(1)
        if axis in traits and traits[axis].cuts_samples:
            places = range(size - 1, size)
        elif axis in traits and traits[axis].ranks_have == "other parameters":
            places = range(size)
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
    sender: Any, queues: Mapping[int, Queue], on_cpu: bool, asked: tuple[CheckedJob, int, int, int, int], quick: bool
) -> None:
    """Send the rank's plan, or an error that tells why there is none. asked: the first arguments of plan_rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    os.dup2(2, 1)  # plugins may print, and standard output is the plan's
    torch.set_num_threads(1)  # a fork has none of the threads of torch's pool, for which it would wait
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        device = torch.device("cpu") if on_cpu else planned_accelerator()
        with messages_over(queues):
            outcome: Any = plan_rank(*asked, device, quick)
    except HpctrainError as error:
        outcome = type(error)(str(error))
    except SystemExit as error:
        outcome = EnvironmentUnfitError(
            f"this job can't be planned: a plugin or the model has ended its process with {error.code!r}"
        )
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
