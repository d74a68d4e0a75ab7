"""Measures what a tokenizer costs at the start of a job: the processor time of all its processes.

    python benchmarks/tokenizing.py [--megabytes 17] [--files 100] [--ranks 2] [--directory DIR]

Writes random words into files, trains a BPE on a part of them, and runs a job of one step: on random ids, which needs no
tokenizer, then twice on the files, with a cache that is empty at first. Prints processor seconds and seconds of each, and of
`hpctrain check`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

VOCABULARY = 8192
WORDS = 40_000


def write_corpus(directory: Path, size: int, files: int) -> None:
    """Words of random letters, drawn by Zipf's law, 12 to a line."""
    draw = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    lengths = draw.integers(2, 11, WORDS)
    words = np.array(["".join(draw.choice(letters[: 8 + n], n)) for n in lengths])
    chance = 1 / np.arange(1, WORDS + 1)
    for number in range(files):
        drawn = words[draw.choice(WORDS, size // files // 6, p=chance / chance.sum())]
        lines = (" ".join(drawn[i : i + 12]) for i in range(0, len(drawn), 12))
        (directory / f"{number:05}.txt").write_text("\n".join(lines)[: size // files])


def train_tokenizer(corpus: Path, path: Path) -> None:
    """A BPE over bytes, trained on a twentieth of the files."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, special_tokens=["<|endoftext|>"])
    files = sorted(map(str, corpus.glob("*.txt")))
    tokenizer.train(files[: max(1, len(files) // 20)], trainer)
    tokenizer.save(str(path))


def job(directory: Path, name: str, dataset: dict[str, Any]) -> Path:
    """A job file of one small step."""
    model = {"name": "gpt", "hidden_size": 32, "layers": 1, "attention_heads": 2}
    tables = {
        "job": {"name": name, "steps": 1, "output_dir": str(directory / name)},
        "model": {**model, "vocab_size": VOCABULARY, "max_seq_length": 64},
        "dataset": dataset,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch": {"global_size": 4, "micro_size": 1},
    }
    path = directory / f"{name}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def measured(*words: str, cache: Path) -> str:
    """Processor seconds and seconds of `hpctrain WORDS` and all its processes."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    before, begin = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "hpctrain", *words], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=900
    )
    after, seconds = os.times(), time.perf_counter() - begin
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return f"{used:7.1f} processor seconds {seconds:7.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=17)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        corpus, tokenizer, cache = directory / "corpus", directory / "tokenizer.json", directory / "cache"
        corpus.mkdir()
        write_corpus(corpus, round(arguments.megabytes * 1e6), arguments.files)
        train_tokenizer(corpus, tokenizer)
        text = job(directory, "text", {"name": "text", "files": [str(corpus / "*.txt")], "tokenizer": str(tokenizer)})
        ranks = str(arguments.ranks)
        random = job(directory, "random", {"name": "synthetic", "samples": 1000})
        print("check, random ids ", measured("check", str(random), cache=cache), flush=True)
        print("check             ", measured("check", str(text), cache=cache), flush=True)
        for what, path in (("random ids", random), ("first start", text), ("second start", text)):
            print(f"{what:18}", measured("run", str(path), "-n", ranks, "--resume", "never", cache=cache), flush=True)


if __name__ == "__main__":
    main()
