"""A failing rank, or one that hangs in a call, ends the job: one rank prints the error; unexpected errors name rank and host."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from hpctrain.base.errors import EXIT_ENVIRONMENT, EXIT_TRAINING, HpctrainError
from hpctrain.contracts.identity import Identity
from hpctrain.job.problems import sentence
from hpctrain.mpi.errors import CommunicationError
from hpctrain.ranks.meeting import MEETING_TIMEOUT, PeerError, World, meet
from hpctrain.ranks.prints import tell
from hpctrain.ranks.process import end_now
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.watchdog.watcher import end_waiting_ranks

# how long a rank waits after a failed communication for the rank at fault to print
_AFTER_THE_CAUSE = timedelta(seconds=1)
_PATIENCE = timedelta(seconds=5)  # how long later failing ranks wait for the first one to print
_GATHERING_SECONDS = 2.0  # how long a leaving rank waits for the others to leave, before the launcher ends them
_LEAVING_SECONDS = 5  # how long a rank may take to leave by itself after SIGTERM
MPI_START_SECONDS = 900.0
"""The limit of MPI_Init, which waits for all ranks. From a slow file system some start minutes after others."""


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error; SystemExit and KeyboardInterrupt keep Python's codes."""
    if isinstance(error, SystemExit):  # of an own loop
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_TRAINING


def describe(error: BaseException, identity: Identity) -> str:
    """A sentence for an error that the user can fix; a traceback with rank and host for any other."""
    if isinstance(error, HpctrainError):
        return sentence(error)
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return f"hpctrain: {in_a_line(error, identity)}"
    trace = "".join(traceback.format_exception(error))
    return f"hpctrain: rank {identity.rank} on {identity.node} failed:\n{trace}"


def in_a_line(error: BaseException, identity: Identity) -> str:
    """The error without hpctrain's name in front and without a traceback."""
    if isinstance(error, HpctrainError):
        return str(error)
    what = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"rank {identity.rank} on {identity.node} failed: {type(error).__name__}{f': {what}' if what else ''}"


@contextmanager
def world_of_ranks(identity: Identity, channel: RankChannel, timeout: timedelta = MEETING_TIMEOUT) -> Iterator[World]:
    """The ranks, once they have met; an error of one of several ranks in this context ends all. timeout: as of `meet`."""
    world = meet(identity, channel, timeout)
    try:
        yield world
    except BaseException as error:
        if identity.size == 1:
            raise
        leave(world, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        world.close()


def leave(world: World, error: BaseException) -> NoReturn:
    """End this process and the other ranks with the exit code of the first error on any rank, which its rank prints."""
    ignore_terminate()
    code = _code_of_first(world, error)
    world.channel.report_exit(code)
    everybody = _all_leave(world)
    if not everybody:
        end_waiting_ranks(world, code)
    end_now(world.identity, code, everybody)


def _code_of_first(world: World, error: BaseException) -> int:
    """Print the error, or wait for the first failing rank to print its own; the job's exit code."""
    own = exit_code_of(error)
    if isinstance(error, PeerError):  # rank 0 prints, and all have its code
        return own
    if isinstance(error, CommunicationError) or getattr(error, "is_of_another_rank", False):
        _wait_for_print(world, _AFTER_THE_CAUSE)  # the rank at fault comes first
    try:
        first = world.store.compare_set("failed", "", f"{world.identity.rank} {own}").decode()
    except RuntimeError:  # the store is gone with rank 0, which has printed the reason
        return EXIT_TRAINING
    rank, code = map(int, first.split())
    if rank != world.identity.rank:
        _wait_for_print(world, _PATIENCE)
        return code
    print(describe(error, world.identity), file=sys.stderr, flush=True)
    world.channel.report_error(in_a_line(error, world.identity))
    with suppress(RuntimeError):  # of a store that is gone with rank 0; likewise below
        world.store.set("failed/printed", "1")
    return code


def delay_terminate() -> None:
    """Let a SIGTERM that the loop does not answer end this process after a few seconds instead of at once.

    `srun --kill-on-bad-exit` sends SIGTERM to ranks that exit slightly later than the first. They must exit with the code
    that all agreed on. Killed by the signal they would turn 75 into 143, and the batch script would not requeue the job.
    """

    def end_soon(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
        signal.alarm(_LEAVING_SECONDS)

    signal.signal(signal.SIGTERM, end_soon)


def end_on_signals(channel: RankChannel) -> None:
    """Let SIGINT and SIGTERM end this rank at once: it has nothing to save."""

    def end(number: int, frame: FrameType | None) -> None:
        channel.report_exit(128 + number)
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    channel.answers_signals()


def ignore_terminate() -> None:
    """Keep this rank's own exit code, whatever `srun --kill-on-bad-exit` sends meanwhile.

    Unlike a handler, this outlasts the interpreter.
    """
    if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def limited(stage: str, seconds: float, channel: RankChannel, identity: Identity | None = None) -> Iterator[None]:
    """End this rank, and with it the job, if the body takes longer. identity: None before it is known."""

    def end() -> None:
        who = f"a rank on {socket.gethostname()}" if identity is None else f"rank {identity.rank} on {identity.node}"
        advice = "look at this node, and at what other ranks say; those that say nothing may not have started"
        text = f"{who} did not finish {stage} within {seconds:g} s; {advice}"
        tell(f"hpctrain: {text}")
        channel.report_error(text)
        channel.report_exit(EXIT_ENVIRONMENT)
        if identity is None:
            os._exit(EXIT_ENVIRONMENT)
        end_now(identity, EXIT_ENVIRONMENT, False)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _all_leave(world: World) -> bool:
    """Whether every rank is leaving with an error; waits briefly for ranks that have not noticed it."""
    give_up = time.monotonic() + _GATHERING_SECONDS
    with suppress(RuntimeError):
        leaving = world.store.add("leaving", 1)
        while leaving < world.identity.size and time.monotonic() < give_up:
            time.sleep(0.02)
            leaving = world.store.add("leaving", 0)
        return leaving == world.identity.size
    return False


def _wait_for_print(world: World, patience: timedelta) -> None:
    with suppress(RuntimeError):
        world.store.wait(["failed/printed"], patience)
