"""The plugin `huggingface` of data sets. `datasets` is imported where a job names it: every command loads this module."""

from __future__ import annotations

from hpctrain.api import Dataset, DatasetContext, Samples, Split, Stream, UsageError, hookimpl
from hpctrain_huggingface.dataset.options import HubDatasetOptions


class HubDataset(Dataset):
    """A data set of Hugging Face, from disk: texts, conversations, answers to prompts, or columns as they are."""

    name = "huggingface"
    Options = HubDatasetOptions
    options: HubDatasetOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | Stream | None:
        from datasets import IterableDataset

        from hpctrain_huggingface.dataset.encoding import Encoder
        from hpctrain_huggingface.dataset.lengths import LOOKS, counted_lengths, estimated_lengths
        from hpctrain_huggingface.dataset.opening import opened
        from hpctrain_huggingface.dataset.samples import Rows, RowStream

        options = self.options
        named = {"train": options.train, "validation": options.validation, "test": options.test}[split]
        rows = opened(options, named or split, needed=named is not None)
        if rows is None:
            return None
        encoder = Encoder(options, context.seq_length)
        columns = rows.column_names
        absent = [name for name in encoder.needed() if columns is not None and name not in columns]
        if absent:
            raise UsageError(
                f"[dataset]: {options.path} has no column {absent[0]!r}; it has {', '.join(columns or ())}"
            )
        identity = repr(sorted(options.model_dump(exclude={"train", "validation", "test", "streaming"}).items()))
        if isinstance(rows, IterableDataset):
            return RowStream(rows, encoder, identity)
        if not context.by_tokens:
            return Rows(rows, encoder, identity)
        if context.may_estimate and len(rows) > 2 * LOOKS:
            made = Rows(rows, encoder, identity, estimated_lengths(rows, encoder))
            made.is_estimate = True
            return made
        return Rows(rows, encoder, identity, counted_lengths(rows, encoder, f"{identity} {split}", options, context))


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [HubDataset]
