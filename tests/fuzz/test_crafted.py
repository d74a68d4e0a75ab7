"""Crafted checkpoints and run directories (cases.py): each command must end with a sentence and the right exit code, in little
time and memory, and must not read, write or run anything outside of the directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import CASES, Case
from confined import Confined, confined
from crafting import Place, make_bases


@pytest.fixture(scope="module")
def server() -> Iterator[Confined]:
    with confined() as one:
        yield one


@pytest.fixture(scope="module")
def bases(server: Confined, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("bases"), server)


@pytest.mark.cases(
    thorough=[
        "hdf5, run checkpoints abandoned: a megabyte of anything",
        "hdf5, metrics.jsonl: many lines",
        "hdf5, looked at, rows: many lines",
        "hdf5, manifest.json: 20000 parts cut along 20 dims",
        "hdf5, manifest.json: 100 layouts of 500 parts with holes",
        "hdf5, manifest.json: 300 MB of text",
        "hdf5, manifest.json: 50000 shards",
        "hdf5, shard-00000.json: a million checksums",
        "weights, w.safetensors: 5000 empty tensors",
    ]
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.tier == "default" else [getattr(pytest.mark, case.tier)]) for case in CASES],
    ids=lambda case: f"{case.base}, {case.name}".replace("/", " "),
)
def test_crafted(case: Case, server: Confined, bases: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "x"
    shutil.copytree(bases[case.base], root)
    place = Place(root)
    place.sing()
    case.change(place)
    found = []
    for ended in server.run(root, *case.commands):
        word = ended.words[ended.words[0] == "checkpoint"]
        found += [f"{word}: {fault}" for fault in ended.faults()]
        if ended.code != case.codes[word]:
            found.append(f"{word}: exit {ended.code}, expected {case.codes[word]}: {ended.err[-300:]}")
    found += place.silence()
    shutil.rmtree(root)
    assert not found


def test_there_are_enough() -> None:
    assert len(CASES) >= 200
