"""The examples of docs/plugins/: each is a plugin, those that one rank can run train together, and the first one's tests pass."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli
from plugin_pages import HOME, ROOT

import hpctrain
from hpctrain.registry.registry import build_registry
from hpctrain.registry.slots import SLOTS

TEMPLATES = ROOT / "plugins" / "hpctrain_tools" / "templates" / "plugins"


def blocks(page: str, language: str = "python") -> list[str]:
    """The code of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (HOME / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def example(slot: str) -> str:
    """The example of a slot's page, where it is on the page, else the file that the page names."""
    found = [code for code in blocks(slot) if f"def {SLOTS[slot].hook}()" in code]
    return found[0] if found else (TEMPLATES / f"{slot}.txt").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(here: Path, slot: str) -> str:
    """Write the example of a slot; the name of its module."""
    (here / f"page_{slot}.py").write_text(example(slot))
    return f"page_{slot}"


@pytest.mark.parametrize("slot", SLOTS)
def test_the_example_of_a_slot_is_a_plugin_without_a_remark(here: Path, slot: str) -> None:
    module = write(here, slot)
    registry = build_registry([module])
    mine = [(key, entry) for key, entry in registry.entries.items() if entry.source.module == module]
    assert [of for (of, _), _ in mine] == [slot]
    said = [registry.remarks[key] for key, _ in mine if key in registry.remarks]
    assert not [text for text in said if not text.startswith(f"it provides the {slot} ")], said


@pytest.mark.thorough
def test_the_examples_train_together_and_resume(here: Path) -> None:
    """All that need neither several ranks nor a scheduler, against a run that isn't interrupted."""
    chosen: dict[str, dict[str, Any]] = {
        "model": {"name": "bag", "layers": 4},
        "dataset": {"name": "sums", "seq_length": 8},
        "optimizer": {"name": "sign-descent", "lr": 0.01},
        "schedule": {"name": "triangle", "period": 6},
        "sharding": {"name": "late-sums"},
        "precision": {"mode": "power-of-two"},
        "activation_checkpointing": {"mode": "second-half"},
        "checkpoint": {"format": "per-rank", "every_steps": 3},
        "communicator": {"name": "acme-gloo"},
    }
    lists = {"logger": [{"name": "lines"}], "hook": [{"name": "stops"}], "metric": [{"name": "distance"}]}
    tables = {
        **chosen,
        **lists,
        "batch": {"global_size": 8, "micro_size": 4},
        "evaluation": {"every_steps": 3, "batches": 2},
        "plugins": {"load": [write(here, slot) for slot in (*chosen, *lists)]},
    }

    def losses(directory: str, *stops: int) -> list[float]:
        """Train to each of `stops` in turn."""
        for steps in stops:
            hpctrain.run({**tables, "job": {"name": "pages", "steps": steps, "output_dir": directory}})
        rows = [json.loads(line) for line in (here / directory / "metrics.jsonl").read_text().splitlines()]
        assert 0 < rows[-1]["evaluation_distance"] < 255
        return [row["loss"] for row in rows if "loss" in row]

    whole = losses("whole", 12)
    assert len(whole) == 12 and whole[-1] < whole[0]
    assert losses("parts", 6, 12) == whole
    lines = [line.split() for line in (here / "parts" / "losses.txt").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in lines] == [*enumerate(whole, 1)]


def test_the_first_plugin_passes_the_tests_of_its_page(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for language in ("python", "toml"):
        for code in blocks("first", language):
            place = re.match(r"# (acme/\S+|job\.toml)\n", code)
            if place is not None:
                (here / place[1]).parent.mkdir(parents=True, exist_ok=True)
                (here / place[1]).write_text(code)
    points = tomli.loads((here / "acme/pyproject.toml").read_text())["project"]["entry-points"]["hpctrain"]
    info = here / "acme" / "acme_hpctrain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hpctrain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpctrain]\n" + "".join(f"{key} = {points[key]}\n" for key in points))
    monkeypatch.syspath_prepend(str(here / "acme"))
    assert build_registry().find("schedule", "triangle").source.distribution == "acme-hpctrain"
    assert hpctrain.load_job(here / "job.toml").schedule.name == "triangle"
    names: dict[str, Any] = {}
    exec(compile((here / "acme/tests/test_triangle.py").read_text(), "test_triangle.py", "exec"), names)
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test(**({"tmp_path": here / "out"} if "tmp_path" in test.__code__.co_varnames else {}))
