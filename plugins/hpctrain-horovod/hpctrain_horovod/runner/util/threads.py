"""Threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Start a thread that calls `target(*args)`; silent: without a traceback if it raises."""

    def quietly(*arguments: Any) -> None:
        with suppress(Exception):
            target(*arguments)

    thread = threading.Thread(target=quietly if silent else target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
