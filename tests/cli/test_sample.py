"""hpctrain sample: the text of a greedy loop over the loaded module, under any layout."""

from __future__ import annotations

import pytest
import torch
from jobs import JobFile
from launching import hpctrain, in_process, run

import hpctrain as api

CHECKPOINT = ("--checkpoint", "out/checkpoints/latest")


@pytest.fixture
def trained(job: JobFile) -> JobFile:
    job.tables["model"] |= {"vocab_size": 256, "max_seq_length": 16}
    job.tables["dataset"] = {"name": "stdlib-text", "max_bytes": 20_000}
    job.write()
    done = in_process("run", "job.toml", "--set", "job.steps=12", "--set", "optimizer.lr=0.01", cwd=job.directory)
    assert done.code == 0, done
    return job


def expected(job: JobFile, prompt: str, tokens: int) -> str:
    module = api.load(job.output / "checkpoints" / "latest")
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(tokens):
            window = ids[-16:]
            ids.append(int(module(torch.tensor([window]))[0, -1].argmax()))
    return bytes(ids).decode("utf-8", "replace")


@pytest.mark.cases(nightly=["tensor", "pipeline"])
@pytest.mark.parametrize(
    "words",
    [(), ("-n", "2", "--set", "parallelism.tensor=2"), ("-n", "2", "--set", "parallelism.pipeline=2", "--set", "sharding.stage=1"),
     ("-n", "2", "--set", "parallelism.context=2")],
    ids=["alone", "tensor", "pipeline", "context"],
)  # fmt: skip
def test_greedy(trained: JobFile, words: tuple[str, ...]) -> None:
    asked = ("--prompt", "import wörter", "--tokens", "30", "--temperature", "0")
    asked = ("sample", "job.toml", *CHECKPOINT, *asked, *words)
    done = run(hpctrain(*asked), trained.directory) if words else in_process(*asked, cwd=trained.directory)
    assert done.code == 0 and not done.err, done
    assert done.out.rstrip("\n").rstrip("\ufffd") == expected(trained, "import wörter", 30).rstrip("\n").rstrip(
        "\ufffd"
    )


def test_draws_and_mistakes(trained: JobFile) -> None:
    def sample(*words: str) -> str:
        done = in_process(
            "sample", "job.toml", *CHECKPOINT, "--prompt", "def ", "--tokens", "12", *words, cwd=trained.directory
        )
        assert done.code == 0, done
        return done.out

    texts = [sample("--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2] and all(text.startswith("def ") for text in texts)
    assert sample("--top-k", "1") == sample("--temperature", "0")
    for words, says in [
        (("--prompt", ""), "a prompt of one token at least"),
        (
            ("--prompt", "x", "--set", "dataset.name=synthetic", "--set", "dataset.max_bytes="),
            "needs a dataset of text, found 'synthetic'",
        ),
    ]:  # fmt: skip
        refused = in_process("sample", "job.toml", *CHECKPOINT, *words, cwd=trained.directory)
        assert refused.code == 2 and says in refused.err and "Traceback" not in refused.err and not refused.out, refused
