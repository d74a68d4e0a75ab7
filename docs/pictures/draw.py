"""Draws the pictures of the pages from the .json files beside it: `python docs/pictures/draw.py`, with matplotlib.

losses.json comes from losses.py, startup.json from benchmarks/startup.py. Lines and text are grey: they show on white and on black.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

HERE = Path(__file__).parent
GREY = "#808890"
COLORS = ("#2a7fb8", "#d1662b", "#3a9a5b", "#b8860b", "#8464c4", "#c2487a")


def figure(columns: int) -> tuple[Any, Any]:
    """A row of diagrams."""
    pyplot.rcParams.update({"svg.hashsalt": "hpctrain", "svg.fonttype": "none", "font.size": 9, "text.color": GREY})
    return pyplot.subplots(1, columns, figsize=(8.4, 3.0), constrained_layout=True)


def save(drawn: Any, name: str) -> None:
    """The same bytes for the same numbers."""
    for axes in drawn.axes:
        axes.set_facecolor("none")
        axes.tick_params(colors=GREY, which="both")
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            label.set_color(GREY)
        for spine in axes.spines.values():
            spine.set_color(GREY)
    drawn.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})
    pyplot.close(drawn)


def draw_losses() -> None:
    """The losses of each layout over those of one process, and how far they are from them."""
    found: dict[str, list[float]] = json.loads((HERE / "losses.json").read_text())
    (alone, first), *others = found.items()
    drawn, (left, right) = figure(2)
    left.plot(first, linewidth=6.0, color=GREY, alpha=0.35, label=alone)
    for color, (name, values) in zip(COLORS, others, strict=True):
        left.plot(values, linewidth=1.0, color=color, label=name)
        far = [abs(mine - value) / value or float("nan") for mine, value in zip(values, first, strict=True)]
        right.plot(far, "o", markersize=2.5, color=color)
    left.set(title="loss", xlabel="step")
    left.legend(frameon=False, fontsize=8)
    right.axhline(2**-23, color=GREY, linewidth=0.8)
    right.text(len(first) - 1, 2**-23 * 1.3, "the last bit of a float32", ha="right", va="bottom")
    right.set(
        title="relative difference from 1 process (equal: no dot)", xlabel="step", yscale="log", ylim=(5e-10, 1e-5)
    )
    save(drawn, "losses")


def draw_startup() -> None:
    """The time and the processor time until the first step, beside torchrun."""
    rows: list[dict[str, float]] = json.loads((HERE / "startup.json").read_text())
    drawn, pair = figure(2)
    for axes, what, title in zip(
        pair, ("seconds", "cpu"), ("seconds to the first step", "processor seconds"), strict=True
    ):
        for color, who in zip(COLORS, ("hpctrain", "torchrun"), strict=False):
            axes.plot(
                [f"{row['ranks']:g}" for row in rows],
                [row[f"{who}_{what}"] for row in rows],
                "o-",
                color=color,
                label=who,
            )
        axes.set(title=title, xlabel="ranks", ylim=(0, None))
        axes.legend(frameon=False)
    save(drawn, "startup")


def draw_holders() -> None:
    """The part of parameters, gradients and optimizer state that each of four ranks holds: quarters of a bar."""
    everything, quarters = [(0, 1, 2, 3)] * 4, [(rank,) for rank in range(4)]
    halves = [(0, 1), (0, 1), (2, 3), (2, 3)]
    stripes = [(0, 2), (1, 3), (0, 2), (1, 3)]
    layouts = {
        "stage 0": (everything, everything, everything),
        "stage 1": (everything, everything, quarters),
        "stage 2": (everything, quarters, quarters),
        "stage 3": (quarters, quarters, quarters),
        "pipeline = 2": (halves, halves, halves),
        "tensor = 2": (stripes, stripes, stripes),
    }
    drawn, panels = figure(len(layouts))
    for axes, (title, parts) in zip(panels, layouts.items(), strict=True):
        for kind, (color, held) in enumerate(zip(COLORS, parts, strict=False)):
            for rank in range(4):
                for quarter in range(4):
                    fill = color if quarter in held[rank] else "none"
                    place = (rank * 1.25 + kind * 0.35, 3 - quarter)
                    axes.add_patch(pyplot.Rectangle(place, 0.3, 0.95, facecolor=fill, edgecolor=GREY, linewidth=0.5))
        axes.set(title=title, xlim=(-0.1, 4.8), ylim=(-0.1, 4.05), yticks=[])
        axes.set_xticks([rank * 1.25 + 0.5 for rank in range(4)], [f"{rank}" for rank in range(4)])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    panels[0].set_xlabel("rank")
    names = ("parameters", "gradients", "optimizer state")
    for kind, (color, name) in enumerate(zip(COLORS, names, strict=False)):
        drawn.text(0.42 + kind * 0.2, 0.02, name, color=color, weight="bold", ha="center")
    save(drawn, "who-holds-what")


if __name__ == "__main__":
    draw_losses()
    draw_holders()
    draw_startup()
