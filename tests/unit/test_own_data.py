"""Data of one's own: batches made by a function of the user's, workers that outlive an evaluation."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

import hpctrain
from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.checking.check import check
from hpctrain.contracts.identity import Identity
from hpctrain.data.batches import Batches
from hpctrain.data.loader import Loader
from hpctrain.data.order import SampleOrder
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob
from hpctrain.ranks.watchdog.position import Position
from hpctrain.ranks.watchdog.status import status_of
from hpctrain.registry.blame import failing_layer
from hpctrain.registry.user_code.dataset import UserDataset
from hpctrain.registry.user_code.samples import UserSamples

OWN = '''
import os

import torch
from pathlib import Path
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Words:
    """Sentences of 1 to 7 words, 9 marks a place behind the end; a worker notes that it has got a copy of the data."""

    def __init__(self, split):
        self.split = split

    def __setstate__(self, state):
        self.__dict__.update(state)
        with Path("starts").open("a") as file:
            file.write(f"{self.split} {os.getpid()}\\n")

    def __len__(self):
        return 40 if self.split == "train" else 11

    def __getitem__(self, index):
        words = torch.arange(index % 7 + 1) + index % 2
        return words, words.sum() % 3


def data(split):
    return Words(split) if split != "test" else None


def pad(samples):
    ids = pad_sequence([words for words, _ in samples], batch_first=True, padding_value=9)
    return {"ids": ids, "labels": torch.stack([label for _, label in samples])}


class ByEpoch(Words):
    """The label changes from epoch to epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        words, label = super().__getitem__(index)
        return words, (label + self.epoch) % 3


def by_epoch(split):
    return ByEpoch(split)


class Collated(Words):
    def collate_fn(self, samples):
        return pad(samples)


def collated(split):
    return Collated(split)


def masked(samples):
    batch = pad(samples)
    batch["ids"] = torch.where(torch.rand(batch["ids"].shape) < 0.3, 8, batch["ids"])
    return batch


def first_only(samples):
    return pad(samples[:1])


def tensor(samples):
    return samples[0][0]


def failing(samples):
    return pad(samples) if len(samples) == 1 else {}["no such key"]


class Mean(nn.Module):
    """Of the words' vectors; places behind the end count nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6, padding_idx=9), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids).sum(1) / (ids != 9).sum(1, keepdim=True))


def rare(dataset):
    return [0 if index % 7 == 3 else 1 + index % 2 for index in range(len(dataset))]


class Weighted(Collated):
    sample_weights = torch.tensor([0.0, 1.0] * 20)


def weighted(split):
    return Weighted(split)


def few(dataset):
    return [1.0, 2.0]


def negative(dataset):
    return [-1.0] * len(dataset)


def loader(split, kind="random"):
    words, own = Words(split), torch.utils.data
    ones = torch.ones(len(words))
    given = {
        "random": {"shuffle": True, "drop_last": True},
        "plain": {},
        "distributed": {"sampler": own.DistributedSampler(words, 2, 0)},
        "weighted": {"sampler": own.WeightedRandomSampler(ones, 9)},
        "subset": {"sampler": own.SubsetRandomSampler([1, 2])},
        "some": {"sampler": own.RandomSampler(words, num_samples=3)},
        "init": {"worker_init_fn": print},
        "none": {"batch_size": None},
        "batches": {"batch_sampler": Sizes()},
    }[kind]
    if kind == "batches":
        return own.DataLoader(words, collate_fn=pad, **given)
    return own.DataLoader(words, **{"batch_size": 5, "collate_fn": pad, "num_workers": 1, **given})


class Sizes(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([[1, 2], [3]])


class Odd(Words):
    def __init__(self, split, kind):
        super().__init__(split)
        self.kind = kind

    def __getitem__(self, index):
        words = torch.full((4,), index % 9)
        if index == 7:
            if self.kind == "short":
                words = words[:3]
            elif self.kind == "none":
                return None
            elif self.kind == "mapping":
                return {"ids": {"words": words[:2]}, "labels": 1}
        return {"ids": {"words": words}, "labels": 1} if self.kind == "mapping" else (words, torch.tensor(1))


def odd(split, kind):
    return Odd(split, kind) if split == "train" else None


class Crooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(10, 6), nn.ModuleList([nn.Linear(6, 6), nn.Linear(7, 3)])

    def forward(self, ids):
        values = self.embedding(ids)
        for block in self.blocks:
            values = block(values)
        return values.sum(1)


def closed(split):
    class Local(Words):
        pass

    return Local(split)
'''


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "own.py").write_text(OWN)


def tables(output: str, dataset: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "job": {"name": "own", "steps": 6, "seed": 3, "output_dir": output},
        "model": {"name": "own:Mean", "loss": "torch.nn.functional:cross_entropy"},
        "dataset": dataset, "optimizer": {"name": "sgd", "lr": 0.5}, "batch": {"global_size": 12, "micro_size": 4},
    }  # fmt: skip
    for name, table in more.items():
        made[name] = {**made.get(name, {}), **table}
    return made


def rows_of(job: dict[str, Any], key: str = "loss") -> list[float]:
    hpctrain.run(job)
    rows = [json.loads(line) for line in Path(job["job"]["output_dir"], "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def plain_losses(name: str, steps: int = 6) -> list[float]:
    """The job in a plain loop, sample by sample, so that nothing is padded."""
    own: Any = __import__("own")
    torch.manual_seed(derive_seed(3, "model"))
    module, words = own.Mean(), getattr(own, name.partition(":")[2])("train")
    words = getattr(words, "dataset", words)  # a DataLoader's
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    opened = UserDataset(name, {}).open("train", None)  # type: ignore[arg-type]
    assert opened is not None
    order, losses = SampleOrder(40, 3, opened.fingerprint()), []
    for step in range(steps):
        chosen = []
        for position, index in zip(
            range(12 * step, 12 * (step + 1)), order.at(12 * step, 12 * (step + 1)), strict=True
        ):
            if hasattr(words, "set_epoch"):
                words.set_epoch(position // 40)
            chosen.append(words[int(index)])
        loss = torch.stack([cross_entropy(module(ids[None]), label[None]) for ids, label in chosen]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.nightly
def test_samples_of_several_lengths_train_through_a_function_of_ones_own() -> None:
    """Named in the job or a method of the data set, with workers and without: the losses of a loop without padding."""
    found = rows_of(tables("named", {"name": "own:data", "collate": "own:pad"}))
    assert found == pytest.approx(plain_losses("own:data"), rel=1e-6)
    assert rows_of(tables("workers", {"name": "own:data", "collate": "own:pad", "workers": 2})) == found
    own = rows_of(tables("method", {"name": "own:collated"}))
    assert own == pytest.approx(plain_losses("own:collated"), rel=1e-6)
    both = rows_of(tables("both", {"name": "own:collated", "collate": "own:masked"}))
    assert both != own, "the key of the job comes first"


@pytest.mark.thorough
def test_what_a_collate_draws_depends_on_the_seed_alone() -> None:
    dataset = {"name": "own:data", "collate": "own:masked"}
    straight = rows_of(tables("straight", dataset))
    assert rows_of(tables("workers", {**dataset, "workers": 2})) == straight
    rows_of(tables("halves", dataset, job={"steps": 3}))
    assert rows_of(tables("halves", dataset)) == straight
    assert rows_of(tables("other", dataset, job={"seed": 4})) != straight


@pytest.mark.cases(
    nightly=[
        "1-own:first_only-TrainingError-collate = 'own:first_only' returned a target of shape \\\\(1,\\\\) for 4 samples; expec"
    ]
)
@pytest.mark.parametrize(
    ("collate", "kind", "sentence"),
    [
        ("own:first_only", TrainingError, r"collate = 'own:first_only' returned a target of shape \(1,\) for 4 samples; expec"),
        ("own:tensor", TrainingError, "collate = 'own:tensor' returned Tensor, expected a dict of tensors with labels, or a li"),
        ("own:failing", TrainingError, r"'own:failing' raised KeyError: 'no such key'\n  File .*own.py\", line \d+, in failing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_fails_is_told_by_its_key(
    collate: str, kind: type[HpctrainError], sentence: str, workers: int
) -> None:
    with pytest.raises(kind, match=sentence) as error:
        hpctrain.run(tables("out", {"name": "own:data", "collate": collate, "workers": workers}))
    assert "Traceback" not in str(error.value) and str(error.value).count("File ") == ("raised" in sentence)


@pytest.mark.parametrize("kind", ["short", "none", "mapping"])
def test_samples_that_do_not_fit_together_are_told(kind: str) -> None:
    with pytest.raises(TrainingError) as found:
        hpctrain.run(tables("odd", {"name": "own:odd", "kind": kind}, batch={"global_size": 40, "micro_size": 40}))
    said = str(found.value)
    assert re.search(r"the samples \d+, .* can't be made into a batch \(", said), said
    assert '[dataset] collate = "package.module:function"' in said


def test_a_sample_that_hangs_is_told_by_its_line() -> None:
    entered, goes_on = threading.Event(), threading.Event()

    class Hangs(list[int]):
        def __getitem__(self, index: Any) -> Any:
            entered.set()
            goes_on.wait()  # hangs here
            return torch.zeros(2)

    class Samples(UserSamples):
        draws = False  # then a thread loads

    source = Samples("here:Hangs", Hangs([0]), None, None)
    loader = Loader(
        Pool(Batches(source)), iter([Planned([0], 0)]), lambda batch: batch, len, torch.device("cpu"), torch.float32
    )
    assert entered.wait(60)
    position = Position()
    with position.inside("data", 0), position.inside("data", 1):
        [told] = status_of(Identity(), position).loading
    goes_on.set()
    loader.close()
    assert told.startswith("the thread that loads samples is at ") and told.endswith("goes_on.wait()  # hangs here")


def test_an_error_of_shapes_names_the_layer_and_its_input() -> None:
    job = tables("out", {"name": "own:odd", "kind": "fine"}, model={"name": "own:Crooked"})
    with pytest.raises(
        TrainingError,
        match=r"in the layer blocks\.1 of Crooked, Linear\(in_features=7, .*, on \(4, 4, 6\) float32, on a batch of ",
    ):
        hpctrain.run(job)


def test_a_layer_that_can_not_be_shown_is_named() -> None:
    class Unshown(torch.nn.Linear):
        def extra_repr(self) -> str:
            raise AttributeError

    with pytest.raises(RuntimeError) as found:
        torch.nn.Sequential(Unshown(2, 2))(torch.zeros(3, 3))
    assert failing_layer(found.value.__traceback__) == ", in the layer 0 of Sequential, Unshown, on (3, 3) float32"


def test_a_collate_that_can_not_be_is_told_before_the_start() -> None:
    tokens = {"batch": {"tokens": 99, "micro_tokens": 9}}
    for dataset, more, sentence in (
        ({"name": "own:data", "collate": "own:padd"}, {}, "collate = 'own:padd': own:padd: own has no 'padd'; did you mean 'pad'?"),
        ({"name": "own:data", "collate": "own:Words"}, {}, "is a class, expected a function of a list of samples"),
        ({"name": "own:data", "collate": "os:getpid"}, {}, "it is called with a list of samples: too many positional"),
        ({"name": "synthetic", "collate": "own:pad"}, {}, "collate: it goes with data of your own"),
        ({"name": "own:data", "collate": "own:pad"}, tokens, "collate: batches by tokens are padded by hpctrain"),
    ):  # fmt: skip
        made = {**tables("out", dataset), **more}
        with pytest.raises(JobError) as error:
            check(RawJob(made, {}, "j"), 1)
        assert sentence in str(error.value), str(error.value)


def test_batches_of_two_shapes_are_refused_where_a_pipeline_would_hang() -> None:
    from hpctrain.data.shapes import OneShape

    split = OneShape(lambda batch: batch, "pipeline")
    split({"ids": torch.zeros(2, 5), "labels": torch.zeros(2)})
    with pytest.raises(
        TrainingError, match=r"pipeline takes micro batches of one shape, found \[\(2, 5\), \(2,\)\] and \[\(2, 4"
    ):
        split({"ids": torch.zeros(2, 4), "labels": torch.zeros(2)})


@pytest.mark.thorough
def test_ten_evaluations_start_each_worker_once() -> None:
    evaluations = {"evaluation": {"every_steps": 1}, "job": {"steps": 10}}
    dataset = {"name": "own:collated"}
    alone = rows_of(tables("alone", dataset, **evaluations), "evaluation_loss")
    assert not Path("starts").exists()
    found = rows_of(tables("workers", {**dataset, "workers": 2}, **evaluations), "evaluation_loss")
    assert found == alone and len(found) == 10
    starts = Counter(line.split()[0] for line in Path("starts").read_text().splitlines())
    assert starts == {"train": 2, "validation": 2}, "the data is sent once to each"


@pytest.mark.cases(thorough=["fork"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_other_ways_to_start_workers(method: str) -> None:
    dataset = {"name": "own:data", "collate": "own:masked"}
    started = {**dataset, "workers": 2, "start_method": method}
    evaluation = {"evaluation": {"every_steps": 3}}
    assert rows_of(tables("out", started, **evaluation)) == rows_of(tables("alone", dataset, **evaluation))
    assert Path("starts").exists() == (method == "forkserver"), "forked workers share the data"


def test_data_that_can_not_be_sent_to_workers() -> None:
    alone = rows_of(tables("out", {"name": "own:closed", "collate": "own:pad"}))
    forked = {"name": "own:closed", "collate": "own:pad", "workers": 1, "start_method": "fork"}
    assert rows_of(tables("forked", forked)) == alone
    with pytest.raises(
        UsageError, match=r"workers = 1: the data can't be sent to worker processes \(.*Local.* use workers = 0"
    ):
        hpctrain.run(tables("sent", {"name": "own:closed", "collate": "own:pad", "workers": 1}))


@pytest.mark.parametrize("workers", [0, 2])
def test_data_by_index_are_told_the_epoch(workers: int) -> None:
    """As a plain loop would tell them, position by position; a resume goes on in its epoch."""
    dataset = {"name": "own:by_epoch", "collate": "own:pad", "workers": workers}
    whole = rows_of(tables("whole", dataset, job={"steps": 8}))
    assert whole == pytest.approx(plain_losses("own:by_epoch", 8), rel=1e-6)
    rows_of(tables("halves", dataset, job={"steps": 5}))
    assert rows_of(tables("halves", dataset, job={"steps": 8})) == whole


def drawn(output: str, steps: int, **dataset: Any) -> tuple[list[float], list[float]]:
    job = tables(output, {"collate": "own:pad", **dataset}, job={"steps": steps})
    return rows_of(job), rows_of(job, "epoch")


@pytest.mark.thorough
def test_weighted_samples_are_drawn_alike_on_a_resume_and_with_workers() -> None:
    straight = drawn("straight", 8, name="own:data", weights="own:rare")
    assert straight[0] != drawn("even", 8, name="own:data")[0]
    assert straight[1][-1] == pytest.approx(96 / 40), "an epoch draws as many samples as there are"
    drawn("halves", 5, name="own:data", weights="own:rare")
    assert drawn("halves", 8, name="own:data", weights="own:rare", workers=1) == straight
    assert drawn("own", 8, name="own:weighted")[0] != drawn("named", 8, name="own:weighted", weights="own:rare")[0]


def test_other_weights_are_other_data() -> None:
    Path("changed.py").write_text("WEIGHTS = [1.0] * 40\ndef weigh(data): return WEIGHTS\n")
    drawn("out", 3, name="own:data", weights="changed:weigh")
    __import__("changed").WEIGHTS[7] = 2.0
    with pytest.raises(HpctrainError, match="was trained on other data"):
        drawn("out", 8, name="own:data", weights="changed:weigh")


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ("own:few", r"found weights of the shape \(2,\), expected 40 finite numbers"),
        ("own:negative", r"found weights of -1.0 to -1.0, expected 40 finite numbers, none below 0 and one above"),
        ("own:data", "weights = 'own:data': found Words, expected numbers, one for each sample"),
    ],
)  # fmt: skip
def test_weights_that_can_not_be(weights: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        hpctrain.run(tables("out", {"name": "own:data", "weights": weights}))


def test_a_value_beside_the_loss_with_the_name_of_a_key_is_refused() -> None:
    Path("beside.py").write_text(
        "from torch.nn.functional import cross_entropy\n"
        "def loss(outputs, target): return {'loss': cross_entropy(outputs, target), 'lr': outputs.mean()}\n"
    )
    with pytest.raises(TrainingError, match="the loss reports 'lr', which is a key of each row; expected another name"):
        hpctrain.run(tables("out", {"name": "own:data"}, model={"loss": "beside:loss"}, batch={"micro_size": 1}))


def test_an_epoch_that_fills_no_batch() -> None:
    """It is a batch, or refused."""
    data = {"name": "own:data", "collate": "own:pad"}
    assert rows_of(tables("out", data, batch={"global_size": 48, "drop_last": False}), "samples") == [40] * 6
    with pytest.raises(
        UsageError, match="drop_last: 'own:data' has 40 samples, which do not fill one global batch of 48"
    ):
        hpctrain.run(tables("out", data, batch={"global_size": 48, "drop_last": True}))


@pytest.mark.thorough
def test_a_data_loader_is_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Its data set, its collate_fn and its number of workers; the order and the batches are the job's."""
    evaluated = {"evaluation": {"every_steps": 3}}
    direct = {"name": "own:data", "collate": "own:pad"}
    assert rows_of(tables("plain", direct)) == pytest.approx(plain_losses("own:data"), rel=1e-6)
    capsys.readouterr()
    found = rows_of(tables("loader", {"name": "own:loader"}, **evaluated))
    assert found == pytest.approx(plain_losses("own:loader"), rel=1e-6)
    told = (
        "loader       of the DataLoader are used the data set, collate_fn and num_workers = 1; its batch_size = 5 and "
    )
    decided = (
        "RandomSampler are not, since [batch] and [job] seed decide; nor are drop_last = True (see [batch] drop_last)"
    )
    assert told + decided in capsys.readouterr().out
    assert Counter(line.split()[0] for line in Path("starts").read_text().splitlines()) == {"train": 1, "validation": 1}
    Path("starts").unlink()
    for kind in ("plain", "distributed"):
        assert rows_of(tables(kind + "-loader", {"name": "own:loader", "kind": kind, "workers": 0})) == found
    assert not Path("starts").exists(), "the job's workers come first"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("weighted", "with a WeightedRandomSampler; give its weights as"), ("subset", "with the sampler SubsetRandomSampler"),
        ("some", "with the sampler RandomSampler, which can't be used"), ("init", "with a worker_init_fn, which can't be used"),
        ("none", "with batch_size=None, whose data set makes"), ("batches", r"with a batch_sampler of its own \(Sizes\), which"),
    ],
)  # fmt: skip
def test_a_data_loader_that_can_not_be_taken_over(kind: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"'own:loader' returned a DataLoader {sentence}"):
        hpctrain.run(tables("out", {"name": "own:loader", "kind": kind}))


SCRIPT = """
import sys, torch, hpctrain

class Data(list):
    pass

def data(split):
    return Data([(torch.ones(4), torch.tensor(1))] * 8)

def train():
    hpctrain.run({
        "job": {"name": "main", "steps": 2, "output_dir": sys.argv[1]},
        "model": {"name": "torch.nn:Linear", "in_features": 4, "out_features": 2, "loss": "torch.nn.functional:cross_entropy"},
        "dataset": {"name": "__main__:data", **eval(sys.argv[2])},
        "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 2},
    })

"""


@pytest.mark.nightly
def test_data_of_a_script_or_a_notebook() -> None:
    """A notebook has no file that a worker could import, as code from the command line."""
    guarded, bare = SCRIPT + "if __name__ == '__main__': train()", SCRIPT + "train()"
    Path("guarded.py").write_text(guarded)
    Path("bare.py").write_text(bare)
    for words, options, said in (
        (["guarded.py"], {"workers": 1}, ""),
        (["bare.py"], {"workers": 1}, "call hpctrain.run under if __name__"),
        (["-c", bare], {"workers": 1, "start_method": "fork"}, ""),
        (["-c", bare], {"workers": 1}, "in a notebook needs workers = 0 or start_method"),
    ):
        output = f"out-{len(list(Path().glob('out-*')))}"
        done = run([sys.executable, *words, output, repr(options)], Path.cwd(), 60)
        assert (done.code == 0) == (not said) and said in done.err, done
        assert not said or "[dataset] workers = 1: a worker process ended" in done.err, done


class Centred(torch.nn.Module):
    """A mean that follows from the number of its calls."""

    calls = 0

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ((outputs - target) ** 2).mean() * self.calls


def contrasted(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs @ target.T, torch.arange(len(outputs)))


def squares(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((outputs - target) ** 2).sum()


def parts(outputs: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"size": outputs.abs().mean(1), "fit": 0.1 * squares(outputs, target)}


def beside(outputs: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sum that is reported only."""
    return {"loss": (outputs - target).square().mean(), "squares": squares(outputs, target)}


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (beside, None),
        (squares, "the loss of"),
        (parts, "the loss 'fit' of"),
        (torch.nn.MSELoss(reduction="sum"), "the loss of"),
        (torch.nn.functional.mse_loss, None),
        (lambda outputs, target: (outputs - target).abs().mean(1), None),
        (contrasted, None),
    ],
)
def test_a_loss_that_is_a_sum_is_told(loss: Any, named: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    points = [(torch.full((2,), float(i % 5)), torch.full((3,), i % 3 - 0.5)) for i in range(24)]
    model = {"name": "torch.nn:Linear", "in_features": 2, "out_features": 3, "loss": loss}
    hpctrain.run({"job": {"name": "summed", "steps": 2}, "batch": {"global_size": 12, "micro_size": 4}, "model": model,
                  "dataset": {"name": points}, "optimizer": {"name": "sgd", "lr": 1e-9}})  # fmt: skip
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss  ")]
    assert len(told) == (named is not None) and all(
        f" {named} torch.nn:Linear grows with the number of samples" in line for line in told
    ), told


def test_the_trial_of_a_loss_leaves_an_object_as_it_is() -> None:
    points = [(torch.ones(2), torch.zeros(3))] * 24
    loss = Centred()
    model = {"name": "torch.nn:Linear", "in_features": 2, "out_features": 3, "loss": loss}
    hpctrain.run({"job": {"name": "centred", "steps": 2}, "batch": {"global_size": 12, "micro_size": 4}, "model": model,
                  "dataset": {"name": points}, "optimizer": {"name": "sgd", "lr": 1e-9}})  # fmt: skip
    assert loss.calls == 2 * 3


class ByItems:
    """A data set whose items are another one's."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


@pytest.mark.parametrize("part", [None, [7, 3, 5, 0, 9, 1, 8, 2, 6, 4]], ids=["TensorDataset", "Subset"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_tensors_in_memory_are_read_at_once(
    part: list[int] | None, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As their items would be stacked; also where a batch has the end of an epoch and the begin of the next."""
    tensors = torch.randn(10, 2, 3, dtype=torch.float64), torch.arange(10), torch.rand(10) < 0.5
    whole = TensorDataset(*tensors)
    source: Any = whole if part is None else Subset(whole, part)
    read = Counter[str]()
    one, other = (Batches(UserSamples("given", data, None, None)) for data in (source, ByItems(source)))
    plain = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda data, at: read.update("r") or plain(data, at))
    for begin, end in ((0, 3), (3, 7), (7, 13), (13, 16), (16, 17)):
        indices = [place % 10 for place in range(begin, end)]
        planned = Planned(indices, 0, positions=range(begin, end) if training else ())
        before = read["r"]
        found = one[planned].batch
        at_once = read["r"] == before
        assert at_once is (begin not in ((0, 7) if training else (0,)))
        expected = other[planned].batch
        assert isinstance(found, list) and [each.dtype for each in found] == [each.dtype for each in expected]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_loss_that_changes_its_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics would measure the changed one."""
    monkeypatch.chdir(tmp_path)

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, target.clamp_(max=1))

    data = TensorDataset(torch.randn(12, 3), torch.randint(5, (12,)))
    tables = {
        "job": {"name": "own", "steps": 2}, "model": {"name": lambda: torch.nn.Linear(3, 5), "loss": loss},
        "dataset": {"name": data}, "batch": {"global_size": 4, "micro_size": 4}, "optimizer": {"name": "sgd", "lr": 0.1},
    }  # fmt: skip
    with pytest.raises(TrainingError, match=r"the loss of .* changed its target in place, expected a copy"):
        hpctrain.run(tables)
