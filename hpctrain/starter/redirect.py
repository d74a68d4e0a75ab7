"""A program of its own: runs a rank's command with its output in files, DIR/rank.N/stdout and stderr.

    python redirect.py DIR RANKS COMMAND...

It imports nothing of hpctrain, since it stands in front of every rank.
"""

from __future__ import annotations

import os
import sys

# a batch script has Slurm's variables, too
_RANK = ("HPCTRAIN_HOROVOD_WORKER", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def main(directory: str, ranks: str, command: list[str]) -> None:
    """Become the command."""
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "0")
    place = os.path.join(directory, f"rank.{rank.zfill(len(str(int(ranks) - 1)))}")
    os.makedirs(place, exist_ok=True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
