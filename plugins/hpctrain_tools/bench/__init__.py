"""Measurements of a machine, and of a job on it: its step, its scaling, checkpoints, and other trainers of the same model."""

from hpctrain_tools.bench.measuring import Spread, spread, start_measuring, tell_measured

__all__ = ["Spread", "spread", "start_measuring", "tell_measured"]
