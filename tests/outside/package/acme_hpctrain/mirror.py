"""Keeps a copy of each checkpoint, of whatever format, on an HTTP server, and gets the newest one from there where none is left."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote

from hpctrain.api import Field, Hook, Options, UsageError, hookimpl

LOG = logging.getLogger("hpctrain")
_INDEX = "index.json"
_SECONDS = 60.0


class MirrorOptions(Options):
    url: str = Field(pattern="^https?://", description="where the server takes files by PUT and gives them back by GET")


class Mirror(Hook):
    """A copy of each checkpoint on an HTTP server."""

    name = "mirror"
    Options = MirrorOptions
    options: MirrorOptions

    def start(self):
        return _Mirror(self.options.url.rstrip("/"))


class _Mirror:
    """The mirror of one run; rank 0 talks to the server, the others wait for it in the restore."""

    def __init__(self, url: str) -> None:
        self._url, self._index, self._is_first = url, {}, False

    @hookimpl
    def hpctrain_state(self, job, identity):
        self._is_first = identity.rank == 0
        home = Path(job.output_dir) / "checkpoints"
        if self._is_first:
            self._index = json.loads(self._get(_INDEX) or b"{}")
            if self._index and not [*home.glob("step-*")]:
                self._fetch(home, max(self._index))

    @hookimpl
    def hpctrain_checkpoint_saved(self, step, path):
        if not self._is_first:
            return
        files = [str(one.relative_to(path)) for one in sorted(path.rglob("*")) if one.is_file()]
        try:
            for name in files:
                self._put(f"{path.name}/{name}", (path / name).read_bytes())
            self._index[path.name] = files
            self._put(_INDEX, json.dumps(self._index).encode())
        except (URLError, OSError) as error:
            LOG.warning("mirror: %s is not on the server: %s", path.name, error)

    def _fetch(self, home: Path, name: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=".mirror-") as scratch:
            whole = Path(scratch) / "whole"
            for file in self._index[name]:
                target = (whole / file).resolve()
                if not target.is_relative_to(whole.resolve()):
                    raise UsageError(f"mirror: {self._url} lists {file!r}, expected a path inside of a checkpoint")
                content = self._get(f"{name}/{file}")
                if content is None:
                    raise UsageError(f"mirror: {self._url} lists {name}/{file}, and has no such file")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            shutil.move(whole, home / Path(name).name)

    def _get(self, name: str) -> bytes | None:
        try:
            with urllib.request.urlopen(f"{self._url}/{quote(name)}", timeout=_SECONDS) as answer:
                return answer.read()
        except HTTPError as error:
            if error.code == 404:
                return None
            raise UsageError(f"mirror: {self._url}/{name}: found {error}, expected the file, or 404") from None
        except URLError as error:
            raise UsageError(f"mirror: {self._url} doesn't answer: {error.reason}") from None

    def _put(self, name: str, content: bytes) -> None:
        request = urllib.request.Request(f"{self._url}/{quote(name)}", content, method="PUT")
        urllib.request.urlopen(request, timeout=_SECONDS).close()


@hookimpl
def hpctrain_hook():
    return [Mirror]
