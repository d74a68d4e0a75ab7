"""Initial values by (seed, name, row), and the loader."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.random_numbers import ROWS_PER_DRAW, derive_seed, fill_normal
from hpctrain.contracts.dataset import DatasetContext, Samples
from hpctrain.data.batches import Batches
from hpctrain.data.loader import Loader
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.registry.registry import build_registry

REGISTRY = build_registry()


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 3), st.data())
def test_any_rows_are_the_rows_of_the_whole(rows: int, width: int, data: st.DataObject) -> None:
    whole = torch.empty(rows, width)
    fill_normal(whole, 0.5, 1, "name", (0, rows))
    begin = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(begin, rows))
    part = torch.empty(end - begin, width)
    fill_normal(part, 0.5, 1, "name", (begin, end))
    assert torch.equal(part, whole[begin:end])


def test_values_are_normal_and_differ_by_seed_and_name() -> None:
    tensors = []
    for seed, name in ((1, "a"), (2, "a"), (1, "b")):
        tensor = torch.empty(1000, 50)
        fill_normal(tensor, 0.02, seed, name, (0, 1000))
        assert abs(tensor.std().item() - 0.02) < 2e-4 and abs(tensor.mean().item()) < 3e-4
        assert len(torch.unique(tensor)) > 49_000, "no row repeats another"
        tensors.append(tensor)
    assert not torch.equal(tensors[0], tensors[1]) and not torch.equal(tensors[0], tensors[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_fill_a_large_tensor_with_the_same_values(dtype: torch.dtype) -> None:
    before, wide = torch.get_num_threads(), 2**13
    blocks = [
        torch.randn(ROWS_PER_DRAW, wide, generator=torch.Generator().manual_seed(derive_seed(5, "n", draw))) * 0.3
        for draw in range(4)
    ]
    torch.set_num_threads(3)
    try:
        large = torch.nn.Parameter(torch.empty(180, wide, dtype=dtype))
        with torch.no_grad():
            fill_normal(large, 0.3, 5, "n", (30, 210))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(large, torch.cat(blocks)[30:210].to(dtype))


class Numbers(Samples):
    def __init__(self, count: int, bad: int = -1) -> None:
        self._count, self._bad = count, bad

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if index == self._bad:
            raise ValueError("bad sample")
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index)}

    def fingerprint(self) -> str:
        return "numbers"


@pytest.mark.cases(nightly=["2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_keeps_the_order_and_the_places(workers: int) -> None:
    """Also when signals that ask the job to stop go to its workers, too, as those from a terminal and from Slurm do."""
    plan = [Planned([i, i + 1, i + 2], 100 + i, counts=i < 20) for i in range(0, 30, 3)]

    def terms(batch: Any) -> int:
        return int(batch["labels"].sum())

    others = set(psutil.Process().children(recursive=True))
    pool = Pool(Batches(Numbers(40)), workers, 2)
    loader = Loader(pool, iter(plan), lambda b: b, terms, torch.device("cpu"), torch.float64)
    batches = [next(loader)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for process in set(psutil.Process().children(recursive=True)) - others:
            process.send_signal(number)
    batches += loader
    assert [Planned(b.batch["labels"].tolist(), b.place, b.counts) for b in batches] == plan
    assert [b.terms for b in batches] == [3 * i + 3 if i < 20 else 0 for i in range(0, 30, 3)]
    assert batches[0].batch["x"].dtype == torch.float64 and batches[0].batch["labels"].dtype == torch.int64
    loader.close()
    pool.close()


def test_a_sample_that_fails_is_an_error_where_it_is_asked_for() -> None:
    plan = iter([Planned([1], 0), Planned([5], 1), Planned([6], 2)])
    loader = Loader(Pool(Batches(Numbers(40, bad=5))), plan, lambda b: b, len, torch.device("cpu"), torch.float32)
    assert next(loader).batch["labels"].tolist() == [1]
    with pytest.raises(TrainingError, match="loading a sample failed: ValueError: bad sample"):
        next(loader)
    loader.close()


def test_a_loader_that_nobody_empties_closes() -> None:
    plan = iter([Planned([1], 0)] * 10**6)
    loader = Loader(Pool(Batches(Numbers(9)), prefetch=1), plan, lambda b: b, len, torch.device("cpu"), torch.float32)
    next(loader)
    loader.close()
    assert not loader._thread.is_alive()


def open_samples(name: str, split: str = "train", seq: int = 4, vocab: int = 64, **options: Any) -> Samples | None:
    cls = REGISTRY.find("dataset", name).cls
    return cls(cls.Options(**options)).open(split, DatasetContext(seq, vocab, 1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["npy", "bin", "h5"])
def test_tokens_of_every_file(tmp_path: Path, kind: str) -> None:
    ids = np.arange(101, dtype=np.uint16)
    path = tmp_path / f"tokens.{kind}"
    if kind == "npy":
        np.save(path, ids)
    elif kind == "bin":
        ids.tofile(path)
    else:
        import h5py

        with h5py.File(path, "w") as file:
            file["tokens"] = ids
    samples = open_samples("tokens", path=path, validation_fraction=0.2)
    assert samples is not None and samples.vocab_size == 101
    assert len(samples) == (81 - 1) // 4
    assert samples[3]["input_ids"].tolist() == [12, 13, 14, 15]
    assert samples[3]["labels"].tolist() == [13, 14, 15, 16]
    validation = open_samples("tokens", "validation", path=path, validation_fraction=0.2)
    assert validation is not None and validation[0]["input_ids"].tolist() == [81, 82, 83, 84]
    assert samples.fingerprint() != validation.fingerprint()
    assert open_samples("tokens", "validation", path=path) is None
    cut = open_samples("tokens", path=path, end_of_text=6, seq=60)
    assert cut is not None and (lengths := cut.lengths()) is not None and lengths.tolist() == [6, 60, 33]
    assert cut[0]["labels"].tolist() == [1, 2, 3, 4, 5, 6] and cut[1]["input_ids"][0] == 7
    with pytest.raises(UsageError, match="has no documents that end with 200"):
        open_samples("tokens", path=path, end_of_text=200)


def test_files_that_are_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(9))
    for path, sentence in ((tmp_path / "floats.npy", "float64"), (tmp_path / "gone.npy", "there is no file")):
        with pytest.raises(UsageError, match=sentence):
            open_samples("tokens", path=path)
    np.save(tmp_path / "short.npy", np.zeros(3, np.int64))
    with pytest.raises(UsageError, match="has 3 tokens, expected at least 5"):
        open_samples("tokens", path=tmp_path / "short.npy")


def test_text_as_bytes_and_through_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (tmp_path / "b.txt").write_text("one two one")
    (tmp_path / "a.txt").write_text("two two")
    samples = open_samples("text", files=[str(tmp_path / "*.txt")], validation_fraction=0.0, vocab=256)
    assert samples is not None and samples.vocab_size == 256
    assert bytes(samples[0]["input_ids"].tolist()) == b"two "  # a.txt first, whatever the file system says
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = open_samples(
        "text", files=[str(tmp_path / "*.txt")], tokenizer=tmp_path / "tokenizer.json", validation_fraction=0.0
    )
    assert words is not None and words.vocab_size == 3
    assert words[0]["input_ids"].tolist() == [1, 1, 0, 1] and words[0]["labels"].tolist() == [1, 0, 1, 0]


def test_stdlib_text_is_real_text_with_a_validation_split() -> None:
    train, validation = open_samples("stdlib-text", vocab=256), open_samples("stdlib-text", "validation", vocab=256)
    assert train is not None and validation is not None
    assert len(train) > 10 * len(validation) > 1000
    assert train.fingerprint() == open_samples("stdlib-text", vocab=256).fingerprint()  # type: ignore[union-attr]
    text = bytes(b for i in range(200) for b in train[i]["input_ids"].tolist())
    assert b"import" in text
