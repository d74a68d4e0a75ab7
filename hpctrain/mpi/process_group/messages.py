"""Sends and receives of a group, separate from its collectives so that a pipeline cannot block on them.

Every message is posted to MPI at once, in the calling thread: MPI matches by (source, tag) in that order, and no message
waits for another. MPI moves a large message only while both sides call it. So a waiting thread drives MPI, and a thread
of the group drives messages that no caller waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from hpctrain.base import accounting
from hpctrain.base.torch_groups import PythonWork
from hpctrain.mpi.errors import CommunicationError, CommunicationTimeoutError
from hpctrain.mpi.library import MPI, highest_tag
from hpctrain.mpi.transfer.buffers import message, plain_like
from hpctrain.mpi.transfer.waiting import Patience, wait_until
from hpctrain.mpi.transfer.watch import Presence

ANY_SOURCE = MPI.ANY_SOURCE
# A caller that waits at once is served first; the thread is for callers that compute meanwhile.
_HEAD_START = 0.5e-3  # seconds
_LONGEST_SLEEP = 2e-3  # seconds


class Messages:
    """The point-to-point messages of one group.

    timeout: seconds that a wait for a message may take.
    """

    def __init__(self, comm: MPI.Comm, presence: Presence, timeout: float) -> None:
        self._comm = comm
        self._presence, self.group = presence, presence.group_name
        self.timeout = timeout
        self._highest_tag = highest_tag() - 1
        self._changed = threading.Condition()
        self._outstanding: list[MessageWork] = []
        self._driver: threading.Thread | None = None
        self._stopped = False
        self.broken: BaseException | None = None

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> MessageWork:
        """Post plain tensors to a rank of the group. They must stay unchanged until the work has finished."""
        self._check(destination, tag)
        return self._post("send", tensors, tensors, destination, tag)

    def receive(self, tensors: Sequence[Tensor], source: int, tag: int) -> MessageWork:
        """Post receives from a rank of the group, or ANY_SOURCE."""
        if source != ANY_SOURCE:
            self._check(source, tag)
        return self._post("recv", [plain_like(tensor) for tensor in tensors], tensors, source, tag)

    def drain(self) -> None:
        """Wait until every message has been delivered, each within the time limit."""
        while self._outstanding and self.broken is None:
            try:
                self._outstanding[0].wait()
            except (CommunicationError, IndexError):
                continue

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._driver is not None:
            self._driver.join()

    def finished(self, work: MessageWork) -> None:
        """A work reports that it no longer needs to be driven."""
        with self._changed:
            self._outstanding.remove(work)

    def timed_out(self, work: MessageWork, seconds: float) -> CommunicationTimeoutError:
        """The error for a message that never came. MPI still holds its buffer, so the group is unusable."""
        missing = "no matching message was sent" if work.name == "recv" else "it was not received"
        self.broken = CommunicationTimeoutError(
            f"{self.describe(work)} did not finish within {seconds:g} s: {missing}. Look at what that rank does (its "
            "log, or py-spy dump), whether both sides use the same tag, or raise the timeout if it is only slow"
        )
        return self.broken

    def describe(self, work: MessageWork) -> str:
        """The message, in words."""
        peer = "any rank" if work.peer == ANY_SOURCE else f"rank {self._presence.ranks[work.peer]}"
        way = "from" if work.name == "recv" else "to"
        return f"{work.name} {way} {peer} (tag {work.tag}, {self._presence.group}) on {self._presence.here}"

    def _check(self, peer: int, tag: int) -> None:
        if not 0 <= peer < self._comm.size:
            raise ValueError(f"found rank {peer}, expected a rank of the group, 0 to {self._comm.size - 1}")
        if not 0 <= tag <= self._highest_tag:
            raise ValueError(f"found tag {tag}, expected 0 to {self._highest_tag}, the range of this MPI")

    def _post(
        self, name: str, buffers: Sequence[Tensor], tensors: Sequence[Tensor], peer: int, tag: int
    ) -> MessageWork:
        if self.broken is not None:
            raise CommunicationError(f"{self._presence.group} cannot be used after an earlier failure: {self.broken}")
        start = self._comm.Isend if name == "send" else self._comm.Irecv
        with self._changed:
            # Under the lock, so that the parts of one call are not mixed with those of another thread.
            requests = [start(message(buffer), peer, tag) for buffer in buffers]
            work = MessageWork(self, name, requests, buffers, tensors, peer, tag)
            self._outstanding.append(work)
            if self._driver is None:
                self._driver = threading.Thread(
                    target=self._drive, name=f"{self._presence.group} messages", daemon=True
                )
                self._driver.start()
            if len(self._outstanding) == 1:
                self._changed.notify_all()
        return work

    def _drive(self) -> None:
        while True:
            with self._changed:
                while not self._outstanding:
                    if self._stopped:
                        return
                    self._changed.wait()
            started = time.perf_counter()
            while works := list(self._outstanding):
                time.sleep(min(max(_HEAD_START, (time.perf_counter() - started) / 10), _LONGEST_SLEEP))
                for work in works:
                    work.test()
            del works


class MessageWork(PythonWork):
    """The handle of one send or receive. Thread-safe."""

    def __init__(
        self,
        messages: Messages,
        name: str,
        requests: list[MPI.Request],
        buffers: Sequence[Tensor],
        tensors: Sequence[Tensor],
        peer: int,
        tag: int,
    ) -> None:
        super().__init__()
        self.name, self.peer, self.tag = name, peer, tag
        self._messages = messages
        self._requests = requests
        self._buffers = buffers
        self._tensors = tensors
        self._statuses = [MPI.Status() for _ in requests]
        self._testing = threading.Lock()
        self._posted = time.perf_counter()

    def test(self) -> bool:
        """Drive MPI once; return whether the message has been delivered or has failed."""
        if self.done or not self._testing.acquire(blocking=False):
            return self.done
        try:
            if not self.done and self._delivered():
                self._finish()
        finally:
            self._testing.release()
        return self.done

    def _delivered(self) -> bool:
        try:
            return MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as failure:
            sizes = ", ".join(f"{buffer.nbytes} bytes" for buffer in self._buffers)
            self.error = CommunicationError(
                f"{self._messages.describe(self)} of {sizes} failed in MPI: {failure.Get_error_string()}; the two "
                "sides may have passed different sizes, or one of them has ended"
            )
            return True

    def _finish(self) -> None:
        nbytes = sum(buffer.nbytes for buffer in self._buffers)
        if self.name == "recv" and self.error is None:
            arrived = sum(status.Get_elements(MPI.BYTE) for status in self._statuses)
            if arrived != nbytes:
                self.error = CommunicationError(
                    f"{self._messages.describe(self)} got {arrived} bytes, expected {nbytes}: pass a tensor of the "
                    "sender's size and dtype"
                )
            try:
                with torch.inference_mode():  # it can write to inference tensors and others, in any thread
                    for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
                        if buffer is not tensor:
                            tensor.copy_(buffer)
            except RuntimeError as error:  # elements share memory, as after expand()
                self.error = CommunicationError(f"{self._messages.describe(self)} can't be written: {error}")
        accounting.record(self._messages.group, self.name, nbytes, time.perf_counter() - self._posted)
        self.done = True
        self._messages.finished(self)

    # The names below are torch's.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the buffer may be used again, or raise the error. A timeout of zero means the group's."""
        if not self.done:
            start = time.perf_counter()
            limit = timeout.total_seconds() or self._messages.timeout
            finished = wait_until(self.test, start + limit, Patience.LONG)
            accounting.record_wait(self._messages.group, self.name, time.perf_counter() - start)
            if not finished:
                raise self._messages.timed_out(self, limit)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.test()

    def result(self) -> list[Tensor]:
        return list(self._tensors)

    def source_rank(self) -> int:
        """The group rank of the sender."""
        return self._statuses[0].Get_source()
