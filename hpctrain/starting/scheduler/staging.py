"""Packs this Python environment into one file, which a job unpacks on each node's own disk.

A thousand ranks that import torch from a network file system each look for and open some thousands of files there. With
`hpctrain submit --stage` they open them on their own disks instead.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.base.errors import UsageError, WriteError, reason
from hpctrain.base.safe_files import is_only_ours, replacing
from hpctrain.contracts.scheduler import Stage

_OF_EACH_NODE = ("/usr",)
"""Places in which a Python belongs to the operating system, which every node has."""
_PARTS = ("site-packages", "dist-packages")


def described(directory: Path, parent: str) -> Stage:
    """Describe the packed environment for a scheduler. directory: of the packed file. parent: a directory on each node's own disk.

    Raises UsageError for an environment that cannot be packed.
    """
    _refuse_others()
    hashed = hashlib.sha256()
    try:
        for name, path in sorted(_members()):
            if "/__pycache__/" not in name:  # they come and go with the first use of a module
                found = path.lstat()
                hashed.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    except OSError as error:
        raise UsageError(f"--stage: {sys.prefix} cannot be read: {reason(error)}") from None
    return Stage(directory / f"environment-{hashed.hexdigest()[:16]}.tar", parent, _has_base())


def pack(stage: Stage) -> None:
    """Write the file unless it is there. Raises WriteError."""
    if _is_ours(stage.image):
        return
    print(f"packing      {sys.prefix} into {stage.image}", file=sys.stderr, flush=True)
    try:
        stage.image.parent.mkdir(parents=True, exist_ok=True)
        with replacing(stage.image) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name, path in _members():
                tar.add(path, name, recursive=False, filter=_relinked)
    except OSError as error:
        raise WriteError(
            f"--stage: {sys.prefix} could not be packed into {stage.image} ({reason(error)}); make room, or submit without --stage"
        ) from None


def _refuse_others() -> None:
    """Raises UsageError for environments that would not work when unpacked."""
    if sys.prefix.startswith(_OF_EACH_NODE):
        raise UsageError(
            f"--stage: found the Python of the operating system in {sys.prefix}, expected a virtual environment or conda's: make "
            "one, or submit without --stage"
        )
    settings = Path(sys.prefix, "pyvenv.cfg")
    if _has_base() and settings.exists() and "include-system-site-packages = true" in settings.read_text():
        raise UsageError(
            f"--stage: {sys.prefix} takes packages from {sys.base_prefix} (--system-site-packages), which are not packed; "
            "expected an environment that has all of its packages"
        )


def _is_ours(image: Path) -> bool:
    """Whether the file is there, and nobody else can have written it: the ranks run it."""
    try:
        found = image.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and is_only_ours(found)


def _relinked(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """bin/python leads to the Python beside it."""
    base = Path(sys.base_prefix, "bin")
    if _has_base() and member.issym() and Path(member.linkname).parent == base:
        member.linkname = f"../base/bin/{Path(member.linkname).name}"
    return member


def _has_base() -> bool:
    """Whether the Python that a virtual environment stands on has to be packed, too."""
    return sys.prefix != sys.base_prefix and not sys.base_prefix.startswith(_OF_EACH_NODE)


def _members() -> Iterator[tuple[str, Path]]:
    """The files and links, each with its name in the packed file: the environment at the top; `base`, its Python; `path`, packages
    that are installed in place. Python finds these before the .pth files that lead to their directories; files that lead to packed
    packages only are left out."""
    needless = {f"{finder.__name__.removesuffix('_finder')}.pth" for finder in _finders() if _is_packed(finder)}
    for name, path in _below(Path(sys.prefix)):
        if not (path.suffix == ".pth" and re.sub(r"[-.]", "_", path.stem) + ".pth" in needless):
            yield name, path
    if _has_base():
        base = Path(sys.base_prefix)
        library = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for part, kept in (("bin", ("python",)), ("lib", (f"{library}/", "lib"))):
            for name, path in _below(base / part):
                of_others = set(path.relative_to(base).parts) & set(_PARTS)
                if name.startswith(kept) and not of_others and (name.startswith(library) or "/" not in name):
                    yield f"base/{part}/{name}", path
    for package in _installed_in_place():
        if package.is_dir():
            for name, path in _below(package):
                yield f"path/{package.name}/{name}", path
        else:
            yield f"path/{package.name}", package


def _installed_in_place() -> list[Path]:
    """The packages and modules outside of the environment that `pip install --editable` has put on the way to it."""
    found: dict[str, Path] = {}
    for finder in _finders():
        found |= {top: Path(place) for top, place in finder.MAPPING.items() if "." not in top}
    for directory in map(Path, _directories_of_pth()):
        for one in sorted(directory.iterdir()) if directory.is_dir() else ():
            if (one / "__init__.py").exists() or one.suffix == ".py":
                found.setdefault(one.name, one)
    return [path for one in found.values() if (path := one if one.exists() else one.with_suffix(".py")).exists()]


def _finders() -> list[Any]:
    """The modules by which setuptools lets Python find packages that are installed in place."""
    return [one for name, one in sys.modules.items() if name.startswith("__editable__") and hasattr(one, "MAPPING")]


def _is_packed(finder: Any) -> bool:
    names = [*finder.MAPPING, *getattr(finder, "NAMESPACES", {})]
    return all(name.partition(".")[0] in finder.MAPPING for name in names)


def _directories_of_pth() -> list[str]:
    """The directories outside of the environment that its .pth files put on sys.path."""
    files = [one for entry in sys.path if Path(entry).name in _PARTS for one in sorted(Path(entry).glob("*.pth"))]
    lines = [line.strip() for path in files if path.exists() for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if line.startswith(os.sep) and not line.startswith((sys.prefix, sys.base_prefix))]


def _below(directory: Path) -> Iterator[tuple[str, Path]]:
    for at, directories, files in os.walk(directory):
        directories.sort()
        here = Path(at)
        linked = [name for name in directories if (here / name).is_symlink()]
        for name in sorted([*files, *linked]):
            yield str((here / name).relative_to(directory)), here / name
