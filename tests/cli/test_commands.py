"""The other commands, and the examples, as typed."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import tomli
from jobs import JobFile
from launching import hpctrain, in_process, run, started, wait_until
from packages import need_commands

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.cases(thorough=["gpt"], rest="nightly")
@pytest.mark.parametrize("template", ["gpt", "module", "finetune"])
def test_new_writes_a_file_that_the_schema_takes(tmp_path: Path, template: str) -> None:
    done = in_process("new", "--template", template, cwd=tmp_path)
    assert done.code == 0 and "wrote job.toml" in done.out, done
    text = (tmp_path / "job.toml").read_text()
    again = in_process("new", "--template", template, cwd=tmp_path)
    assert again.code == 2 and "exists already" in again.err and (tmp_path / "job.toml").read_text() == text
    schema = in_process("schema", cwd=tmp_path)
    assert schema.code == 0
    validator = jsonschema.Draft202012Validator(json.loads(schema.out))
    for file in [tmp_path / "job.toml", *(ROOT / "examples").glob("**/*.toml")]:
        validator.validate(tomli.loads(file.read_text()))
    for wrong in ({"job": {"stepz": 1}}, {"model": {"freeze": "head.*"}}, {"unknown": {}}, {"extends": 3}):
        assert not validator.is_valid({**tomli.loads(text), **wrong}), wrong


@pytest.mark.thorough
def test_a_new_gpt_checks_and_trains(tmp_path: Path) -> None:
    assert in_process("new", "my.toml", cwd=tmp_path).code == 0
    check = in_process("check", "my.toml", "-n", "4", cwd=tmp_path)
    assert check.code == 0 and "my.toml: ok, 1000 steps" in check.out and "on 4 ranks" in check.out, check
    assert not (tmp_path / "runs").exists()
    small = ["--set", "job.steps=1", "--set", "model.hidden_size=16", "--set", "evaluation.every_steps=0"]
    done = in_process("run", "my.toml", *small, cwd=tmp_path)
    assert done.code == 0 and (tmp_path / "runs" / "gpt" / "checkpoints" / "step-00000001").is_dir(), done


@pytest.mark.thorough
def test_plugins_are_listed_and_shown(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    table = in_process("plugins", cwd=tmp_path)
    assert table.code == 0 and "optimizer" in table.out and "adamw" in table.out and "model.gpt" in table.out
    listed = json.loads(in_process("plugins", "--json", cwd=tmp_path).out)
    gpt = next(row for row in listed if (row["slot"], row["name"]) == ("model", "gpt"))
    assert gpt["state"] == "active" and gpt["distribution"] == "hpctrain" and gpt["entry_point"] == "model.gpt"
    shown = in_process("plugins", "show", "optimizer", "adamw", cwd=tmp_path)
    assert shown.code == 0 and "weight_decay (number >= 0; default 0.01)" in shown.out, shown
    assert in_process("plugins", "show", "optimizer", "adamv", cwd=tmp_path).code == 2
    assert "no slot" in in_process("plugins", "show", "optimiser", "adamw", cwd=tmp_path).err
    assert in_process("plugins", "--load", "bad", cwd=tmp_path).code == 3


def test_the_ranks_of_a_benchmark_end_with_it(tmp_path: Path) -> None:
    """A batch system or `timeout` ends the command alone."""
    with started(hpctrain("bench", "machine", "-n", "2"), tmp_path) as command:
        wait_until(lambda: len(command.members()) >= 3, 60, "two ranks")
        command.process.terminate()
        assert command.finish(60).code == -signal.SIGTERM


@pytest.mark.nightly
def test_checkpoints_are_measured(tmp_path: Path) -> None:
    words = ("bench", "checkpoint", "--size", "4MB", "--ranks", "2", "--rounds", "1")
    done = run(hpctrain(*words, "--json"), tmp_path)
    assert done.code == 0, done
    rows = {(row["operation"], row["method"]): row for row in json.loads(done.out)}
    methods = {method for operation, method in rows if operation == "write"}
    assert methods == {"plain", "hdf5", "torch.save", "DCP"}
    assert rows["write", "hdf5"]["nbytes"] == rows["read", "hdf5"]["nbytes"] == pytest.approx(4e6, rel=0.01)
    assert all(0 < row["low"] <= row["seconds"] <= row["high"] < 60 and row["ratio"] > 0 for row in rows.values())
    assert list(tmp_path.iterdir()) == []
    assert in_process("bench", "checkpoint", "--size", "much", cwd=tmp_path).code == 2
    assert in_process("bench", "checkpoint", "--format", "zarr", cwd=tmp_path).code == 2


def test_help_and_usage(tmp_path: Path) -> None:
    text = in_process("--help", cwd=tmp_path)
    assert text.code == 0 and all(name in text.out for name in ("run", "check", "new", "plugins", "schema", "bench"))
    assert in_process("--version", cwd=tmp_path).out.startswith("hpctrain, version ")
    quick = "import sys; from hpctrain.cli import cli; cli(['--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", quick], tmp_path).code == 0
    for words in (["fly"], ["run"], ["run", "a.toml", "--fast"], ["new", "--template", "x"]):
        done = in_process(*words, cwd=tmp_path)
        assert done.code == 2 and "Traceback" not in done.err and done.err, done


@pytest.mark.parametrize(
    ("words", "streams", "code", "says"),
    [
        ("new", ">/dev/full", 4, "hpctrain: the output could not be written: No space left on device\n"),
        ("new", "| sleep 0", 141, ""),
        ("--version", ">&-", 0, ""),
        ("fly", "2>/dev/full", 2, ""),
        ("fly", "2>&-", 2, ""),
        ("new $'\\xff.toml'", "2>&1 | grep -q 'wrote .udcff.toml'", 0, ""),  # a name that is not valid text
    ],
)
def test_streams_that_take_nothing_are_no_traceback(
    words: str, streams: str, code: int, says: str, tmp_path: Path
) -> None:
    line = f"{{ sleep 0.1; {shlex.join(hpctrain())} {words}; }} {streams}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", says)


COUNTING = """
import json, os, pathlib
from hpctrain.api import hookimpl

@hookimpl
def hpctrain_job_end(result):
    from torch._dynamo.utils import counters
    found = {"caches": os.environ["TORCHINDUCTOR_CACHE_DIR"], **counters["inductor"]}
    pathlib.Path(f"compiled-{os.environ['RANK']}-{result['step']}.json").write_text(json.dumps(found))
"""


@pytest.mark.nightly
def test_a_compiled_model_has_the_same_curve_and_compiles_once(
    job: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start is on a node that has no kernels yet. The first step takes longer than phases may."""
    need_commands("g++")
    for name in (
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    ):  # torch sets them where it has compiled, as in this process
        monkeypatch.delenv(name, raising=False)
    (job.directory / "counting.py").write_text(COUNTING)
    job.set(job={"steps": 6}, model={"layers": 1}, plugins={"load": ["counting"]}, checkpoint={"every_steps": 3})
    assert in_process("run", "job.toml", cwd=job.directory).code == 0
    words = ["-n", "2", "--set", "compile.enabled=true", "--set", "job.output_dir='compiled'"]
    words += ["--set", "watchdog.timeout_seconds=5", "--set", "hook+=kernels"]
    for node, steps in (("a", 3), ("b", 6)):
        disk, home = tmp_path / f"disk-{node}", tmp_path / f"home-{node}"
        disk.mkdir(), home.mkdir()
        started = hpctrain("run", "job.toml", *words, "--set", f"job.steps={steps}")
        places = {"TMPDIR": str(disk), "HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run(started, job.directory, 250, places)
        assert done.code == 0, done
        log = (job.directory / "compiled" / "log" / "rank-00000.log").read_text()
        assert ("with the kernels that an earlier start has made" in log) == (node == "b"), done
        for rank in range(2):
            found = json.loads((job.directory / f"compiled-{rank}-{steps}.json").read_text())
            assert Path(found["caches"]).parent.parent == disk, found
            assert ("fxgraph_cache_miss" in found, "fxgraph_cache_hit" in found) == (node == "a", node == "b"), found
        assert not list(home.rglob("*inductor*")) and not list(home.rglob("*triton*"))
        assert not list(disk.glob("torchinductor_*")), "torch's own place, whose name anybody can take"
    assert len(list((tmp_path / "cache").rglob("*.kernels"))) == 1, "the ranks have the same kernels"
    assert job.losses("compiled") == pytest.approx(job.losses(), rel=1e-5)


@pytest.mark.nightly
def test_a_text_with_a_tokenizer_is_checked_without_encoding_it_and_encoded_once(job: JobFile) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"?": 60}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(job.directory / "tokenizer.json"))
    (job.directory / "text.txt").write_text("".join(f"w{i * i % 59} " for i in range(600_000)))
    job.tables["dataset"] = {"name": "text", "files": ["text.txt"], "tokenizer": "tokenizer.json", "cache": "kept"}
    del job.tables["job"]["steps"]
    job.set(job={"epochs": 0.001})
    checked = in_process("check", "job.toml", "-n", "2", cwd=job.directory)
    assert checked.code == 0 and not (job.directory / "kept").exists(), checked
    told = re.fullmatch(
        r"job.toml: ok, about (\d+) steps, about ([\d,]+) training samples, on 2 ranks\n.*\n", checked.out
    )
    samples = (600_000 * 95 // 100 - 1) // 8
    assert told and int(told[2].replace(",", "")) == pytest.approx(samples, rel=0.05), checked
    for again in (False, True):
        done = run(hpctrain("run", "job.toml", "-n", "2", "--resume", "never"), job.directory)
        assert done.code == 0 and f"{samples:,} samples" in done.out, done
        log = (job.output / "log" / "rank-00000.log").read_text()
        assert ("encoding 2.3 MB of text" in log) is not again, log
    moved = in_process(
        "run", "job.toml", "--set", "dataset.cache='other'", "--set", "job.epochs=0.002", cwd=job.directory
    )
    assert moved.code == 0 and "resuming" in moved.out, moved
