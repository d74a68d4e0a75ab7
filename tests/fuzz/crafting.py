"""Small real files of a run, and the means to craft others of them, for test_crafted.py and test_checkpoint_files.py."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from confined import Confined
from jobs import TINY
from safetensors.torch import save_file

CHECKPOINT = "run/checkpoints/step-00000002"
SPARSE_BYTES = 10 * 2**30
WORD = b"the canary"


@dataclass(frozen=True)
class Place:
    """A directory with `outside/canary`, a run in `run` and files of weights; `crafted` is what the case changes."""

    root: Path

    @property
    def canary(self) -> Path:
        return self.root / "outside" / "canary"

    @property
    def checkpoint(self) -> Path:
        return self.root / CHECKPOINT

    def sing(self) -> None:
        """Create the files that must be neither read nor written. A read shows in the access time."""
        self.canary.parent.mkdir()
        self.canary.write_bytes(WORD)
        os.utime(self.canary, ns=(10**18, 10**18 + 10**9))

    def silence(self) -> list[str]:
        """The changes to these files since then."""
        found, status = [], self.canary.stat()
        if status.st_atime_ns != 10**18:
            found.append("a file outside was read")
        if self.canary.read_bytes() != WORD or status.st_mtime_ns != 10**18 + 10**9:
            found.append("a file outside was written")
        if set(os.listdir(self.canary.parent)) != {"canary"}:
            found.append(f"outside there is {sorted(os.listdir(self.canary.parent))}")
        if (self.root / "ran").exists():
            found.append("code ran")
        return found


# ------------------------------------------------------------------ real ones


def job_text(format: str, steps: int, output: str = "run") -> str:
    tables = json.loads(json.dumps(TINY))
    tables["job"] |= {"output_dir": output, "steps": steps}
    tables["batch"]["micro_size"] = 12
    tables["checkpoint"] = {"format": format, "every_steps": 1}
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)


def make_bases(root: Path, confined: Confined) -> dict[str, Path]:
    """A directory for each kind of file: runs of two steps, and weights."""
    bases = {}
    for format in ("hdf5", "dcp"):
        base = bases[format] = root / format
        base.mkdir()
        for steps in (2, 3):
            (base / f"{steps}.toml").write_text(job_text(format, steps))
        done = confined.run(base, ["run", "2.toml"])
        assert done[0].code == 0, done
        shutil.copytree(base / CHECKPOINT, base / "whole")
    base = bases["weights"] = root / "weights"
    (base / "shards").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(6, 5, generator=generator), "b": torch.arange(7), "c": torch.tensor(2.5)}
    save_file(tensors, base / "w.safetensors")
    torch.save(tensors, base / "w.pt")
    torch.save(tensors, base / "old.pt", _use_new_zipfile_serialization=False)
    for name in tensors:
        save_file({name: tensors[name]}, base / "shards" / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (base / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    return bases


# ------------------------------------------------------------------ anything in a file's place

Craft = Callable[[Place, Path], Any]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(exist_ok=True)


def _socket(place: Place, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        before = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # names of sockets must be short
        try:
            one.bind(path.name)
        finally:
            os.fchdir(before)
            os.close(before)


def _sparse(place: Place, path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


REPLACEMENTS: dict[str, Craft] = {
    "a pipe": lambda place, path: os.mkfifo(path),
    "a link to /dev/zero": lambda place, path: path.symlink_to("/dev/zero"),
    "a link outside": lambda place, path: path.symlink_to(place.canary),
    "a link to nothing outside": lambda place, path: path.symlink_to(place.canary.with_name("new")),
    "a link to itself": lambda place, path: path.symlink_to(path),
    "a socket": _socket,
    "a directory": lambda place, path: path.mkdir(),
    "10 GB of nothing": _sparse,
    "a megabyte of anything": lambda place, path: path.write_bytes(os.urandom(2**20)),
    "an empty file": lambda place, path: path.touch(),
}


def replaced(name: str, craft: str) -> Callable[[Place], Any]:
    """Put `craft` where the file `name` of the place is."""

    def change(place: Place) -> None:
        path = place.root / name
        _remove(path)
        REPLACEMENTS[craft](place, path)

    return change


def link_outside(name: str) -> Callable[[Place], Any]:
    """A link to the file outside: a write to it goes there."""
    return lambda place: (_remove(place.root / name), os.link(place.canary, place.root / name))


def directory_outside(name: str) -> Callable[[Place], Any]:
    """A directory moved out, with a link in its place."""

    def change(place: Place) -> None:
        _remove(place.root / name)
        (place.root / name).symlink_to(place.canary.parent)

    return change


# ------------------------------------------------------------------ JSON with a checksum

Content = dict[str, Any]


def sealed(rest: bytes) -> bytes:
    return b'{"checksum":"%s",\n' % xxhash.xxh3_64_hexdigest(rest).encode() + rest


def reseal(path: Path, rest: bytes) -> str:
    """Write a sealed file; return its checksum."""
    path.write_bytes(sealed(rest))
    return xxhash.xxh3_64_hexdigest(rest)


def content_of(path: Path) -> Content:
    content: Content = json.loads(path.read_bytes())
    del content["checksum"]
    return content


def rewrite(path: Path, change: Callable[[Content], Any]) -> str:
    """Change a sealed file; return its new checksum."""
    content = content_of(path)
    change(content)
    return reseal(path, json.dumps(content).encode()[1:])


def in_manifest(change: Callable[[Content], Any]) -> Callable[[Place], Any]:
    return lambda place: rewrite(place.checkpoint / "manifest.json", change)


def in_table(change: Callable[[Content], Any]) -> Callable[[Place], Any]:
    def both(place: Place) -> None:
        checksum = rewrite(place.checkpoint / "shard-00000.json", change)
        rewrite(place.checkpoint / "manifest.json", lambda content: content["shards"][0].update(table=checksum))

    return both


def raw_manifest(rest: bytes) -> Callable[[Place], Any]:
    return lambda place: reseal(place.checkpoint / "manifest.json", rest)


def raw_table(rest: bytes) -> Callable[[Place], Any]:
    def both(place: Place) -> None:
        checksum = reseal(place.checkpoint / "shard-00000.json", rest)
        rewrite(place.checkpoint / "manifest.json", lambda content: content["shards"][0].update(table=checksum))

    return both


def in_values(**values: Any) -> Callable[[Place], Any]:
    """Change values of the hdf5 checkpoint; None removes a value."""

    def change(content: Content) -> None:
        content["values"].update(values)
        for key in [key for key, value in values.items() if value is None]:
            del content["values"][key]

    return in_manifest(change)


# ------------------------------------------------------------------ DCP


def in_metadata(change: Callable[[Any], Any]) -> Callable[[Place], Any]:
    def both(place: Place) -> None:
        path = place.checkpoint / ".metadata"
        table = pickle.loads(path.read_bytes())
        change(table)
        raw_metadata(pickle.dumps(table))(place)

    return both


def raw_metadata(raw: bytes) -> Callable[[Place], Any]:
    def both(place: Place) -> None:
        (place.checkpoint / ".metadata").write_bytes(raw)
        checksum = xxhash.xxh3_64_hexdigest(raw)
        rewrite(place.checkpoint / "hpctrain.json", lambda content: content.update(metadata_xxh3=checksum))

    return both


def in_json(change: Callable[[Content], Any]) -> Callable[[Place], Any]:
    return lambda place: rewrite(place.checkpoint / "hpctrain.json", change)


class Ran:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("ran",))


# ------------------------------------------------------------------ weights


def in_zip(name: str, change: Callable[[dict[str, bytes]], Any]) -> Callable[[Place], Any]:
    """Change the records of a file of torch.save; its checksums fit."""

    def both(place: Place) -> None:
        path = place.root / name
        with zipfile.ZipFile(path) as saved:
            records = {one: saved.read(one) for one in saved.namelist()}
        change(records)
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as file:
            for one, content in records.items():
                file.writestr(one, content)
        path.write_bytes(made.getvalue())

    return both


def pickled(raw: bytes) -> Callable[[Place], Any]:
    """Replace the pickle in a file of torch.save."""
    return in_zip("w.pt", lambda records: records.update({name: raw for name in records if name.endswith("data.pkl")}))


def saved(content: object) -> Callable[[Place], Any]:
    return lambda place: torch.save(content, place.root / "w.pt")


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> Callable[[Place], Any]:
    """A file with this header, which may claim another length."""

    def write(place: Place) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(text) if length is None else length
        (place.root / "w.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)

    return write


def index(content: object) -> Callable[[Place], Any]:
    def write(place: Place) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (place.root / "shards" / "model.safetensors.index.json").write_bytes(text)

    return write
