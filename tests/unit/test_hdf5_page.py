"""docs/checkpoint-format.md is enough to write a reader: this one goes by the page alone and imports nothing of ours to read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

NUMPY = {"float32": "<f4", "int64": "<i8", "bfloat16": "<u2", "bool": "|u1"}


def unsealed(path: Path) -> tuple[Any, str]:
    """A sealed file's content and its checksum."""
    head, rest = path.read_bytes().split(b"\n", 1)
    content = json.loads(head + b"\n" + rest)
    assert head == b'{"checksum":"%s",' % xxhash.xxh3_64_hexdigest(rest).encode()
    return content, content["checksum"]


def read_by_the_page(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor, whole, after checking every checksum."""
    manifest, _ = unsealed(directory / "manifest.json")
    assert (manifest["format"], manifest["version"]) == ("hpctrain-hdf5", 2)
    whole = {
        name: np.zeros(manifest["layouts"][one["layout"]]["shape"], NUMPY[one["dtype"]])
        for name, one in manifest["tensors"].items()
    }
    for number, shard in enumerate(manifest["shards"]):
        table, checksum = unsealed(directory / shard["name"].replace(".h5", ".json"))
        raw, inside = (directory / shard["name"]).read_bytes(), bytearray(table["size"])
        assert checksum == shard["table"] and len(raw) == table["size"]
        for name, chunks in table["chunks"].items():
            parts = manifest["layouts"][manifest["tensors"][name]["layout"]]["parts"]
            for part, chunk in zip((one for one in parts if one["shard"] == number), chunks, strict=True):
                item = whole[name].dtype.itemsize
                data = raw[chunk["at"] : chunk["at"] + math.prod(part["shape"]) * item]
                inside[chunk["at"] : chunk["at"] + len(data)] = b"1" * len(data)
                row = item * math.prod(part["shape"][1:])
                step = max(1, 1048576 // row) * row if row else 1
                found = [xxhash.xxh3_64_hexdigest(data[at : at + step]) for at in range(0, len(data), step)]
                assert found == chunk["xxh3"], name
                where = tuple(slice(o, o + n) for o, n in zip(part["offsets"], part["shape"], strict=True))
                whole[name][where] = np.frombuffer(data, whole[name].dtype).reshape(part["shape"])
        outside = np.frombuffer(raw, np.uint8)[np.frombuffer(inside, np.uint8) == 0]
        assert xxhash.xxh3_64_hexdigest(outside.tobytes()) == table["xxh3"]
    return whole


def test_a_reader_that_goes_by_the_page_reads_every_value(tmp_path: Path) -> None:
    from hpctrain_plugins.checkpoint.hdf5 import Hdf5

    from hpctrain.api import Piece, State

    torch.manual_seed(0)
    cut, bits = torch.randn(900, 1500), torch.randn(7, 3).bfloat16()
    tensors = {
        "model/b": bits, "model/c": torch.tensor([True, False]), "model/empty": torch.zeros(0, 3),
        "optimizer/b/step": torch.tensor(5),
    }  # fmt: skip
    pieces = [Piece.whole(*one) for one in tensors.items()]
    for top, left in ((0, 0), (0, 700), (600, 0), (600, 700)):  # of one block and of two
        corner = cut[top : 600 if top == 0 else 900, left : 700 if left == 0 else 1500]
        pieces.append(Piece("model/a", (900, 1500), (top, left), corner))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        Hdf5().writer().write(State(pieces, {"step": 1}), tmp_path, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    found = read_by_the_page(tmp_path)
    assert set(found) == {*tensors, "model/a"}
    assert np.array_equal(found["model/a"], cut.numpy())
    assert np.array_equal(found["model/b"], bits.view(torch.uint16).numpy())
    assert (
        found["model/c"].tolist() == [1, 0] and found["optimizer/b/step"] == 5 and found["model/empty"].shape == (0, 3)
    )
