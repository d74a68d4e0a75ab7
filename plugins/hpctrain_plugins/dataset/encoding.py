"""Texts as ids of a tokenizers file: encoded once, kept in the cache, and mapped by every rank of the node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpctrain.api import DatasetContext, EnvironmentUnfitError, UsageError
from hpctrain.toolkit.cache import Write, kept
from hpctrain_plugins.dataset.corpus import Corpus
from hpctrain_plugins.dataset.windows import MappedRow

LOG = logging.getLogger("hpctrain")

CACHE = "tokens"
"""The directory of the kept files within the cache."""
# the version of the kept files; a change of what they hold needs another number
_FORMAT = 1
# text to encode at once. The library needs about 20 bytes of memory for each byte of text.
_BATCH_BYTES = 2**23
# the parts of the text from which an estimate is made
_EXCERPTS, _EXCERPT_BYTES = 16, 2**15

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Encoded:
    """All ids in a row, the number of ids of each text, and the size of the vocabulary. tokens: sliceable integers."""

    tokens: Any
    sizes: _Ints
    vocab_size: int
    is_estimate: bool = False


class Encoder:
    """A tokenizers file and the token that ends each text."""

    def __init__(self, path: Path, end_of_text: str | None) -> None:
        """Raises UsageError for a file that is none, or a token that it lacks."""
        try:
            import tokenizers  # optional: only jobs with a tokenizer file need it
        except ImportError:
            raise EnvironmentUnfitError(
                "[dataset] tokenizer needs the package tokenizers, which is not installed: pip install 'hpctrain[tokenizers]'"
            ) from None
        if not os.path.isfile(path):  # unlike Path.is_file, it accepts names that are too long
            raise UsageError(
                f"[dataset] tokenizer: there is no file {path}; expected the path of a tokenizer.json (names of the Hugging "
                "Face hub are not taken)"
            )
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"[dataset] tokenizer: {path} is not a tokenizers file: {error}") from None
        self._tokenizer.no_truncation()  # a file may say how a program that classifies texts cuts and fills them
        self._tokenizer.no_padding()
        self._end = [] if end_of_text is None else [self._id_of(end_of_text, path)]
        self.vocab_size = int(self._tokenizer.get_vocab_size())
        known = [*self._tokenizer.get_vocab().values(), *self._tokenizer.encode("").ids]
        self.dtype = np.min_scalar_type(max(known, default=0))
        self.identity = repr((_FORMAT, tokenizers.__version__, self._end)).encode() + path.read_bytes()

    def ids(self, texts: list[bytes]) -> list[_Ints]:
        """The ids of each text, (tokens,), on all cores that this thread may use."""
        encoded = self._tokenizer.encode_batch_fast([text.decode("utf-8", "replace") for text in texts])
        return [np.array([*one.ids, *self._end], np.int64) for one in encoded]

    def encode(self, text: str) -> list[int]:
        """The ids of a text that goes on: without the tokens that begin and end one."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _id_of(self, token: str, path: Path) -> int:
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            added = [repr(one.content) for one in self._tokenizer.get_added_tokens_decoder().values()]
            raise UsageError(
                f"[dataset] end_of_text: {path} has no token {token!r}; expected one of its tokens"
                + (f", such as {', '.join(added[:5])}" if added else "")
            )
        return found


def encoded(corpus: Corpus, encoder: Callable[[], Encoder], context: DatasetContext) -> Encoded:
    """The whole corpus. Collective as `context.once_per_node` is; only one rank of the node needs an encoder, or reads text."""
    path, note = context.once_per_node("text", lambda: _keep(corpus, encoder(), context.cache / CACHE))
    try:
        tokens = MappedRow(path, note["dtype"], 0, note["tokens"])
        sizes = np.fromfile(path, "<i8", note["texts"], offset=note["begin"])
    except OSError as error:
        raise EnvironmentUnfitError(f"[dataset] cache: {path} cannot be read: {error.strerror}") from None
    return Encoded(tokens, sizes, note["vocab_size"])


def estimated(corpus: Corpus, encoder: Encoder) -> Encoded:
    """The corpus with ids that are all 0, as many as excerpts of it suggest; a short corpus itself, in memory."""
    if sum(corpus.sizes) <= 2 * _EXCERPTS * _EXCERPT_BYTES:
        return in_memory(corpus, encoder)
    excerpts = [text for part in corpus.excerpts(_EXCERPTS, _EXCERPT_BYTES) for text in corpus.texts(part)]
    per_byte = sum(map(len, encoder.ids(excerpts))) / max(1, sum(map(len, excerpts)))
    lengths = (
        [len(text) for content in corpus.contents() for text in corpus.texts(content)]
        if corpus.by_line
        else corpus.sizes
    )
    sizes = np.maximum(np.rint(np.array(lengths, np.int64) * per_byte), 1).astype(np.int64)
    return Encoded(np.broadcast_to(np.uint8(0), (int(sizes.sum()),)), sizes, encoder.vocab_size, is_estimate=True)


def in_memory(corpus: Corpus, encoder: Encoder) -> Encoded:
    """The whole corpus, without the cache."""
    rows = [row for texts in _batches(corpus, xxhash.xxh3_128()) for row in encoder.ids(texts)]
    ids = _joined(rows)
    return Encoded(ids, _lengths(rows), max(encoder.vocab_size, int(ids.max(initial=-1)) + 1))


def _keep(corpus: Corpus, encoder: Encoder, directory: Path) -> tuple[str, dict[str, Any]]:
    """The path of the kept file, and its note."""
    digest = _digest(corpus, encoder)
    for content in corpus.contents():
        _add(digest, content)
    name = digest.hexdigest()

    def make(write: Write) -> dict[str, Any]:
        LOG.info("encoding %.1f MB of text, to be kept in %s", sum(corpus.sizes) / 1e6, directory / name)
        return _encode(corpus, encoder, name, write)

    path, note = kept(directory, name, make)
    return str(path), note


def _encode(corpus: Corpus, encoder: Encoder, name: str, write: Write) -> dict[str, Any]:
    """Write the ids, filled up to whole 8 bytes, then the number of ids of each text as int64."""
    digest, largest, tokens, sizes = _digest(corpus, encoder), -1, 0, [_lengths([])]
    for texts in _batches(corpus, digest):
        rows = encoder.ids(texts)
        ids = _joined(rows)
        largest, tokens = max(largest, int(ids.max(initial=-1))), tokens + len(ids)
        if largest > np.iinfo(encoder.dtype).max:
            raise UsageError(f"[dataset] tokenizer: it gives the id {largest}, which its vocabulary lacks")
        write(memoryview(ids.astype(encoder.dtype).tobytes()))
        sizes.append(_lengths(rows))
    if digest.hexdigest() != name:
        raise UsageError("[dataset] files: they changed while they were read; start again when they are complete")
    begin = -(-tokens * encoder.dtype.itemsize // 8) * 8
    write(memoryview(bytes(begin - tokens * encoder.dtype.itemsize)))
    counts = _joined(sizes)
    write(memoryview(counts.astype("<i8").tobytes()))
    vocab_size = max(encoder.vocab_size, largest + 1)
    return {
        "dtype": encoder.dtype.str,
        "tokens": tokens,
        "begin": begin,
        "texts": len(counts),
        "vocab_size": vocab_size,
    }


def _digest(corpus: Corpus, encoder: Encoder) -> xxhash.xxh3_128:
    """The digest of everything that the ids depend on besides the text."""
    return xxhash.xxh3_128(encoder.identity + (b" line" if corpus.by_line else b" file"))


def _add(digest: xxhash.xxh3_128, content: bytes) -> None:
    digest.update(len(content).to_bytes(8, "little"))
    digest.update(content)


def _batches(corpus: Corpus, digest: xxhash.xxh3_128) -> Iterator[list[bytes]]:
    """All texts, some megabytes at a time; `digest` gets the content of each file."""
    batch, size = [], 0
    for content in corpus.contents():
        _add(digest, content)
        for text in corpus.texts(content):
            batch.append(text)
            size += len(text)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    yield batch


def _joined(rows: list[_Ints]) -> _Ints:
    return np.concatenate([np.zeros(0, np.int64), *rows])


def _lengths(rows: list[_Ints]) -> _Ints:
    return np.array([*map(len, rows)], np.int64)
