"""A rank of `horovod.run`: `python -m hpctrain_horovod.runner.task DIRECTORY`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from hpctrain.toolkit.commands import is_private
from hpctrain.toolkit.launcher_variables import set_variables
from hpctrain_horovod.engine import runtime
from hpctrain_horovod.runner import FUNCTION, RESULT


def main(directory: Path) -> None:
    """Call the function of the directory, and leave its result there. Ends the rank unless it is this user's alone."""
    if not directory.is_dir() or not is_private(directory):
        sys.exit(
            f"horovod.run: {directory} on {os.uname().nodename} is not a directory of this user's alone, expected that of the "
            "program that called it: set TMPDIR to a directory that all hosts share"
        )
    function, arguments, options = pickle.loads((directory / FUNCTION).read_bytes())
    result: Any = function(*arguments, **options)
    rank = runtime.last_rank()
    if rank is None:  # the function did not use Horovod
        set_variables()
        rank = int(os.environ.get("RANK", "0"))
    (directory / f"{RESULT}.{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
