"""Plots of a run as SVG whose colours are variables of the page, so that they follow light and dark. matplotlib is optional."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.toolkit.commands import EnvironmentUnfitError, escaped
from hpctrain_tools.report.curves import PARTS, Point
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.wall_time import KINDS

COLORS = {
    "ink": "#010203", "faint": "#010204", "c0": "#010205", "c1": "#010206", "c2": "#010207", "c3": "#010208",
    "c4": "#010209", "c5": "#01020a", "c6": "#01020b", "c7": "#01020c",
}  # fmt: skip
"""Colours that no plot has by itself: each stands for a variable of the page."""
_LINES = [f"c{number}" for number in range(8)]
WIDTHS = {"wide": 8.4, "narrow": 4.2}
"""Inches: for a screen, and for a phone, where the text of the wide one would be too small."""
_HEIGHT = 2.5
_BARS = 12


def refuse_without_matplotlib() -> None:
    """Raises EnvironmentUnfitError where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise EnvironmentUnfitError(
            "--format html draws with matplotlib, which is not installed: pip install 'hpctrain[plots]', or take --format markdown"
        ) from None


class Plot:
    """An empty plot. axes: matplotlib's."""

    def __init__(self, width: float, height: float = _HEIGHT) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.axes: Any = self.figure.subplots()
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        self.axes.margins(x=0.01)

    def over_steps(self) -> None:
        """The horizontal axis has steps, which are whole numbers."""
        self.axes.set_xlabel("step")
        self.axes.xaxis.get_major_locator().set_params(integer=True)

    def svg(self, name: str) -> str:
        """The plot as an element. name: begins the ids in it, which a page has once each."""
        content = io.StringIO()
        self.figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        found = content.getvalue()
        found = found[found.index("<svg") :]
        found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
        found = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", found)
        found = re.sub(
            r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg [^>]*?)height="[^"]*"', r"\1\2", found, count=1
        )
        found = re.sub(r' width="[^"]*pt"', "", found, count=1)
        for variable, colour in COLORS.items():
            found = found.replace(colour, f"var(--{variable})")
        return found


def style() -> Any:
    """matplotlib's settings for all plots: text stays text, and nothing in it is mathematics."""
    ink, faint = COLORS["ink"], COLORS["faint"]
    return {
        "svg.fonttype": "none", "svg.hashsalt": "hpctrain", "text.parse_math": False, "font.size": 9, "axes.unicode_minus": False,
        "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": faint, "xtick.color": ink, "ytick.color": ink,
        "axes.grid": True, "grid.color": faint, "grid.linewidth": 0.4, "axes.axisbelow": True, "legend.frameon": False,
        "lines.linewidth": 1.4, "path.simplify": True, "axes.formatter.useoffset": False,
    }  # fmt: skip


def draw(name: str, runs: Sequence[Facts], width: str) -> str:
    """A plot by its name; "" if the runs have nothing to draw. width: "wide" or "narrow"."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(style()):
        warnings.simplefilter("ignore")  # of letters that its own font lacks; the page's font has them
        plot = _PLOTS[name](runs, WIDTHS[width])
        return "" if plot is None else plot.svg(f"{name}-{width}-{abs(hash(runs[0].directory)) % 10**6}")


def _curve(plot: Plot, points: Sequence[Point], key: str, color: str, label: str = "", scale: float = 1.0) -> bool:
    found = [((one.first + one.last) / 2, value * scale) for one in points if (value := one.mean(key)) is not None]
    if found:
        marker = "." if len(found) == 1 else ""
        plot.axes.plot(*zip(*found, strict=True), color=COLORS[color], label=escaped(label), marker=marker)
    return bool(found)


def loss(runs: Sequence[Facts], width: float) -> Plot | None:
    """The loss with its range, and the evaluations."""
    plot, rows = Plot(width), runs[0].rows
    shown = _curve(plot, rows.points, "loss", "c0", "loss")
    if any(one.last > one.first for one in rows.points):
        ranged = [one for one in rows.points if one.high >= one.low]
        plot.axes.fill_between(
            [(one.first + one.last) / 2 for one in ranged], [one.low for one in ranged], [one.high for one in ranged],
            color=COLORS["c0"], alpha=0.2, linewidth=0,
        )  # fmt: skip
    measured = [(one.step, value) for one in rows.evaluations if (value := one.measured.get("loss")) is not None]
    if measured:
        plot.axes.plot(*zip(*measured, strict=True), color=COLORS["c1"], label="evaluation", marker="o", markersize=3)
    plot.over_steps()
    plot.axes.legend(loc="upper right")
    return plot if shown or measured else None


def of_key(key: str, label: str, color: str, scale: float = 1.0, from_zero: bool = True) -> Callable[..., Plot | None]:
    """A function that draws a key of the rows."""

    def made(runs: Sequence[Facts], width: float) -> Plot | None:
        plot, rows = Plot(width, 1.9), runs[0].rows
        shown = _curve(plot, rows.points, key, color, scale=scale)
        plot.over_steps()
        unit = f"{rows.newest.counts}/s" if rows.newest is not None and key == "per_second" else label
        plot.axes.set_ylabel(unit)
        if from_zero:
            plot.axes.set_ylim(bottom=0)
        return plot if shown else None

    return made


def parts(runs: Sequence[Facts], width: float) -> Plot | None:
    """The parts of a step's time, one on the other."""
    plot = Plot(width, 2.9)
    points = [one for one in runs[0].rows.points if one.counts["forward"] or one.counts["other"]]
    if not points:
        return None
    places = [(one.first + one.last) / 2 for one in points]
    values = [[one.mean(part) or 0.0 for one in points] for part in PARTS]
    colors = [COLORS[one] for one in _LINES[: len(PARTS)]]
    if len(points) == 1:
        places, values = [places[0] - 0.5, places[0] + 0.5], [[one[0], one[0]] for one in values]
    plot.axes.stackplot(places, values, labels=PARTS, colors=colors, linewidth=0)
    whole = sorted(sum(column) for column in zip(*values, strict=True))
    usual = whole[int(0.95 * (len(whole) - 1))]
    if usual > 0 and whole[-1] > 4 * usual:  # a save or a stall would press all others flat
        plot.axes.set_ylim(0, 2 * usual)
    plot.over_steps()
    plot.axes.set_ylabel("seconds")
    plot.figure.legend(
        loc="outside upper left", ncols=4 if width < 6 else 8, columnspacing=1, handlelength=1, fontsize=8
    )
    return plot


def memory(runs: Sequence[Facts], width: float) -> Plot | None:
    """Peaks, and what a device has."""
    plot, rows = Plot(width, 1.9), runs[0].rows
    shown = _curve(plot, rows.points, "memory_max", "c0", "largest rank", 2**-30)
    _curve(plot, rows.points, "memory_mean", "c1", "mean of the ranks", 2**-30)
    whole = runs[0].device_bytes
    if whole:
        plot.axes.axhline(whole / 2**30, color=COLORS["c3"], linestyle="--", label="of the device")
    plot.axes.set_ylim(bottom=0)
    plot.over_steps()
    plot.axes.set_ylabel("GiB")
    plot.axes.legend(loc="lower right")
    return plot if shown else None


def communication(runs: Sequence[Facts], width: float) -> Plot | None:
    """Seconds waited and hidden, by axis and operation."""
    rows = runs[0].rows
    names = sorted({*rows.exposed, *rows.hidden}, key=lambda name: -rows.exposed.get(name, 0.0))[:_BARS][::-1]
    if not names or not rows.weight:
        return None
    plot = Plot(width, 1.1 + 0.28 * len(names))
    waited, hidden = ([1000 * of.get(name, 0.0) / rows.weight for name in names] for of in (rows.exposed, rows.hidden))
    places = range(len(names))
    plot.axes.barh(places, waited, color=COLORS["c3"], label="waited")
    plot.axes.barh(places, hidden, left=waited, color=COLORS["c2"], label="hidden")
    plot.axes.set_yticks(places, [escaped(name[:28]) for name in names])
    plot.axes.set_xlabel("ms a step")
    plot.figure.legend(loc="outside upper left", ncols=2, columnspacing=1, handlelength=1, fontsize=8)
    return plot


def goodput(runs: Sequence[Facts], width: float) -> Plot | None:
    """A bar of the wall time."""
    wall = runs[0].wall
    if wall is None or wall.seconds <= 0:
        return None
    plot, left = Plot(width, 1.1 if width > 6 else 1.4), 0.0
    for kind, color in zip(KINDS, _LINES, strict=False):
        share = 100 * wall.share(kind)
        plot.axes.barh([0], [share], left=left, color=COLORS[color], label=kind)
        left += share
    plot.axes.set_yticks([])
    plot.axes.set_xlabel("% of the wall time")
    plot.figure.legend(
        loc="outside upper left", ncols=3 if width < 6 else 7, columnspacing=1, handlelength=1, fontsize=8
    )
    return plot


def compared(runs: Sequence[Facts], width: float) -> Plot | None:
    """The losses of several runs."""
    plot = Plot(width)
    shown = [
        _curve(plot, one.rows.points, "loss", _LINES[number % len(_LINES)], one.name[:24])
        for number, one in enumerate(runs[: len(_LINES)])
    ]
    plot.over_steps()
    plot.axes.set_ylabel("loss")
    plot.axes.legend(loc="upper right")
    return plot if any(shown) else None


_PLOTS: dict[str, Callable[[Sequence[Facts], float], Plot | None]] = {
    "loss": loss,
    "lr": of_key("lr", "learning rate", "c2"),
    "throughput": of_key("per_second", "", "c4"),
    "mfu": of_key("mfu", "mfu, %", "c5", scale=100),
    "parts": parts,
    "memory": memory,
    "communication": communication,
    "goodput": goodput,
    "compared": compared,
}
