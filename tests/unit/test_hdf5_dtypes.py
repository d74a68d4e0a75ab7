"""Every dtype comes back bit by bit, and other HDF5 tools see the right numbers."""

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
from hpctrain_plugins.checkpoint.hdf5 import Hdf5
from packages import need_commands
from torch import Tensor

from hpctrain.api import CheckpointError, Piece, State

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def write(directory: Path, group: dist.ProcessGroup, *pieces: Piece) -> Hdf5:
    form = Hdf5()
    form.writer().write(State(list(pieces)), directory, group)
    return form


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random_of(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(*shape) < 0.5
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_form_comes_back_bit_by_bit(
    dtype: torch.dtype, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    tensors = {
        "plain": random_of(dtype, 5, 7),
        "scalar": random_of(dtype, 1)[0],
        "empty": torch.empty((0, 3), dtype=dtype),
        "transposed": random_of(dtype, 4, 6).T,
        "strided": random_of(dtype, 9, 4)[::2, 1:3],
        "expanded": random_of(dtype, 1, 3).expand(4, 3),
        "one": random_of(dtype, 1, 1, 1),
    }
    form = write(tmp_path, group, *(Piece.whole(name, tensor) for name, tensor in tensors.items()))
    assert form.names(tmp_path) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    loaded = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in tensors.items()}
    form.load(tmp_path, [Piece.whole(name, tensor) for name, tensor in loaded.items()])
    for name, tensor in tensors.items():
        assert bits(loaded[name]) == bits(tensor), name
    assert form.verify(tmp_path) == []


def test_conjugate_and_negative_views_are_resolved(tmp_path: Path, group: dist.ProcessGroup) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    form = write(tmp_path, group, Piece.whole("conj", tensor.conj()), Piece.whole("imag", tensor.conj().imag))
    conj, imag = torch.zeros(2, dtype=torch.complex64), torch.zeros(2)
    form.load(tmp_path, [Piece.whole("conj", conj), Piece.whole("imag", imag)])
    assert conj.tolist() == [1 - 2j, 3 + 4j]
    assert imag.tolist() == [-2, 4]


def test_all_bfloat16_patterns_are_true_hdf5_floats(tmp_path: Path, group: dist.ProcessGroup) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    form = write(tmp_path, group, Piece.whole("w", patterns))
    loaded = torch.zeros_like(patterns)
    form.load(tmp_path, [Piece.whole("w", loaded)])
    assert torch.equal(loaded.view(torch.int16), patterns.view(torch.int16))
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        seen = torch.from_numpy(file["w"].astype("<f4")[...])
    numbers = ~patterns.isnan()
    assert torch.equal(seen[numbers].view(torch.int32), patterns.float()[numbers].view(torch.int32))
    assert seen[~numbers].isnan().all()


def test_all_float8_e5m2_patterns_are_true_hdf5_floats(tmp_path: Path, group: dist.ProcessGroup) -> None:
    patterns = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2)
    write(tmp_path, group, Piece.whole("w", patterns))
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        seen = file["w"].astype("<f4")[...]
    np.testing.assert_array_equal(seen, patterns.float().numpy())


def test_float8_without_infinities_is_bits_with_a_note(tmp_path: Path, group: dist.ProcessGroup) -> None:
    write(tmp_path, group, Piece.whole("w", torch.tensor([1.0]).to(torch.float8_e4m3fn)))
    with h5py.File(tmp_path / "shard-00000.h5") as file:
        assert (file["w"].dtype, file["w"][0], file["w"].attrs["dtype"]) == ("uint8", 0x38, b"float8_e4m3fn")


def test_h5dump_prints_the_values(tmp_path: Path, group: dist.ProcessGroup) -> None:
    need_commands("h5dump")
    values = [1.0, -2.5, 0.15625, 3e38, -0.0, float("inf")]
    whole = torch.tensor(values).to(torch.bfloat16)
    part = Piece("model/part", (8,), (2,), whole)
    rest = [Piece("model/part", (8,), (0,), whole[:2])]
    write(tmp_path, group, Piece.whole("model/layer.0.weight", whole), part, *rest)
    for dataset in ("model/layer.0.weight", "model/part@2"):
        command = ["h5dump", "-m", "%.9g", "-y", "-w", "0", "-d", dataset, str(tmp_path / "shard-00000.h5")]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        numbers = re.search(r"DATA \{\n\s*(.*)\n", printed)
        assert numbers is not None
        assert [float(text) for text in numbers[1].split(",")] == pytest.approx(whole.tolist(), rel=1e-8)


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.int32, torch.int64),
     (torch.float64, torch.float32), (torch.bool, torch.float32), (torch.float8_e4m3fn, torch.float32)],
)  # fmt: skip
def test_values_are_converted_to_the_dtype_of_the_target(
    source: torch.dtype, target: torch.dtype, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    saved = torch.tensor([0, 1, 0, 1]).to(source)
    form = write(tmp_path, group, Piece.whole("w", saved))
    loaded = torch.full((4,), 7).to(target)
    form.load(tmp_path, [Piece.whole("w", loaded)])
    assert torch.equal(loaded, saved.to(target))


@pytest.mark.parametrize(
    ("source", "target"), [(torch.float32, torch.int64), (torch.complex64, torch.float32), (torch.int8, torch.bool)]
)
def test_conversions_that_lose_the_meaning_are_refused(
    source: torch.dtype, target: torch.dtype, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    form = write(tmp_path, group, Piece.whole("w", torch.ones(2, dtype=source)))
    with pytest.raises(CheckpointError, match="can't be converted"):
        form.load(tmp_path, [Piece.whole("w", torch.ones(2, dtype=target))])


def test_parameters_that_require_gradients_are_filled(tmp_path: Path, group: dist.ProcessGroup) -> None:
    form = write(tmp_path, group, Piece.whole("w", torch.nn.Parameter(torch.ones(3))))
    target = torch.nn.Parameter(torch.zeros(3))
    form.load(tmp_path, [Piece.whole("w", target)])
    assert target.tolist() == [1, 1, 1]
    assert target.requires_grad


def test_a_snapshot_does_not_follow_the_training(group: dist.ProcessGroup) -> None:
    tensor, losses = torch.ones(3), [1.0]
    snapshot = Hdf5().writer().snapshot(State([Piece.whole("w", tensor)], {"losses": losses}))
    tensor.zero_()
    losses.append(2.0)
    assert snapshot.pieces[0].tensor.tolist() == [1, 1, 1]
    assert snapshot.values == {"losses": [1.0]}
