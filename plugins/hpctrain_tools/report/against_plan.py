"""The memory of a run against what `hpctrain plan` has said of its job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain_tools.report.facts import Facts, flat
from hpctrain_tools.report.plan_file import JobPlan
from hpctrain_tools.report.section import Section

_GB = 1e9
# ranks of a plan that the section has
_SHOWN = 6
# keys that a remark names
_KEYS = 3
# letters of a value that are compared, and shown
_COMPARED, _LONGEST = 10_000, 80
# keys that change no device's memory. A plan has 0 workers, whatever its job says.
_FREE = (
    "dataset.workers", "dataset.prefetch", "dataset.start_method", "dataset.cache", "model.weights", "model.weights_strict",
    "optimizer.lr", "optimizer.weight_decay",
)  # fmt: skip


@dataclass(frozen=True)
class AgainstPlan:
    """A plan and what was measured: the peak of the largest rank, and the largest mean over the ranks of their peaks, in bytes;
    None if that is not known. remarks: why these can't be compared."""

    plan: JobPlan
    measured: float | None
    measured_mean: float | None
    remarks: list[str]

    @property
    def ratio(self) -> float | None:
        """The measured peak to the planned one; None where the plan is of something else."""
        return self._to(self.measured, self.plan.largest.most_bytes)

    @property
    def mean_ratio(self) -> float | None:
        """The same of the means."""
        return self._to(self.measured_mean, self.plan.mean_bytes)

    def _to(self, measured: float | None, planned: float) -> float | None:
        return measured / planned if measured is not None and planned > 0 and not self.remarks else None

    def as_dict(self) -> dict[str, Any]:
        """The comparison for JSON, in bytes."""
        return {
            "ranks": self.plan.ranks,
            "axes": self.plan.axes,
            "planned_peak_bytes": self.plan.largest.most_bytes,
            "planned_mean_bytes": self.plan.mean_bytes,
            "measured_peak_bytes": self.measured,
            "measured_mean_bytes": self.measured_mean,
            "ratio": self.ratio,
            "mean_ratio": self.mean_ratio,
            "remarks": self.remarks,
            "of_ranks": [one.model_dump() for one in self.plan.of_ranks],
        }


def against(facts: Facts) -> AgainstPlan | None:
    """Compare a run with its plan; None without one. The starts on as many ranks as the plan has count, or all if there are none of
    them."""
    plan, starts = facts.plan, facts.starts.starts
    if plan is None:
        return None
    on_devices = [number for number, one in enumerate(starts) if one.device]
    alike = [number for number in on_devices if starts[number].ranks == plan.ranks]
    seen = [facts.rows.of_starts[number] for number in alike or on_devices if number in facts.rows.of_starts]
    remarks = list(_differences(facts, plan))
    if starts and not on_devices:
        remarks.append(
            "the run had no accelerator: its rows have the memory of processes, libraries included, which no plan tells"
        )
    elif not any(one.memory_max is not None for one in seen):
        remarks.append("no row of the run has the memory of an accelerator")
    return AgainstPlan(
        plan, _largest(one.memory_max for one in seen), _largest(one.memory_mean for one in seen), remarks
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)


def _differences(facts: Facts, plan: JobPlan) -> Iterator[str]:
    """Sentences about a plan of another layout or another job."""
    starts, layout = facts.starts.starts, facts.layout
    if starts and all(one.ranks != plan.ranks for one in starts):
        yield f"the plan is for {plan.ranks} ranks, the run had {starts[-1].ranks}"
    elif starts and starts[-1].ranks == plan.ranks and layout is not None and layout.axes:
        planned, had = _layout(plan.axes), _layout(layout.axes)
        if planned != had:
            yield f"the layout of the plan is {planned}, that of the run {had}"
    if not facts.tables:
        return
    tables = {name: facts.tables[name] for name in plan.job if name in facts.tables}
    there, here = dict(flat(plan.job, _COMPARED)), dict(flat(tables, _COMPARED))
    if here.get("precision.mode") == "auto":  # a plan decides it, and the log has what the device decided
        ran = facts.described.get("precision", "").partition(" ")[0]
        here["precision.mode"] = ran or there.get("precision.mode", "auto")
    differ = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key) and key not in _FREE]
    if differ:
        named = ", ".join(
            f"{key[:_LONGEST]} is {there.get(key, 'unset')[:_LONGEST]}, not {here.get(key, 'unset')[:_LONGEST]}"
            for key in differ[:_KEYS]
        )
        more = f", and {len(differ) - _KEYS} more keys differ" if len(differ) > _KEYS else ""
        yield f"the plan is of another job: {named}{more}"


def _layout(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)[:_LONGEST] or "one rank"


def told_plan(facts: Facts) -> Section:
    """Planned and measured peaks."""
    found = against(facts)
    if found is None:
        return Section("Memory against the plan")
    largest = found.plan.largest
    table = [
        ("largest rank", _gb(largest.most_bytes), _gb(found.measured), _percent(found.ratio)),
        ("mean over the ranks", _gb(found.plan.mean_bytes), _gb(found.measured_mean), _percent(found.mean_ratio)),
    ]
    table += [(name, _gb(value), "", "") for name, value in _parts(found.plan)]
    told = ["GB of 10^9 bytes, of tensors on a device.", *(f"Not compared: {one}" for one in found.remarks)]
    return Section("Memory against the plan", told, ("", "planned", "measured", "of the plan"), table)


def _parts(plan: JobPlan) -> Iterator[tuple[str, float]]:
    """The parts of the planned peak: those of the largest rank, and the peak of each rank with another part of the model."""
    largest = plan.largest
    yield f"rank {largest.rank}: peak of a step", largest.peak_bytes
    for name, nbytes in largest.at_peak_bytes.items():
        yield f"of it, {name}"[:_LONGEST], nbytes
    yield f"rank {largest.rank}: peak of the start", largest.start_bytes
    yield f"rank {largest.rank}: peak of a save", largest.save.peak
    others = sorted((one for one in plan.of_ranks if one is not largest), key=lambda one: -one.most_bytes)
    for one in others[: _SHOWN - 1]:
        yield f"rank {one.rank}: peak", one.most_bytes


def _gb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _GB:.2f}" if nbytes >= _GB else f"{nbytes / _GB:.3g}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
