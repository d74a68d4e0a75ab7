"""`hpctrain prove`: a job or a program's loop on one process against each layout, beside what re-association explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import tomli
import torch

from hpctrain.api import UsageError
from hpctrain.base.errors import EXIT_USAGE
from hpctrain.base.safe_files import RESOLVED, scratch_directory
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.model.refusals import has_batch_norms
from hpctrain_tools.testing.record import Distances, Record, distances, first_difference
from hpctrain_tools.testing.runs import MIDDLE, Layout, Runs, merged, shortened

# how often the measured noise a difference may be: noise is of one run, and another order has another
_TIMES = 20
# A difference that rounding in float32 explains
_LEAST = 1e-6


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
    tables, whole = shortened(raw.tables), Layout(1)
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
        return Proof(noise, [*rows, *_resumed(train, layouts, one, noise)])


def prove_program(program: Sequence[str], layouts: Sequence[Layout], seconds: float) -> Proof:
    """The same for a program with a loop of its own. Raises UsageError for one that can't train on one process."""
    with scratch_directory("prove-") as directory:
        runs = Runs(directory, Path.cwd(), seconds, program)

        def train(layout: Layout, then: Layout | None = None, **options: Any) -> Record:
            return runs.train({}, layout, then, options)

        one = train(Layout(1))
        if one.code:
            raise UsageError(f"one process can't run {program[0]}, and there is nothing to compare with: {one.ending}")
        noise = distances(train(Layout(1), nudge=torch.finfo(_product_dtype(one)).eps), one)
        rows = [_row(str(layout), train(layout), one, noise) for layout in layouts]
        return Proof(noise, [*rows, *_resumed(train, layouts, one, noise)])


def _resumed(train: Callable[..., Record], layouts: Sequence[Layout], one: Record, noise: Distances) -> list[Row]:
    """Rows of runs that are ended in the middle, and go on on one process."""
    whole = Layout(1)
    return [
        _row(f"{layout}, resumed after step {MIDDLE} on {whole}", train(layout, whole), one, noise, resumed=True)
        for layout in [whole, *(layout for layout in layouts[-1:] if layout != whole)]
    ]


def _product_dtype(record: Record) -> torch.dtype:
    """The dtype of a run's products, by the job that it has written down."""
    tables = tomli.loads((record.directory / "out" / RESOLVED).read_text())
    mode = tables.get("precision", {}).get("mode", "fp32")
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(
        mode[:4].rstrip("-"), torch.float32
    )


def _synced(layout: Layout, size: int) -> Layout:
    """The layout with batch norms over all samples of a step, as one process has them in one micro batch of `size` samples."""
    axes = layout.tables.get("parallelism", {}).values()
    ranks = layout.ranks // prod(one for one in axes if isinstance(one, int))
    tables = {"model": {"sync_batch_norm": True}, "batch": {"micro_size": max(1, size // ranks)}}
    return Layout(layout.ranks, merged(layout.tables, tables)) if ranks > 1 else layout


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


def usual_layouts(tables: Mapping[str, Any]) -> list[Layout]:
    """Two ranks as the job is, then two ranks at ZeRO stages 1 and 3, and those that the batch divides by three."""
    batch = tables.get("batch", {})
    size, micro = batch.get("global_size"), batch.get("micro_size")
    ranks = [2, *([3] if isinstance(size, int) and isinstance(micro, int) and size % (3 * micro) == 0 else [])]
    own = Layout(2)
    return [own, *(Layout(count, {"sharding": {"stage": stage}}) for count in ranks for stage in (1, 3))]
