"""A rank of `horovod.run`: `python -m hpctrain_horovod.runner.task DIRECTORY DIGEST`."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from hpctrain.base.launcher_variables import set_variables
from hpctrain_horovod.engine import runtime
from hpctrain_horovod.runner import FUNCTION, RESULT


def main(directory: Path, digest: str) -> None:
    """Call the function of the directory, and leave its result there. digest: of what the program that calls it has put there; the
    directory may be one that others can write."""
    try:
        content = (directory / FUNCTION).read_bytes()
    except OSError as error:
        sys.exit(f"horovod.run: {error}, on {os.uname().nodename}: set TMPDIR to a directory that all hosts share")
    if hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"horovod.run: another user has changed {directory / FUNCTION}, on {os.uname().nodename}")
    function, arguments, options = pickle.loads(content)
    result: Any = function(*arguments, **options)
    rank = runtime.last_rank()
    if rank is None:  # the function did not use Horovod
        set_variables()
        rank = int(os.environ.get("RANK", "0"))
    (directory / f"{RESULT}.{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
