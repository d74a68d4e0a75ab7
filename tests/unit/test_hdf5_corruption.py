"""Damaged and crafted checkpoints: found while loading and by verify, named, and never a way to other files."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, read, table
from torch import Tensor

from hpctrain.api import CheckpointError, Piece, State

SHARD, TABLE, MANIFEST = "shard-00000.h5", "shard-00000.json", "manifest.json"


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model/a.weight": torch.randn(40, 100),
        "model/a.bias": torch.randn(40),
        "optimizer/a.bias/step": torch.ones(()),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> Path:
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    Hdf5().writer().write(State([Piece.whole(*one) for one in tensors().items()], {"step": 1}), directory, group)
    return directory


def load(directory: Path) -> dict[str, Tensor]:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    Hdf5().load(directory, [Piece.whole(*one) for one in loaded.items()])
    return loaded


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Change a file as someone who means harm would: with a checksum that fits, which is returned."""
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    rest = json.dumps(content).encode()[1:]
    checksum = xxhash.xxh3_64_hexdigest(rest)
    path.write_bytes(b'{"checksum":"%s",\n' % checksum.encode() + rest)
    return checksum


def rewrite_table(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the table, and the manifest so that it fits."""
    checksum = rewrite(directory / TABLE, change)
    rewrite(directory / MANIFEST, lambda content: content["shards"][0].update(table=checksum))


def plant(directory: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a shard through HDF5 and make table and manifest fit the file as it is then."""
    with h5py.File(directory / SHARD, "r+") as file:
        change(file)
    fit(directory)


def fit(directory: Path) -> None:
    raw = (directory / SHARD).read_bytes()
    chunks = table_of(directory).chunks

    def change(content: dict[str, Any]) -> None:
        content["size"] = len(raw)
        spans = sorted((chunk.at, chunk.end) for chunk in chunks)
        frame = b"".join(raw[begin:end] for begin, end in table.holes(spans, len(raw)))
        content["xxh3"] = xxhash.xxh3_64_hexdigest(frame)

    rewrite_table(directory, change)


def table_of(directory: Path) -> table.ShardTable:
    return read.read_table(directory, read.read_manifest(directory), 0)


def test_a_whole_one_loads_without_pickle_and_without_hdf5(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("not while loading")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (h5py, "File")]:
        monkeypatch.setattr(module, name, forbidden)
    loaded = load(checkpoint)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert Hdf5().read_values(checkpoint) == {"step": 1}


def positions(directory: Path, what: str) -> list[tuple[str, int]]:
    """Where to flip: up to 200 places in the data, the HDF5 structure, the table or the manifest."""
    content = table_of(directory)
    inside = {place for begin, end in content.holes for place in range(begin, end)}
    every: list[tuple[str, int]] = {
        "data": [(SHARD, place) for place in range(content.size) if place not in inside],
        "structure": [(SHARD, place) for place in sorted(inside)],
        "table": [(TABLE, place) for place in range((directory / TABLE).stat().st_size)],
        "manifest": [(MANIFEST, place) for place in range((directory / MANIFEST).stat().st_size)],
    }[what]
    return random.Random(what).sample(every, 200)


@pytest.mark.parametrize("what", ["data", "structure", "table", "manifest"])
def test_every_flipped_bit_is_found_while_loading(what: str, checkpoint: Path) -> None:
    for name, position in positions(checkpoint, what):
        flip(checkpoint / name, position, position % 8)
        with pytest.raises(CheckpointError, match=name):
            load(checkpoint)
        flip(checkpoint / name, position, position % 8)
    load(checkpoint)


@pytest.mark.cases(thorough=["data", "structure"])
@pytest.mark.parametrize("what", ["data", "structure", "table", "manifest"])
def test_verify_names_the_file_of_a_flipped_bit(what: str, checkpoint: Path) -> None:
    for name, position in positions(checkpoint, what)[:4]:
        flip(checkpoint / name, position, 0)
        faults = Hdf5().verify(checkpoint)
        assert faults
        assert all(str(checkpoint / name) in fault for fault in faults)
        flip(checkpoint / name, position, 0)


def test_a_flipped_bit_in_the_data_names_the_tensor(checkpoint: Path) -> None:
    chunk = next(one for one in table_of(checkpoint).chunks if one.name == "model/a.bias")
    flip(checkpoint / SHARD, chunk.at + 17, 3)
    with pytest.raises(CheckpointError, match=rf"{SHARD}: tensor model/a\.bias is corrupt"):
        load(checkpoint)
    assert any("model/a.bias is corrupt" in fault for fault in Hdf5().verify(checkpoint))


def test_verify_reports_bytes_up_to_the_total(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert Hdf5().verify(checkpoint, lambda done, total: seen.append((done, total))) == []
    total = sum(tensor.numel() * 4 for tensor in tensors().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_cut_off_missing_and_replaced_files_are_named(checkpoint: Path) -> None:
    shard, kept = checkpoint / SHARD, (checkpoint / SHARD).read_bytes()
    for damage, says in [
        (lambda: os.truncate(shard, len(kept) - 1), "cut off"),
        (shard.unlink, "missing"),
        (lambda: (shard.unlink(), shard.symlink_to("/etc/hostname")), "symbolic link"),
        (lambda: (shard.unlink(), os.mkfifo(shard)), "no regular file"),
    ]:
        damage()
        with pytest.raises(CheckpointError, match=f"{SHARD}: .*{says}"):
            load(checkpoint)
        assert any(SHARD in fault and says in fault for fault in Hdf5().verify(checkpoint))
        shard.unlink(missing_ok=True)
        shard.write_bytes(kept)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: the file is missing"):
        load(checkpoint)
    assert Hdf5().recognizes(checkpoint)


def test_a_table_of_another_save_is_told(checkpoint: Path) -> None:
    rewrite(checkpoint / TABLE, lambda content: content["chunks"]["model/a.bias"][0].update(xxh3=["0" * 16]))
    with pytest.raises(CheckpointError, match=rf"{TABLE}: .*belongs to another save"):
        load(checkpoint)
    assert any(TABLE in fault and "belongs to another save" in fault for fault in Hdf5().verify(checkpoint))
    (checkpoint / TABLE).unlink()
    with pytest.raises(CheckpointError, match=rf"{TABLE}: the file is missing"):
        load(checkpoint)


Content = dict[str, Any]


def layout_of(content: Content, name: str) -> Any:
    return content["layouts"][content["tensors"][name]["layout"]]


def set_shard(**keys: Any) -> Callable[[Content], Any]:
    return lambda content: content["shards"][0].update(keys)


def set_bias_part(**keys: Any) -> Callable[[Content], Any]:
    return lambda content: layout_of(content, "model/a.bias")["parts"][0].update(keys)


def set_bias(**keys: Any) -> Callable[[Content], Any]:
    return lambda content: content["tensors"]["model/a.bias"].update(keys)


def double_bias(content: Content) -> None:
    layout_of(content, "model/a.bias")["parts"] *= 2


def rename_bias(name: str) -> Callable[[Content], Any]:
    return lambda content: content["tensors"].update({name: content["tensors"].pop("model/a.bias")})


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


CRAFTED: dict[str, tuple[Callable[[Content], Any], str]] = {
    "a dropped part": (lambda c: layout_of(c, "model/a.weight")["parts"].clear(), "model/a.weight.*hole"),
    "a doubled part": (double_bias, "model/a.bias.*overlap"),
    "a path up": (set_shard(name="../shard-00000.h5"), "not the name of a shard"),
    "an absolute path": (set_shard(name="/etc/passwd"), "not the name of a shard"),
    "a shard twice": (lambda c: c["shards"].extend(c["shards"]), "a shard twice"),
    "an unknown shard": (set_bias_part(shard=7), "model/a.bias.*shard 7 of 1"),
    "an unknown layout": (set_bias(layout=7), "model/a.bias.*layout 7 of 3"),
    "a negative place": (set_bias_part(offsets=[-8]), "zero or more"),
    "text for a number": (set_bias(layout="0"), "zero or more"),
    "an unknown dtype": (set_bias(dtype="object"), "unknown dtype"),
    "a later version": (lambda c: c.update(version=3), "version 3"),
    "a name that steers a terminal": (rename_bias("\x1b[2J"), r"'\\x1b\[2J' can't name"),
    "a name that can't be shown": (rename_bias("\ud800"), r"'\\ud800' can't name"),
    "values that are a list": (lambda c: c.update(values=[1]), "values are no object"),
    "values that are null": (lambda c: c.update(values=None), "values are no object"),
    "values with odd names": (lambda c: c.update(values={"\x1b[2J": 1}), "values are no object"),
    "values nested deep": (lambda c: c.update(values={"x": nested(600)}), "nested more than 64 deep"),
    "a float beyond all": (lambda c: c.update(values={"x": {"$float": 10**400}}), "malformed .float"),
    "no tensors": (lambda c: c.pop("tensors"), "malformed"),
    "no layouts": (lambda c: c.update(layouts=None), "malformed"),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_manifests_are_refused(what: str, checkpoint: Path) -> None:
    change, says = CRAFTED[what]
    rewrite(checkpoint / MANIFEST, change)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{says}"):
        load(checkpoint)
    assert Hdf5().verify(checkpoint)


def set_place(**keys: Any) -> Callable[[Content], Any]:
    """Change the keys of the bias' chunk."""
    return lambda content: content["chunks"]["model/a.bias"][0].update(keys)


def move_bias_into_weight(content: Content) -> None:
    content["chunks"]["model/a.bias"][0]["at"] = content["chunks"]["model/a.weight"][0]["at"] + 8


CRAFTED_TABLES: dict[str, tuple[Callable[[Content], Any], str]] = {
    "a file of 2^60 bytes": (lambda c: c.update(size=2**60), "far more bytes"),
    "a place beyond the file": (set_place(at=10**9), "model/a.bias.*beyond its file"),
    "a negative place": (set_place(at=-8), "zero or more"),
    "text for a number": (set_place(at="0"), "zero or more"),
    "a place in another chunk": (move_bias_into_weight, "overlap"),
    "a checksum too many": (set_place(xxh3=["0" * 16] * 2), "model/a.bias.*2 checksums"),
    "a chunk too many": (lambda c: c["chunks"]["model/a.bias"].append({"at": 0, "xxh3": []}), "model/a.bias.*2 chunks"),
    "a missing chunk": (lambda c: c["chunks"].pop("model/a.bias"), "model/a.bias.*0 chunks here"),
    "an unknown tensor": (lambda c: c["chunks"].update(x=[]), "4 tensors, 3 in the manifest"),
    "chunks that are a list": (lambda c: c.update(chunks=[]), "malformed"),
    "a chunk that is a number": (lambda c: c["chunks"].update({"model/a.bias": [5]}), "malformed"),
}


@pytest.mark.parametrize("what", CRAFTED_TABLES)
def test_crafted_tables_are_refused(what: str, checkpoint: Path) -> None:
    change, says = CRAFTED_TABLES[what]
    rewrite_table(checkpoint, change)
    with pytest.raises(CheckpointError, match=rf"{TABLE}: .*{says}"):
        load(checkpoint)
    assert any(TABLE in fault for fault in Hdf5().verify(checkpoint))


def test_a_tensor_of_2_to_the_60_bytes_is_refused(checkpoint: Path) -> None:
    def grow(content: Content) -> None:
        layout = layout_of(content, "model/a.bias")
        layout["shape"] = layout["parts"][0]["shape"] = [2**58]

    rewrite(checkpoint / MANIFEST, grow)
    rewrite_table(checkpoint, set_place(xxh3=["0" * 16] * 2))
    assert any("model/a.bias" in fault and "checksums" in fault for fault in Hdf5().verify(checkpoint))


def test_a_crafted_file_of_mostly_nothing_takes_no_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 3 * 16 * 2**20
    os.truncate(checkpoint / SHARD, nbytes)
    rewrite_table(checkpoint, lambda content: content.update(size=nbytes))
    asked, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: asked.append(len(buffers[0])) or preadv(fd, buffers, at))
    with pytest.raises(CheckpointError, match=f"{SHARD}: its HDF5 structure isn't"):
        load(checkpoint)
    assert max(asked) <= read.STEP_BYTES


def test_deep_nesting_is_refused(checkpoint: Path) -> None:
    rest = b'"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    head = b'{"checksum":"%s",\n' % xxhash.xxh3_64_hexdigest(rest).encode()
    (checkpoint / "manifest.json").write_bytes(head + rest)
    with pytest.raises(CheckpointError, match="malformed"):
        load(checkpoint)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", shape=(4,))
    file.create_virtual_dataset("model/planted", layout)


def link(target: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.__setitem__("model/planted", target)


def dataset(**keys: Any) -> Callable[[h5py.File], Any]:
    return lambda file: file.create_dataset("model/planted", **({"shape": (4,), "dtype": "f4"} | keys))


HOSTILE: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "external link": (link(h5py.ExternalLink("other.h5", "/x")), "an external link"),
    "soft link": (link(h5py.SoftLink("/model/a.bias")), "a soft link"),
    "second hard link": (lambda file: link(file["model/a.bias"])(file), "second link"),
    "link to a group above": (lambda file: link(file["model"])(file), "second link"),
    "named type": (link(np.dtype("f4")), "only datasets"),
    "virtual": (virtual, "virtual"),
    "external storage": (dataset(external=[("/etc/passwd", 0, 16)]), "/etc/passwd"),
    "filter": (dataset(chunks=(4,), compression="gzip"), "filter 'deflate'"),
    "chunked": (dataset(chunks=(4,)), "contiguously"),
    "text": (dataset(shape=(), dtype=h5py.string_dtype()), "isn't in the table"),
    "object references": (dataset(dtype=h5py.ref_dtype), "isn't in the table"),
    "region references": (dataset(dtype=h5py.regionref_dtype), "isn't in the table"),
    "extra dataset": (dataset(), "isn't in the table"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_objects_are_refused_by_name(what: str, checkpoint: Path, tmp_path: Path) -> None:
    untouched = tmp_path / "untouched"
    shutil.copytree(checkpoint, untouched)
    change, says = HOSTILE[what]
    plant(checkpoint, change)
    faults = Hdf5().verify(checkpoint)
    assert len(faults) == 1
    assert f"{SHARD}: model/planted" in faults[0]
    assert says in faults[0]
    # Without the table's consent loading refuses the file, too, and verify still names the object.
    shutil.copy(untouched / TABLE, checkpoint)
    shutil.copy(untouched / MANIFEST, checkpoint)
    with pytest.raises(CheckpointError, match=SHARD):
        load(checkpoint)
    assert any("model/planted" in fault for fault in Hdf5().verify(checkpoint))


def test_a_dataset_that_was_swapped_for_a_link_is_named_and_loading_still_reads_the_manifests_bytes(
    checkpoint: Path,
) -> None:
    def change(file: h5py.File) -> None:
        del file["model/a.bias"]
        file["model/a.bias"] = h5py.ExternalLink("other.h5", "/x")

    plant(checkpoint, change)
    assert any("model/a.bias is an external link" in fault for fault in Hdf5().verify(checkpoint))
    assert torch.equal(load(checkpoint)["model/a.weight"], tensors()["model/a.weight"])


def swap_bias(**keys: Any) -> Callable[[h5py.File], Any]:
    """Put another dataset of the same size in the bias' place."""

    def change(file: h5py.File) -> None:
        del file["model/a.bias"]
        file.create_dataset("model/a.bias", **({"shape": (40,), "dtype": "<f4"} | keys))

    return change


def add_attribute(value: Any) -> Callable[[h5py.File], Any]:
    return lambda file: file["model/a.bias"].attrs.__setitem__("dtype", value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (swap_bias(dtype="<i4"), "isn't of the type"),
        (swap_bias(dtype=">f4"), "isn't of the type"),
        (swap_bias(shape=(20,), dtype=h5py.ref_dtype), "isn't of the type"),
        (swap_bias(shape=(10,), dtype=[("x", h5py.vlen_dtype("u1"))]), "isn't of the type"),
        (swap_bias(shape=(20,), dtype=[("x", h5py.ref_dtype)]), "isn't of the type"),
        (swap_bias(shape=(5, 8)), "has the shape [5, 8], in the table [40]"),
        (swap_bias(), "has 160 bytes from byte None"),  # of the right type, elsewhere
        (add_attribute("any length"), "has the attribute 'dtype'"),
        (add_attribute(5), "has the attribute 'dtype'"),
        (lambda file: file["model/a.bias"].attrs.__setitem__("x", file["model"].ref), "has the attribute 'x'"),
    ],
)
def test_a_dataset_that_is_not_the_one_of_the_manifest_is_named(
    change: Callable[[h5py.File], Any], says: str, checkpoint: Path
) -> None:
    plant(checkpoint, change)
    assert any(f"model/a.bias {says}" in fault for fault in Hdf5().verify(checkpoint)), Hdf5().verify(checkpoint)


def test_attributes_of_groups_are_named(checkpoint: Path) -> None:
    def change(file: h5py.File) -> None:
        file.attrs["a"] = file["model"].attrs["b"] = "text of any length"

    plant(checkpoint, change)
    faults = Hdf5().verify(checkpoint)
    assert ["/ has the attribute 'a'" in faults[0], "model has the attribute 'b'" in faults[1]] == [True, True]


def test_a_structure_that_hdf5_does_not_get_through_is_given_up(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain_plugins.checkpoint.hdf5 import verify

    monkeypatch.setattr(verify, "STRUCTURE_SECONDS", 0.01)
    assert any("damaged or crafted" in fault for fault in Hdf5().verify(checkpoint))


def test_a_leaf_that_is_no_plain_value_is_a_type_error(tmp_path: Path, group: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"values\.scaler is a torch\.Tensor"):
        Hdf5().writer().write(State([], {"scaler": torch.ones(1)}), tmp_path, group)
