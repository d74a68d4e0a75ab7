"""The frame of `hpctrain top`: the lines of one or several runs, as many as there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from hpctrain_tools.runs.lines import OF_LOSS, about, log_line, loss_chart, only_line
from hpctrain_tools.runs.room import Room
from hpctrain_tools.runs.watcher import Snapshot

# lines of a terminal that has one for the keys
_HINT_FROM = 12
# lines of the log that come before a chart
_LOG_FIRST = 4
# lines of a chart
_CHART = range(3, 9)
# lines of the log where the height has no limit
_LOG_OF_ALL = 10


def frame(seen: Sequence[Snapshot], room: Room, height: int | None, hint: str = "") -> list[Text]:
    """Lines. height: None for all lines. hint: a last line, where there is room."""
    if height is None:
        return [line for one in seen for line in _block(one, room, None)]
    foot = [Text(hint[: room.width], style="dim", no_wrap=True, end="")] if hint and height >= _HINT_FROM else []
    height -= len(foot)
    each, more = divmod(height, len(seen))
    if each == 0:
        shown, left = seen[: height - 1], len(seen) - height + 1
        return [*(only_line(one, room) for one in shown), room.joined([(f"and {left} more", "dim")])]
    lines = [line for number, one in enumerate(seen) for line in _block(one, room, each + (number < more))]
    return [*lines, *[Text("", end="")] * (height - len(lines)), *foot] if foot else lines


def _block(seen: Snapshot, room: Room, height: int | None) -> list[Text]:
    """The lines of a run."""
    if height == 1:
        return [only_line(seen, room)]
    lines = list(about(seen, room))
    if height is None:
        return [*(one.text for one in lines), *(log_line(text, room) for text in seen.log[-_LOG_OF_ALL:])]
    if len(lines) > height:
        kept = sorted(range(len(lines)), key=lambda number: (lines[number].importance, number))[:height]
        return [lines[number].text for number in sorted(kept)]
    found = [one.text for one in lines]
    rows = min(_CHART.stop - 1, height - len(lines) - min(_LOG_FIRST, len(seen.log)))
    if rows >= _CHART.start and len(seen.history.losses) > 1:
        place = next(number for number, one in enumerate(lines) if one.importance == OF_LOSS)
        found[place : place + 1] = loss_chart(seen, room, rows)
    left = height - len(found)
    return found + [log_line(text, room) for text in (seen.log[-left:] if left else [])]
