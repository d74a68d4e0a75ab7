"""`text`: the user's files, as bytes or through a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from hpctrain.api import Dataset, DatasetContext, Field, Options, Plan, Problem, Samples, Split, UsageError, hookimpl
from hpctrain.toolkit.cache import refuse_unwritable
from hpctrain_plugins.dataset.corpus import Corpus
from hpctrain_plugins.dataset.documents import open_documents
from hpctrain_plugins.dataset.encoding import CACHE, Encoded, Encoder, encoded, estimated, in_memory
from hpctrain_plugins.dataset.stdlib_text import BYTES, ByteText
from hpctrain_plugins.dataset.windows import open_split


class TextOptions(Options):
    files: list[str] = Field(min_length=1, description="files or glob patterns (** too), read in sorted order")
    tokenizer: Path | None = Field(default=None, description="a tokenizers file (tokenizer.json); without it, bytes")
    end_of_text: str | None = Field(
        default=None,
        description='a token of the tokenizer, such as "<|endoftext|>", that is put behind each file (or line, with '
        'documents = "line"); without it, files follow each other directly',
    )
    documents: Literal["joined", "file", "line"] = Field(
        default="joined",
        description="joined: all files are one text, cut into samples of seq_length; file, line: each file or line is a "
        "sample of its own length, for [batch] tokens (cut if longer than seq_length; blank lines are left out)",
    )
    validation_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="share of the tokens (or documents) kept for validation"
    )


class Text(ByteText):
    """Text files, as bytes or through a tokenizer, as one text or as documents."""

    name = "text"
    Options = TextOptions
    options: TextOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if self.options.end_of_text is None or self.options.tokenizer is not None:
            return []
        return [
            Problem("it is a token of a tokenizer, and there is none; give [dataset] tokenizer", "dataset.end_of_text")
        ]

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        if self.options.tokenizer is None:
            return self._samples(self._bytes, split, context)
        if not context.may_estimate:
            return self._samples(encoded(self._corpus, lambda: self._encoder, context), split, context)
        refuse_unwritable(context.cache / CACHE)
        try:
            return self._samples(self._estimate, split, context)
        except UsageError:
            if context.seq_length is None or not self._estimate.is_estimate:
                raise
            # too little text, as it seems: only the text itself can say so
            return self._samples(in_memory(self._corpus, self._encoder), split, context)

    @property
    def vocabulary(self) -> int:
        return super().vocabulary if self.options.tokenizer is None else self._encoder.vocab_size

    def encode(self, text: str) -> list[int]:
        return super().encode(text) if self.options.tokenizer is None else self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids) if self.options.tokenizer is None else self._encoder.decode(ids)

    def _samples(self, text: Encoded, split: Split, context: DatasetContext) -> Samples | None:
        fraction = self.options.validation_fraction
        samples: Samples | None
        if self.options.documents == "joined":
            samples = open_split(text.tokens, split, fraction, context, text.vocab_size, "text")
        else:
            samples = open_documents(text.tokens, text.sizes, split, fraction, context, text.vocab_size, "text")
        if samples is not None:
            samples.is_estimate = text.is_estimate
        return samples

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus(self.options.files, self.options.documents == "line")

    @cached_property
    def _encoder(self) -> Encoder:
        assert self.options.tokenizer is not None
        return Encoder(self.options.tokenizer, self.options.end_of_text)

    @cached_property
    def _estimate(self) -> Encoded:
        return estimated(self._corpus, self._encoder)

    @cached_property
    def _bytes(self) -> Encoded:
        texts = [text for content in self._corpus.contents() for text in self._corpus.texts(content)]
        joint = b"\n" if self.options.documents == "joined" else b""
        return Encoded(np.frombuffer(joint.join(texts), dtype=np.uint8), np.array([*map(len, texts)], np.int64), BYTES)


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [Text]
