"""The directory of a run's checkpoints on rank 0: names, order, and changes that a crash can't leave half done.

`step-00000010` is complete, `.tmp` is being written, `.old` is being replaced, `.del` is being deleted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.errors import reason
from hpctrain.base.safe_files import is_own_directory, make_directory, read_bytes, replacing, sync_directory

LOG = logging.getLogger("hpctrain")
Staying = Callable[[Sequence[Path], set[str]], tuple[set[Path], Path | None]]
"""A choice of the checkpoints to keep and of the best one; see Retention.staying."""
_STEP = re.compile(r"step-([0-9]{8,18})")  # at most 18 digits: below 2**63


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory; -1 for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def behind_name(path: Path) -> Path:
    """The checkpoint that `path` names, if it is a file `latest` or `best`; else `path` itself."""
    if path.name not in ("latest", "best"):
        return path
    try:
        name = read_bytes(path).decode(errors="replace").strip()
    except OSError:
        return path
    return path.with_name(name) if _STEP.fullmatch(name) else path


class CheckpointDirectory:
    """Rank 0's operations on the files. Every method may raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.began = 0
        """The step from which this training continued. Later checkpoints that it did not write are abandoned."""
        self._own: set[str] = set()  # the names of those that it wrote

    def path(self, step: int) -> Path:
        """The path of the checkpoint of `step`."""
        return self.root / f"step-{step:08d}"

    def candidates(self) -> list[Path]:
        """The checkpoints in the order in which a resume tries them.

        Newest step first. Abandoned checkpoints come last: a training that continued from an older checkpoint left them
        behind.
        """
        if self.root.is_symlink():  # `retain` would delete in another directory of the user's
            raise OSError(errno.ELOOP, "it is a symbolic link, expected the directory itself", str(self.root))
        if not self.root.is_dir():
            return []
        abandoned = self._abandoned()
        checkpoints = [path for path in self.root.iterdir() if step_of(path) >= 0 and is_own_directory(path)]
        return sorted(checkpoints, key=lambda path: (path.name not in abandoned, step_of(path)), reverse=True)

    def clean(self) -> None:
        """Remove the remains of earlier crashes as far as possible; restore a checkpoint whose replacement never finished."""
        self._put_back()  # first: then each .old that is left has a successor
        for pattern in ("step-*.tmp", "step-*.old", "step-*.del", ".latest.*.tmp", ".best.*.tmp", ".abandoned.*.tmp"):
            for remains in self.root.glob(pattern):
                try:
                    _remove(remains)
                except OSError as error:  # remains do no harm
                    LOG.warning("could not remove %s, which a crash left: %s", remains, reason(error))

    def begin(self, step: int) -> Path:
        """A new, empty directory for the checkpoint of `step`; removes the remains of earlier saves."""
        make_directory(self.root)
        self.clean()
        temporary = self.path(step).with_suffix(".tmp")
        _remove(temporary)  # an earlier save of this step may have failed
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path) -> Path:
        """Give a complete and synced checkpoint its final name; replaces an older one of the same step."""
        final = temporary.with_suffix("")
        beyond = {path.name for path in self.candidates() if step_of(path) > self.began}
        # Before the new name appears: after a crash in between, a resume would take an abandoned checkpoint.
        self._abandon(self._abandoned() | beyond - self._own)
        sync_directory(temporary)  # before the rename: else a power failure may leave the name without the files
        replaces = os.path.lexists(final)
        if replaces:
            final.rename(final.with_suffix(".old"))  # a directory can't be renamed over another one that has files
        temporary.rename(final)
        try:
            sync_directory(self.root)
            self._abandon(self._abandoned() - {final.name})
        except OSError:
            final.rename(temporary)  # to be discarded: a failed save must not replace the old checkpoint
            raise
        self._own.add(final.name)
        self._name("latest", final)
        if replaces:
            self._delete(final.with_suffix(".old"))  # last: until now, `clean` could give it its name back
        return final

    def discard(self, temporary: Path) -> None:
        """Remove the files of a failed save as far as possible."""
        shutil.rmtree(temporary, ignore_errors=True)
        self._put_back()

    def retain(self, staying: Staying, saved: Path) -> None:
        """Delete all checkpoints but those that `staying` returns and the one just saved; name the best one."""
        candidates = self.candidates()
        kept, best = staying(candidates, self._abandoned())
        self._name("best", best)  # before the deletions: it must not name what is gone
        for path in candidates:
            if path not in kept and path != saved:
                self._delete(path)
        self._abandon({name for name in self._abandoned() if (self.root / name).exists()})

    def _name(self, file: str, checkpoint: Path | None) -> None:
        """Write a checkpoint's name into a file beside it, or remove that file without one. It is only a hint for people: the
        checkpoint is safe without it."""
        path = self.root / file
        try:
            if checkpoint is not None:
                _write_text(path, checkpoint.name + "\n")
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            LOG.warning("could not update %s: %s", path, reason(error))

    def _put_back(self) -> None:
        """Rename checkpoints back whose replacements never got their names."""
        for old in self.root.glob("step-*.old"):
            if is_own_directory(old) and not old.with_suffix("").exists():
                try:
                    old.rename(old.with_suffix(""))
                except OSError as error:
                    LOG.warning("could not give %s its name back: %s", old, reason(error))

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint, as far as possible: too many do no harm."""
        doomed = path.with_suffix(".del")
        try:
            path.rename(doomed)  # a crash must not leave half a checkpoint under a valid name
            _remove(doomed)
        except OSError as error:
            LOG.warning("could not delete the old checkpoint %s: %s", path, reason(error))

    def _abandoned(self) -> set[str]:
        """The names of the checkpoints that a training left behind."""
        try:
            listed = read_bytes(self.root / "abandoned").decode(errors="replace").split()
        except FileNotFoundError:
            return set()
        return {name for name in listed if _STEP.fullmatch(name)}

    def _abandon(self, names: set[str]) -> None:
        """Record the abandoned checkpoints."""
        if names == self._abandoned():
            return  # most saves abandon nothing
        if names:
            _write_text(self.root / "abandoned", "".join(f"{name}\n" for name in sorted(names)))
        else:
            (self.root / "abandoned").unlink()


def _remove(path: Path) -> None:
    """Remove a file, a directory or a symbolic link (not its target), if it exists."""
    if is_own_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())
