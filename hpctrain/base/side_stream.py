"""Work of an accelerator beside its computing: copies from and to host memory, and what may overlap with backward.

Imports only torch and files of this folder. Plugins find it in hpctrain.api.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.devices import is_accelerator
from hpctrain.base.torch_private import foreach_copy_

__all__ = ["Done", "SideStream"]


@dataclass(frozen=True)
class Done:
    """A point of a stream. On the CPU, where no work is ever left, waiting does nothing."""

    _event: Any = None

    @staticmethod
    def here(device: torch.device) -> Done:
        """The point after all that this thread has launched on `device`, on the stream that it computes on."""
        return Done(torch.accelerator.current_stream(device).record_event()) if is_accelerator(device) else Done()

    def before_computing(self, tensors: Iterable[Tensor] = ()) -> None:
        """Run what this thread launches from now on after this point. tensors: made on the side stream, used from now on."""
        if self._event is not None:
            here = torch.accelerator.current_stream(self._event.device)
            here.wait_event(self._event)
            if not _recorded(tensors, here):
                self.wait()

    def wait(self) -> None:
        """Wait until the accelerator has come to this point, so that the program may read host memory."""
        if self._event is not None:
            self._event.synchronize()

    def is_over(self) -> bool:
        """Whether the accelerator has come to this point."""
        return self._event is None or bool(self._event.query())


class SideStream:
    """A stream of `device` beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if is_accelerator(device) else None

    @contextmanager
    def entered(self, after_computing: bool = True, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
        """Launch here what is launched inside.

        after_computing: it runs after all that this thread has launched before. tensors: those made outside that it reads or
        writes; their memory gets no other use before that is over.
        """
        if self._stream is None:
            yield
            return
        if after_computing:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        try:
            with self._stream:
                yield
        finally:
            if not _recorded(tensors, self._stream):
                self.done().wait()

    def done(self) -> Done:
        """The point after all that has been launched here."""
        return Done() if self._stream is None else Done(self._stream.record_event())


def _recorded(tensors: Iterable[Tensor], stream: Any) -> bool:
    """Let no memory of the tensors have another use before `stream` is done. False for kinds of tensors of which torch can't."""
    can = True
    for one in tensors:
        if not is_accelerator(one.device):
            continue
        if one.layout == torch.strided and type(one) in (Tensor, torch.nn.Parameter):
            one.record_stream(stream)
        else:
            can = False
    return can


@lru_cache
def _for_copies(device: torch.device) -> SideStream:
    """The stream of copies that the program waits for: torch has few streams, and hands them out again."""
    return SideStream(device)


def copy_to_host(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target in host memory; waits for an accelerator once, after all of them."""
    device = next((one.device for one in sources if is_accelerator(one.device)), None)
    if device is None:
        foreach_copy_(list(targets), list(sources))
        return
    copies = _for_copies(device)
    with copies.entered(tensors=sources):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    copies.done().wait()
