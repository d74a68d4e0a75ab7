"""Starts the ranks of a Horovod script, over MPI or without, and waits for them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.starting.hosts import Hosts
from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starting.processes import Launched, over_pmi
from hpctrain.toolkit.commands import EnvironmentUnfitError, UsageError, scratch_directory
from hpctrain_horovod.starter import supervised
from hpctrain_horovod.starter.hosts import discovered

HERE_AS = "localhost"
"""The name of this machine where the user gives none."""
_POLL = 0.1  # seconds between two looks at the ranks
_NO_MPI = (
    "horovodrun: found no MPI library, expected one; load your site's MPI module, or pip install 'hpctrain[mpich]'"
)


@dataclass(frozen=True)
class Numbers:
    """Options of a job without MPI."""

    ranks: int | None
    least: int | None
    most: int | None
    slots: int
    reset_limit: int | None
    start_timeout: float


def as_worker(words: Sequence[str], ranks: int, output: Path | None, hosts: Sequence[str] | None) -> list[str]:
    """The command of a rank that finds out who it is in HOROVOD_ variables. Raises UsageError.

    output: the directory of files for what the ranks print. hosts: the host of each rank; None where the launcher places them.
    """
    options = ["--hosts", ",".join(hosts)] if hosts else []
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-filename {output}: the directory cannot be made: {error.strerror}") from None
        options += ["--output", str(output.absolute()), "--ranks", str(ranks)]
    return [sys.executable, str(Path(__file__).with_name("as_worker.py")), *options, *words]


def run_over_mpi(
    words: Sequence[str], ranks: int, hosts: Hosts | None, mpi_words: list[str], output: Path | None, verbose: bool
) -> int:
    """Run the command on the ranks; their exit code.

    Raises EnvironmentUnfitError without an MPI, UsageError without the program.
    """
    remote = hosts is not None and not hosts.are_here
    places = None if mpi_words else hosts.first(ranks).by_rank if hosts is not None else [HERE_AS] * ranks
    command = as_worker([_program(words), *words[1:]], ranks, output, places)
    library = ask_library()
    if library is None:
        raise EnvironmentUnfitError(_NO_MPI)
    if library.speaks_pmi and not remote and not mpi_words:
        if verbose:
            print(f"{ranks} ranks here: {' '.join(command)}", file=sys.stderr)
        started = over_pmi(command, ranks)
        status = _wait(started)
        if started.failed_rank is not None:
            end = supervised.sentence(started.failed_rank, os.uname().nodename, started.failed_status)
            early = (
                "" if started.failed_status else " before MPI_Finalize, so that the others would wait for it forever"
            )
            print(end + early, file=sys.stderr, flush=True)
        return status
    mpiexec = find_mpiexec(library.flavour)
    more = [*(hosts.words(mpiexec.flavour, _own_variables()) if hosts is not None and remote else []), *mpi_words]
    command = [*more, sys.executable, "-I", supervised.__file__, *command]
    if verbose:
        print(" ".join([*mpiexec.command(ranks), *command]), file=sys.stderr)
    ends = _FirstEnd()
    status = _wait(UnderMpiexec(mpiexec, command, ranks, ends=ends))
    if status and ends.code is None and status < 128:
        print(
            f"horovodrun: the ranks ended with exit code {status}: their output has the reason, unless one left before "
            "MPI_Finalize or was lost with its host",
            file=sys.stderr,
            flush=True,
        )
    return status if status == 0 or ends.code is None else ends.code


def run_without_mpi(
    words: Sequence[str],
    numbers: Numbers,
    hosts: Hosts | None,
    script: Path | None,
    output: Path | None,
    ssh: list[str],
) -> int:
    """Run the command on workers that need no MPI; the exit code of the job. script: prints the hosts. Raises UsageError."""
    from hpctrain_horovod.starter.elastic import Elastic, Limits  # they import torch

    count = numbers.ranks or numbers.least or (hosts.slots if hosts else None)
    if count is None or not words:
        raise UsageError(
            "horovodrun lacks -np N or a command; expected: hpctrain horovodrun -np N --gloo python train.py"
        )
    least, most = numbers.least or count, max(numbers.most or count, count)
    if least > count:
        raise UsageError(f"found --min-np {least} and -np {count}, expected at most as many")
    fixed = hosts or Hosts(((HERE_AS, most),))

    def discover() -> Hosts:
        return fixed if script is None else discovered(script, numbers.slots)

    elastic = numbers.least is not None or script is not None
    if elastic:
        os.environ["HOROVOD_ELASTIC"] = "1"
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600"
    try:
        returns = float(text)
    except ValueError:
        raise UsageError(f"found HOROVOD_ELASTIC_TIMEOUT={text}, expected seconds such as 600") from None
    limits = Limits(least, most, elastic, numbers.reset_limit, numbers.start_timeout, returns)
    places = None if elastic else fixed.first(most).by_rank
    command = as_worker([_program(words), *words[1:]], most, output, places)
    with scratch_directory() as directory:
        return _wait(Elastic(command, limits, discover, directory, ssh))


def _own_variables() -> list[str]:
    return [name for name in os.environ if name.startswith("HOROVOD_")]


class _FirstEnd:
    """Takes note of the first rank that has not ended well, as supervised.py tells of it; passes everything on."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._line = b""

    def take(self, chunk: bytes) -> bytes:
        *lines, self._line = (self._line + chunk).split(b"\n")
        found = next((one for line in lines if (one := supervised.ENDED.search(line))), None)
        if found is not None and self.code is None:
            self.code = int(found[2]) + (128 if found[1] == b"signal" else 0)
        return chunk

    def rest(self) -> bytes:
        return b""


def _program(words: Sequence[str]) -> str:
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"horovodrun: found no program {words[0]}, expected a command such as `python train.py`")
    return program


def _wait(launched: Launched) -> int:
    """The ranks' exit code. A signal to this process ends them."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    while True:
        try:
            status = launched.wait(timeout=_POLL)
            return status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            if signals:
                launched.kill()
                return 128 + signals[0]
