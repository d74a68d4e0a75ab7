"""The weights of a directory that `save_pretrained` made, read by the rows that a rank holds.

transformers itself says which stored tensors make up a parameter: names change between its releases, and some parameters, such as
those of experts, are put together from several stored tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from hpctrain.api import CheckpointError, UsageError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ROWS = 4096
"""Rows that are compared at a time."""


@dataclass(frozen=True)
class Files:
    """The safetensors files of a directory: the file of each tensor."""

    directory: Path
    places: Mapping[str, Path]

    @staticmethod
    def of(directory: Path, single: str = _SINGLE) -> Files:
        """The files in `directory`: an index and those that it names, or the one named `single`.

        Raises UsageError for a directory without them, CheckpointError for a damaged one.
        """
        if single == _SINGLE and (directory / _INDEX).is_file():
            listed = _weight_map(directory / _INDEX)
            return Files(directory, {name: directory / Path(file).name for name, file in listed.items()})
        if (directory / single).is_file():
            with _opened(directory / single) as file:
                return Files(directory, dict.fromkeys(file.keys(), directory / single))
        others = sorted(path.name for path in directory.glob("*.bin"))
        found = f"found {others[0]}" if others else "found neither"
        raise UsageError(
            f"[model] path: expected {_SINGLE} or {_INDEX} in {directory}, {found}; write one with "
            "save_pretrained() of a model that from_pretrained() has loaded"
        )

    def fill(self, name: str, tensor: Tensor, rows: tuple[int, int], shape: tuple[int, ...]) -> None:
        """Copy the rows `rows` of a stored tensor. Raises CheckpointError unless it has `shape`."""
        with _opened(
            self.places[name]
        ) as file:  # closed at once: pages of a mapped file count as this process's memory
            stored = file.get_slice(name)
            refuse_shape(f"{name} in {self.directory}", stored.get_shape(), shape)
            tensor.copy_(stored[rows[0] : rows[1]] if shape else file.get_tensor(name))

    def shapes(self) -> dict[str, list[int]]:
        """The shape of each stored tensor. Raises CheckpointError for a file that is damaged, or lacks one."""
        found = {}
        for path in set(self.places.values()):
            with _opened(path) as file:
                names = (name for name, place in self.places.items() if place == path)
                found.update({name: _found(file, name, path).get_shape() for name in names})
        return found

    def whole(self, name: str) -> Tensor:
        """All of a stored tensor."""
        with _opened(self.places[name]) as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    def identity(self) -> str:
        """A hash of the files' names and sizes and of what begins and ends them: other weights have another one.

        To hash all of 140 GB at each start would take longer than to read them.
        """
        found = sha256()
        for path in sorted(set(self.places.values())):
            size = path.stat().st_size
            with path.open("rb") as raw:
                begin = raw.read(2**16)
                raw.seek(max(0, size - 2**16))
                found.update(f"{path.name} {size} ".encode() + begin + raw.read())
        return found.hexdigest()[:16]


def _found(file: Any, name: str, path: Path) -> Any:
    """The slice of a tensor of an open file. Raises CheckpointError if the file lacks it."""
    try:
        return file.get_slice(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path} lacks {name}, which the index beside it names: {error}") from error


def refuse_shape(what: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raises CheckpointError for a tensor of another shape than the model's."""
    if list(found) != list(expected):
        raise CheckpointError(
            f"the weights: {what} has the shape {list(found)}, expected {list(expected)}: the weights are of another model than "
            "the configuration"
        )


def _opened(path: Path) -> Any:
    """A safetensors file. Raises CheckpointError unless it is whole."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} isn't a whole safetensors file: {error}") from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise CheckpointError(f"{path} has no weight_map from tensors to files") from None


@dataclass
class Source:
    """The stored tensors of a parameter: one as it is, or several that a converter of transformers puts together."""

    stored: list[tuple[str, str]] = field(default_factory=list)
    """The names, each with the pattern of the converter that it matches."""
    converter: WeightConverter | None = None


class Weights:
    """The weights of a model by its parameters' names. One conversion is kept: it may make several parameters."""

    def __init__(
        self,
        files: Files,
        model: PreTrainedModel,
        conversions: Sequence[Any],
        wanted: dict[str, Tensor],
        tied: Iterable[Sequence[str]],
    ) -> None:
        """conversions: of stored tensors, for the model's class. wanted: the state of the model, before adapters. tied: the names
        of each tied parameter, its main name first."""
        self.files, self._model = files, model
        self.sources, self.unused = _sources(files.places, model, conversions, wanted)
        for first, *others in tied:
            for name in others:
                found = self.sources.pop(name, None)
                if found is not None and first in self.sources:
                    self._refuse_untied(first, name, found, wanted[first])
                elif found is not None:
                    self.sources[first] = found
        self._latest: tuple[Source, dict[str, Tensor]] | None = None

    def _refuse_untied(self, first: str, other: str, found: Source, like: Tensor) -> None:
        """Raises CheckpointError if two parameters that the model ties are stored with different values."""
        for begin in range(0, len(like), _ROWS):
            rows = begin, min(len(like), begin + _ROWS)
            one, two = (torch.empty((rows[1] - begin, *like.shape[1:]), dtype=torch.float32) for _ in range(2))
            self._fill(first, self.sources[first], one, rows, tuple(like.shape))
            self._fill(other, found, two, rows, tuple(like.shape))
            if not torch.equal(one, two):
                raise CheckpointError(
                    f"{self.files.directory} stores {first} and {other} with different values, and the configuration ties them; "
                    "set [model] config = { tie_word_embeddings = false }"
                )

    def fill(self, name: str, tensor: Tensor, rows: tuple[int, int], shape: tuple[int, ...]) -> None:
        """Fill `tensor`, the rows `rows` of the parameter `name` of `shape`. Raises CheckpointError for another shape."""
        self._fill(name, self.sources[name], tensor, rows, shape)

    def _fill(self, name: str, source: Source, tensor: Tensor, rows: tuple[int, int], shape: tuple[int, ...]) -> None:
        if source.converter is None:
            ((stored, _),) = source.stored
            self.files.fill(stored, tensor, rows, shape)
            return
        whole = self._converted(name, source)
        refuse_shape(f"{name} of {self.files.directory}", whole.shape, shape)
        tensor.copy_(whole[rows[0] : rows[1]] if shape else whole)

    def _converted(self, name: str, source: Source) -> Tensor:
        assert source.converter is not None
        if self._latest is None or self._latest[0] is not source:
            converter = deepcopy(source.converter)
            for stored, pattern in source.stored:
                # a function in place of a future is read when the converter wants it
                converter.add_tensor(name, stored, pattern, cast(Any, partial(self.files.whole, stored)))
            made = converter.convert(name, model=self._model, config=self._model.config)
            self._latest = source, {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        return self._latest[1][name]


def _sources(
    stored: Iterable[str], model: PreTrainedModel, conversions: Sequence[Any], wanted: dict[str, Tensor]
) -> tuple[dict[str, Source], dict[str, str]]:
    """The sources by the model's names, and the stored names that it has no use for, with those that it would give them."""
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, Source] = {}
    unused = {}
    for name in sorted(stored, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if own not in wanted and name in wanted:
            own, pattern = name, None
        if own not in wanted:
            unused[name] = own
        elif pattern is None:
            found[own] = Source([(name, name)])
        else:
            source = found.setdefault(own, Source(converter=of_pattern[pattern]))
            source.stored.append((name, pattern))
    for source in [one for one in found.values() if one.converter is not None]:
        _share(source, found, wanted)
    return found, unused


def _share(source: Source, found: dict[str, Source], wanted: Mapping[str, Tensor]) -> None:
    """Note a source that makes several parameters under all of their names: transformers matches the first one."""
    assert source.converter is not None
    first, *others = source.converter.target_patterns
    own = next(name for name, one in found.items() if one is source)
    for other in others:
        name = own.replace(first, other)
        if name in wanted:
            found[name] = source
