"""Asks the model of a job on this rank, without training it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from hpctrain.base.errors import EXIT_DONE
from hpctrain.checking.check import CheckedJob
from hpctrain.contracts.identity import Identity
from hpctrain.job.raw import RawJob
from hpctrain.ranks.failure import end_on_signals
from hpctrain.ranks.meeting import World
from hpctrain.ranks.prints import labelled_prints
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.rank import exits_refused
from hpctrain.training.start import Start, agree, communicate, meet, started

Answer: TypeAlias = Callable[[CheckedJob, World, torch.device, LifeCycle], dict[str, Any]]
"""The answer of a job's model to a question; collective, equal on all ranks."""


def answer_on_rank(
    identity: Identity, read: Callable[[], RawJob], answer: Answer, channel: RankChannel
) -> dict[str, Any]:
    """Meet the other ranks, agree on the job, and ask its model."""
    end_on_signals(channel)
    with started(identity, read, channel, (meet, _label_output, agree, communicate)) as start, exits_refused():
        found = answer(start.checked, start.world, start.device, start.hooks)
    return {**found, "exit_code": EXIT_DONE}


def _label_output(start: Start) -> None:
    """Put the rank before users' lines."""
    start.undo.enter_context(labelled_prints(start.identity))
