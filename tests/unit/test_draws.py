"""Draws of data sets: the same on any number of workers and whatever the model draws meanwhile, other numbers in each epoch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.base.draws import Draws

AUGMENTED = """
import random

import numpy as np
import torch

LOG = []


class Images:
    def __init__(self, split):
        self.labels = torch.arange(60) % 3

    def __len__(self):
        return 60

    def __getitem__(self, index):
        image = torch.nn.functional.one_hot(self.labels[index], 6).float()
        image = image * torch.empty(6).uniform_(0.5, 1.5) + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand()
        if torch.rand(1) < 0.5:
            image = image.flip(0)
        LOG.append((index, image.tolist()))
        return image, self.labels[index]


def images(split):
    return Images(split) if split == "train" else None


def model():
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Dropout(0.4), torch.nn.ReLU(), torch.nn.Linear(40, 3))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "augmented.py").write_text(AUGMENTED)
    monkeypatch.delitem(__import__("sys").modules, "augmented", raising=False)


def run(output: str, steps: int = 12, seed: int = 1, evaluates: int = 0, **dataset: Any) -> list[float]:
    hpctrain.run({
        "job": {"name": "augmented", "steps": steps, "seed": seed, "output_dir": output},
        "model": {"name": "augmented:model", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "augmented:images", **dataset}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 20, "micro_size": 5}, "evaluation": {"every_steps": evaluates},
    })  # fmt: skip
    rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.nightly
def test_a_job_with_augmentation_and_dropout_is_the_same_twice_with_workers_and_after_a_resume() -> None:
    straight = run("straight")
    assert run("again") == straight
    assert run("workers", workers=2) == straight
    run("halves", steps=7)
    assert run("halves") == straight
    assert run("other", seed=2) != straight


def test_every_epoch_draws_anew() -> None:
    run("out", steps=9)  # 180 samples: three epochs
    log = __import__("augmented").LOG
    drawn = [image for index, image in log if index == 7]
    assert len({tuple(image) for image in drawn}) == 3, "once in each epoch"


class Items:
    """Items, one for each way to draw. kept: generators of its own."""

    def __init__(self) -> None:
        self.kept = [
            np.random.default_rng(5),
            np.random.RandomState(5),
            random.Random(5),
            torch.Generator().manual_seed(5),
        ]
        self.kept.append(np.random.Generator(np.random.MT19937(5)))  # type: ignore[arg-type]

    def python(self, *_: object) -> float:
        return random.gauss(0, 1)

    def numpy(self, *_: object) -> float:
        return float(np.random.randn())

    def torch(self, *_: object) -> float:
        return torch.randn(1).item()

    def seeded(self, *_: object) -> float:
        torch.manual_seed(7)
        return torch.rand(1).item() + random.random()

    def forked(self, *_: object) -> float:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return torch.rand(1).item()

    def own(self, *_: object) -> tuple[float, ...]:
        new, old, python, of_torch, twister = self.kept
        return new.random(), old.rand(), python.random(), torch.rand(1, generator=of_torch).item(), twister.random()  # type: ignore


WAYS = ("python", "numpy", "torch", "seeded", "forked", "own")


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest  # type: ignore[union-attr]


@pytest.mark.parametrize("way", WAYS)
def test_a_draw_follows_from_its_name_and_is_not_seen_by_the_model(way: str) -> None:
    np.random.randn()  # the next one is drawn in advance
    before = generators()
    items = Items()
    draws, one = Draws(3, items), getattr(items, way)
    together = draws.of([(number,) for number in range(6)], one)
    assert len(set(together)) == (1 if way == "forked" else 6) or way == "seeded"
    apart = Draws(3, items)
    assert [apart.of([(number,)], one)[0] for number in reversed(range(6))] == together[::-1], (
        "by any rank, in any order"
    )
    assert draws.of([(2,), (5,)], one) == [together[2], together[5]], "after others"
    with apart.held():
        assert apart.seeded((4,), one) == together[4], "as an item of a stream"
    if way not in ("forked",):
        assert Draws(4, items).of([(2,)], one) != [together[2]]
    after = generators()
    assert after == before


def test_calls_that_draw_nothing_are_called_once_and_late_draws_are_found() -> None:
    calls: list[int] = []

    def item(number: int) -> float:
        calls.append(number)
        return random.random() if number >= 3 else 0.0

    draws = Draws(1, None)
    for first in (0, 1):
        draws.of([(first,), (first + 1,)], item)
    assert calls == [0, 1, 1, 2]
    late = draws.of([(2,), (3,), (4,)], item)
    assert calls[4:] == [2, 3, 4, 2, 3, 4]
    assert late == [0.0, *(draws.of([(number,)], item)[0] for number in (3, 4))]
    assert len(calls) == 12, "then each is seeded and called once"


def test_data_that_cannot_be_seeded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    Path("augmented.py").write_text(AUGMENTED.replace("np.random.rand()", "np.random.default_rng().random()"))
    run("out", steps=1)
    assert "gave another item" in caplog.text and "default_rng(index)" in caplog.text


RENEWED = """
import numpy as np
import torch

SEEN = set()


class Renewed:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 30

    def set_epoch(self, epoch):
        self.rng = np.random.default_rng([7, epoch])

    def __getitem__(self, index):
        SEEN.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.zeros(1).device.type))
        return torch.from_numpy(self.rng.standard_normal(6)).float(), torch.tensor(index % 3)


def images(split):
    return Renewed() if split != "test" else None


def model():
    return torch.nn.Linear(6, 3)
"""


def test_a_generator_that_an_epoch_replaces_is_found_again_and_modes_of_the_caller_are_not_the_datas() -> None:
    """Over three epochs, evaluations without gradients between, with workers and after a resume."""
    Path("augmented.py").write_text(RENEWED)
    straight = run("straight", evaluates=5)
    assert run("workers", evaluates=5, workers=2) == straight
    run("halves", steps=7, evaluates=5)
    assert run("halves", evaluates=5) == straight
    assert {(True, False, "cpu")} == __import__("augmented").SEEN


@pytest.mark.parametrize("kept", [0, 1], ids=["even", "a normal number kept for the next call"])
@pytest.mark.parametrize(
    "draw", [np.random.rand, np.random.randn, lambda: np.random.normal(size=2).sum()], ids=["rand", "randn", "normal"]
)
def test_a_draw_from_numpy_is_seen_whatever_it_was(draw: Any, kept: int) -> None:
    """NumPy's global generator goes on as if nothing had been drawn, and each name gets its number, the second time too."""
    np.random.seed(7)
    np.random.randn(kept)  # makes two, and keeps the second
    draws, before = Draws(5, None), np.random.get_state(legacy=False)
    assert draws.of([(9,)], lambda _: 4, lambda: [3]) == [3], "nothing drawn: all at once"
    once, again = (draws.of([(1,), (2,), (1,)], lambda _: draw(), lambda: [draw()] * 3) for _ in range(2))
    assert once == again and once[0] == once[2] != once[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), before)


def test_a_draw_is_seen_after_another_generator_took_the_place_of_numpy_s() -> None:
    """It can't be seeded as this one, which NumPy says."""
    draws, first = Draws(5, None), np.random.get_bit_generator()
    assert draws.of([(1,)], lambda _: 0, lambda: [1]) == [1]
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(TypeError, match="re-seed"):
            draws.of([(1,)], lambda _: np.random.rand(), lambda: [np.random.rand()])
    finally:
        np.random.set_bit_generator(first)
