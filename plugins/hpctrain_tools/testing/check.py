"""check_plugin: the kit as one call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from pydantic import ValidationError

from hpctrain.api import EnvironmentUnfitError, Identity, Machine, Plugin, UsageError
from hpctrain.base.safe_files import scratch_directory
from hpctrain.registry.registry import Registry, build_registry
from hpctrain.registry.slots import SLOTS
from hpctrain_tools.testing.descriptions import describe
from hpctrain_tools.testing.kit import EnoughError, Finding, Kit
from hpctrain_tools.testing.promises import examine

__all__ = ["BrokenPromiseError", "check_plugin", "find_broken_promises"]


class BrokenPromiseError(AssertionError):
    """A plugin breaks promises of its slot. findings: which, and how it showed."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def check_plugin(
    plugin: type[Plugin] | str, job: Mapping[str, Any] | None = None, ranks: Sequence[int] = (1, 2, 3)
) -> None:
    """Train the plugin in the layouts that its slot promises, and compare: with one process, with hpctrain's own in its place,
    and with itself ended in the middle and resumed, on another layout, too.

    plugin: the class, or "slot.name" of an installed one. job: tables on top of the kit's tiny job, with the options that the
    plugin needs. ranks: numbers of ranks, which the kit starts.

    Raises BrokenPromiseError with a sentence for each promise that does not hold: plugin, slot, promise, and what was found.
    Raises UsageError for what is no plugin, and EnvironmentUnfitError where the plugin says that this machine lacks what it needs.
    """
    findings = find_broken_promises(plugin, job, ranks)
    if findings:
        raise BrokenPromiseError(findings)


def find_broken_promises(
    plugin: type[Plugin] | str,
    job: Mapping[str, Any] | None = None,
    ranks: Sequence[int] = (1, 2, 3),
    first: bool = False,
) -> list[Finding]:
    """The findings of `check_plugin`, none for a plugin that keeps its promises. first: whether one is enough."""
    cls, slot, modules = _found(plugin)
    with scratch_directory("kit-") as directory:
        kit = Kit(cls, slot, job or {}, ranks, modules, directory, first)
        _refuse_missing_options(kit)
        _refuse_machine(kit)
        with suppress(EnoughError):
            examine(kit)
            describe(kit)
    return kit.findings


def _refuse_missing_options(kit: Kit) -> None:
    """Raises UsageError where the plugin needs options that the job does not give."""
    try:
        kit.valid_options()
    except ValidationError as error:
        found = ", ".join(" ".join([*map(str, one["loc"]), one["msg"].lower()]) for one in error.errors())
        raise UsageError(
            f"check_plugin: {kit.slot} {kit.plugin.name!r} can't be made ({found}); give it a job with its options"
        ) from None


def _refuse_machine(kit: Kit) -> None:
    """Raises EnvironmentUnfitError where the plugin can't run on this machine's CPUs: then nothing is known of its promises."""
    lacking = None
    with suppress(Exception):  # what can't be made, or raises, is examined
        plugin = build_registry(kit.modules).make(kit.plugin, kit.plugin.Options(**kit.options))
        lacking = plugin.missing(Machine(Identity(source="mpi"), torch.device("cpu")))
    if lacking:
        raise EnvironmentUnfitError(f"{kit.slot} {kit.plugin.name!r} can't be examined on this machine: {lacking}")


def _found(plugin: type[Plugin] | str) -> tuple[type[Plugin], str, list[str]]:
    """The class, its slot, and the module that a job has to load for it."""
    if isinstance(plugin, str):
        slot, _, name = plugin.partition(".")
        if slot not in SLOTS:
            raise UsageError(
                f'check_plugin: found {plugin!r}, expected a class or "slot.name" with one of {", ".join(SLOTS)}'
            )
        return build_registry(()).find(slot, name).cls, slot, []
    slots = [one.name for one in SLOTS.values() if inspect.isclass(plugin) and issubclass(plugin, one.contract)]
    if not slots:
        raise UsageError(f"check_plugin: found {plugin!r}, expected a subclass of a slot's contract in hpctrain.api")
    slot = "profile" if "profile" in slots else slots[0]
    if _is_of(build_registry(()), plugin, slot):
        return plugin, slot, []
    for module in (plugin.__module__, plugin.__module__.partition(".")[0]):
        with suppress(EnvironmentUnfitError):  # a module without hooks
            if _is_of(build_registry((module,)), plugin, slot):
                return plugin, slot, [module]
    raise UsageError(
        f"check_plugin: {plugin.__module__} has no hook hpctrain_{slot} that returns {plugin.__qualname__}; expected one, marked "
        "with hpctrain.api.hookimpl"
    )


def _is_of(registry: Registry, plugin: type[Plugin], slot: str) -> bool:
    entry = registry.entries.get((slot, plugin.name))
    return entry is not None and (entry.cls is plugin or entry.cls.__qualname__ == plugin.__qualname__)
