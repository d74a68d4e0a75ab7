"""index.h5 shows whole tensors to any HDF5 tool, and loading takes no notice of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, index
from hpctrain_tools.checkpoint.writing import alone
from packages import need_commands

from hpctrain.api import CheckpointError, Piece, State


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with alone() as one:
        yield one


def halves(name: str, tensor: torch.Tensor) -> list[Piece]:
    shape = tuple(tensor.shape)
    return [Piece(name, shape, (0, begin), tensor[:, begin : begin + 2]) for begin in range(0, shape[1], 2)]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model/layer.0.weight": torch.randn(5, 6, generator=generator).to(torch.bfloat16),
        "model/50%bigger%b": torch.arange(12).reshape(3, 4),
        "model/small": torch.randn(2, 4, generator=generator).to(torch.float8_e5m2),
        "model/bits": torch.randn(2, 4, generator=generator).to(torch.float8_e4m3fn),
        "model/scalar": torch.tensor(7.5),
        "model/empty": torch.empty(0, 3),
    }


@pytest.fixture
def checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> Path:
    pieces = []
    for name, tensor in tensors().items():
        pieces += halves(name, tensor) if tensor.dim() == 2 and tensor.numel() else [Piece.whole(name, tensor)]
    Hdf5().writer().write(State(pieces), tmp_path, group)
    return tmp_path


def test_whole_tensors_are_seen_through_the_index(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with h5py.File(checkpoint / "index.h5") as file:
        for name in ("model/layer.0.weight", "model/small"):
            assert file[name].is_virtual
            np.testing.assert_array_equal(file[name].astype("<f4")[...], tensors()[name].float().numpy())
        np.testing.assert_array_equal(file["model/50%bigger%b"][...], np.arange(12).reshape(3, 4))
        np.testing.assert_array_equal(file["model/bits"][...], tensors()["model/bits"].view(torch.uint8).numpy())
        assert file["model/bits"].attrs["dtype"] == b"float8_e4m3fn"
        assert file["model/scalar"][()] == 7.5
        assert file["model/empty"].shape == (0, 3)
    assert Hdf5().verify(checkpoint) == []


def test_h5dump_prints_a_bfloat16_tensor_that_is_cut_over_datasets(checkpoint: Path) -> None:
    need_commands("h5dump")
    command = ["h5dump", "-m", "%.9g", "-y", "-w", "0", "-d", "/model/layer.0.weight", str(checkpoint / "index.h5")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "16-bit little-endian floating-point" in printed
    data = re.search(r"DATA \{\n(.*?)\n\s*\}", printed, re.DOTALL)
    assert data is not None
    numbers = [float(text) for text in data[1].replace("\n", "").split(",") if text.strip()]
    assert numbers == pytest.approx(tensors()["model/layer.0.weight"].flatten().tolist(), rel=1e-8)


def test_a_missing_shard_is_nan_in_the_index_and_an_error_for_the_loader(checkpoint: Path) -> None:
    (checkpoint / "shard-00000.h5").unlink()
    with h5py.File(checkpoint / "index.h5") as file:
        assert np.isnan(file["model/layer.0.weight"].astype("<f4")[...]).all()
    with pytest.raises(CheckpointError, match="missing"):
        Hdf5().load(checkpoint, [Piece.whole("model/scalar", torch.zeros(()))])


@pytest.mark.parametrize("content", [b"", b"no HDF5", None])
def test_loading_takes_no_notice_of_the_index(content: bytes | None, checkpoint: Path) -> None:
    (checkpoint / "index.h5").unlink()
    if content is not None:
        (checkpoint / "index.h5").write_bytes(content)
    target = torch.zeros(5, 6, dtype=torch.bfloat16)
    Hdf5().load(checkpoint, [Piece.whole("model/layer.0.weight", target)])
    assert torch.equal(target, tensors()["model/layer.0.weight"])
    assert Hdf5().verify(checkpoint) == []


def test_too_many_chunks_have_no_index(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_CHUNKS", 2)
    for number, columns in enumerate((4, 6)):
        (tmp_path / str(number)).mkdir()
        Hdf5().writer().write(State(halves("w", torch.ones(2, columns))), tmp_path / str(number), group)
        assert (tmp_path / str(number) / "index.h5").exists() == (columns == 4)
        assert Hdf5().verify(tmp_path / str(number)) == []
