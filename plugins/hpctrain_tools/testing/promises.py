"""The promises of each slot, as runs that must train alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hpctrain.base.errors import EXIT_USAGE
from hpctrain_tools.testing.checkpoints import examine_files
from hpctrain_tools.testing.comparisons import (
    AGAIN,
    LOSSES,
    RESUMED,
    TRAINS,
    compare_behind_another,
    compare_in_place,
    compare_layouts,
    compare_resumed,
    compare_rollback,
    compare_two_axes,
    layouts_of,
    run_of_one_process,
)
from hpctrain_tools.testing.jobs import ODD, SPIKING, STEADY
from hpctrain_tools.testing.kit import Kit
from hpctrain_tools.testing.methods import PROMISES as OF_METHODS
from hpctrain_tools.testing.record import ALIKE, CLOSE, EXACT, Record
from hpctrain_tools.testing.runs import MIDDLE, STEPS, Layout, merged

# tables of batches by tokens, of samples of several lengths
_TOKENS: dict[str, Any] = {
    "dataset": {"name": "synthetic", "samples": 60, "validation_samples": 13, "min_length": 2},
    "batch": {"global_size": None, "micro_size": None, "tokens": 60, "micro_tokens": 20},
}


def examine(kit: Kit) -> None:
    """Examine what the plugin promises; the kit has the findings."""
    for promise in (OF_METHODS.get(kit.slot), _PROMISES.get(kit.slot)):
        if promise is not None:
            promise(kit)


def _model(kit: Kit) -> None:
    compare_layouts(kit, 1, 3, 2)
    whole = kit.train()
    full = {"activation_checkpointing": {"mode": "full"}}
    for layout in [*layouts_of(kit, 0)][:1]:
        kit.expect(TRAINS, kit.train(full, layout=layout), whole, where=f"{layout}, and full activation checkpointing")
    rows = kit.train(_TOKENS)
    if rows.code == 0:
        other = {"batch": {**_TOKENS["batch"], "micro_tokens": 60}}
        kit.expect(TRAINS, kit.train(_TOKENS, other), rows, where="rows that are padded to other lengths")
        packed = merged(_TOKENS, {"batch": {"packing": True}})
        kit.expect("trains packed samples as padded ones", kit.train(packed), rows, where="rows of several samples")


def _dataset(kit: Kit) -> None:
    compare_layouts(kit)
    whole = kit.train()
    loaders = {"dataset": {**kit.tables["dataset"], "workers": 2}}
    kit.expect("loads the same samples in workers", kit.train(loaders), whole, EXACT, "2 workers of a loader")


def _optimizer(kit: Kit) -> None:
    compare_layouts(kit, 1, 3, 2)
    whole = kit.train()
    first = whole.steps.get(1, {}).get("parameters", {})
    if first and not any((one != whole.steps[0]["parameters"][name]).any() for name, one in first.items()):
        kit.breaks("its step updates each parameter", "no parameter changed in the first step")
    odd = kit.train(ODD)
    for layout in [*layouts_of(kit, 2, 3)]:
        kit.expect(
            TRAINS, kit.train(ODD, layout=layout), odd, where=f"{layout}, a model with tied and unused parameters"
        )
    compare_two_axes(kit, whole, sharding={"stage": 1})
    compare_rollback(kit, Layout(1), *[*layouts_of(kit, 2)][:1])


def _schedule(kit: Kit) -> None:
    whole = run_of_one_process(kit)
    if whole is not None:
        compare_resumed(kit, whole, Layout(1), Layout(1), EXACT)
        for layout in [*layouts_of(kit, 1)][:1]:
            kit.expect(TRAINS, kit.train(layout=layout), whole, where=str(layout))
        compare_behind_another(kit, whole)


def _parallelism(kit: Kit) -> None:
    # an axis of two ranks, and two of them side by side
    own = [Layout(2), Layout(4), Layout(4, {"sharding": {"stage": 3}})]
    whole = kit.train(own=False)
    if not any(kit.train(layout=one).code == 0 for one in own):
        kit.breaks("trains the kit's job", f"on {own[0]}, the run ended: {kit.train(layout=own[0]).ending}")
        return
    for layout in own:
        kit.expect(TRAINS, kit.train(layout=layout), whole, CLOSE, str(layout))
    kit.expect(
        TRAINS,
        kit.train(STEADY, layout=own[0]),
        kit.train(STEADY, own=False),
        CLOSE,
        f"{own[0]}, a model with tied parameters",
    )
    three = {"batch": {"micro_size": 4}}
    kit.expect(TRAINS, kit.train(three, layout=own[0]), whole, CLOSE, f"{own[0]}, three micro batches")
    if kit.plugin.name != "tensor":
        inside = {"parallelism": {**kit.tables["parallelism"], "tensor": 2}}
        kit.expect(
            TRAINS, kit.train(inside, layout=Layout(4)), whole, CLOSE, "4 ranks, [parallelism] tensor = 2 within"
        )
    kit.expect("trains the kit's job", kit.train(ODD, layout=own[0]), where=f"{own[0]}, a model with dropout")
    compare_resumed(kit, whole, own[0], own[0])
    compare_resumed(kit, whole, own[0], own[1])


def _sharding(kit: Kit) -> None:
    layouts = [Layout(ranks) for ranks in kit.ranks]
    if getattr(kit.plugin, "ranks_diverge", False):
        for layout in layouts:
            found = kit.train(layout=layout)
            kit.expect("trains the kit's job", found, where=str(layout))
            kit.expect(
                AGAIN,
                kit.train({"job": {**kit.job["job"], "name": "again"}}, layout=layout),
                found,
                EXACT,
                str(layout),
                LOSSES,
            )
            resumed = kit.train(layout=layout, then=layout)
            kit.expect(RESUMED, resumed, found, EXACT, str(layout), LOSSES)
        return
    compare_in_place(kit, layouts, CLOSE)
    whole = kit.train(own=False)
    averages = {"hook": [{"name": "ema", "decay": 0.5}]}  # it changes pieces where no step does
    kit.expect(
        TRAINS,
        kit.train(averages, layout=layouts[-1]),
        kit.train(averages, own=False),
        CLOSE,
        f"{layouts[-1]}, with ema",
    )
    compare_two_axes(kit, whole)
    compare_behind_another(kit, whole)
    compare_rollback(kit, layouts[-1])


def _precision(kit: Kit) -> None:
    whole = run_of_one_process(kit)
    if whole is None:
        return
    exact = kit.train(own=False)
    renamed = [name for name in whole.steps[0]["parameters"] if name not in exact.steps[0]["parameters"]]
    if renamed:
        kit.breaks("keeps the parameters' names", f"one is called {renamed[0]} now")
    kit.expect("learns what fp32 learns", whole, exact, ALIKE, what=("evaluation",))
    wide = all(one.element_size() > 2 for one in whole.steps[0]["parameters"].values()) and _agree(whole, exact)
    for layout in layouts_of(kit, 0, 3):
        kit.expect(TRAINS, kit.train(layout=layout), whole, CLOSE if wide else ALIKE, str(layout), LOSSES)
        compare_resumed(kit, kit.train(layout=layout), layout, layout, EXACT)
    compare_two_axes(
        kit, whole, ALIKE, LOSSES
    )  # products of parts round otherwise, even where layouts of whole ones agree
    compare_behind_another(kit, whole)
    kit.expect("trains the kit's job", kit.train(ODD))


def _agree(one: Record, other: Record) -> bool:
    return abs(one.loss - other.loss) <= CLOSE * abs(other.loss)


def _activation_checkpointing(kit: Kit) -> None:
    layouts = [Layout(1), *layouts_of(kit, 3, 2)]
    compare_in_place(kit, layouts, CLOSE)
    whole = kit.train(own=False)
    for layout in layouts[:2]:  # what forwards leave in buffers follows from the layout
        kept = kit.train(STEADY, layout=layout, own=False)
        where = f"{layout}, a model whose forwards change a buffer"
        kit.expect(TRAINS, kit.train(STEADY, layout=layout), kept, where=where, what=("buffers",))
    frozen = {"model": {**STEADY["model"], "freeze": ["embedding.weight"]}}
    where = "one rank, a model whose first block's inputs need no gradient"
    kit.expect(TRAINS, kit.train(frozen), kit.train(frozen, own=False), where=where)
    compare_two_axes(kit, whole)
    compare_behind_another(kit, whole)


def _compression(kit: Kit) -> None:
    free = {"optimizer": {"clip_norm": 1e6}}  # a clipped gradient doesn't show its size
    whole, shares = kit.train(free, own=False), dict[str, float]()
    layouts = [*layouts_of(kit, 0, 2)]
    for layout in [*layouts, *[Layout(2, {"sharding": {"stage": 3}})][: len(layouts)]]:
        found = kit.train(free, layout=layout)
        if found.code == EXIT_USAGE:
            continue
        if kit.expect("trains the kit's job", found, where=str(layout)):
            shares[str(layout)] = _share_sent(found, whole)
            if abs(found.loss - whole.loss) > 0.1 * abs(whole.loss):
                told = f"on {layout}, the last loss is {found.loss:.4g}, and {whole.loss:.4g} without it"
                kit.breaks("learns what a job without it learns", told)
            compare_resumed(kit, found, layout, layout, EXACT, free)
            often = {"checkpoint": {"every_steps": 1}}
            resumed = kit.train(free, often, layout=layout, then=layout, middle=MIDDLE - 1)
            where = f"{layout}, resumed after step {MIDDLE - 1}"
            kit.expect(RESUMED, resumed, kit.train(free, often, layout=layout), EXACT, where)
        _takes_no_infinity(kit, layout)
        compare_rollback(kit, layout)
    # a compression may send other numbers than the sums, but of more ranks not less by the factor that a mean would have
    sent = [*shares.values()]
    if sent and not (min(sent) > 0.3 and max(sent) < 1.5 and min(sent) > 0.7 * sent[0]):
        by_layout = ", ".join(f"{share:.2f} on {layout}" for layout, share in shares.items())
        kit.breaks("its sum is that of the gradients, nearly", f"the numbers that it sent, of the sums: {by_layout}")


def _takes_no_infinity(kit: Kit, layout: Layout) -> None:
    spiked, plain = (kit.train(SPIKING, layout=layout, own=one) for one in (True, False))
    both = [step for step in plain.steps if step in spiked.steps]
    taken = [step for step in both if _skipped(plain, step) != _skipped(spiked, step)]
    if spiked.code != 0 or taken:
        how = spiked.ending
        if taken:
            how = f"took the update of step {taken[0]}, whose gradient is infinite on one rank"
        kit.breaks("its sum is not finite where a gradient is not", f"on {layout}, it {how}")


def _share_sent(found: Record, whole: Record) -> float:
    """The size of the first gradients' numbers that were sent (those that are not zero), of their sums."""
    gradients = (one.steps[1]["gradients"].values() for one in (found, whole))
    sums, wanted = (torch.cat([one.flatten().double() for one in of]) for of in gradients)
    sent = sums != 0
    return float((sums * wanted)[sent].sum() / (wanted * wanted)[sent].sum()) if sent.any() else 0.0


def _skipped(record: Record, step: int) -> bool:
    before, now = (record.steps.get(one, {}).get("parameters") for one in (step - 1, step))
    return before is not None and now is not None and all((now[name] == before[name]).all() for name in now)


def _checkpoint(kit: Kit) -> None:
    whole = kit.train(own=False)
    layouts = [Layout(1), *layouts_of(kit, 1, 3)]
    beside = {"checkpoint": {**kit.tables["checkpoint"], "every_steps": MIDDLE, "keep": 9, "asynchronous": True}}
    for tables, how in (({}, ""), (beside, ", saved in the background")):
        found = kit.train(tables)
        kit.expect(TRAINS, found, whole, EXACT, f"one rank{how}")
        for layout, then in (
            (layouts[0], layouts[0]),
            (layouts[-1], layouts[-1]),
            (layouts[-1], layouts[0]),
            (layouts[0], layouts[-1]),
        ):
            compare_resumed(kit, whole, layout, then, CLOSE, tables)
    odd = kit.train(ODD, own=False)
    compare_resumed(kit, odd, layouts[-1], layouts[0], CLOSE, ODD)
    compare_behind_another(kit, whole)
    examine_files(kit, [kit.train(), kit.train(beside), kit.train(layout=layouts[-1])])


def _communicator(kit: Kit) -> None:
    layouts = [*layouts_of(kit, 0, 3, 1)]
    compare_in_place(kit, layouts, CLOSE, models=({},))
    tables = {"parallelism": {"pipeline": 2}}
    kit.expect(TRAINS, kit.train(tables, layout=Layout(2)), kit.train(own=False), CLOSE, "a pipeline of 2 ranks")
    compare_two_axes(kit, kit.train(own=False))


def _logger(kit: Kit) -> None:
    whole = kit.train(own=False)
    for layout in (Layout(1), *layouts_of(kit, 0)):
        found = kit.train(layout=layout)
        kit.expect("changes nothing of a training", found, whole, EXACT if layout.ranks == 1 else CLOSE, str(layout))
        if "gets no more rows" in found.screen:
            line = next(one for one in found.screen.splitlines() if "gets no more rows" in one)
            kit.breaks("takes each row", f"on {layout}, {line}")
    compare_behind_another(kit, whole)
    compare_resumed(kit, whole, Layout(1), Layout(1), EXACT)


def _hook(kit: Kit) -> None:
    whole = run_of_one_process(kit)
    if whole is None:
        return
    again, plain = kit.train({"job": {**kit.job["job"], "name": "again"}}), kit.train(own=False)
    for layout in layouts_of(kit, 1, 3):
        found = kit.train(layout=layout)
        if kit.expect(TRAINS, found, whole, CLOSE, str(layout)) and (key := _other_figure(found, whole, again, plain)):
            kit.breaks("reports the same figures on each layout", f"on {layout}, {key}")
    compare_two_axes(kit, whole, sharding={"stage": 1})
    if max(whole.steps) == STEPS:
        compare_behind_another(kit, whole)
        compare_rollback(kit, Layout(1))
        compare_resumed(kit, whole, Layout(1), Layout(1), EXACT)
        for layout in [*layouts_of(kit, 1)][:1]:
            compare_resumed(kit, whole, layout, Layout(1), CLOSE)


def _other_figure(found: Record, whole: Record, again: Record, plain: Record) -> str:
    """A figure that a hook adds to rows and that differs between two layouts, though it is the same in two runs on one; "" for
    none."""
    for step, kept in whole.steps.items():
        row, other, of_layout, usual = (
            one.get("row", {})
            for one in (kept, again.steps.get(step, {}), found.steps.get(step, {}), plain.steps.get(step, {}))
        )
        added = [key for key in row if key not in usual]
        for key in (one for one in added if isinstance(row[one], float) and other.get(one) == row[one]):
            if not math.isclose(of_layout.get(key, math.nan), row[key], rel_tol=CLOSE):
                return f"{key} at step {step} is {of_layout.get(key)}, expected {row[key]:.6g}"
    return ""


def _metric(kit: Kit) -> None:
    whole = run_of_one_process(kit)
    if whole is None:
        return
    kit.expect("changes nothing of a training", whole, kit.train(own=False), EXACT, what=("row", "parameters"))
    after = {"metric": [*kit.tables["metric"], {"name": "perplexity"}]}
    if kit.plugin.name != "perplexity":
        alone = kit.train({"metric": [{"name": "perplexity"}]}, own=False)
        kit.expect("looks at outputs and batches", kit.train(after), alone, EXACT, "a metric behind it")
    kit.expect(
        "measures alike in other batches",
        kit.train({"batch": {"micro_size": 12}}),
        whole,
        CLOSE,
        "one micro batch of 12",
    )
    for layout in layouts_of(kit, 0, 3):
        kit.expect("measures as one process does", kit.train(layout=layout), whole, CLOSE, str(layout))
    compare_two_axes(kit, whole)
    compare_behind_another(kit, whole)
    compare_resumed(kit, whole, Layout(1), Layout(1), EXACT)


def _profile(kit: Kit) -> None:
    whole = kit.train(own=False)
    for layout in (Layout(1), *layouts_of(kit, 0)):
        kit.expect("changes nothing of a training", kit.train(layout=layout), whole, CLOSE, str(layout))
    compare_behind_another(kit, whole)


_PROMISES: dict[str, Callable[[Kit], None]] = {
    "activation_checkpointing": _activation_checkpointing,
    "checkpoint": _checkpoint,
    "communicator": _communicator,
    "compression": _compression,
    "dataset": _dataset,
    "hook": _hook,
    "logger": _logger,
    "metric": _metric,
    "model": _model,
    "optimizer": _optimizer,
    "parallelism": _parallelism,
    "pipeline_schedule": _parallelism,
    "precision": _precision,
    "profile": _profile,
    "schedule": _schedule,
    "sharding": _sharding,
}
