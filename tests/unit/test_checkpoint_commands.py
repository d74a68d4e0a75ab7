"""hpctrain checkpoint ...: what the commands print and the codes that they exit with, in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.dcp import Dcp
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, read
from hpctrain_tools.checkpoint import batches, conversion
from hpctrain_tools.checkpoint.writing import alone
from launching import Finished
from safetensors.torch import load_file, save_file
from torch import Tensor

from hpctrain.api import Piece, State
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.cli import execute
from hpctrain.toolkit.checkpoint.sealed import seal

Command = Callable[..., Finished]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `hpctrain checkpoint WORDS` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["hpctrain", "checkpoint", *map(str, words)])
        code = execute()
        out, err = capsys.readouterr()
        return Finished(code, out, err)

    return run


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randn(6, 5, generator=generator) + step,
        "a.bias": torch.randn(6, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "ids": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
    }


def state(step: int) -> State:
    whole = weights(step)
    rows = whole.pop("a.weight")
    cut = [Piece("model/a.weight", (6, 5), (begin, 0), rows[begin : begin + 2]) for begin in (0, 2, 4)]
    others = [Piece.whole(f"model/{name}", tensor) for name, tensor in whole.items()]
    values = {"layout": {"dp_replicate": 1, "dp_shard": 1}, "evaluation_loss": 3.0 - step}
    values["evaluation_metrics"] = {"accuracy": step / 8}
    return State([*cut, *others, Piece.whole("optimizer/a.bias/step", torch.tensor(float(step)))], values)


@pytest.fixture
def run_directory(tmp_path: Path) -> Iterator[Path]:
    """A run with the checkpoints of steps 1 and 2."""
    root = tmp_path / "run" / "checkpoints"
    with alone() as group:
        store = CheckpointStore(root, Hdf5(None), [Hdf5(None)], group)
        for step in (1, 2):
            store.save(step, state(step))
    yield tmp_path / "run"
    assert not dist.is_initialized()


@pytest.fixture
def newest(run_directory: Path) -> Path:
    return run_directory / "checkpoints" / "step-00000002"


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def place_of(directory: Path, name: str, number: int = 0) -> int:
    """Where a tensor's chunk lies in the first shard."""
    chunks = read.read_table(directory, read.read_manifest(directory), 0).chunks
    return [chunk for chunk in chunks if chunk.name == name][number].at


def test_list_names_every_checkpoint_the_next_to_resume_from_first(command: Command, run_directory: Path) -> None:
    (run_directory / "checkpoints" / "step-00000003").mkdir()
    (run_directory / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    (run_directory / "checkpoints" / "best").write_text("step-00000002\n")
    for named in (run_directory, run_directory / "checkpoints"):
        done = command("list", named)
        assert done.code == 0
        lines = done.out.splitlines()
        assert [next((s for s in "123" if f"step-0000000{s}" in line), "") for line in lines] == ["", "3", "2", "1"]
        assert "unknown format" in lines[1]
        assert "hdf5" in lines[2] and lines[2].endswith("loss 1.0000  accuracy 0.2500  best")
        assert "damaged" in lines[3] and "manifest.json" in lines[3]


@pytest.mark.parametrize("moment", ["read_values", "recognizes"])
def test_list_leaves_out_what_a_run_deletes_meanwhile(
    command: Command, run_directory: Path, newest: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Hdf5, moment)

    def later(form: Hdf5, directory: Path) -> object:
        if directory.name == newest.name and directory.exists():
            directory.rename(directory.with_suffix(".del"))
        return real(form, directory)

    monkeypatch.setattr(Hdf5, moment, later)
    done = command("list", run_directory)
    assert done.code == 0 and "step-00000001" in done.out and "step-00000002" not in done.out, done


def test_show_prints_tensors_shards_step_and_layout(command: Command, newest: Path) -> None:
    text = command("show", newest)
    assert text.code == 0
    for part in (
        "step         2",
        "dp_replicate 1, dp_shard 1",
        "shard-00000.h5",
        "model/a.bias",
        "bfloat16",
        "[6, 5]",
    ):
        assert part in text.out
    content = json.loads(command("show", newest, "--json").out)
    assert content["step"] == 2
    assert content["layout"] == {"dp_replicate": 1, "dp_shard": 1}
    assert content["values"]["evaluation_loss"] == 1.0
    assert [one["file"] for one in content["shards"]] == ["shard-00000.h5"]
    weight = content["tensors"]["model/a.weight"]
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [6, 5], 120)
    assert [one["offsets"] for one in weight["chunks"]] == [[0, 0], [2, 0], [4, 0]]
    assert len(content["tensors"]) == 7
    (newest / "shard-00000.h5").unlink()
    assert "shard-00000.h5 (missing)" in command("show", newest).out


def test_latest_stands_for_the_checkpoint_that_it_names(command: Command, newest: Path) -> None:
    best, latest = newest.parent / "best", newest.parent / "latest"
    best.write_text("step-00000001\n")
    assert command("show", best).out == command("show", newest.with_name("step-00000001")).out
    assert latest.read_text().strip() == newest.name
    assert command("show", latest).out == command("show", newest).out
    assert command("verify", latest).code == 0
    for content in ("../../etc", "step-1", "", "x" * 5000):
        latest.write_text(content)
        done = command("show", latest)
        assert done.code == 2 and f"{latest} isn't a checkpoint" in done.err, done


def test_show_takes_any_values(command: Command) -> None:
    values = {"layout": [1], "x": {(1, 2): float("nan")}, "y": b"\0", "z": ("\x1b[2J", 1), "step": "\x1b[2J"}
    Path("c").mkdir()
    with alone() as group:
        Hdf5().writer().write(State([Piece.whole("model/w", torch.ones(2))], values), Path("c"), group)
    content = json.loads(command("show", "c", "--json").out)
    assert content["values"] == {"x": {"(1, 2)": None}, "y": repr(b"\0"), "z": ["\x1b[2J", 1]}
    text = command("show", "c")
    assert text.code == 0 and "layout       unknown" in text.out and "\x1b" not in text.out


def test_verify_is_silent_about_nothing(command: Command, newest: Path) -> None:
    done = command("verify", newest)
    assert done.code == 0 and "whole, 7 tensors" in done.out and done.err == ""
    flip(newest / "shard-00000.h5", place_of(newest, "model/a.weight", 1))
    done = command("verify", newest)
    assert "1 fault\n" in done.err
    (newest / "notes.txt").write_text("x")
    (newest / "\x1b[2J").write_text("x")
    done = command("verify", newest)
    assert done.code == 5 and done.out == ""
    assert "3 faults" in done.err and r"\x1b[2J: the manifest" in done.err and "\x1b" not in done.err
    assert "shard-00000.h5: tensor model/a.weight is corrupt: the checksum of its part [2, 5] at [2, 0]" in done.err
    assert f"{newest / 'notes.txt'}: the manifest doesn't know this file" in done.err


def test_what_is_no_checkpoint_is_told(command: Command, run_directory: Path) -> None:
    for words, says in [
        (("show", "nowhere"), "there is no checkpoint nowhere"),
        (("verify", run_directory), "this run has"),
        (("list", "nowhere"), "there is no run"),
        (("list", "."), "has no checkpoints"),
        (("diff", "nowhere", run_directory), "there is no checkpoint"),
        (("export", run_directory, "--to", "torch", "x.pt"), "step-00000002"),
        (("import", "nowhere", "x"), "no weights at nowhere"),
        (("import", run_directory, "x", "--format", "zarr"), "'zarr'"),
        (("export", run_directory, "--to", "onnx", "x"), "onnx"),
    ]:
        done = command(*words)
        assert done.code == 2 and says in done.err and "Traceback" not in done.err, (words, done)


def test_what_the_system_does_not_let_in_is_told(
    command: Command, run_directory: Path, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 300
    for words in [("list", long), ("show", long), ("verify", long), ("diff", newest, long), ("import", long, "out")]:
        done = command(*words)
        assert done.code == 5 and f"{long}: File name too long" in done.err, done
    real = Hdf5.recognizes

    def refuse(form: Hdf5, directory: Path) -> bool:
        if directory.name == newest.name:
            raise PermissionError(13, "Permission denied", str(directory / "manifest.json"))
        return real(form, directory)

    monkeypatch.setattr(Hdf5, "recognizes", refuse)
    done = command("list", run_directory)
    assert done.code == 0 and "unreadable: Permission denied: " in done.out.splitlines()[1], done
    assert "step-00000001  hdf5" in done.out.splitlines()[2]


def test_a_damaged_manifest_is_exit_5_everywhere(command: Command, newest: Path) -> None:
    flip(newest / "manifest.json", 300)
    older = newest.with_name("step-00000001")
    for words in [
        ("show", newest),
        ("verify", newest),
        ("diff", older, newest),
        ("export", newest, "--to", "torch", "x"),
    ]:
        done = command(*words)
        assert done.code == 5 and "manifest.json" in done.err, (words, done)
    assert not Path("x").exists()


@pytest.mark.parametrize("limit", [1, 64, 2**28])
def test_diff_says_which_tensors_differ_and_by_how_much(
    command: Command, newest: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches.batches, "__defaults__", (limit,))
    older = newest.with_name("step-00000001")
    done = command("diff", older, newest)
    assert done.code == 1
    assert "value step: 1 in A, 2 in B" in done.out
    assert "2 tensors differ" in done.out
    row = next(line.split() for line in done.out.splitlines() if line.startswith("model/a.weight"))
    relative = ((30**0.5) / weights(1)["a.weight"].norm()).item()
    assert row[1:5] == ["30", "of", "30", "1"] and float(row[5]) == pytest.approx(relative, rel=1e-2)
    assert "optimizer/a.bias/step" in done.out
    same = command("diff", newest, newest)
    assert same.code == 0 and same.out == "all tensors are equal\n"


def test_diff_tells_missing_tensors_other_forms_and_nan(command: Command, tmp_path: Path) -> None:
    nan = float("nan")
    contents = {
        "one": {"w": torch.tensor([1.0, nan, nan]), "x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(1)},
        "two": {"w": torch.tensor([1.0, nan, 2.0]), "x": torch.ones(3), "y": torch.ones(2).bfloat16()},
    }
    with alone() as group:
        for name, tensors in contents.items():
            (tmp_path / name).mkdir()
            Hdf5().writer().write(
                State([Piece.whole(*item) for item in tensors.items()], {"step": 1}), tmp_path / name, group
            )
    lines = {line.split()[0]: line for line in command("diff", "one", "two").out.splitlines()}
    assert "1 of 3" in lines["w"] and "nan" in lines["w"]
    assert "float32 [2] in A, float32 [3] in B" in lines["x"]
    assert "0 of 2" in lines["y"] and "bfloat16 [2] in B" in lines["y"]
    assert "only in A" in lines["z"]


def test_export_writes_what_other_programs_read(command: Command, newest: Path) -> None:
    expected = weights(2)
    for kind, out, load in [("safetensors", "w.safetensors", load_file), ("torch", "w.pt", torch.load)]:
        done = command("export", newest, "--to", kind, out)
        assert done.code == 0 and f"wrote {out}: 6 tensors" in done.out, done
        loaded = load(out)
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
        again = command("export", newest, "--to", kind, out)
        assert again.code == 2 and "exists already" in again.err
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_half_written_file(
    command: Command, newest: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    given = signal.signal(number, before)  # what a shell starts in the background ignores Ctrl-C
    monkeypatch.setattr(conversion, "write_at", lambda *_: signal.raise_signal(number))
    try:
        assert command("export", newest, "--to", "safetensors", "out").code == code
        assert not list(Path().glob("out*")) and signal.getsignal(number) == before
    finally:
        signal.signal(number, given)


def test_export_refuses_what_safetensors_does_not_hold(command: Command, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with alone() as group:
        Hdf5().writer().write(
            State([Piece.whole("model/w", torch.ones(2, dtype=torch.complex64))]), tmp_path / "c", group
        )
    done = command("export", "c", "--to", "safetensors", "c.safetensors")
    assert done.code == 5 and "w is torch.complex64" in done.err and not Path("c.safetensors").exists()


def test_export_of_a_damaged_checkpoint_leaves_no_file(command: Command, newest: Path) -> None:
    flip(newest / "shard-00000.h5", place_of(newest, "model/a.bias"))
    for kind in ("safetensors", "torch"):
        done = command("export", newest, "--to", kind, "out")
        assert done.code == 5 and "model/a.bias is corrupt" in done.err
    assert [path.name for path in Path().iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "checkpoint"])
def test_import_makes_a_checkpoint_to_start_from(command: Command, newest: Path, kind: str) -> None:
    expected = {f"net.{name}": tensor for name, tensor in weights(2).items()} | {"other": torch.ones(1)}
    source, prefix = {"safetensors": ("w.safetensors", "net."), "torch": ("w.pt", "net."), "checkpoint": (newest, "")}[
        kind
    ]
    if kind == "safetensors":
        save_file(expected, str(source))
    elif kind == "torch":
        torch.save(expected, source)
    done = command("import", source, "made", "--prefix", prefix)
    assert done.code == 0 and 'weights = "made"' in done.out, done
    assert command("verify", "made").code == 0
    target = {name: torch.zeros_like(tensor) for name, tensor in weights(2).items()}
    form = Hdf5()
    assert set(form.names(Path("made"))) == {f"model/{name}" for name in target}
    form.load(Path("made"), [Piece.whole(f"model/{name}", tensor) for name, tensor in target.items()])
    assert all(torch.equal(target[name], tensor) for name, tensor in weights(2).items())
    assert command("import", source, "made", "--prefix", prefix).code == 2
    torch.save({}, "empty.pt")
    assert "empty.pt holds no tensor at all" in command("import", "empty.pt", "other").err
    none = command("import", source, "other", "--prefix", "x.")
    assert none.code == 5 and "begins with 'x.'" in none.err and not Path("other").exists()


def test_what_has_the_temporary_name_stays_and_a_missing_directory_is_told(command: Command, newest: Path) -> None:
    Path("made.tmp").mkdir()
    Path("made.tmp/data").write_text("x")
    Path("w.tmp").write_text("mine")
    for words in [("import", newest, "made"), ("export", newest, "--to", "torch", "w")]:
        assert command(*words).code == 0
    assert Path("made.tmp/data").read_text() == "x" and Path("w.tmp").read_text() == "mine"
    for words in [("import", newest), ("export", newest, "--to", "torch"), ("export", newest, "--to", "safetensors")]:
        done = command(*words, "gone/out")
        assert done.code == 2 and "gone/out: there is no directory gone" in done.err, done


@pytest.mark.parametrize("shape", [[1, 2**60], [2**70]])
def test_a_tensor_that_no_memory_holds_is_told_and_leaves_nothing(
    command: Command, newest: Path, shape: list[int]
) -> None:
    content = json.loads((newest / "manifest.json").read_bytes())
    del content["checksum"]
    part = {"shard": 0, "offsets": [0] * len(shape), "shape": shape}
    content["layouts"].append({"shape": shape, "parts": [part]})
    content["tensors"]["model/huge"] = {"dtype": "float32", "layout": len(content["layouts"]) - 1}
    (newest / "manifest.json").write_bytes(seal(content))
    for words in [
        ("diff", newest, newest),
        ("export", newest, "--to", "torch", "out"),
        ("export", newest, "--to", "safetensors", "out"),
        ("import", newest, "out"),
    ]:
        done = command(*words)
        assert (
            done.code == 5 and ("huge" in done.err or "less than 2^63" in done.err) and not list(Path().glob("out*"))
        ), done


@pytest.mark.timeout(20)
def test_import_refuses_a_pipe_instead_of_waiting_for_its_writer(command: Command) -> None:
    os.mkfifo("w.pt")
    for path in ("w.pt", "/dev/zero"):
        done = command("import", path, "out")
        assert done.code == 2 and f"{path} is no regular file" in done.err, done


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_is_told_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    form = Dcp()  # its items are read whole: the writing is what fails
    (tmp_path / "c").mkdir()
    with alone() as group:
        form.writer().write(
            State([Piece.whole("model/w", torch.ones(2**19)), Piece.whole("model/b", torch.ones(2))]), Path("c"), group
        )
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True, timeout=30)
    try:
        for words in [("export", "c", "--to", "safetensors"), ("export", "c", "--to", "torch"), ("import", "c")]:
            done = command(*words, "disk/out")
            assert done.code == 4 and "disk/out could not be written: " in done.err, done
            assert "no space left on device" in done.err.lower() and not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({1: torch.ones(1)}, "holds [1], expected a state dict"),
        ({"\x1b[2J": torch.ones(1)}, r"'\x1b[2J' can't name a tensor"),
        ({"w": torch.eye(2).to_sparse()}, "w is nested, meta, quantized or sparse, expected a dense tensor"),
        ({"w": torch.eye(2).to_sparse_csr()}, "w is nested, meta, quantized or sparse"),
        ({"w": torch.ones(2, device="meta")}, "w is nested, meta, quantized or sparse"),
        (
            {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
            "w is nested, meta, quantized or sparse",
        ),
    ],
)
def test_import_refuses_what_is_no_state_dict_of_plain_tensors(
    command: Command, content: dict[object, Tensor], says: str
) -> None:
    torch.save(content, "w.pt")
    done = command("import", "w.pt", "out")
    assert done.code == 5 and f"w.pt: {says}" in done.err.replace("w.pt holds", "w.pt: holds"), done
    assert not Path("out").exists()


def test_import_refuses_a_nested_tensor(command: Command) -> None:
    """Since torch 2.15 torch.load does it itself."""
    torch.save({"w": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, "w.pt")
    done = command("import", "w.pt", "out")
    assert done.code == 5 and (
        "w is nested, meta, quantized or sparse" in done.err or "_rebuild_nested_tensor" in done.err
    ), done
    assert not Path("out").exists()


def test_import_runs_nothing_of_a_file(command: Command) -> None:
    class Exploding:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.mkdir, (Path("exploded"),))

    sys.modules[__name__].Exploding = Exploding  # type: ignore[attr-defined]
    Exploding.__qualname__ = "Exploding"
    torch.save({"w": Exploding()}, "evil.pt")
    done = command("import", "evil.pt", "out")
    assert done.code == 5 and "evil.pt" in done.err and "weights_only" not in done.err
    assert not Path("exploded").exists() and not Path("out").exists()


THIRD_PARTY = '''
import json
import torch
from hpctrain.api import CheckpointFormat, CheckpointWriter, StoredChunk, StoredTensor, hookimpl


class OneFileWriter(CheckpointWriter):
    def snapshot(self, state):
        return state

    def write(self, snapshot, directory, group):
        torch.save({piece.name: piece.tensor for piece in snapshot.pieces}, directory / "all.one")
        (directory / "values.json").write_text(json.dumps(snapshot.values))


class OneFile(CheckpointFormat):
    """A format of someone else: what one rank has, in one file of torch.save."""

    name = "one-file"

    def writer(self):
        return OneFileWriter()

    def _all(self, directory):
        return torch.load(directory / "all.one", weights_only=True)

    def read_values(self, directory):
        return json.loads((directory / "values.json").read_text())

    def tensors(self, directory):
        return {
            name: StoredTensor(t.dtype, tuple(t.shape), (StoredChunk("all.one", (0,) * t.dim(), tuple(t.shape)),))
            for name, t in self._all(directory).items()
        }

    def load(self, directory, pieces):
        for piece in pieces:
            where = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape))
            piece.tensor.copy_(self._all(directory)[piece.name][where])

    def verify(self, directory, progress=None):
        return [] if (directory / "all.one").exists() else [f"{directory / 'all.one'}: missing"]

    def recognizes(self, directory):
        return (directory / "values.json").exists()


@hookimpl
def hpctrain_checkpoint():
    return [OneFile]
'''


def test_a_third_partys_format_has_all_the_commands(command: Command, newest: Path) -> None:
    Path("one_file.py").write_text(THIRD_PARTY)
    load = ("--load", "one_file")
    assert command(*load, "import", newest, "other", "--format", "one-file").code == 0
    assert "one-file" in command(*load, "show", "other").out
    assert command(*load, "verify", "other").code == 0
    assert command(*load, "export", "other", "--to", "safetensors", "w.safetensors").code == 0
    assert torch.equal(load_file("w.safetensors")["a.weight"], weights(2)["a.weight"])
    differing = command(*load, "diff", newest, "other")
    assert differing.code == 1 and "1 tensors differ" in differing.out  # the optimizer's isn't exported
    Path("other/all.one").unlink()
    done = command(*load, "verify", "other")
    assert done.code == 5 and "other/all.one: missing" in done.err
    assert command("show", "other").code == 2
