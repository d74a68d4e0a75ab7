"""hpctrain evaluate and predict: the same figures and outputs under any layout, held against the run and a plain forward."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import JobFile
from launching import INTERRUPT, hpctrain, in_process, run, started, wait_until
from plain import gpt_loss, module_of, samples_of, stacked

import hpctrain as api

LAYOUTS: list[tuple[str, ...]] = [
    (), ("-n", "2"), ("-n", "2", "--set", "parallelism.tensor=2"), ("-n", "2", "--set", "parallelism.context=2"),
    ("-n", "2", "--set", "parallelism.pipeline=2", "--set", "batch.micro_size=3"), ("-n", "2", "--set", "sharding.stage=3"),
]  # fmt: skip


@pytest.fixture
def trained(job: JobFile) -> JobFile:
    job.set(job={"seed": 3}, dataset={"validation_samples": 10}, evaluation={"every_steps": 4})
    job.tables["metric"] = [{"name": "accuracy"}, {"name": "perplexity"}]
    job.write()
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 0, done
    return job


@pytest.fixture(scope="module")
def step_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step; copied by tests, never changed."""
    job = JobFile(tmp_path_factory.mktemp("trained"))
    done = in_process("run", "job.toml", "--set", "job.steps=1", cwd=job.directory)
    assert done.code == 0, done
    return job.output


def ask(job: JobFile, command: str, *words: str) -> Any:
    done = run(hpctrain(command, "job.toml", "--checkpoint", "out/checkpoints/latest", *words), job.directory)
    assert done.code == 0 and not done.err, done
    return done.out


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    "layouts", [LAYOUTS[::5], pytest.param(LAYOUTS[1:5], marks=pytest.mark.nightly)], ids=["few", "the others"]
)
def test_any_layout_gives_the_figures_of_the_run_and_the_same_outputs(
    trained: JobFile, layouts: list[tuple[str, ...]]
) -> None:
    rows = [json.loads(line) for line in (trained.output / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "evaluation_loss" in row)
    weights = trained.directory / "weights.pt"
    newest = str(trained.output / "checkpoints" / "latest")
    assert in_process("checkpoint", "export", newest, str(weights), "--to", "torch", cwd=trained.directory).code == 0
    module = module_of(trained.tables, torch.float32)
    module.load_state_dict(torch.load(weights, weights_only=True))
    loaded = api.load(newest)
    assert not loaded.training and loaded.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        expected = module(torch.stack([one["input_ids"] for one in samples_of(trained.tables, "validation")])).numpy()
    before = sorted(path for path in trained.output.rglob("*"))
    for number, words in enumerate(layouts):
        found = json.loads(ask(trained, "evaluate", "--json", *words))
        assert found["tokens"] == row["evaluation_tokens"] == 80
        for name in ("loss", "accuracy", "perplexity"):
            assert found[name] == pytest.approx(row[f"evaluation_{name}"], rel=1e-6), (words, found)
        said = ask(trained, "predict", "--out", f"{number}.npy", *words)
        assert said == f"{number}.npy: (10, 8, 64) float32\n", said
        outputs = np.load(trained.directory / f"{number}.npy")
        assert np.allclose(outputs, expected, rtol=1e-5, atol=1e-6), words
    assert sorted(path for path in trained.output.rglob("*")) == before, "the run's directory is left alone"
    assert ask(trained, "evaluate", "--split", "train").startswith(
        "out/checkpoints/latest on the train split:\n  loss "
    )


@pytest.mark.nightly
def test_weights_that_a_hook_keeps(job: JobFile) -> None:
    job.set(job={"seed": 3}, dataset={"validation_samples": 10}, evaluation={"every_steps": 4})
    job.tables["hook"] = [{"name": "ema", "decay": 0.8}]
    job.write()
    assert run(hpctrain("run", "job.toml", "-n", "2", "--set", "sharding.stage=3"), job.directory).code == 0
    rows = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    averaged = next(row["evaluation_loss"] for row in reversed(rows) if "evaluation_loss" in row)
    for words in LAYOUTS[:2]:
        found = json.loads(ask(job, "evaluate", "--json", "--weights-of", "ema", *words))
        assert found["loss"] == pytest.approx(averaged, rel=1e-6)
    assert abs(json.loads(ask(job, "evaluate", "--json"))["loss"] - averaged) > 1e-4
    newest, weights = str(job.output / "checkpoints" / "latest"), job.directory / "weights.pt"
    words = ("checkpoint", "export", newest, str(weights), "--to", "torch", "--weights-of", "ema")
    assert run(hpctrain(*words), job.directory).code == 0
    exported, loaded = torch.load(weights, weights_only=True), api.load(newest, weights_of="ema").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in loaded.items())
    samples = samples_of(job.tables, "validation")
    with torch.no_grad():
        module = api.load(newest, weights_of="ema")
        loss = gpt_loss(module, *stacked([samples[i] for i in range(10)])).item()
    assert loss == pytest.approx(averaged, rel=1e-6)
    refused = in_process("evaluate", "job.toml", "--checkpoint", newest, "--weights-of", "swa", cwd=job.directory)
    assert refused.code == 2 and "has no weights of 'swa'; it has the model's and those of 'ema'" in refused.err, (
        refused
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("evaluate", "--checkpoint", "gone"), 2, "there are no weights at gone"),
        (("evaluate", "--checkpoint", "out/checkpoints/latest", "--split", "test"), 2, "synthetic: it has no samples of the split"),
        (("evaluate", "--checkpoint", "out/checkpoints/latest", "--set", "model.layers=1"), 5, "are of another model"),
        (("predict", "--checkpoint", "out/checkpoints/latest", "--out", "x.txt"), 2, "expected a name that ends in .npy"),
        (("predict", "--checkpoint", "out/checkpoints/latest", "--out", "gone/x.npy"), 2, "can't be written: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(job: JobFile, step_trained: Path, words: tuple[str, ...], code: int, says: str) -> None:
    shutil.copytree(step_trained, job.output)
    refused = in_process(words[0], "job.toml", *words[1:], cwd=job.directory)
    assert refused.code == code and says in refused.err and "Traceback" not in refused.err, refused


@pytest.mark.nightly
def test_ctrl_c_ends_an_evaluation_at_once(job: JobFile) -> None:
    job.set(dataset={"validation_samples": 10**7})
    assert in_process("run", "job.toml", "--set", "job.steps=1", cwd=job.directory).code == 0
    words = hpctrain("evaluate", "job.toml", "--checkpoint", "out/checkpoints/latest", "-n", "2")
    with started(words, job.directory) as running:
        wait_until(lambda: len(running.ranks()) == 2, 60, "both ranks are there")
        time.sleep(6)  # evaluating, or on the way there
        running.process.send_signal(INTERRUPT)
        done = running.finish(60)
    assert done.code == 130 and "Traceback" not in done.err, done


@pytest.mark.thorough
def test_a_model_of_ones_own_with_augmentation_on_a_test_split(job: JobFile) -> None:
    (job.directory / "own.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))\n"
        "def data(split):\n"
        "    generator = torch.Generator().manual_seed(len(split))\n"
        "    return [(torch.randn(4, generator=generator), torch.tensor(i % 3)) for i in range(30 if split == 'train' else 7)]\n"
    )
    for table in ("model", "dataset"):
        job.tables[table] = {}
    job.set(model={"name": "own:model", "loss": "torch.nn.functional:cross_entropy"}, dataset={"name": "own:data"})
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    ask(job, "predict", "--split", "test", "--out", "one.npy")
    said = ask(job, "predict", "--split", "test", "--out", "three.npy", "-n", "3")
    assert said.splitlines() == ["three.npy: (7, 3) float32"]
    one, three = (np.load(job.directory / f"{name}.npy") for name in ("one", "three"))
    assert one.shape == (7, 3) and np.allclose(one, three, rtol=1e-6) and np.isfinite(one).all()
    assert not list(Path(job.directory).glob(".*.tmp"))
