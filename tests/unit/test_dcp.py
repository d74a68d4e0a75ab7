"""The format dcp: to and from torch.distributed.checkpoint, resharded, and no pickle's code run."""

from __future__ import annotations

import enum
import io
import os
import pickle
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hpctrain_plugins.checkpoint.dcp import Dcp
from hpctrain_plugins.checkpoint.hdf5 import Hdf5
from hpctrain_tools.checkpoint.writing import alone
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from hpctrain.api import CheckpointError, Piece, State
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.weights import load_weights
from hpctrain.toolkit.checkpoint.sealed import seal, unseal


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with alone() as one:
        yield one


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "model/a.weight": torch.randn(7, 5, generator=generator),
        "model/b": torch.randn(4, generator=generator).to(torch.bfloat16),
        "model/empty": torch.empty(0, 3),
        "model/ids": torch.arange(6),
        "optimizer/a.weight/step": torch.tensor(3.0),
    }


def pieces(ways: int = 1) -> list[Piece]:
    """Everything, the matrix cut into `ways` parts along the columns."""
    whole = tensors()
    weight = whole.pop("model/a.weight")
    parts, begin = [], 0
    for part in weight.chunk(ways, 1):
        parts.append(Piece("model/a.weight", (7, 5), (0, begin), part))
        begin += part.shape[1]
    return [*parts, *(Piece.whole(*item) for item in whole.items())]


@pytest.fixture
def checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> Path:
    directory = tmp_path / "step-00000003"
    directory.mkdir()
    Dcp().writer().write(State(pieces(2), {"step": 3, "betas": (0.9, 0.95)}), directory, group)
    return directory


def load(directory: Path) -> dict[str, Tensor]:
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in tensors().items()}
    Dcp().load(directory, [Piece.whole(*one) for one in loaded.items()])
    return loaded


def same(loaded: dict[str, Tensor]) -> bool:
    return all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


def test_what_was_written_comes_back(checkpoint: Path) -> None:
    form = Dcp()
    assert same(load(checkpoint))
    assert form.read_values(checkpoint) == {"step": 3, "betas": (0.9, 0.95)}
    assert form.names(checkpoint) == {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    assert len(form.tensors(checkpoint)["model/a.weight"].chunks) == 2
    assert form.recognizes(checkpoint) and not Hdf5().recognizes(checkpoint)
    seen: list[tuple[int, int]] = []
    assert form.verify(checkpoint, lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    part = torch.zeros(3, 3, dtype=torch.float64)
    form.load(checkpoint, [Piece("model/a.weight", (7, 5), (2, 1), part)])
    assert torch.equal(part, tensors()["model/a.weight"][2:5, 1:4].double())


def test_dcp_reads_ours(checkpoint: Path) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert same(state)


def test_ours_reads_dcps_and_starts_from_it(tmp_path: Path, group: dist.ProcessGroup) -> None:
    state = {"net": {"layer.weight": torch.randn(4, 3)}, "scale": torch.tensor(2.0), "epoch": 7, "name": "x"}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    form = Dcp()
    assert form.names(tmp_path / "theirs") == {"net.layer.weight": (4, 3), "scale": ()}
    assert form.verify(tmp_path / "theirs") == []
    assert form.read_values(tmp_path / "theirs") == {}
    target, scale = torch.zeros(2, 3), torch.zeros(())
    wanted = [Piece("net.layer.weight", (4, 3), (1, 0), target), Piece.whole("scale", scale)]
    load_weights(tmp_path / "theirs", [Hdf5(), Dcp()], wanted, group)
    assert torch.equal(target, state["net"]["layer.weight"][1:3]) and scale == 2


def test_the_store_saves_and_restores_and_passes_over_a_damaged_one(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    formats = [Dcp(), Hdf5()]
    for step, form in ((1, Hdf5()), (2, Dcp()), (3, Dcp())):
        CheckpointStore(tmp_path, form, formats, group).save(step, State(pieces(step)))
    shard = next((tmp_path / "step-00000003").glob("*.distcp"))
    raw = bytearray(shard.read_bytes())
    at = raw.index(tensors()["model/a.weight"][0, :2].numpy().tobytes())
    raw[at] ^= 4
    shard.write_bytes(raw)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    result = CheckpointStore(tmp_path, formats[0], formats, group).restore(
        [Piece.whole(*one) for one in loaded.items()]
    )
    assert result is not None and result.step == 2 and same(loaded)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "hpctrain"]
    assert str(shard) in warning and "tensor model/a.weight" in warning


def test_every_flipped_bit_is_found_or_changes_nothing(checkpoint: Path) -> None:
    """DCP itself detects none. A zip has bytes that mean nothing, so not every flip can be an error."""
    chance, found = random.Random(4), 0
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    for number in range(150):
        path = files[number % len(files)]
        raw = path.read_bytes()
        position = chance.randrange(len(raw))
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 1 << number % 8]) + raw[position + 1 :])
        try:
            assert same(load(checkpoint)), (path, position)
        except CheckpointError as error:
            found += 1
            assert path.name in str(error)
            if path.suffix == ".distcp":
                assert Dcp().verify(checkpoint)
        path.write_bytes(raw)
    assert found > 100


class EarlyPython311(pickle.Pickler):
    """Pickles an enum as Python 3.11.0 to 3.11.3 did."""

    def reducer_override(self, one: Any) -> Any:
        return (getattr, (type(one), one.name)) if isinstance(one, enum.Enum) else NotImplemented


def test_a_metadata_of_any_python_is_read(checkpoint: Path) -> None:
    written = io.BytesIO()
    EarlyPython311(written).dump(dcp.FileSystemReader(checkpoint).read_metadata())
    assert b"getattr" in written.getvalue()
    (checkpoint / "hpctrain.json").unlink()
    (checkpoint / ".metadata").write_bytes(written.getvalue())
    assert same(load(checkpoint))


class Exploding:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


class Hidden:
    """A call of something that a naive list of allowed modules would let pass."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call  # type: ignore[return-value]


@pytest.mark.parametrize(
    "content",
    [
        Exploding(),
        {"x": [Exploding()]},
        Hidden(torch.load, ("evil.pt",)),
        Hidden(eval, ("1",)),
        Hidden(getattr, (str, "x")),
    ],
    ids=["mkdir", "nested", "torch.load", "eval", "getattr"],
)
def test_a_crafted_metadata_runs_nothing(
    content: object, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (checkpoint / "hpctrain.json").unlink()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"\.metadata: it names .*does not belong in it"):
        load(checkpoint)
    assert Dcp().verify(checkpoint)
    assert not (tmp_path / "exploded").exists()


def placed(*operations: bytes) -> bytes:
    return b"\x80\x04N" + b"".join(operations) + b"."


@pytest.mark.parametrize("raw", [placed(b"\xff"), b"\x80\x04N"], ids=["an unknown operation", "no end"])
def test_a_damaged_metadata_is_refused(raw: bytes, checkpoint: Path) -> None:
    (checkpoint / "hpctrain.json").unlink()
    (checkpoint / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match="malformed content"):
        load(checkpoint)


def test_a_metadata_changes_no_class(checkpoint: Path) -> None:
    names = [b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"ctorch.serialization\n_get_layout\n"]
    state = b"(N}\x8c\x07__doc__\x8c\x06hackedstb"  # what sets attributes instead of keys
    (checkpoint / "hpctrain.json").unlink()
    (checkpoint / ".metadata").write_bytes(placed(*(name + state for name in names)))
    with pytest.raises(CheckpointError, match="malformed"):
        load(checkpoint)
    assert "hacked" not in (Metadata.__doc__ or "", torch.serialization._get_layout.__doc__)


def test_a_crafted_item_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "c", no_dist=True)
    evil = tmp_path / "evil.pt"
    torch.save(Exploding(), evil)
    table = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    (place,) = table.storage_data.values()
    place.offset, place.length = 0, evil.stat().st_size
    (tmp_path / "c" / place.relative_path).write_bytes(evil.read_bytes())
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"distcp: tensor w is corrupt"):
        Dcp().load(tmp_path / "c", [Piece.whole("w", torch.zeros(100))])
    assert not (tmp_path / "exploded").exists()


Table = Any


def _places(table: Table) -> list[Any]:
    return list(table.storage_data.values())


CRAFTED: dict[str, tuple[Callable[[Table], Any], str]] = {
    "a path up": (lambda t: setattr(_places(t)[0], "relative_path", "../x"), "not the name of a file"),
    "an absolute path": (lambda t: setattr(_places(t)[0], "relative_path", "/etc/passwd"), "not the name of a file"),
    "a place beyond the file": (lambda t: setattr(_places(t)[0], "offset", 10**9), "cut off"),
    "a negative place": (lambda t: setattr(_places(t)[0], "offset", -5), "zero or more"),
    "a hole": (lambda t: t.state_dict_metadata["model/a.weight"].chunks.pop(), "hole"),
    "a chunk without a place": (lambda t: t.storage_data.clear(), "no place"),
    "another dtype": (
        lambda t: setattr(t.state_dict_metadata["model/a.weight"].properties, "dtype", torch.float64), "promises",
    ),
    "a name that steers a terminal": (
        lambda t: t.state_dict_metadata.update({"\x1b[2J": t.state_dict_metadata["model/a.weight"]}), "can't name",
    ),
    "no table": (lambda t: t.__dict__.clear(), "malformed"),
    "an extension": (lambda t: setattr(_places(t)[0], "transform_descriptors", ["zstd"]), "zstd"),
}  # fmt: skip


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_table_is_refused(what: str, checkpoint: Path) -> None:
    change, says = CRAFTED[what]
    (checkpoint / "hpctrain.json").unlink()
    table = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(table)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=says):
        load(checkpoint)
    assert Dcp().verify(checkpoint)


def test_values_that_are_no_object_are_refused(checkpoint: Path) -> None:
    path = checkpoint / "hpctrain.json"
    content = unseal(path.read_bytes())
    path.write_bytes(seal({"metadata_xxh3": content["metadata_xxh3"], "values": [1]}))
    with pytest.raises(CheckpointError, match=r"hpctrain\.json: its values are no object"):
        Dcp().read_values(checkpoint)
    assert len(Dcp().verify(checkpoint)) == 1


def test_the_values_of_a_checkpoint_of_hpctrain_s_are_missed(checkpoint: Path) -> None:
    """Checkpoints of other programs have no such values."""
    (checkpoint / "hpctrain.json").unlink()
    assert Dcp().verify(checkpoint) == [f"{checkpoint / 'hpctrain.json'}: the file is missing"]


def test_missing_and_unknown_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "notes").write_text("x")
    assert [str(checkpoint / "notes") in fault for fault in Dcp().verify(checkpoint)] == [True]
    next(checkpoint.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"distcp: tensor .*missing"):
        load(checkpoint)
    assert len(Dcp().verify(checkpoint)) > 2
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    assert not Dcp().recognizes(checkpoint)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
@pytest.mark.parametrize("room", [0, 1, 5, 64])
def test_a_full_disk_is_told_with_directory_and_rank(room: int, tmp_path: Path, group: dist.ProcessGroup) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True, timeout=30)
    try:
        (tmp_path / "filler").write_bytes(bytes(2**20 - room * 4096))
        (tmp_path / "c").mkdir()
        many = State([Piece.whole(f"w{number}", torch.ones(1000)) for number in range(60)])
        with pytest.raises(OSError, match=rf"no space left on device while writing {tmp_path}/c.* \(rank 0, node "):
            Dcp().writer().write(many, tmp_path / "c", group)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        (State([Piece("w", (4,), (0,), torch.ones(3))]), CheckpointError, "w can't be saved: .*hole"),
        (State([Piece.whole("w", torch.ones(2)), Piece.whole("w", torch.ones(3))]), CheckpointError, "one full shape"),
        (State([], {"x": torch.ones(1)}), TypeError, "values.x is a torch.Tensor"),
    ],
)
def test_what_cannot_be_saved_is_told(
    state: State, error: type[Exception], says: str, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    with pytest.raises(error, match=says):
        Dcp().writer().write(state, tmp_path, group)
