"""Draws dilated-attention.svg, which tokens see which: `python docs/pictures/dilated.py`, with hpctrain-dilated-attention."""

from __future__ import annotations

from collections.abc import Iterator

from draw import COLORS, GREY, figure, save
from hpctrain_dilated_attention.pattern import Pattern, Place, spans, steps

TOKENS = 64
DENSE = Pattern((8, 32, 64), (1, 2, 4))
PANELS = {
    "head 0": (DENSE, 0),
    "head 1": (DENSE, 1),
    "head 0, block-sparse": (Pattern((8, 32, 64), (1, 2, 4), block=2, sparsity_ratio=0.5), 0),
}


def pairs(pattern: Pattern, head: int) -> Iterator[tuple[int, int, int]]:
    """Group, query and key of each pair that meets."""
    for span in spans(pattern, Place(TOKENS, 0, TOKENS, head, 1)):
        held = span.begin, span.end
        for step in steps(pattern, span.total, held, held):
            for piece in range(step.count):
                first = step.query + piece * step.queries, step.key + piece * step.keys
                for query in range(first[0], first[0] + step.queries):
                    for key in range(first[1], first[1] + step.keys):
                        if not step.causal or key - first[1] <= query - first[0]:
                            for start in span.starts:
                                offset = start + span.phases[0]
                                yield span.group, offset + query * span.rate, offset + key * span.rate


if __name__ == "__main__":
    drawn, axes = figure(len(PANELS))
    drawn.set_dpi(220)
    for panel, (title, (pattern, head)) in zip(axes, PANELS.items(), strict=True):
        found = sorted(set(pairs(pattern, head)), reverse=True)
        panel.scatter(
            [key for _, _, key in found],
            [query for _, query, _ in found],
            s=4,
            marker="s",
            linewidths=0,
            rasterized=True,
            color=[COLORS[group] for group, _, _ in found],
        )
        panel.set(
            title=title, xlim=(-1, TOKENS), ylim=(TOKENS, -1), aspect="equal", xticks=[], yticks=[], xlabel="keys"
        )
        for cut in (16, 32, 48):
            panel.axhline(cut - 0.5, color=GREY, linewidth=0.6, linestyle=":")
    axes[0].set(ylabel="queries; dotted: four ranks' parts")
    for group, (length, rate) in enumerate(DENSE.groups):
        axes[0].plot([], [], "s", color=COLORS[group], markersize=4, label=f"segments of {length}, every {rate}")
    axes[0].legend(frameon=False, fontsize=7, loc="upper right", labelcolor=GREY)
    save(drawn, "dilated-attention")
