"""The presets of models: their sizes, counted on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.api import HpctrainError
from hpctrain.checking.check import check
from hpctrain.job.reading import read_job
from hpctrain.model.build import build_on_meta

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}
"""Parameters, by the tables of the weights' files."""
ENDS = {
    "llama-2": (1, 2),
    "llama-3": (128000, 128001),
    "qwen2.5": (151643, 151643),
    "qwen3": (151643, 151645),
}
"""The tokens that begin and end a text, by the config.json of the same weights."""
REST = """
[job]
name = "sized"
steps = 1
[dataset]
name = "synthetic"
seq_length = 16
[optimizer]
name = "adamw"
lr = 1e-4
[batch]
global_size = 1
micro_size = 1
"""


@pytest.mark.nightly
def test_each_preset_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for name, parameters in PUBLISHED.items():
        path.write_text(f'extends = "preset:{name}"\n{REST}')
        module: Any = build_on_meta(check(read_job(path), None).parts.model)
        assert sum(one.numel() for one in module.parameters()) == parameters, name
        for family, ends in ENDS.items():
            if name.startswith(family):
                assert (module.config.bos_token_id, module.config.eos_token_id) == ends, name


def test_an_unknown_preset_is_told_with_all_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('extends = "preset:llama-3-9b"\n')
    with pytest.raises(HpctrainError) as raised:
        read_job(path)
    found = str(raised.value)
    assert found.startswith(
        f"{path}:1: extends: there is no preset 'llama-3-9b', here or in an installed package; expected one of "
    )
    told = found.rpartition("one of ")[2].split(", ")
    assert told == sorted(told) and set(told) >= PUBLISHED.keys()


def test_a_preset_that_two_packages_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job must not change with what else is installed."""
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "gpt2-124m.toml").write_text("[model]\nlayers = 1\n")
    entry_points = tmp_path / "acme-1.dist-info" / "entry_points.txt"
    entry_points.parent.mkdir()
    entry_points.write_text("[hpctrain.presets]\nacme = acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "job.toml"
    path.write_text('extends = "preset:gpt2-124m"\n')
    with pytest.raises(HpctrainError) as raised:
        read_job(path)
    found = str(raised.value)
    assert found.startswith(f"{path}:1: extends: packages have several presets 'gpt2-124m': ")
    assert str(tmp_path / "acme" / "gpt2-124m.toml") in found and found.count("gpt2-124m.toml") == 2
