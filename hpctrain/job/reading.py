"""Reads a job file and the files that it extends, and keeps the line of each key."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import tomli

from hpctrain.base.errors import JobFileError
from hpctrain.base.safe_files import read_bytes
from hpctrain.job.overrides import apply_override
from hpctrain.job.raw import RawJob, merge, value_at
from hpctrain.job.toml import LimitError, key_lines, parse

__all__ = ["read_job"]

# the begin of the name of a file that comes with hpctrain
_PRESET = "preset:"


def read_job(path: Path, overrides: Sequence[str] = ()) -> RawJob:
    """Read `path`, merged over the files that it extends, with `overrides` ("table.key=value") on top.

    Raises UsageError with file:line for a missing file, invalid TOML, a cycle, or a malformed override.
    """
    raw = _read_file(path, [])
    raw.source = str(path)
    for override in overrides:
        apply_override(raw, override)
    return raw.refuse_values()


def _read_file(path: Path, chain: list[Path]) -> RawJob:
    resolved = Path(os.path.realpath(path))  # not resolve(), which raises in a loop of links
    if resolved in chain:
        loop = " -> ".join(str(p) for p in [*chain[chain.index(resolved) :], resolved])
        raise JobFileError(f"{path}:1: extends goes in a circle: {loop}; remove one of them")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise JobFileError(f"{path}: found a device, a pipe or a directory, expected a job file")
        content = read_bytes(resolved)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise JobFileError(f"{path}: there is no such file; expected a job file (hpctrain new writes one)") from None
    except OSError as error:
        raise JobFileError(f"{path}: cannot be read as a job file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise JobFileError(
            f"{path}:{line}: found byte {content[error.start]:#04x}, expected UTF-8; save it as UTF-8"
        ) from None
    try:
        tables = parse(text)
    except tomli.TOMLDecodeError as error:
        why = f"{error.msg} (column {error.colno}){_case_of(error)}"
        raise JobFileError(f"{path}:{error.lineno}: not valid TOML: {why}") from None
    except LimitError as error:
        raise JobFileError(f"{path}: not a job file: {error}") from None
    raw = RawJob(tables, {key: f"{path}:{line}" for key, line in key_lines(text)}, str(path)).refuse_values()
    base = tables.pop("extends", None)
    if base is None:
        return raw
    place = raw.places.pop(("extends",))
    bases = base if isinstance(base, list) else [base]
    if not bases or not all(isinstance(one, str) for one in bases):
        raise JobFileError(f"{place}: extends: expected the path of a job file, or a list of paths, found {base!r}")
    files = [str(_preset(one.removeprefix(_PRESET), place)) if one.startswith(_PRESET) else one for one in bases]
    raws = []
    for file in files:
        if not os.path.isfile(path.parent / file):  # unlike Path's, it doesn't raise for names that are too long
            raise JobFileError(
                f"{place}: extends: there is no file {path.parent / file}; a path is relative to the file that wrote it"
            )
        raws.append(_read_file(path.parent / file, [*chain, resolved]))
    return reduce(_on_top, [*raws, raw])


def _preset(name: str, place: str) -> Path:
    """The file of a model's sizes: the core's, or that of a distribution whose entry point of the group `hpctrain.presets` names
    a package with such files."""
    folders = [str(Path(__file__).parent / "presets")]
    for entry in entry_points(group="hpctrain.presets"):
        with suppress(ImportError):  # a distribution whose files are gone
            found = find_spec(entry.value)
            folders += [] if found is None else list(found.submodule_search_locations or ())
    known = {path.stem: path for folder in folders for path in Path(folder).glob("*.toml")}
    several = [folder for folder in folders if (Path(folder) / f"{name}.toml").is_file()]
    if len(several) > 1:
        raise JobFileError(f"{place}: extends: several packages have a preset {name!r}: {', '.join(several)}")
    if name not in known:
        raise JobFileError(
            f"{place}: extends: there is no preset {name!r}, here or in an installed package; expected one of "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def _case_of(error: tomli.TOMLDecodeError) -> str:
    """A remedy for Python's True and False."""
    found = re.match("True|False", error.doc[error.pos :])
    return "" if found is None else f"; TOML writes {found[0].lower()}, found {found[0]}"


def _on_top(below: RawJob, above: RawJob) -> RawJob:
    """The merge of two files. `above` replaces arrays as a whole, so their elements drop the places from below."""
    arrays = {key for key in above.places if isinstance(value_at(above.tables, key), list)}
    kept = {k: v for k, v in below.places.items() if not any(k[: len(a)] == a for a in arrays)}
    return RawJob(merge(below.tables, above.tables), {**kept, **above.places}, above.source)
