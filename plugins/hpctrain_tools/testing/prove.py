"""`hpctrain prove`: a user's own job on one process against each layout, with what re-association explains measured beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from hpctrain.api import UsageError
from hpctrain.base.errors import EXIT_USAGE
from hpctrain.base.safe_files import scratch_directory
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.refusals import has_batch_norms
from hpctrain_tools.testing.record import Distances, Record, distances, first_difference
from hpctrain_tools.testing.runs import MIDDLE, STEPS, Layout, Runs, merged, without_unset

# how often the measured noise a difference may be: noise is of one run, and another order has another
_TIMES = 20
# A difference that rounding in float32 explains
_LEAST = 1e-6
# tables that have no part in what is compared
_LEFT_OUT = ("logger", "scheduler", "profile")


@dataclass(frozen=True)
class Row:
    """A layout, and how far its run is from that of one process. first: what differs first. hint: what that may be."""

    layout: str
    state: str
    distances: Distances | None = None
    first: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Proof:
    """The rows, and the distances that a change of the last bit makes."""

    noise: Distances
    rows: Sequence[Row]

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return all(row.state in ("alike", "refused") for row in self.rows)


def prove(raw: RawJob, layouts: Sequence[Layout], seconds: float) -> Proof:
    """Train the job for a few steps on one process, on each of the layouts, and resumed on others. seconds: the limit of a run.

    Raises UsageError for a job that one process can't train.
    """
    tables, whole = _small(raw), Layout(1)
    checked = check(RawJob(tables, {}, raw.source), 1, tries=True)
    size = checked.job.batch.global_size
    synced = checked.plan.outline is not None and has_batch_norms(checked.plan.outline) and size is not None
    if synced:
        tables = merged(tables, {"batch": {"micro_size": size}})
        layouts = [_synced(layout, size or 1) for layout in layouts]
    with scratch_directory("prove-") as directory:
        runs = Runs(directory, Path.cwd(), seconds)

        def train(layout: Layout, then: Layout | None = None, **options: Any) -> Record:
            return runs.train(tables, layout, then, {"still": synced, **options})

        one = train(whole)
        if one.code:
            raise UsageError(f"one process can't train the job, and there is nothing to compare with: {one.ending}")
        product = checked.parts.precision.product_dtype(torch.device("cpu"))
        noise = distances(train(whole, nudge=torch.finfo(product).eps), one)
        rows = [_row(str(layout), train(layout), one, noise) for layout in layouts]
        still, micro_size = train(whole, still=True), checked.job.batch.micro_size or 1
        if micro_size % 2 == 0 and not synced and not still.draws:
            halves = Layout(1, {"batch": {"micro_size": micro_size // 2}})
            rows.append(_row(str(halves), train(halves, still=True), still, noise))
        last = layouts[-1] if layouts else whole
        for layout, then in [(whole, whole), *([(last, whole)] if last != whole else [])]:
            name = f"{layout}, resumed after step {MIDDLE} on {then}"
            rows.append(_row(name, train(layout, then), one, noise, resumed=True))
        return Proof(noise, rows)


def _synced(layout: Layout, size: int) -> Layout:
    """The layout with batch norms over all samples of a step, as one process has them in one micro batch of `size` samples."""
    axes = layout.tables.get("parallelism", {}).values()
    ranks = layout.ranks // prod(one for one in axes if isinstance(one, int))
    tables = {"model": {"sync_batch_norm": True}, "batch": {"micro_size": max(1, size // ranks)}}
    return Layout(layout.ranks, merged(layout.tables, tables)) if ranks > 1 else layout


def _small(raw: RawJob) -> dict[str, Any]:
    """The tables of the job for a few steps, with two evaluations and two saves."""
    tables = {name: table for name, table in raw.tables.items() if name not in _LEFT_OUT}
    small = {
        "job": {"steps": STEPS, "epochs": None, "output_dir": None},
        "checkpoint": {"every_steps": MIDDLE, "every_epochs": None, "keep": 3, "keep_every": None, "keep_best": None},
    }
    if tables.get("evaluation"):
        small["evaluation"] = {"every_steps": MIDDLE, "every_epochs": None}
    found = merged(tables, small)
    return {name: without_unset(table) if isinstance(table, Mapping) else table for name, table in found.items()}


def _row(name: str, found: Record, one: Record, noise: Distances, resumed: bool = False) -> Row:
    if found.code == EXIT_USAGE:
        return Row(name, "refused", first=found.ending)
    if found.code:
        return Row(name, "failed", first=found.ending)
    far = distances(found, one)
    limit = max(_LEAST, _TIMES * noise.largest)
    difference = first_difference(found, one, limit)
    notes = "; ".join(dict.fromkeys(f"it {how}" for _, how in found.notes))
    if difference is None and not notes:
        return Row(name, "alike", far)
    first = "; ".join(one for one in (str(difference or ""), notes) if one)
    return Row(
        name,
        "differs",
        far,
        first,
        difference.hint(resumed and difference.step > MIDDLE) if difference is not None else "",
    )


def parse_layout(text: str) -> Layout:
    """The layout "RANKS [TABLE.KEY=VALUE ...]", such as "4 sharding.stage=3 parallelism.tensor=2". Raises UsageError."""
    ranks, *words = text.split()
    tables: dict[str, dict[str, Any]] = {}
    for word in words:
        key, is_set, value = word.partition("=")
        table, is_key, name = key.partition(".")
        if not is_set or not is_key:
            raise UsageError(f"--layout {text!r}: found {word!r}, expected TABLE.KEY=VALUE, such as sharding.stage=3")
        tables.setdefault(table, {})[name] = int(value) if value.isdecimal() else value
    if not ranks.isdecimal() or not int(ranks):
        raise UsageError(f"--layout {text!r}: found {ranks!r}, expected a number of ranks first")
    return Layout(int(ranks), tables)


def usual_layouts(raw: RawJob) -> list[Layout]:
    """Two ranks as the job is, then two ranks at ZeRO stages 1 and 3, and those that the batch divides by three."""
    batch = raw.tables.get("batch", {})
    size, micro = batch.get("global_size"), batch.get("micro_size")
    ranks = [2, *([3] if isinstance(size, int) and isinstance(micro, int) and size % (3 * micro) == 0 else [])]
    own = Layout(2)
    return [own, *(Layout(count, {"sharding": {"stage": stage}}) for count in ranks for stage in (1, 3))]
