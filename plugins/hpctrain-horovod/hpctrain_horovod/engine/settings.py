"""The engine's settings, from Horovod's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """fusion_bytes: the most that small tensors are sent together in. stall_warning, stall_shutdown: seconds, 0 for never."""

    fusion_bytes: int = 128 * 1024 * 1024
    cache_capacity: int = 1024
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    timeline: str | None = None
    mark_cycles: bool = False
    dynamic_process_sets: bool = False

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> EngineSettings:
        """Raises ValueError for a value that is not a number."""

        def number(name: str, default: float) -> float:
            text = environment.get(name, "")
            try:
                return float(text) if text else default
            except ValueError:
                raise ValueError(f"found {name}={text!r}, expected a number") from None

        def flag(name: str) -> bool:
            return environment.get(name, "0").lower() not in ("", "0", "false")

        timeline = environment.get("HOROVOD_TIMELINE")
        return EngineSettings(
            fusion_bytes=int(number("HOROVOD_FUSION_THRESHOLD", EngineSettings.fusion_bytes)),
            cache_capacity=int(number("HOROVOD_CACHE_CAPACITY", EngineSettings.cache_capacity)),
            stall_warning=0.0
            if flag("HOROVOD_STALL_CHECK_DISABLE")
            else number("HOROVOD_STALL_CHECK_TIME_SECONDS", EngineSettings.stall_warning),
            stall_shutdown=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", EngineSettings.stall_shutdown),
            timeline=None if timeline in (None, "", "DYNAMIC") else timeline,
            mark_cycles=flag("HOROVOD_TIMELINE_MARK_CYCLES"),
            dynamic_process_sets=flag("HOROVOD_DYNAMIC_PROCESS_SETS"),
        )
