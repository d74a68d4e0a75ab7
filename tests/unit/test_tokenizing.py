"""Text through a tokenizer: encoded once, kept by content, the same ids whoever made them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from hpctrain.base.errors import EnvironmentUnfitError, UsageError
from hpctrain.contracts.dataset import DatasetContext, Samples, Split
from hpctrain.registry.registry import build_registry
from hpctrain.toolkit.cache import kept

REGISTRY = build_registry()
TEXTS = ["the cat sat on the mat\n" * 40, "a dog ate the hat of the cat\n" * 30, "\n\nrats\n"]


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files and a BPE of 279 ids in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, text in enumerate(TEXTS):
        Path(f"{number}.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|end|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save("tokenizer.json")
    return tmp_path


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of the tokenizer got."""
    from hpctrain_plugins.dataset.encoding import Encoder

    calls: list[int] = []
    real: Callable[..., Any] = Encoder.ids

    def counted(self: Encoder, texts: list[bytes]) -> Any:
        calls.append(len(texts))
        return real(self, texts)

    monkeypatch.setattr(Encoder, "ids", counted)
    return calls


def opened(split: Split = "train", may_estimate: bool = False, seq: int = 4, **options: Any) -> Samples:
    cls = REGISTRY.find("dataset", "text").cls
    options = {"files": ["?.txt"], "tokenizer": "tokenizer.json", "validation_fraction": 0.0, **options}
    context = DatasetContext(seq, None, 1, may_estimate=may_estimate)
    samples = cls(cls.Options(**options)).open(split, context)  # type: ignore[attr-defined]
    assert samples is not None
    return samples


def ids_of(samples: Samples) -> list[int]:
    return [int(one) for index in range(len(samples)) for one in samples[index]["input_ids"]]


def expected(end: list[int] | None = None) -> list[int]:
    """The library's own ids of the three files."""
    tokenizer = Tokenizer.from_file("tokenizer.json")
    return [one for text in TEXTS for one in [*tokenizer.encode(text).ids, *(end or [])]]


def entries() -> list[Path]:
    return sorted(Path("cache/hpctrain/tokens").iterdir())


def test_ids_are_the_library_s_and_the_second_time_nothing_is_encoded(encodings: list[int]) -> None:
    first = opened()
    assert ids_of(first) == expected()[: 4 * len(first)] and len(first) == (len(expected()) - 1) // 4
    assert encodings == [3]
    again = opened()
    assert encodings == [3] and ids_of(again) == ids_of(first) and again.fingerprint() == first.fingerprint()
    assert again.vocab_size == first.vocab_size == Tokenizer.from_file("tokenizer.json").get_vocab_size() > 256
    [entry] = entries()
    assert entry.stat().st_mode & 0o777 == 0o600 and entry.parent.stat().st_mode & 0o777 == 0o700
    # 2 bytes for each id, then a count for each file, then a note of some hundred bytes
    assert 2 * len(expected()) + 24 < entry.stat().st_size < 2 * len(expected()) + 400


def test_another_text_or_tokenizer_is_another_entry(encodings: list[int]) -> None:
    opened()
    Path("0.txt").write_text(TEXTS[0][:-1] + "!")
    opened()
    text = Path("tokenizer.json").read_text()
    Path("tokenizer.json").write_text(text.replace('"<|end|>"', '"<|fin|>"'))
    opened()
    opened(end_of_text="<|fin|>")
    opened(documents="line")
    opened(documents="file")  # the ids of "joined" and the counts that are kept with them
    assert len(entries()) == 5 and len(encodings) == 5


def test_documents_are_the_files_or_lines() -> None:
    tokenizer = Tokenizer.from_file("tokenizer.json")
    for documents, texts in (("file", TEXTS), ("line", "".join(TEXTS).splitlines(keepends=True))):
        rows = [tokenizer.encode(text).ids for text in texts if text.strip()]
        samples = opened(documents=documents, seq=2000)
        assert [samples[i]["input_ids"].tolist() for i in range(len(samples))] == [row[:-1] for row in rows]
        assert samples.lengths().tolist() == [len(row) - 1 for row in rows]  # type: ignore[union-attr]
        copy = pickle.loads(pickle.dumps(samples))  # as worker processes get it
        assert len(pickle.dumps(samples)) < 4000 and copy.fingerprint() == samples.fingerprint()


def test_a_token_ends_each_text() -> None:
    end = Tokenizer.from_file("tokenizer.json").token_to_id("<|end|>")
    samples = opened(end_of_text="<|end|>")
    assert ids_of(samples) == expected([end])[: 4 * len(samples)] != expected()[: 4 * len(samples)]
    lines = opened(documents="line", end_of_text="<|end|>", seq=2000)
    assert all(lines[i]["labels"][-1] == end for i in range(len(lines))) and len(lines) == 71
    with pytest.raises(UsageError, match=r"end_of_text: tokenizer.json has no token 'none'.*such as '<\|end\|>'"):
        opened(end_of_text="none")


def test_a_tokenizer_that_cuts_and_fills_texts_does_so_no_more() -> None:
    tokenizer = Tokenizer.from_file("tokenizer.json")
    whole = expected()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    tokenizer.save("tokenizer.json")
    samples = opened()
    assert ids_of(samples) == whole[: 4 * len(samples)]


def test_a_tokenizer_s_own_special_tokens_stay() -> None:
    tokenizer = Tokenizer.from_file("tokenizer.json")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 0)])
    tokenizer.save("tokenizer.json")
    assert expected().count(0) == 3
    assert ids_of(opened(seq=1))[-5:] == expected()[-6:-1]


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "link", "folder"])
def test_a_damaged_entry_is_made_again(damage: str, encodings: list[int]) -> None:
    whole = ids_of(opened())
    [entry] = entries()
    content = bytearray(entry.read_bytes())
    if damage == "flipped":
        content[len(content) // 3] ^= 1
        entry.write_bytes(content)
    elif damage == "cut":
        entry.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        entry.write_bytes(b"")
    elif damage == "link":
        entry.rename("elsewhere")
        entry.symlink_to(Path("elsewhere").absolute())
    else:
        entry.unlink()
        entry.mkdir()
        with pytest.raises(
            EnvironmentUnfitError, match=r"the cache cache/hpctrain/tokens can't be written to.*directory"
        ):
            opened_relative()
        return
    assert ids_of(opened()) == whole and len(encodings) == 2
    assert ids_of(opened()) == whole and len(encodings) == 2
    assert [path.name for path in entries()] == [entry.name] and not entry.is_symlink()


def opened_relative() -> Samples:
    cls = REGISTRY.find("dataset", "text").cls
    plugin = cls(cls.Options(files=["?.txt"], tokenizer="tokenizer.json"))
    return plugin.open("train", DatasetContext(4, None, 1, Path("cache/hpctrain")))  # type: ignore[attr-defined, no-any-return]


def test_a_cache_that_cannot_be_written_is_told() -> None:
    Path("file").touch()
    cls = REGISTRY.find("dataset", "text").cls
    plugin = cls(cls.Options(files=["?.txt"], tokenizer="tokenizer.json"))
    for may_estimate in (False, True):  # a rank, and `hpctrain check`
        context = DatasetContext(4, None, 1, Path("file"), may_estimate=may_estimate)
        with pytest.raises(
            EnvironmentUnfitError, match=r"the cache file/tokens can't be written to .*\[dataset\] cache"
        ):
            plugin.open("train", context)  # type: ignore[attr-defined]
    absent = DatasetContext(4, None, 1, Path("absent/cache"), may_estimate=True)
    assert plugin.open("train", absent) is not None and not Path("absent").exists()  # type: ignore[attr-defined]


MAKES = """
import sys, time
from pathlib import Path
from hpctrain.toolkit.cache import kept

def make(write):
    write(memoryview(b"half"))
    print("half", flush=True)
    if sys.argv[1] == "hangs":
        time.sleep(60)
    else:
        sys.stdin.read(1)  # until the other process has written its half, too
    write(memoryview(b"whole" + sys.argv[1].encode()))
    return sys.argv[1]

path, note = kept(Path("shared"), "entry", make)
print(path.read_bytes()[:10].decode(), note, flush=True)
"""


def maker(word: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKES, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.nightly
def test_what_a_killed_process_left_is_not_used_and_removed_later() -> None:
    with maker("hangs") as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "half\n"
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
    [left] = Path("shared").iterdir()
    path, note = kept(Path("shared"), "entry", lambda write: write(memoryview(b"new")) or "note")
    assert path.read_bytes().startswith(b"new") and note == "note" and left.exists()  # it may still be written
    os.utime(left, (time.time() - 2 * 86400,) * 2)
    hidden = Path("shared/.mine.tmp")
    hidden.touch()
    os.utime(hidden, (0, 0))
    kept(Path("shared"), "other", lambda write: None)
    assert not left.exists() and hidden.exists()


def test_a_file_under_another_name_is_made_again() -> None:
    """Who may write in the directory can rename files of others, and the token ids of other texts would be trained."""
    path, _ = kept(Path("shared"), "one", lambda write: write(memoryview(b"first")))
    path.rename(path.with_name("other"))
    path, _ = kept(Path("shared"), "other", lambda write: write(memoryview(b"second")))
    assert path.read_bytes().startswith(b"second")


@pytest.mark.nightly
def test_two_processes_make_the_same_entry_at_the_same_time() -> None:
    """The second does not replace what the first may have mapped; both have a complete file."""
    with maker("1") as first, maker("2") as second:
        for one in (first, second):
            assert one.stdout is not None and one.stdout.readline() == "half\n"
        said = [one.communicate("x", timeout=60)[0] for one in (first, second)]
    assert said == ["halfwhole1 1\n"] * 2
    assert [path.name for path in Path("shared").iterdir()] == ["entry"]


def test_files_that_change_while_they_are_read_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain_plugins.dataset import encoding

    real = encoding.kept

    def slow(*arguments: Any) -> Any:  # between the hash and the encoding
        Path("1.txt").write_text("changed")
        return real(*arguments)

    monkeypatch.setattr(encoding, "kept", slow)
    with pytest.raises(UsageError, match="they changed while they were read"):
        opened()
    assert not entries()


@pytest.mark.thorough
def test_a_check_estimates_a_long_text_and_counts_a_short_one(encodings: list[int]) -> None:
    exact = opened(may_estimate=True)
    assert not exact.is_estimate and ids_of(exact) == ids_of(opened())
    for number in range(4):
        Path(f"{number}.txt").write_text(TEXTS[number % 2] * 600)
    encodings.clear()
    for documents in ("joined", "line"):
        seq = 32 if documents == "joined" else 2000
        about, real = (opened(documents=documents, seq=seq, may_estimate=one) for one in (True, False))
        assert about.is_estimate and not real.is_estimate
        assert len(about) == pytest.approx(len(real), rel=0.1)
        assert np.sum(about.lengths()) == pytest.approx(np.sum(real.lengths()), rel=0.1)
        about.fingerprint(), about[len(about) - 1]
    assert len(entries()) == 3


@pytest.mark.thorough
def test_an_estimate_refuses_nothing() -> None:
    """A split that seems to be a token too short is counted."""
    for number in range(2):
        Path(f"{number}.txt").write_text(TEXTS[number] * 900)
    exact = len(opened(seq=1)) + 1
    assert len(opened(may_estimate=True, seq=exact - 1)) == 1
    with pytest.raises(UsageError, match=f"has {exact} tokens, expected at least {exact + 1}"):
        opened(may_estimate=True, seq=exact)
