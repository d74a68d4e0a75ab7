"""Where the user's own code is called: an error in it is told by the key of the job file, with the user's frames only."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import HpctrainError, TrainingError, UsageError

_HERE = str(Path(__file__).parent.parent)
_LIBRARIES = tuple(
    path + os.sep for path in {_HERE, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Around a call of what the job file names; `what` is the subject of the sentence.

    An error inside of the user's files is TrainingError. Where none of them has been reached, the reference or its arguments
    are wrong, which is UsageError.
    """
    try:
        yield
    except HpctrainError:
        raise
    except (Exception, SystemExit) as error:
        said = f"{what} raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        if frames:
            raise TrainingError(f"{said}\n{''.join(traceback.format_list(frames))}".rstrip()) from error
        raise UsageError(f"{said}; check what is called and its arguments, the other keys of the table") from error


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_LIBRARIES))
