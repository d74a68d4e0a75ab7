"""Plugins of every slot, each of which breaks one promise of its contract; FAULTS says which, and what a run must say."""

from __future__ import annotations

from faulty import model_and_data, steps
from faulty.around_steps import SCHEDULERS, ChangesRows, OpensNothing
from faulty.between_ranks import COMMUNICATORS, CutsAnew, CutsFirst, register
from faulty.fault import FAULTS, Fault, of_slot
from hpctrain.api import hookimpl

__all__ = ["COMMUNICATORS", "FAULTS", "SCHEDULERS", "Fault", "model_and_data", "register", "steps"]


@hookimpl
def hpctrain_model():
    return of_slot("model")


@hookimpl
def hpctrain_dataset():
    return of_slot("dataset")


@hookimpl
def hpctrain_optimizer():
    return of_slot("optimizer")


@hookimpl
def hpctrain_schedule():
    return of_slot("schedule")


@hookimpl
def hpctrain_precision():
    return of_slot("precision")


@hookimpl
def hpctrain_activation_checkpointing():
    return of_slot("activation_checkpointing")


@hookimpl
def hpctrain_checkpoint():
    return of_slot("checkpoint")


@hookimpl
def hpctrain_hook():
    return of_slot("hook")


@hookimpl
def hpctrain_metric():
    return of_slot("metric")


@hookimpl
def hpctrain_parallelism():
    return [*of_slot("parallelism"), CutsFirst, CutsAnew]


@hookimpl
def hpctrain_sharding():
    return of_slot("sharding")


@hookimpl
def hpctrain_compression():
    return of_slot("compression")


@hookimpl
def hpctrain_pipeline_schedule():
    return of_slot("pipeline_schedule")


@hookimpl
def hpctrain_logger():
    return [ChangesRows, OpensNothing]


@hookimpl
def hpctrain_scheduler():
    return SCHEDULERS
