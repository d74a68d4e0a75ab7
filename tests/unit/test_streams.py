"""Iterable data sets: read in order, begun anew at their end, continued where a run stopped."""

from __future__ import annotations

import json
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from launching import in_process
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.base.draws import Draws
from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checking.check import check
from hpctrain.data.opening import open_data
from hpctrain.job.raw import RawJob
from hpctrain.registry.user_code.samples import UserStream

OWN = '''
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Flow(IterableDataset):
    """17 rows an epoch, shuffled in a buffer and disturbed, all with the global generators."""

    count = 17

    def __init__(self, split):
        self.split, self.epoch = split, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        return range(self.count)

    def __iter__(self):
        Path("begun").open("a").write(f"{self.split} {self.epoch}\\n")
        buffer = []
        for number in self.numbers():
            buffer.append(number)
            if len(buffer) == 4:
                yield self.row(buffer.pop(random.randrange(4)))
        for number in buffer:
            yield self.row(number)

    def row(self, number):
        return torch.eye(17)[number] + 0.1 * torch.randn(17) + 0.01 * np.random.rand() + self.epoch, torch.tensor(number % 3)


def flow(split):
    return Flow(split)


class Counted(Flow):
    def __len__(self):
        return self.count


def counted(split):
    return Counted(split)


class Stateful:
    """Not of torch's class; counts what it reads, and goes on from a state."""

    def __init__(self, split):
        self.number = 0

    def state_dict(self):
        return {"number": self.number, "as": ("tuple", 0.5)}

    def load_state_dict(self, state):
        assert state["as"] == ("tuple", 0.5)
        self.number = state["number"]
        Path("loaded").write_text(str(self.number))

    def __iter__(self):
        while self.number < 17:
            self.number += 1
            yield torch.eye(17)[self.number - 1], torch.tensor(self.number % 3)
        self.number = 0

    def fingerprint(self):
        return "stateful"


def stateful(split):
    return Stateful(split)


class Late(Stateful):
    """Counts an item when the next one is asked for: a resume repeats it."""

    def __iter__(self):
        while self.number < 17:
            yield torch.eye(17)[self.number], torch.tensor(self.number % 3)
            self.number += 1
        self.number = 0


def late(split):
    return Late(split)


class ByIndex(IterableDataset):
    def __iter__(self):
        return ((torch.eye(17)[number], torch.tensor((number + 1) % 3)) for number in range(17))


def by_index(split):
    return ByIndex()


class Unsaved(Stateful):
    def state_dict(self):
        return {"generator": torch.Generator().get_state(), "number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def unsaved(split):
    return Unsaved(split)


class Aware(Flow):
    """Shares its items out over workers by itself, as torch's pages tell."""

    def numbers(self):
        worker = get_worker_info()
        return range(17) if worker is None else range(worker.id, 17, worker.num_workers)


def aware(split):
    return Aware(split)


class Sharded(Aware):
    first, step = 0, 1

    def shard(self, num_shards, index):
        part = Sharded(self.split)
        part.first, part.step = index, num_shards
        return part

    def numbers(self):
        worker = get_worker_info()
        assert worker is None, "shared out twice"
        return range(self.first, self.count, self.step)


def sharded(split):
    return Sharded(split)


class Short(Sharded):
    def shard(self, num_shards, index):
        return super().shard(num_shards, index) if index == 0 else []


def short(split):
    return Short(split)


def generator(split):
    return (row for row in [(torch.zeros(17), torch.tensor(1))])


def empty(split):
    return Stateful(split) if split == "train" else set()


class Unseeded(Flow):
    def row(self, number):
        return torch.eye(17)[number] * float(np.random.default_rng().random()), torch.tensor(0)


def unseeded(split):
    return Unseeded(split)


class Failing(Flow):
    def row(self, number):
        return super().row(number if number < 12 else {}["no such row"])


def failing(split):
    return Failing(split)


class Stuck(Flow):
    """What is read ahead of the second step never comes."""

    def fingerprint(self):
        return "stuck"

    def row(self, number):
        return super().row(number if number < 13 else time.sleep(600))


def stuck(split):
    return Stuck(split)


def weights(data):
    return [1.0] * 17


def none(split):
    return {row for row in []}
'''


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "flows.py").write_text(OWN)


def tables(output: str, name: str, steps: int = 9, **more: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "job": {"name": "flow", "steps": steps, "seed": 3, "output_dir": output},
        "model": {"name": "torch.nn:Linear", "in_features": 17, "out_features": 3, "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": f"flows:{name}"}, "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 6, "micro_size": 2},
    }  # fmt: skip
    for table, keys in more.items():
        made[table] = {**made.get(table, {}), **keys}
    return made


def losses(job: dict[str, Any], key: str = "loss") -> list[float]:
    hpctrain.run(job)
    rows = [json.loads(line) for line in Path(job["job"]["output_dir"], "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def plain(steps: int = 9) -> list[float]:
    """The job with Flow in a plain loop."""
    flows: Any = __import__("flows")
    rows, draws = [], Draws(3, None)
    for epoch in range(4):
        stream = flows.Flow("train")
        stream.set_epoch(epoch)
        iterator = iter(stream)
        for number in range(17):
            with draws.held():
                rows.append(draws.seeded(("stream", 0, epoch, number), partial(next, iterator)))
    torch.manual_seed(derive_seed(3, "model"))
    module = torch.nn.Linear(17, 3)
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(steps):
        chosen = rows[6 * step : 6 * (step + 1)]
        loss = cross_entropy(
            module(torch.stack([row for row, _ in chosen])), torch.stack([label for _, label in chosen])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.thorough
def test_a_stream_with_draws_is_that_of_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """Over epochs, with workers, and after a resume in the middle of an epoch, which skips what was read of it."""
    straight = losses(tables("straight", "flow"))
    assert straight == pytest.approx(plain(), rel=1e-6)
    assert "data         a stream, read by one reader, unknown number of samples" in capsys.readouterr().out
    assert losses(tables("workers", "flow", dataset={"workers": 2})) == straight
    losses(tables("halves", "flow", steps=4))
    Path("begun").unlink()
    assert losses(tables("halves", "flow")) == straight
    assert "data         skipping 7 items of the stream, read in epoch 1 before" in capsys.readouterr().out
    assert Path("begun").read_text().split("\n")[-4:] == ["train 1", "train 2", "train 3", ""], (
        "epoch 0 is not read again"
    )


@pytest.mark.thorough
def test_a_stream_goes_on_from_its_own_state(capsys: pytest.CaptureFixture[str]) -> None:
    straight = losses(tables("straight", "stateful"))
    assert straight == losses(tables("by-index", "by_index")), "the look at its first items has left no trace"
    for workers in (0, 1):
        name = f"workers-{workers}"
        losses(tables(name, "stateful", steps=4, dataset={"workers": workers}))
        assert losses(tables(name, "stateful", dataset={"workers": workers})) == straight
        assert "the stream goes on from its saved state" in capsys.readouterr().out
        assert Path("loaded").read_text() == "7"
    with pytest.raises(
        UsageError, match=r"state of the stream can't be saved: state_dict\(\).generator is a torch.Tensor"
    ):
        losses(tables("unsaved", "unsaved"))


@pytest.mark.cases(nightly=["2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_asks_for_its_worker_loses_nothing(workers: int) -> None:
    assert losses(tables("out", "aware", dataset={"workers": workers})) == pytest.approx(plain(), rel=1e-6)


@pytest.mark.thorough
def test_workers_read_shards_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    two = {"dataset": {"workers": 2, "start_method": "forkserver"}}
    straight = losses(tables("straight", "sharded", **two))
    assert "a stream, in 2 shards" in capsys.readouterr().out
    losses(tables("halves", "sharded", steps=4, **two))
    assert losses(tables("halves", "sharded", **two)) == straight
    capsys.readouterr()
    losses(tables("halves", "sharded", steps=12))
    out = capsys.readouterr().out
    assert "was read in 2 shards and is read in 1 now: some of its items come again in epoch" in out, out
    with pytest.raises(UsageError, match="shard 1 of 2 of the stream has no items"):
        losses(tables("short", "short", **two))


def test_epochs_of_a_stream_with_a_length() -> None:
    job = tables("out", "counted", evaluation={"every_epochs": 1})
    del job["job"]["steps"]
    job["job"]["epochs"] = 2
    assert losses(job, "evaluation_loss") and losses(job, "epoch")[-1] == pytest.approx(30 / 17)
    assert len(losses(job)) == 2 * 17 // 6


def test_a_worker_that_never_answers_does_not_outlive_the_run() -> None:
    begin = time.monotonic()
    assert len(losses(tables("out", "stuck", steps=1, dataset={"workers": 1}))) == 1
    assert time.monotonic() - begin < 60 and not multiprocessing.active_children()


@pytest.mark.thorough
def test_evaluations_begin_a_stream_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of workers, and although the rows are drawn."""
    alone = losses(tables("alone", "flow", evaluation={"every_steps": 3}), "evaluation_loss")
    workers = losses(
        tables("workers", "flow", evaluation={"every_steps": 3}, dataset={"workers": 2}), "evaluation_loss"
    )
    assert workers == alone and len(alone) == 3
    counts = losses(tables("alone", "flow", evaluation={"every_steps": 3}), "evaluation_samples")
    assert counts == [17, 17, 17]


def test_the_commands_take_a_stream() -> None:
    """`check` says what it is, `evaluate` reads it to its end; `predict` can't say how many rows there will be."""
    job = tables("out", "flow", evaluation={"every_steps": 9})
    (found,) = losses(job, "evaluation_loss")
    Path("job.toml").write_text(tomli_w.dumps(job))
    done = in_process("check", "job.toml", cwd=Path.cwd())
    assert "ok, 9 steps, a stream of training samples" in done.out, done
    words = ("--checkpoint", "out/checkpoints/latest", "--split", "validation")
    done = in_process("evaluate", "job.toml", *words, "--json", cwd=Path.cwd())
    assert done.code == 0 and json.loads(done.out) == {"loss": pytest.approx(found, rel=1e-6), "samples": 17}, done
    done = in_process("predict", "job.toml", *words, "--out", "out.npy", cwd=Path.cwd())
    assert done.code == 2 and "a stream has an unknown number; use samples by index" in done.err, done


@pytest.mark.parametrize(
    ("name", "changes", "kind", "sentence"),
    [
        ("flow", {"job": {"epochs": 2}}, UsageError, r"\[job\] epochs: 'flows:flow' is a stream without .* give \[job\] steps"),
        ("flow", {"checkpoint": {"every_epochs": 1}}, UsageError, r"\[checkpoint\] every_epochs: .* give every_steps"),
        ("flow", {"batch": {"drop_last": False}}, UsageError, r"\[batch\] drop_last: 'flows:flow' is a stream, whose batches"),
        ("late", {}, UsageError, r"after load_state_dict\(state_dict\(\)\) its iterator goes on with other items.* before its `yi"),
        ("generator", {}, UsageError, "returned generator, which can be read once only; expected an object whose __iter__"),
        ("none", {}, UsageError, "returned a stream that has no items"),
        ("unseeded", {}, UsageError, r"gives other items each time, although .* seed its own generators \(set_epoch"),
        ("failing", {}, TrainingError, r"item \d+ of its iterator raised KeyError: 'no such row'\n  File .*flows.py.*in __iter"),
        ("flow", {"dataset": {"weights": "flows:weights"}}, UsageError, "weights: 'flows:flow' returned Flow, a stream, which"),
        ("empty", {"evaluation": {"every_steps": 9}}, TrainingError, "no token or sample of the evaluated split has a label"),
    ],
)  # fmt: skip
def test_streams_that_can_not_be(name: str, changes: dict[str, Any], kind: type[HpctrainError], sentence: str) -> None:
    job = tables("out", name, **changes)
    if "epochs" in job["job"]:
        del job["job"]["steps"]
    with pytest.raises(kind, match=f"(?s){sentence}"):
        hpctrain.run(job)


def test_a_plugin_may_open_a_stream() -> None:
    """What hpctrain.api exports is enough; `check` reads only its first items."""
    checked = check(RawJob(tables("out", "counted"), {}, "j"), 1)
    data = open_data(checked.job, checked.parts)
    assert isinstance(data.training, UserStream) and isinstance(data.training, hpctrain.api.Stream)
    assert data.samples == 17 and data.steps == 9
