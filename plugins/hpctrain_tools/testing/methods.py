"""Promises of a plugin's methods that need no run: which are pure, and which do what they say when the kit calls them."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.api import (
    CheckpointFormat,
    Dataset,
    DatasetContext,
    Logger,
    MatrixOptimizer,
    ModelSpec,
    Optimizer,
    Piece,
    Precision,
    Profiler,
    Schedule,
    State,
    Stream,
)
from hpctrain.data.batches import snapshot
from hpctrain.model.parameters import build_optimizer
from hpctrain.model.trials import updates_parts_alike
from hpctrain_tools.testing.hook import hooks_of_steps
from hpctrain_tools.testing.jobs import JOB, LENGTH, VOCABULARY
from hpctrain_tools.testing.kit import Kit
from hpctrain_tools.testing.runs import STEPS
from hpctrain_tools.testing.scripts import examine_scripts

# whether gradients are finite, update by update
_FINITE = (True, True, False, True, True, True, False, False, True, True, True, True)
# scalers try a larger scale every 2000 updates
_UPDATES = 2100
# relative to the largest change of a parameter
_CLOSE = 1e-4
# seconds in which a logger's thread has written a few rows
_CALM = 0.5


def _model(kit: Kit) -> None:
    plugin = kit.made()
    assert isinstance(plugin, ModelSpec)
    with torch.device("meta"):
        module = plugin.build()
    blocks, inner = plugin.blocks(module), list(module.modules())
    if any(all(block is not one for one in inner) for block in blocks):
        kit.breaks("gives blocks of the module", "a block is no part of the module that blocks() is given")
    elif len({id(one) for block in blocks for one in block.modules()}) < sum(len([*one.modules()]) for one in blocks):
        kit.breaks("gives blocks of the module", "a block is there twice, or in another one")
    _target(kit, plugin)


def _target(kit: Kit, plugin: ModelSpec) -> None:
    """Give the model the kit's tokens; one that takes none isn't asked."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    batch = {"input_ids": ids, "labels": ids.clone()}
    method = "forward"
    with suppress(Exception), torch.no_grad():
        outputs = plugin.forward(plugin.build(), batch)
        if torch.equal(batch["labels"], ids):
            method = "loss"
            plugin.loss(outputs, batch)
    if not torch.equal(batch["labels"], ids):
        promise = "leaves the target of its batch, which metrics measure"
        kit.breaks(promise, f"changed it in place in `{method}`, expected a copy")


def _checkpoint(kit: Kit) -> None:
    """Two saves of one run: each snapshot is a copy, of the values at its time, however they have changed."""
    plugin = kit.made()
    assert isinstance(plugin, CheckpointFormat)
    live, writer = torch.arange(12.0).view(3, 4), plugin.writer()
    for save in range(2):
        snapshot = writer.snapshot(State([Piece("model/kit", (3, 4), (0, 0), live)], {"step": save}))
        before = live.clone()
        live.numpy()[:] += 1  # as some programs do, and batch norms, without torch's count of changes
        if not torch.equal(snapshot.pieces[0].tensor, before):
            kit.breaks("a snapshot is a copy", f"that of save {save + 1} has other values than there were")


def _dataset(kit: Kit) -> None:
    """Options that change samples change the fingerprint, by which a resume knows its data."""
    context = DatasetContext(LENGTH, VOCABULARY, JOB["job"]["seed"])
    with suppress(Exception):  # it may need files, or other numbers: its runs tell
        first, print_ = _samples(kit.made(), context)
        if _samples(kit.made(), context)[0] != first:
            return  # it draws
        for key, other in kit.varied():
            with suppress(Exception):
                samples, other_print = _samples(kit.made(**{key: other}), context)
                if samples != first and other_print == print_:
                    kit.breaks("its fingerprint differs where a sample does", f"with {key} = {other} it is the same")


def _samples(plugin: Dataset, context: DatasetContext) -> tuple[object, str]:
    """A few samples, and the fingerprint."""
    source = plugin.open("train", context)
    assert source is not None
    items = [one for one, _ in zip(iter(source), range(3), strict=False)] if isinstance(source, Stream) else [source[0]]
    return [snapshot(item) for item in items], source.fingerprint()


def _optimizer(kit: Kit) -> None:
    plugin, rate = kit.made(), 0.02
    assert isinstance(plugin, Optimizer)
    with suppress(Exception):  # it may need a GPU, or other shapes: its runs tell
        set_later, given, again = (_update(kit.made(lr=lr), rate) for lr in (2 * rate, rate, rate))
        if _differ(given, again):
            return kit.breaks(
                "updates alike from the same values", "a second optimizer of this process updated otherwise"
            )
        if _differ(set_later, given):
            kit.breaks(
                "takes the rate of each group as it is at a step", "a rate that was set in a group has no effect"
            )
        for key, other in kit.varied():
            if key != "lr" and _differ(_update(plugin, rate, **{key: other}), _update(kit.made(**{key: other}), rate)):
                kit.breaks(
                    "takes the options of each group",
                    f"{key} = {other} of a group has another effect than as an option",
                )
        if isinstance(plugin, MatrixOptimizer) or not updates_parts_alike(
            lambda groups: build_optimizer(plugin, groups)
        ):
            return None  # jobs that cut a parameter are refused, in a sentence
        if _differ(_update(plugin, rate, pieces=2), _update(plugin, rate)):
            kit.breaks(
                "updates each element by itself",
                "half of a matrix has another update alone than within the whole, once its gradient is zero",
            )
    return None


def _update(plugin: Optimizer, rate: float, pieces: int = 1, **options: Any) -> Tensor:
    """The change of a matrix in three steps, of which the second has gradients for its lower half only. pieces: parameters that it
    is cut into. options: of its group."""
    draw = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(8, 6, generator=draw) for _ in range(4))
    gradients[1][:4] = 0
    parts = [nn.Parameter(part.clone()) for part in values.chunk(pieces)]
    optimizer = build_optimizer(plugin, [{"params": parts, **dict(plugin.options), **options}])
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # as a run seeds what a step draws
        for gradient in gradients:
            for part, share in zip(parts, gradient.chunk(pieces), strict=True):
                part.grad = share.clone()
            optimizer.step()
    return torch.cat([part.detach() for part in parts]) - values


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > _CLOSE * other.abs().max())


def _schedule(kit: Kit) -> None:
    plugin = kit.made()
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
    for step in range(STEPS):
        of_longer, alone = (one.factor(step, 2 * STEPS) for one in (plugin, kit.made()))
        if of_longer != alone:
            told = f"gave {of_longer:g} for step {step} of {2 * STEPS} behind others of {STEPS}, and {alone:g} alone"
            return kit.breaks("is a pure function of the step", told)
    for key, other in kit.varied():
        used, anew = kit.made(**{key: other}), _anew(kit.plugin)
        if anew is None:
            continue
        fresh = anew(anew.Options(**dict(used.options)))
        for step in range(STEPS):
            if used.factor(step, STEPS) != fresh.factor(step, STEPS):
                told = f"gave {used.factor(step, STEPS):g} for step {step} with {key} = {other}, behind one with other options"
                return kit.breaks("is a pure function of the step", f"{told}, and {fresh.factor(step, STEPS):g} alone")
    return None


def _anew(plugin: Any) -> Any:
    """The class from a second copy of its module, of which nothing has been called; None if it can't be made."""
    with suppress(Exception):  # a module may register what can be there once
        spec = importlib.util.find_spec(plugin.__module__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, plugin.__qualname__)
    return None


def _precision(kit: Kit) -> None:
    plugin = kit.made()
    assert isinstance(plugin, Precision)
    with suppress(RuntimeError, ValueError):  # it looks at the ranks of a job
        for count in range(len(_FINITE) + 1):
            scaler, other = plugin.start(), plugin.start()
            for finite in _FINITE[:count]:
                scaler.update(finite)
            if scaler.scale <= 0:
                return kit.breaks("scales the loss by a number above zero", f"its scale is {scaler.scale}")
            other.restore(scaler.state())
            for later in range(_UPDATES if count == len(_FINITE) else len(_FINITE)):
                if other.scale != scaler.scale or other.state() != scaler.state():
                    found = f"the scale is {other.scale:g} once {scaler.scale:g} was restored, {later} updates later"
                    return kit.breaks("its scaler's state holds all that a resume needs", found)
                for one in (scaler, other):
                    one.update(later % 13 != 12)
    return None


def _logger(kit: Kit) -> None:
    """Read what a logger writes of some rows, as far as it is text: each row, the last ones too, and no step twice."""
    rows = [{"step": step, "time": 1.75e9 + step, "loss": 1 / step, "lr": 0.1} for step in range(1, 15)]
    with suppress(Exception):  # it may need a server: its runs tell
        whole, hasty, again = (
            _lines(kit, name, *parts, calm=calm)
            for name, parts, calm in (
                ("whole", [(0, rows)], _CALM),
                ("hasty", [(0, rows)], 0.0),
                ("again", [(0, rows[:12]), (10, rows[10:])], _CALM),
            )
        )
        if hasty < whole:
            kit.breaks(
                "takes each row", f"{whole - hasty} lines of {whole} are missing where close() follows the last row"
            )
        if again != whole:
            kit.breaks(
                "forgets the rows behind the step that a run resumes from, and no others",
                f"steps 11 and 12 came again after a resume from step 10, and there are {again} lines in place of {whole}",
            )


def _lines(kit: Kit, name: str, *parts: tuple[int, Sequence[dict[str, Any]]], calm: float) -> int:
    """The lines of text below a run's directory, once each part's rows were logged behind a start from its step."""
    directory = kit.directory / name
    directory.mkdir()
    plugin = kit.made()
    assert isinstance(plugin, Logger)
    for step, rows in parts:
        writer = plugin.open(directory, step)
        for row in rows:
            writer.log(dict(row))
        time.sleep(calm)
        writer.close()
    found = 0
    for path in directory.rglob("*"):
        with suppress(UnicodeDecodeError, OSError):
            found += len(path.read_text().splitlines())
    return found


def _profile(kit: Kit) -> None:
    with suppress(RuntimeError, ValueError):  # it looks at the ranks of a job
        plugin = kit.plugin(kit.plugin.Options())
        assert isinstance(plugin, Profiler)
        idle = hooks_of_steps(plugin.start())
        if idle:
            kit.breaks(
                "costs a step nothing where nothing is recorded",
                f"start() with default options returns {', '.join(idle)}; expected what a window needs to join for that time",
            )


PROMISES: dict[str, Callable[[Kit], None]] = {
    "checkpoint": _checkpoint,
    "dataset": _dataset,
    "logger": _logger,
    "model": _model,
    "optimizer": _optimizer,
    "precision": _precision,
    "profile": _profile,
    "schedule": _schedule,
    "scheduler": examine_scripts,
}
