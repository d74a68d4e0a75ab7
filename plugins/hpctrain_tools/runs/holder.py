"""The process that runs in an output directory, by the lock that it holds."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.safe_files import reading
from hpctrain.job.output_lock import FILE_NAME


@dataclass(frozen=True)
class Holder:
    """The process that took the lock last. name: such as "process 12 on node3". holds: whether it holds it still."""

    name: str
    holds: bool

    @property
    def is_of_this_node(self) -> bool:
        """Whether it ran here. File systems may have locks that other nodes don't see."""
        return self.name.endswith(f" on {platform.node()}")


def holder_of(directory: Path) -> Holder | None:
    """The process that runs in `directory`, or ran there last; None if there was none. OSError if the lock can't tell: the file
    system has no locks, or the file is another person's.

    Not for a process that holds the lock itself: it would lose it.
    """
    try:
        with reading(directory / FILE_NAME) as fd:
            name = os.read(fd, 200).decode(errors="replace").partition("\n")[0].strip() or "another process"
            try:
                fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                return Holder(name, True)
            return Holder(name, False)
    except FileNotFoundError:
        return None
