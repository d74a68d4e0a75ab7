"""The comparisons that slots share: with one process, with first-party plugins, behind resumes, rollbacks and other jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.base.errors import EXIT_USAGE
from hpctrain_tools.testing.jobs import ODD, STEADFAST, STUMBLING
from hpctrain_tools.testing.kit import Kit
from hpctrain_tools.testing.record import CLOSE, EXACT, Record
from hpctrain_tools.testing.runs import MIDDLE, Layout

TRAINS, AGAIN, BEHIND, RESUMED, BACK = (
    "trains as one process does",
    "trains alike twice",
    "trains alike in another process, behind another job",
    "goes on after a resume as if nothing had been",
    "goes back to a checkpoint as if the steps after it had not been",
)
"""Promises of several slots."""
LOSSES = ("row", "evaluation")
ALL = ("row", "gradients", "parameters", "evaluation")
"""Parts of a step that are compared."""


def layouts_of(kit: Kit, *stages: int) -> Iterator[Layout]:
    """Each number of ranks, with each of the stages in turn."""
    for place, ranks in enumerate(one for one in kit.ranks if one > 1):
        yield Layout(ranks, {"sharding": {"stage": stages[place % len(stages)]}} if stages else {})


def compare_two_axes(
    kit: Kit, whole: Record, tolerance: float = CLOSE, what: tuple[str, ...] = ALL, **tables: Any
) -> None:
    """Compare on a second axis beside the data's, of the same size: groups are not the ranks of the job."""
    layout = Layout(4, {"parallelism": {"tensor": 2}, **tables})
    if max(kit.ranks) > 1:
        kit.expect(TRAINS, kit.train(layout=layout), whole, tolerance, str(layout), what)


def compare_behind_another(kit: Kit, whole: Record, *tables: Mapping[str, Any], what: tuple[str, ...] = ALL) -> None:
    """Find what another job has left in the process, and what the process itself decides, such as the hashes of texts."""
    kit.expect(BEHIND, kit.train(*tables, behind=kit.others()), whole, EXACT, what=what)


def run_of_one_process(kit: Kit, *tables: Mapping[str, Any]) -> Record | None:
    """The run of one process, from which others may not differ; None if it fails."""
    found = kit.train(*tables)
    if found.code == EXIT_USAGE:
        kit.breaks("trains the kit's job", f"{found.ending}; give check_plugin a job with what it needs")
        return None
    return found if kit.expect("trains the kit's job", found) else None


def compare_resumed(
    kit: Kit, whole: Record, layout: Layout, then: Layout, tolerance: float = CLOSE, *tables: Mapping[str, Any]
) -> None:
    """A run that ended in the middle and went on, from one that did not."""
    found = kit.train(*tables, layout=layout, then=then)
    where = f"{layout}, resumed after step {MIDDLE} on {then}"
    if (
        found.code != EXIT_USAGE
        and kit.expect(RESUMED, found, whole, tolerance, where)
        and f"from step {MIDDLE}" not in found.screen
    ):
        kit.breaks(RESUMED, f"on {where}, it began anew")


def compare_layouts(kit: Kit, *others: int, tables: tuple[Mapping[str, Any], ...] = ()) -> None:
    """A plugin whose run on one process is the reference: its other layouts, and its resumes. others: stages."""
    whole = run_of_one_process(kit, *tables)
    if whole is None:
        return
    kit.expect(TRAINS, kit.train({"batch": {"micro_size": 12}}, *tables), whole, where="one micro batch of all samples")
    layouts = [*layouts_of(kit, *others)]
    for layout in layouts:
        kit.expect(TRAINS, kit.train(*tables, layout=layout), whole, where=str(layout))
    compare_resumed(kit, whole, Layout(1), Layout(1), EXACT, *tables)
    if layouts:
        compare_resumed(kit, whole, layouts[0], layouts[-1], CLOSE, *tables)
    compare_behind_another(kit, whole, *tables)


def compare_rollback(kit: Kit, *layouts: Layout) -> None:
    """A rollback, and what it was to have left."""
    for layout in layouts:
        found, expected = kit.train(STUMBLING, layout=layout), kit.train(STEADFAST, layout=layout)
        if expected.code == 0:
            kit.expect(BACK, found, expected, EXACT, f"{layout}, after a rollback")


def compare_in_place(
    kit: Kit,
    layouts: list[Layout],
    tolerance: float,
    models: tuple[Mapping[str, Any], ...] = ({}, ODD),
) -> None:
    """A plugin that must train as the first-party one in its place does on one process. models: tables."""
    for model in models:
        whole = kit.train(model, own=False)
        of = ", a model with tied, frozen and unused parameters" if model else ""
        for layout in layouts:
            kit.expect(TRAINS, kit.train(model, layout=layout), whole, tolerance, f"{layout}{of}", ALL)
        if layouts and not model:
            first, last = layouts[0], layouts[-1]
            compare_resumed(kit, whole, last, last, tolerance)
            compare_resumed(kit, whole, last, first, tolerance)
