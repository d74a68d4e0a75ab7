"""The id of a submitted job: the name of its supervisor, and the directory of its run, where the end is written down."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from hpctrain.base.safe_files import read_bytes, replacing
from hpctrain.toolkit.commands import UsageError

_ENDED = "ray.ended.json"
_STOPPED = "ray.stopped"
_SAFE = "/._-"


@dataclass(frozen=True)
class JobId:
    """Text "hpctrain-1f2e3d4c@/runs/x": characters of the directory that no id may have are written as =2B."""

    name: str
    directory: Path

    @staticmethod
    def new(directory: Path) -> JobId:
        """The id of a new job of the run in `directory`."""
        return JobId(f"hpctrain-{secrets.token_hex(4)}", directory)

    @staticmethod
    def of(text: str) -> JobId:
        """The id that `text` tells. Raises UsageError."""
        name, _, directory = text.partition("@")
        if not name.startswith("hpctrain-") or not directory.startswith("/"):
            raise UsageError(f"found the id {text!r}, expected one of a job on Ray, such as hpctrain-1f2e3d4c@/runs/x")
        return JobId(name, Path(unquote(directory.replace("=", "%"))))

    def __str__(self) -> str:
        return f"{self.name}@{quote(str(self.directory), safe=_SAFE).replace('%', '=')}"


@dataclass(frozen=True)
class End:
    """How a job has ended: its exit code and a sentence, if there is one."""

    name: str
    code: int
    why: str = ""


def note_stop(id: JobId) -> None:
    """Write down in the run's directory that the job is to stop: a supervisor that is started again must know it."""
    with suppress(OSError), replacing(id.directory / _STOPPED) as file:
        file.write(id.name.encode())


def was_stopped(id: JobId) -> bool:
    """Whether the job was to stop."""
    with suppress(OSError):
        return read_bytes(id.directory / _STOPPED) == id.name.encode()
    return False


def write_end(id: JobId, code: int, why: str = "") -> None:
    """Write down in the run's directory how the job has ended."""
    with replacing(id.directory / _ENDED) as file:
        file.write(json.dumps(asdict(End(id.name, code, why))).encode())


def read_end(id: JobId) -> End | None:
    """How the job has ended; None if it has not, or a later one of the same run has."""
    with suppress(OSError, ValueError, TypeError):
        end = End(**json.loads(read_bytes(id.directory / _ENDED)))
        return end if end.name == id.name else None
    return None
