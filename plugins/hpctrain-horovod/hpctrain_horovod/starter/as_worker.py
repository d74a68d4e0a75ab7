"""A program of its own: becomes the command of a Horovod worker, which finds out who it is in HOROVOD_ variables.

python as_worker.py --hosts HOST,HOST,... --output DIR --ranks N COMMAND...
"""

from __future__ import annotations

import argparse
import os
import sys

from hpctrain_horovod.engine.variables import WORKER, of_launcher, of_started


def main(words: list[str]) -> None:
    """Set the variables, send the output to files if asked, and become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", help="the host of each rank, where horovodrun has placed them")
    parser.add_argument("--output", help="the directory of files for the output")
    parser.add_argument("--ranks", type=int, help="the most ranks that there may be")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    told = of_launcher(os.environ)
    rank = os.environ.get(WORKER) or told.get("HOROVOD_RANK", "0")
    if options.hosts:
        told |= of_started(options.hosts.split(","), int(rank), None if WORKER in os.environ else told)
    os.environ.update(told)
    if options.output:
        _write_to(os.path.join(options.output, f"rank.{rank.zfill(len(str(options.ranks - 1)))}"))
    os.execvp(options.command[0], options.command)


def _write_to(place: str) -> None:
    os.makedirs(place, exist_ok=True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)


if __name__ == "__main__":
    main(sys.argv[1:])
