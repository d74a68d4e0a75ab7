"""Opens a data set of Hugging Face. Nothing is downloaded: compute nodes have no network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset

from hpctrain.api import UsageError
from hpctrain_huggingface.dataset.options import HubDatasetOptions

_KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}


def opened(options: HubDatasetOptions, split: str, needed: bool) -> Dataset | IterableDataset | None:
    """The rows of `split`; None if the data set lacks it and it is not `needed`. Raises UsageError for a path that is none."""
    path = options.path
    with _offline():
        if path.is_file() and not needed and split != options.train:
            return None  # a file alone is what is trained on
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _from_disk(options, split, needed)
        try:
            found = datasets.load_dataset(
                **_words(options), name=options.subset, split=split, streaming=options.streaming
            )
        except (ValueError, KeyError) as error:
            if not needed and "split" in str(error).lower():
                return None
            raise UsageError(f"[dataset] path: {path}: {_first_line(error)}") from error
        except datasets.exceptions.DatasetGenerationError as error:
            raise UsageError(
                f"[dataset] path: {path} can't be read: {_first_line(error.__cause__ or error)}"
            ) from error
        except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
            raise UsageError(
                f"[dataset] path: there is no data set {path}, nor one of that name in the cache here: {_first_line(error)}; "
                "nothing is downloaded in a job: load it once where there is a network"
            ) from error
    assert isinstance(found, (Dataset, IterableDataset))
    return found


def _words(options: HubDatasetOptions) -> dict[str, Any]:
    """load_dataset's arguments: a file's kind, or a directory or a repository. The rows of a file are the split to train on."""
    path = options.path
    if path.is_file():
        if path.suffix not in _KINDS:
            raise UsageError(f"[dataset] path: {path} is no {', '.join(_KINDS)}; expected one, or a directory")
        return {"path": _KINDS[path.suffix], "data_files": {options.train.partition("[")[0]: str(path)}}
    return {"path": str(path)}


def _from_disk(options: HubDatasetOptions, split: str, needed: bool) -> Dataset | IterableDataset | None:
    found = datasets.load_from_disk(str(options.path))
    name, bracket, _ = split.partition("+")[0].partition("[")
    if isinstance(found, DatasetDict):
        if name not in found:
            if not needed:
                return None
            raise UsageError(f"[dataset] {options.path} has no split {name!r}; it has {', '.join(map(str, found))}")
        found = found[name]
    elif name != options.train.partition("[")[0]:
        return None  # one split alone is the one to train on
    if bracket:
        instruction = datasets.ReadInstruction.from_spec(split)
        spans = instruction.to_absolute({name: len(found)})
        rows = [row for span in spans for row in range(span.from_ or 0, len(found) if span.to is None else span.to)]
        found = found.select(rows)
    return found.to_iterable_dataset(num_shards=max(1, min(64, len(found)))) if options.streaming else found


@contextmanager
def _offline() -> Iterator[None]:
    """datasets without a network, and without bars on the screen."""
    before = datasets.config.HF_HUB_OFFLINE
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        if bars:
            datasets.enable_progress_bars()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
