"""Options of a window: the table [profile], and the request of `hpctrain profile --now`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from hpctrain.api import Field, Options, UsageError

ASKED = ("warmup", "record", "ranks", "shapes", "memory", "stacks", "snapshot")
"""The options that a request may give."""


class TorchProfilerOptions(Options):
    wait: int = Field(default=2, ge=0, description="steps before each window; counted from each start of the job")
    warmup: int = Field(
        default=1, ge=0, description="steps at the begin of a window that are not kept: the profiler's start slows them"
    )
    record: int = Field(
        default=0,
        ge=0,
        description="steps that a window keeps; 0: there are no windows but those of `hpctrain profile --now`",
    )
    repeat: int = Field(default=1, ge=0, description="number of windows; 0: until the job ends")
    ranks: Literal["all"] | list[int] = Field(default="all", description='ranks that are traced: "all", or a list')
    shapes: bool = Field(default=False, description="with the shapes of each operator's inputs")
    memory: bool = Field(default=False, description="with the memory that each operator takes and gives back")
    stacks: bool = Field(default=False, description="with Python's functions, which slows the steps of a window most")
    snapshot: bool = Field(
        default=False, description="also write who takes an accelerator's memory, as pytorch.org/memory_viz shows it"
    )
    ranges: bool = Field(
        default=False,
        description="mark the phases of all steps for Nsight Systems (NVTX) or rocprof (ROCTX), in windows or not",
    )

    def chosen(self, size: int) -> list[int]:
        """The ranks that are traced, of `size`."""
        return [*range(size)] if self.ranks == "all" else sorted(set(self.ranks))

    def refusal(self, size: int) -> str | None:
        """A clause if the chosen ranks are not some of a job with `size` ranks."""
        wrong = [rank for rank in self.chosen(size) if not 0 <= rank < size]
        if self.chosen(size) and not wrong:
            return None
        return f"expected ranks from 0 to {size - 1}, found {', '.join(map(str, wrong)) or 'none'}"

    def asked(self, values: Mapping[str, Any], size: int) -> TorchProfilerOptions:
        """The options of a window that is asked for: `values` over those of the job. Raises UsageError for wrong ones."""
        unknown = sorted(values.keys() - set(ASKED))
        if unknown:
            raise UsageError(f"found {', '.join(unknown)}, expected some of {', '.join(ASKED)}")
        try:
            merged = self.model_validate({**self.model_dump(), "record": self.record or 1, **values, "wait": 0})
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']}, found {first['input']!r}"
            ) from None
        refused = merged.refusal(size) or (None if merged.record else "expected at least one step to record, found 0")
        if refused is not None:
            raise UsageError(refused)
        return merged
