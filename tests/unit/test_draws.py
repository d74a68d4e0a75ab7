"""What data sets draw: the same on any number of workers and whatever the model draws meanwhile, other numbers in each epoch."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.base.random_numbers import drawing

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


def run(output: str, steps: int = 12, seed: int = 1, **dataset: Any) -> list[float]:
    hpctrain.run({
        "job": {"name": "augmented", "steps": steps, "seed": seed, "output_dir": output},
        "model": {"name": "augmented:model", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "augmented:images", **dataset}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 20, "micro_size": 5},
    })  # fmt: skip
    rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def test_a_job_with_augmentation_and_dropout_is_the_same_twice_with_workers_and_after_a_resume() -> None:
    straight = run("straight")
    assert run("again") == straight
    assert run("ahead", prefetch=8) == straight, "however far ahead the thread is of the model"
    assert run("workers", workers=2) == straight
    run("halves", steps=7)
    assert run("halves") == straight
    assert run("other", seed=2) != straight


def test_every_epoch_draws_anew() -> None:
    run("out", steps=9)  # 180 samples: three epochs
    log = __import__("augmented").LOG
    drawn = [image for index, image in log if index == 7]
    assert len({tuple(image) for image in drawn}) == 3, "once in each epoch"


def test_threads_do_not_share_draws() -> None:
    """The loaders of training and evaluation run at the same time."""

    def item(number: int) -> tuple[float, ...]:
        with drawing("item", number):
            first = random.random(), np.random.rand()
            time.sleep(0.002)
            return (*first, random.random(), np.random.rand(), torch.distributions.Beta(2.0, 3.0).sample().item())

    alone = [item(number) for number in range(20)]
    state = random.getstate()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(item, range(20))) == alone
    assert random.getstate() == state


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    draws = []
    for _ in range(2):
        with drawing(1, "x"):
            like = torch.zeros(2, 3, dtype=torch.float64)
            draws.append([
                torch.rand(2), torch.randn_like(like), torch.rand_like(like), torch.randperm(9), torch.randint(5, (4,)),
                torch.zeros(3).normal_(), torch.full((5,), 0.5).bernoulli(), torch.multinomial(torch.ones(4), 2),
                torch.tensor(random.random()), torch.tensor(np.random.rand()),
            ])  # fmt: skip
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(*draws, strict=True))
    assert draws[0][1].shape == (2, 3) and draws[0][1].dtype == torch.float64
    with drawing(2, "x"):
        assert not torch.equal(torch.rand(2), draws[0][0])
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
