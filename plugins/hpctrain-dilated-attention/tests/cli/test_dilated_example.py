"""The example as its second line says to run it, and on one rank: the losses are the same. Text goes on after a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import JobFile
from launching import hpctrain, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "long.toml"


def rows(directory: Path, ranks: int, *settings: str) -> list[dict[str, Any]]:
    words = [word for one in (f"job.output_dir=on-{ranks}", *settings) for word in ("--set", one)]
    done = run(hpctrain("run", str(EXAMPLE), "-n", str(ranks), *words), directory, timeout=200)
    assert done.code == 0, done
    return [json.loads(line) for line in (directory / f"on-{ranks}" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_the_example_learns_and_ranks_change_nothing(tmp_path: Path) -> None:
    cut = rows(tmp_path, 2)
    whole = rows(tmp_path, 1, "parallelism.context=1")
    for name, count in (("loss", 20), ("evaluation_loss", 2)):
        mine, expected = ([row[name] for row in one if name in row] for one in (cut, whole))
        assert len(mine) == count and mine == pytest.approx(expected, rel=2e-5)
    losses = [row["loss"] for row in cut if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    planned = run(hpctrain("plan", str(EXAMPLE), "-n", "2"), tmp_path)
    assert "rank 1 sends in a step" in planned.out and "all_to_all over cp" in planned.out, planned


@pytest.mark.thorough
def test_text_goes_on_and_an_encoder_has_none_to_say(job: JobFile) -> None:
    job.tables["model"] = {
        "name": "longnet", "hidden_size": 16, "layers": 1, "attention_heads": 2, "vocab_size": 256, "max_seq_length": 16,
        "segment_lengths": [8, 16], "dilation_rates": [1, 2],
    }  # fmt: skip
    job.tables["dataset"] = {"name": "stdlib-text", "max_bytes": 20_000}
    job.write()
    done = run(hpctrain("run", "job.toml"), job.directory)
    assert done.code == 0, done
    asked = hpctrain(
        "sample", "job.toml", "--checkpoint", "out/checkpoints/latest", "--prompt", "def ", "--tokens", "3"
    )
    done = run(asked, job.directory)
    assert done.code == 0 and done.out.startswith("def "), done
    done = run([*asked, "--set", "model.name=longnet-encoder"], job.directory)
    assert done.code == 2 and "what 'longnet-encoder' says of a token depends on the tokens behind it" in done.err, done
