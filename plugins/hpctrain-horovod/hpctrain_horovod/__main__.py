"""`mpirun -n 4 python -m hpctrain_horovod train.py ARGUMENTS` runs a Horovod script as it is."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from hpctrain_horovod.alias import hand_down, install
from hpctrain_horovod.engine.variables import of_launcher

_EXIT_USAGE = 2


def main(words: list[str]) -> int:
    """Run the script in place of this module; returns the exit code of a mistake in the command."""
    if not words or (words[0].startswith("-") and words[0] != "-m") or words == ["-m"]:
        print(
            "usage: mpirun -n N python -m hpctrain_horovod SCRIPT.py ARGUMENTS..., or -m MODULE ARGUMENTS...",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    install()
    hand_down()
    os.environ.update(of_launcher(os.environ))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return 0
    script = Path(words[0])
    if not script.exists():
        print(f"hpctrain_horovod: found no script {script}, expected a Python file", file=sys.stderr)
        return _EXIT_USAGE
    sys.argv = words
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
