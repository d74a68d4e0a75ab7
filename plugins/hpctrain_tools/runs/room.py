"""Lines of a view, and the room that they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.cells import cell_len, set_cell_size
from rich.text import Text

Part: TypeAlias = tuple[str, str]
"""A text and its style."""


@dataclass(frozen=True)
class Line:
    """A line of a view. importance: 0 for the most important; what has no room is left out, the least important first."""

    importance: int
    text: Text


@dataclass(frozen=True)
class Room:
    """The room of a line. ascii_only: the output has no other characters."""

    width: int
    ascii_only: bool = False

    @property
    def ellipsis(self) -> str:
        """The mark of what is cut off."""
        return "..." if self.ascii_only else "…"

    def joined(self, parts: Sequence[Part]) -> Text:
        """The first parts that have room, with two spaces between them; of the first as much as there is room for."""
        line = Text(no_wrap=True, end="")
        for number, (text, style) in enumerate(parts):
            left = self.width - line.cell_len - (2 if number else 0)
            if cell_len(text) > left:
                if not number:
                    line.append(set_cell_size(text, max(0, left - len(self.ellipsis))) + self.ellipsis, style)
                break
            line.append("  " if number else "")
            line.append(text, style)
        return line

    def end_of(self, text: str, width: int) -> str:
        """The end of a path that has no room."""
        if cell_len(text) <= width:
            return text
        while text and cell_len(text) + len(self.ellipsis) > width:
            text = text[1:]
        return self.ellipsis + text
