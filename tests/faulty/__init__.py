"""Plugins of every slot, each of which breaks one promise of its contract: FAULTS says which. A job loads one of the modules."""

from __future__ import annotations

from faulty import around_steps, between_ranks, checkpoints, habits, model_and_data, steps, strangers
from faulty.fault import FAULTS, Fault

__all__ = [
    "FAULTS",
    "Fault",
    "around_steps",
    "between_ranks",
    "checkpoints",
    "habits",
    "model_and_data",
    "steps",
    "strangers",
]
