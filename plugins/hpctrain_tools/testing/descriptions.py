"""Promises that need no run: what a plugin says of itself, and methods that are pure."""

from __future__ import annotations

import ast
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args, get_type_hints

import torch
from pydantic import ValidationError

from hpctrain.api import (
    EnvironmentUnfitError,
    JobState,
    Launch,
    ModelSpec,
    Precision,
    Schedule,
    Scheduler,
    SubmittedRun,
    UsageError,
)
from hpctrain_tools.testing.kit import Kit
from hpctrain_tools.testing.runs import STEPS

# modules of hpctrain whose every name is public
_PUBLIC = ("api", "toolkit", "testing")
# scalers try a larger scale every 2000 updates
_UPDATES = 2100
_WORDS = get_args(get_type_hints(JobState)["word"])


def describe(kit: Kit) -> None:
    """Examine promises of every plugin."""
    plugin = kit.plugin
    if not (plugin.__doc__ or "").strip():
        kit.breaks("has a sentence for `hpctrain plugins show`", "its class has no docstring")
    private = [name for name in _imported(plugin.__module__) if not _is_public(name)]
    if private:
        kit.breaks(
            "imports what is public only",
            f"{plugin.__module__} imports {private[0]}, expected hpctrain.api or hpctrain.toolkit",
        )
    silent = [key for key, field in plugin.Options.model_fields.items() if not field.description]
    if silent:
        kit.breaks("describes each option", f"{', '.join(silent)} has no description in Field")
    try:
        plugin.Options(**{**_options(kit), "no_such_option": 1})
    except ValidationError as error:
        if not any(one["type"] == "extra_forbidden" for one in error.errors()):
            missing = [str(one["loc"][0]) for one in error.errors() if one["loc"]]
            if set(missing) - {"no_such_option"}:
                kit.breaks("is made from its options", f"{', '.join(missing)}: give check_plugin a job with them")
    else:
        kit.breaks("refuses unknown options", "its Options take no_such_option = 1")


def _imported(module: str) -> list[str]:
    """The names of hpctrain's that a module imports, such as "hpctrain.mpi.Settings"."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found += [f"{node.module}.{one.name}" for one in node.names]
    return [name for name in found if name.startswith("hpctrain.")]


def _is_public(name: str) -> bool:
    """Whether a name is of the interface of plugins, or in `__all__` of its module."""
    if name.split(".")[1] in _PUBLIC:
        return True
    module, _, last = name.rpartition(".")
    return last in getattr(sys.modules.get(module), "__all__", ())


def made(kit: Kit) -> Any:
    """The plugin with the options of the kit's job."""
    return kit.plugin(kit.plugin.Options(**_options(kit)))


def _options(kit: Kit) -> dict[str, Any]:
    return {key: value for key, value in kit.options.items() if key in kit.plugin.Options.model_fields}


def _model(kit: Kit) -> None:
    plugin = made(kit)
    assert isinstance(plugin, ModelSpec)
    with torch.device("meta"):
        module = plugin.build()
    blocks, inner = plugin.blocks(module), list(module.modules())
    if any(all(block is not one for one in inner) for block in blocks):
        kit.breaks("gives blocks of the module", "a block is no part of the module that blocks() is given")
    elif len({id(one) for block in blocks for one in block.modules()}) < sum(len([*one.modules()]) for one in blocks):
        kit.breaks("gives blocks of the module", "a block is there twice, or in another one")


def _schedule(kit: Kit) -> None:
    plugin = made(kit)
    assert isinstance(plugin, Schedule)
    found: dict[int, float] = {}
    for step in (*range(STEPS), *reversed(range(STEPS)), 0, STEPS - 1):
        factor = plugin.factor(step, STEPS)
        if not isinstance(factor, (int, float)) or not 0 <= float(factor) < math.inf:
            return kit.breaks(
                "gives a factor of zero or more for each step", f"gave {factor!r} for step {step} of {STEPS}"
            )
        if found.setdefault(step, factor) != factor:
            return kit.breaks(
                "is a pure function of the step", f"gave {factor:g} for step {step}, and {found[step]:g} before"
            )
    return None


def _precision(kit: Kit) -> None:
    plugin = made(kit)
    assert isinstance(plugin, Precision)
    try:
        scaler, other = plugin.start(), plugin.start()
        for finite in (True, True, False, True):
            if scaler.scale <= 0:
                return kit.breaks("scales the loss by a number above zero", f"its scale is {scaler.scale}")
            scaler.update(finite)
        other.restore(scaler.state())
        for updates in range(_UPDATES):
            if other.scale != scaler.scale or other.state() != scaler.state():
                found = f"the scale is {other.scale:g} once {scaler.scale:g} was restored, {updates} updates later"
                return kit.breaks("its scaler's state holds all that a resume needs", found)
            for one in (scaler, other):
                one.update(updates % 7 != 0 or updates > 20)
    except (RuntimeError, ValueError):  # it looks at the ranks of a job
        pass
    return None


def _scheduler(kit: Kit) -> None:
    plugin = made(kit)
    assert isinstance(plugin, Scheduler)
    for name in ("kit", "an odd $name's 'place'"):
        directory = kit.directory / name
        directory.mkdir()
        run = SubmittedRun(directory, directory / "job.submitted.toml", "")
        run.job.touch()
        launch = Launch("kit", directory, (run,), directory, 1, 2, 1, 60, 30, ("hpctrain",))
        with suppress(UsageError, EnvironmentUnfitError):  # it may refuse such names, in a sentence
            _look_at(kit, plugin.render(launch), name)
    with suppress(UsageError, EnvironmentUnfitError, OSError):
        state: Any = plugin.state("1")
        if not isinstance(state, JobState) or state.word not in _WORDS:
            kit.breaks("gives a state that hpctrain knows", f"gave {state}, expected one of {', '.join(_WORDS)}")


def _look_at(kit: Kit, script: object, name: str) -> None:
    if not isinstance(script, str):
        return kit.breaks("renders the text of a script", f"rendered {type(script).__name__}")
    if script.startswith("#!") and "sh" in script.splitlines()[0]:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30)
        if done.returncode:
            kit.breaks("renders a script that the shell reads", f"for {name!r}: {done.stderr.strip()}")
    return None


PROMISES: dict[str, Callable[[Kit], None]] = {
    "model": _model,
    "schedule": _schedule,
    "precision": _precision,
    "scheduler": _scheduler,
}
