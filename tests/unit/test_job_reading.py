"""Positions, extends and --set."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tomli
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from jobs import TINY

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import check
from hpctrain.job import toml
from hpctrain.job.problems import JobError
from hpctrain.job.raw import merge
from hpctrain.job.reading import read_job
from hpctrain.job.toml import key_lines

KEYS = st.text('abcdefgh-_ .é"', min_size=1, max_size=4)
VALUES = st.recursive(
    st.one_of(st.integers(-99, 99), st.booleans(), st.text(max_size=12), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)


def test_lines_of_every_kind_of_statement() -> None:
    text = '''# a comment
[job]
name = "a" # [no.header]

"quoted key" = 1
dotted.key = 2
list = [
  1,   # one
  2,
]
text = """
[not.a.header]
"""
[[logger]]
name = "x"
[[logger]]
name = "y"
[logger.below]
k = 1
inline = { a = 1, b = [ { c = 2 } ] }
'''
    lines = dict(key_lines(text))
    assert lines["job",] == 2
    assert lines["job", "name"] == 3
    assert lines["job", "quoted key"] == 5
    assert lines["job", "dotted", "key"] == 6
    assert lines["job", "list"] == 7
    assert lines["job", "text"] == 11
    assert lines["logger", 0, "name"] == 15 and lines["logger", 1, "name"] == 17
    assert lines["logger", 1, "below", "k"] == 19
    assert lines["logger", 1, "below", "inline", "b", 0, "c"] == 20
    assert not any("not" in map(str, key) for key in lines)


def test_an_array_of_thousands_of_lines_is_not_read_again_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    read, parse = [], toml._parse
    monkeypatch.setattr(toml, "_parse", lambda text: (read.append(text), parse(text))[1])
    text = (
        "[dataset]\nfiles = [\n" + "".join(f'  "part-{number}.txt",\n' for number in range(5000)) + "]\nworkers = 2\n"
    )
    lines = dict(key_lines(text))
    assert lines["dataset", "files", 4999] == 2 and lines["dataset", "workers"] == 5004
    assert len(read) == 4


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_key_of_any_toml_has_a_line_that_shows_it(tables: dict[str, object]) -> None:
    text = tomli_w.dumps(tables)
    lines = dict(key_lines(text))
    for key in _keys(tomli.loads(text)):
        assert key in lines, key
        assert 1 <= lines[key] <= len(text.split("\n"))


def _keys(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[str | int, ...]] = []
    for name, inner in items:
        # an empty table below a header of its own has no statement but that header
        found += [(*prefix, name), *_keys(inner, (*prefix, name))]
    return found


def test_extends_takes_several_files_the_later_ones_on_top(tmp_path: Path) -> None:
    """Presets and site files of several packages in one job; both may extend one file."""
    (tmp_path / "base.toml").write_text("[a]\nbase = 1\n")
    for name, values in (("model", "x = 1\ny = 1"), ("site", "y = 2\nz = 2")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "base.toml"\n[a]\n{values}\n')
    path = tmp_path / "job.toml"
    path.write_text('extends = ["model.toml", "site.toml"]\n[a]\nz = 3\n')
    raw = read_job(path)
    assert raw.tables == {"a": {"base": 1, "x": 1, "y": 2, "z": 3}}
    where = {key: place.removeprefix(f"{tmp_path}/") for key, place in raw.places.items()}
    assert (where["a", "x"], where["a", "y"], where["a", "z"]) == ("model.toml:3", "site.toml:3", "job.toml:3")
    path.write_text('extends = ["model.toml", "job.toml"]\n')
    with pytest.raises(UsageError, match="extends goes in a circle"):
        read_job(path)


def test_extends_merges_tables_and_replaces_arrays(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[a]\nx = 1\nlist = [1, 2]\n[b]\ny = 1\n[[logger]]\nname = "one"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "job.toml").write_text('extends = "../base.toml"\n[a]\nlist = [3]\n[[logger]]\nname = "two"\n')
    raw = read_job(tmp_path / "sub" / "job.toml", ["b.y=2", "c.z=text", "a.flag=true"])
    assert raw.tables == {
        "a": {"x": 1, "list": [3], "flag": True}, "b": {"y": 2}, "logger": [{"name": "two"}], "c": {"z": "text"},
    }  # fmt: skip
    assert raw.place(("a", "x")).endswith("base.toml:2")
    assert raw.place(("a", "list")).endswith("job.toml:3")
    assert raw.place(("logger", 0, "name")).endswith("job.toml:5")
    assert raw.place(("b", "y")) == "--set b.y=2"
    assert raw.place(("a", "unwritten")).endswith("job.toml:2"), "the table stands for a key that is not there"


def test_one_override_sets_one_key(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[a]\nx = 1\n")
    raw = read_job(tmp_path / "job.toml", ["a.list=[1,\n2]", "a.x=2 # more", "a.text=2\na.y=3"])
    assert raw.tables == {"a": {"x": 2, "list": [1, 2], "text": "2\na.y=3"}}


def test_an_override_of_a_row(tmp_path: Path) -> None:
    """By its number or its name."""
    (tmp_path / "job.toml").write_text(
        '[[hook]]\nname = "ema"\ndecay = 0.9\n[[hook]]\nname = "mine"\n[[metric]]\nname = "top-k"\n[[metric]]\nname = "top-k"\n'
        '[optimizer]\ngroups = [{ pattern = "*.bias" }]\n'
    )
    sets = ["hook.ema.decay=", "hook.1.x=1", "hook.mine.y=2", "metric.1.k=5", "optimizer.groups.0.lr=0.1"]
    raw = read_job(tmp_path / "job.toml", sets)
    assert raw.tables == {
        "hook": [{"name": "ema"}, {"name": "mine", "x": 1, "y": 2}],
        "metric": [{"name": "top-k"}, {"name": "top-k", "k": 5}],
        "optimizer": {"groups": [{"pattern": "*.bias", "lr": 0.1}]},
    }
    assert raw.place(("hook", 1, "y")) == "--set hook.mine.y=2" and ("hook", 0, "decay") not in raw.places
    for override, why in (
        ("hook.2.x=1", r"\[\[hook\]\]: there is no row '2' \(rows: 0 to 1, or ema, mine\)"),
        ("metric.top-k.k=1", r"\[\[metric\]\]: 2 rows have the name 'top-k'; say which by its number"),
        ("hook.x=1", r"\[\[hook\]\] is an array of tables; choose a row by number or name: hook\.0\.KEY"),
        ("optimizer.groups.x.lr=1", r"\[\[optimizer\.groups\]\]: there is no row 'x' \(rows: 0 to 0\)"),
    ):
        with pytest.raises(UsageError, match=rf"--set {override}: {why}"):
            read_job(tmp_path / "job.toml", [override])


def test_an_override_of_nothing_takes_a_key_away(tmp_path: Path) -> None:
    """A job that is trained in epochs for once, say, where its file has steps."""
    (tmp_path / "job.toml").write_text("[job]\nsteps = 1\n[sharding]\nstage = 1\n")
    raw = read_job(tmp_path / "job.toml", ["job.steps=", "job.epochs=2"])
    assert raw.tables == {"job": {"epochs": 2}, "sharding": {"stage": 1}} and ("job", "steps") not in raw.places
    with pytest.raises(UsageError, match=r"--set job\.stepz=: there is no job\.stepz to remove"):
        read_job(tmp_path / "job.toml", ["job.stepz="])


def test_an_override_adds_a_row(tmp_path: Path) -> None:
    """By its name, or as a table; the next override finds it. Elsewhere += adds a value."""
    (tmp_path / "job.toml").write_text('[model]\nfreeze = ["a"]\n[[hook]]\nname = "mine"\n')
    sets = [
        "logger+=csv",
        'hook+={name="ema", decay=0.9}',
        "hook.ema.every_steps=2",
        "model.freeze+=b.*",
        "optimizer.groups+={lr=1}",
    ]
    raw = read_job(tmp_path / "job.toml", sets)
    assert raw.tables == {
        "model": {"freeze": ["a", "b.*"]},
        "hook": [{"name": "mine"}, {"name": "ema", "decay": 0.9, "every_steps": 2}],
        "logger": [{"name": "csv"}],
        "optimizer": {"groups": [{"lr": 1}]},
    }
    assert raw.place(("logger", 0)) == "--set logger+=csv" and raw.place(("hook", 1, "decay")).startswith(
        "--set hook+="
    )
    for override, why in (
        ("model+=x", r"\[model\] is no array"),
        ("logger+=", r"expected table\.key=value.* or array\+=value"),
    ):
        with pytest.raises(UsageError, match=why):
            read_job(tmp_path / "job.toml", [override])


def test_an_override_adds_all_of_an_array(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(tomli_w.dumps({**TINY, "model": {**TINY["model"], "freeze": ["*.bias"]}}))
    sets = ['model.freeze+=["a", "b"]', "model.freeze+=c", 'logger+=["csv", {name="tensorboard"}]', "metric+=accuracy"]
    raw = read_job(tmp_path / "job.toml", sets)
    assert raw.tables["model"]["freeze"] == ["*.bias", "a", "b", "c"]
    assert raw.tables["logger"] == [{"name": "csv"}, {"name": "tensorboard"}]
    assert raw.tables["metric"] == [{"name": "accuracy"}]
    assert raw.place(("model", "freeze", 2)) == "--set " + sets[0] and raw.place(("logger", 1)) == "--set " + sets[2]
    with pytest.raises(JobError, match=r"\[job\] name: expected a valid string, found 7"):
        check(read_job(tmp_path / "job.toml", ["job.name=7"]), 1)
    with pytest.raises(UsageError, match="found an array in an array, expected names or tables"):
        read_job(tmp_path / "job.toml", ['logger+=[["csv"]]'])


def test_a_job_survives_the_way_to_another_rank(tmp_path: Path) -> None:

    path = tmp_path / "job.toml"
    path.write_text('[a]\nx = [1, {y = 2}]\n[[logger]]\nname = "n"\n')
    raw = read_job(path)
    assert type(raw).from_json(json.loads(json.dumps(raw.as_json()))) == raw


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends = 3\n", ":1: extends: expected the path"),
        ("extends = [3]\n", ":1: extends: expected the path"),
        ("extends = []\n", ":1: extends: expected the path"),
        ('[job]\nextends = "x"\n', None),
        ('extends = "gone.toml"\n', ":1: extends: there is no file"),
        ("a = 1\na = 2\n", ":2: not valid TOML"),
        ("[compile]\nenabled = True\n", ":2: not valid TOML: Invalid value .column 11.; TOML writes true, found True"),
        (f"a = {'[' * 3000}{']' * 3000}\n", ": not a job file: .* nested"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, sentence: str | None) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    if sentence is None:
        assert read_job(path).tables["job"]["extends"] == "x"
        return
    with pytest.raises(UsageError, match=f"job.toml{sentence}"):
        read_job(path)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", Path("/dev/zero"), tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match=f"{path}: found a device, a pipe or a directory, expected a job file"):
            read_job(path)
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(2**33)
    with pytest.raises(UsageError, match=f"it has {2**33} bytes, expected at most"):
        read_job(tmp_path / "endless")


@pytest.mark.parametrize("override", [b"a.b=\xff", b"a.b=[1, '\xe9']", b"a.\xff=1", b"\xff.b=1"])
def test_an_override_with_bytes_that_are_no_utf_8(tmp_path: Path, override: bytes) -> None:
    (tmp_path / "job.toml").write_text("[a]\n")
    with pytest.raises(UsageError, match="found bytes that are no UTF-8"):
        read_job(tmp_path / "job.toml", [os.fsdecode(override)])


def test_merge_leaves_its_inputs_alone() -> None:
    below, above = {"a": {"x": 1}}, {"a": {"y": 2}}
    assert merge(below, above) == {"a": {"x": 1, "y": 2}}
    assert below == {"a": {"x": 1}} and above == {"a": {"y": 2}}


def test_files_of_other_editors(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbf[job]\r\nname = "a"\r\n')
    raw = read_job(path)
    assert raw.tables == {"job": {"name": "a"}} and raw.place(("job", "name")) == f"{path}:2"
    path.write_bytes(b'[job]\nname = "\xe9"\n')
    with pytest.raises(UsageError, match=r"job.toml:2: found byte 0xe9, expected UTF-8"):
        read_job(path)
