"""The crafted checkpoints and run directories of test_crafted.py: place, change, and expected exit codes."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import crafting as c
import torch
from crafting import CHECKPOINT, Content, Place

LOOKING = [
    ["checkpoint", "verify", CHECKPOINT],
    ["checkpoint", "show", CHECKPOINT],
    ["checkpoint", "diff", CHECKPOINT, "whole"],
    ["checkpoint", "list", "run"],
    ["checkpoint", "export", CHECKPOINT, "--to", "safetensors", "exported"],
    ["restore", CHECKPOINT],
]
RESUMING = [*LOOKING[1:4], ["run", "3.toml", "--resume", CHECKPOINT]]
RUNNING = [["run", "3.toml"], ["checkpoint", "list", "run"]]
ONLY_RUNNING = RUNNING[:1]
VIEWING = [["runs", "run"], ["top", "run"], ["status", "run"], ["report", "run", "--format", "json"]]
Codes = dict[str, int]
"""By the command's word."""
REFUSED: Codes = {"verify": 5, "show": 5, "diff": 5, "list": 0, "export": 5, "restore": 5, "run": 5, "import": 5}
UNREADABLE: Codes = {**REFUSED, "show": 0}
"""Names that the manifest marks as whole."""
FINE: Codes = dict.fromkeys(REFUSED, 0)


@dataclass(frozen=True)
class Case:
    """`change` modifies the base; then `commands` must end with `codes`."""

    name: str
    base: str
    change: Callable[[Place], Any]
    commands: list[list[str]]
    codes: Codes
    tier: str = "default"


_OF_EVERY_RUN = ("a pipe", "a link outside")
"""The replacements of each file in the default tier."""


def _replaced(base: str, file: str, commands: list[list[str]], codes: Codes, **special: Codes) -> list[Case]:
    return [
        Case(
            f"{file.removeprefix(CHECKPOINT + '/')}: {craft}", base, c.replaced(file, craft), commands,
            {**codes, **special.get(craft.replace(" ", "_").replace("/", "_"), {})},
            "default" if craft in _OF_EVERY_RUN else "thorough",
        )
        for craft in c.REPLACEMENTS
    ]  # fmt: skip


def _cases(base: str, file: str, crafts: dict[str, Callable[[Place], Any]], codes: Codes) -> list[Case]:
    return [Case(f"{file}: {name}", base, change, LOOKING, codes) for name, change in crafts.items()]


# ------------------------------------------------------------------ run directories

USAGE: Codes = {"run": 2, "list": 0}
GOES_ON: Codes = {"run": 0, "list": 0}
IN_RUN = [
    *_replaced("hdf5", "run/metrics.jsonl", RUNNING, USAGE, **{"10_GB_of_nothing": GOES_ON, "a_megabyte_of_anything": GOES_ON, "an_empty_file": GOES_ON}),
    *_replaced("hdf5", "run/job.resolved.toml", RUNNING, USAGE, an_empty_file=USAGE),
    *_replaced("hdf5", "run/lock", RUNNING, USAGE, **{"10_GB_of_nothing": GOES_ON, "a_megabyte_of_anything": GOES_ON, "an_empty_file": GOES_ON}),
    *_replaced("hdf5", "run/log/rank-00000.log", RUNNING, USAGE, **{"10_GB_of_nothing": GOES_ON, "a_megabyte_of_anything": GOES_ON, "an_empty_file": GOES_ON}),
    *_replaced("hdf5", "run/checkpoints/abandoned", RUNNING, {"run": 5, "list": 5}, a_megabyte_of_anything=GOES_ON, an_empty_file=GOES_ON),
    *_replaced("hdf5", "run/checkpoints/latest", RUNNING, GOES_ON),
    *_replaced("hdf5", "run/checkpoints/step-00000003.tmp", RUNNING, GOES_ON),
    *_replaced("hdf5", "run/checkpoints/step-00000001.old", RUNNING, GOES_ON),
    Case("lock: another name of a file outside", "hdf5", c.link_outside("run/lock"), RUNNING, USAGE),
    Case("log: another name of a file outside", "hdf5", c.link_outside("run/log/rank-00000.log"), RUNNING, USAGE),
    Case("log: a directory outside", "hdf5", c.directory_outside("run/log"), RUNNING, USAGE),
    Case("checkpoints: a directory outside", "hdf5", c.directory_outside("run/checkpoints"), RUNNING, {"run": 5, "list": 5}),
    Case("step-3: a directory outside", "hdf5", c.directory_outside("run/checkpoints/step-00000003"), RUNNING, GOES_ON),
    *(
        Case(f"{name}: a link outside", "hdf5", c.replaced(f"run/{name}", "a link outside"), RUNNING, GOES_ON)
        for name in ("metrics.jsonl.tmp", "job.resolved.toml.tmp", "checkpoints/latest.tmp", "checkpoints/abandoned.tmp")
    ),
]  # fmt: skip


def lines(*rows: bytes) -> Callable[[Place], Any]:
    return lambda place: (place.root / "run" / "metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in rows))


def toml(text: str) -> Callable[[Place], Any]:
    return lambda place: (place.root / "run" / "job.resolved.toml").write_text(text)


ROWS: dict[str, list[bytes]] = {
    "deep": [b"[" * 100_000 + b"]" * 100_000, b'{"step":' + b"[" * 100_000 + b"1" + b"]" * 100_000 + b"}"],
    "odd steps": [b'{"step":"1"}', b'{"step":true}', b'{"step":1.5}', b'{"step":null}', b'{"step":-1}', b'{"step":{}}'],
    "infinite steps": [b'{"step":Infinity}', b'{"step":NaN}', b'{"step":1e999}'],
    "long numbers": [b'{"step":' + b"1" * 10_000 + b"}"],
    "no objects": [b"[]", b"1", b"null", b'"step"', b"\xff\xfe", b"\0" * 100],
    "a long line": [b'{"step":1,"x":"' + b"x" * 50_000_000 + b'"}'],
    "many lines": [b"{}"] * 200_000,
}
TOMLS = {
    "deep arrays": "x = " + "[" * 10_000 + "]" * 10_000,
    "deep keys": "a" + ".a" * 20_000 + " = 1",
    "deep tables": "[a" + ".a" * 20_000 + "]\n",
    "escape codes": '[job]\nname = "\\u001b[2J"\n[model]\n"\\u001b]0;x" = 1\n',
    "another kind": "job = 1\nmodel = []\n",
    "long numbers": "[model]\nx = " + "1" * 100_000,
}
IN_RUN += [Case(f"metrics.jsonl: {name}", "hdf5", lines(*rows), RUNNING, GOES_ON) for name, rows in ROWS.items()]
IN_RUN += [Case(f"job.resolved.toml: {name}", "hdf5", toml(text), RUNNING, USAGE) for name, text in TOMLS.items()]


# ------------------------------------------------------------------ hdf5


def a_layout(shape: list[int], parts: list[dict[str, Any]] | None = None, dtype: str = "float32") -> Callable[[Place], Any]:  # fmt: skip
    """Add a tensor of this form."""

    def change(content: Content) -> None:
        whole = [{"shard": 0, "offsets": [0] * len(shape), "shape": shape}]
        content["layouts"].append({"shape": shape, "parts": whole if parts is None else parts})
        content["tensors"]["model/planted"] = {"dtype": dtype, "layout": len(content["layouts"]) - 1}

    return c.in_manifest(change)


def grid(parts: int, dims: int, shift: int = 0) -> Callable[[Place], Any]:
    """A tensor in slices along the first dim, each nearly as large as all others along the other dims, which are cut, too."""
    shape = [parts, *[4] * (dims - 1)]
    cut = [
        {"shard": 0, "offsets": [row, *[half] * (dims - 1)], "shape": [1, *[2 + shift] * (dims - 1)]}
        for row in range(parts // 2)
        for half in (0, 2)
    ]
    return a_layout(shape, cut)


def faulty_layouts(count: int, parts: int) -> Callable[[Place], Any]:
    """Layouts with parts side by side except for the last two, which no check finds quickly."""

    def change(content: Content) -> None:
        cut = [{"shard": 0, "offsets": [one, 0], "shape": [1, 2]} for one in range(parts)]
        cut[-1]["shape"] = [1, 1]
        wide = [{**one, "offsets": [0, one["offsets"][0] * 2], "shape": [parts, 2]} for one in cut[:-1]]
        for number in range(count):
            content["layouts"].append({"shape": [parts, 2 * parts], "parts": wide})
            content["tensors"][f"model/x{number}"] = {"dtype": "float32", "layout": len(content["layouts"]) - 1}

    return c.in_manifest(change)


def retyped(old: str, new: str) -> Callable[[Place], Any]:
    def change(content: Content) -> None:
        for one in content["tensors"].values():
            one["dtype"] = new if one["dtype"] == old else one["dtype"]

    return c.in_manifest(change)


def reshaped(place: Place) -> None:
    """Give a matrix another shape with as many elements."""

    def change(content: Content) -> None:
        layout = next(one for one in content["layouts"] if len(one["shape"]) == 2)
        layout["shape"] = layout["parts"][0]["shape"] = layout["shape"][::-1]

    c.in_manifest(change)(place)


def many_shards(place: Place) -> None:
    """List many shards that do not exist."""
    c.in_manifest(
        lambda content: content["shards"].extend({"name": f"shard-{n:05d}.h5", "table": "0" * 16} for n in range(1, 50_000))
    )(place)  # fmt: skip


def deep_values(depth: int) -> bytes:
    return b'"format":"hpctrain-hdf5","version":2,"shards":[],"layouts":[],"tensors":{},"values":' + b'{"x":' * depth + b"1" + b"}" * depth + b"}"  # fmt: skip


def set_key(**keys: Any) -> Callable[[Place], Any]:
    return c.in_manifest(lambda content: content.update(keys))


def set_shard(**keys: Any) -> Callable[[Place], Any]:
    return c.in_manifest(lambda content: content["shards"][0].update(keys))


def rename(name: str) -> Callable[[Place], Any]:
    return c.in_manifest(lambda content: content["tensors"].update({name: next(iter(content["tensors"].values()))}))


MANIFESTS: dict[str, Callable[[Place], Any]] = {
    "a shape of 10^400": a_layout([10**400]),
    "a shape of many 10^400": a_layout([10**400] * 30),
    "a shape of 2^62 x 2^62": a_layout([2**62, 2**62]),
    "10^5 dims": a_layout([1] * 100_000),
    "10^5 dims, cut": a_layout([2] * 100_000, [{"shard": 0, "offsets": [0] * 100_000, "shape": [1] * 100_000}]),
    "20000 parts cut along 20 dims": grid(20_000, 20),
    "100 layouts of 500 parts with holes": faulty_layouts(100, 500),
    "a part too far": a_layout([4], [{"shard": 0, "offsets": [2**63], "shape": [4]}]),
    "no part": a_layout([4], []),
    "a shape that is text": c.in_manifest(lambda content: content["layouts"][0].update(shape="12")),
    "a shape that is an object": c.in_manifest(lambda content: content["layouts"][0].update(shape={"1": 2})),
    "a shape with true": c.in_manifest(lambda content: content["layouts"][0].update(shape=[True])),
    "a shape with 1.0": c.in_manifest(lambda content: content["layouts"][0].update(shape=[1.0])),
    "a shape with null": c.in_manifest(lambda content: content["layouts"][0].update(shape=[None])),
    "parts that are an object": c.in_manifest(lambda content: content["layouts"][0].update(parts={})),
    "a layout that is a list": c.in_manifest(lambda content: content["layouts"].__setitem__(0, [])),
    "layouts that are text": set_key(layouts="x"),
    "tensors that are a list": set_key(tensors=[]),
    "a tensor that is null": c.in_manifest(lambda content: content["tensors"].update(x=None)),
    "a tensor without layout": c.in_manifest(lambda content: content["tensors"].update(x={"dtype": "float32"})),
    "a layout below zero": c.in_manifest(lambda content: next(iter(content["tensors"].values())).update(layout=-1)),
    "a layout that is true": c.in_manifest(lambda content: next(iter(content["tensors"].values())).update(layout=True)),
    "a dtype that is a list": c.in_manifest(lambda content: next(iter(content["tensors"].values())).update(dtype=[])),
    "a dtype with escape codes": c.in_manifest(lambda content: next(iter(content["tensors"].values())).update(dtype="\x1b[2J")),
    "shards that are an object": set_key(shards={}),
    "a shard that is text": set_key(shards=["shard-00000.h5"]),
    "a shard's name with a path": set_shard(name="../../../outside/canary"),
    "a shard's name with a line feed": set_shard(name="shard-00000.h5\n"),
    "a shard's name in other digits": set_shard(name="shard-\u0660\u0660\u0660\u0660\u0660.h5"),
    "a shard's table that is a list": set_shard(table=[]),
    "a format with escape codes": set_key(format="\x1b[2J\x07"),
    "a format that is deep": set_key(format=json.loads("[" * 400 + "]" * 400)),
    "a later version": set_key(version=3),
    "a version of 10^4000": set_key(version=10**4000),
    "a name with escape codes": rename("model/\x1b[2J"),
    "a name that is empty": rename(""),
    "values that are a list": set_key(values=[]),
    "values with escape codes for a key": set_key(values={"\x1b[2J": 1}),
    "an unknown tag": c.in_values(x={"$eval": "1"}),
    "a tag that is no text": c.in_values(x={"$bytes": 1}),
    "a tag of pairs that are none": c.in_values(x={"$dict": [1]}),
    "a tag with a list for a key": c.in_values(x={"$dict": [[[1], 1]]}),
    "a tag of a number too long": c.in_values(x={"$float": "1" * 100_000}),
    "a million lists in one": c.raw_manifest(b'"format":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
    "values 100000 deep": c.raw_manifest(deep_values(100_000)),
    "values 900 deep": c.raw_manifest(deep_values(900)),
    "a number of 100000 digits": c.raw_manifest(b'"version":' + b"1" * 100_000 + b"}"),
    "NaN for a version": c.raw_manifest(b'"format":"hpctrain-hdf5","version":NaN}'),
    "no object": c.raw_manifest(b"1}"),
    "200 MB of digits": c.raw_manifest(b'"x":[' + b"1," * 100_000_000 + b"1]}"),
    "300 MB of text": c.raw_manifest(b'"x":"' + b"x" * 300_000_000 + b'"}'),
}  # fmt: skip
CLAIMS: dict[str, Callable[[Place], Any]] = {
    "2^60 elements": a_layout([2**60]),
    "an empty one of 2^62": a_layout([0, 2**62]),
}
SAVED: dict[str, tuple[Callable[[Place], Any], Codes]] = {
    "bias as int32": (retyped("float32", "int32"), UNREADABLE),
    "all as uint32": (retyped("float32", "uint32"), UNREADABLE),
    "all as complex64": (retyped("float32", "complex64"), UNREADABLE),
    "all as bfloat16": (retyped("float32", "bfloat16"), UNREADABLE),
    "all as float64": (retyped("float32", "float64"), UNREADABLE),
    "all as float8": (retyped("float32", "float8_e4m3fn"), UNREADABLE),
    "a matrix turned": (reshaped, UNREADABLE),
    "50000 shards": (many_shards, {**FINE, "verify": 5}),
}
TABLES: dict[str, Callable[[Place], Any]] = {
    "a size of 10^400": c.in_table(lambda content: content.update(size=10**400)),
    "a size of 2^62": c.in_table(lambda content: content.update(size=2**62)),
    "a size that is text": c.in_table(lambda content: content.update(size="1")),
    "no size": c.in_table(lambda content: content.pop("size")),
    "a checksum that is a list": c.in_table(lambda content: content.update(xxh3=[])),
    "a checksum with escape codes": c.in_table(lambda content: content.update(xxh3="\x1b[2J")),
    "chunks that are text": c.in_table(lambda content: content.update(chunks="x")),
    "a chunk that is null": c.in_table(lambda content: content["chunks"].update({key: [None] for key in content["chunks"]})),
    "chunks that are a number": c.in_table(lambda content: content["chunks"].update(dict.fromkeys(content["chunks"], 1))),
    "a place of 2^70": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(at=2**70)),
    "a place that is true": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(at=True)),
    "checksums that are text": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(xxh3="x")),
    "checksums that are numbers": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(xxh3=[1])),
    "checksums that are an object": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(xxh3={"x": 1})),
    "a million checksums": c.in_table(lambda content: next(iter(content["chunks"].values()))[0].update(xxh3=["0" * 16] * 1_000_000)),
    "a million deep": c.raw_table(b'"chunks":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
}  # fmt: skip

NUMBERS = {"head.weight": {"step": 1}}
RESUMED: dict[str, Callable[[Place], Any]] = {
    "numbers that are text": c.in_values(optimizer_numbers={"embedding.weight": {"step": "1"}, "head.weight": {"step": "x"}}),
    "numbers that are lists": c.in_values(optimizer_numbers={"head.weight": {"exp_avg": [1]}}),
    "numbers that are a list": c.in_values(optimizer_numbers=[]),
    "numbers too large": c.in_values(optimizer_numbers={"head.weight": {"step": 10**400}}),
    "groups that are a list of text": c.in_values(optimizer_groups=["x"]),
    "groups that set text": c.in_values(optimizer_groups=[{"betas": "x"}]),
    "groups that set parameters": c.in_values(optimizer_groups=[{"params": []}]),
    "groups that set a rate": c.in_values(optimizer_groups=[{"lr": "x"}]),
    "groups that set a number too large": c.in_values(optimizer_groups=[{"eps": 10**400}]),
    "groups that set nothing for betas": c.in_values(optimizer_groups=[{"betas": None, "x": 1}]),
    "groups that set a number for betas": c.in_values(optimizer_groups=[{"betas": 1}]),
    "groups that are a number": c.in_values(optimizer_groups=1),
    "begun that is text": c.in_values(optimizer_begun="x"),
    "samples that are text": c.in_values(samples_seen="1"),
    "samples below zero": c.in_values(samples_seen=-1),
    "samples of 2^63": c.in_values(samples_seen=2**63),
    "a fingerprint with escape codes": c.in_values(fingerprint="\x1b[2J\x1b]0;x\x07"),
    "a fingerprint of a megabyte": c.in_values(fingerprint="x" * 2**20),
    "a fingerprint that is a list": c.in_values(fingerprint=[1]),
    "a precision that is text": c.in_values(precision="x"),
    "a step that is text": c.in_values(step="x"),
    "a step of 10^400": c.in_values(step=10**400),
    "a step below zero": c.in_values(step=-1),
    "no step": c.in_values(step=None),
    "an evaluation that is text": c.in_values(evaluation_loss="x"),
    "no fingerprint": c.in_values(fingerprint=None),
}  # fmt: skip
SHOWN = {**FINE, "diff": 0, "run": 5}
HDF5 = [
    *_replaced("hdf5", f"{CHECKPOINT}/manifest.json", LOOKING, REFUSED),
    *_replaced("hdf5", f"{CHECKPOINT}/shard-00000.json", LOOKING, UNREADABLE),
    *_replaced("hdf5", f"{CHECKPOINT}/shard-00000.h5", LOOKING, UNREADABLE),
    *_replaced("hdf5", f"{CHECKPOINT}/index.h5", LOOKING[:2], FINE),
    *_cases("hdf5", "manifest.json", MANIFESTS, REFUSED),
    *_cases("hdf5", "manifest.json", CLAIMS, UNREADABLE),
    *(Case(f"manifest.json: {name}", "hdf5", change, LOOKING, codes) for name, (change, codes) in SAVED.items()),
    *_cases("hdf5", "shard-00000.json", TABLES, UNREADABLE),
    Case("values: numbers of nobody", "hdf5", c.in_values(optimizer_numbers={"nobody": {"x": 1}}), RESUMING, FINE),
    *(Case(f"values: {name}", "hdf5", change, RESUMING, SHOWN) for name, change in RESUMED.items()),
]

# ------------------------------------------------------------------ dcp


def first(table: Any) -> Any:
    return next(iter(table.state_dict_metadata.values()))


def places(table: Any) -> list[Any]:
    return list(table.storage_data.values())


def sized(*shape: int) -> Callable[[Any], Any]:
    def change(table: Any) -> None:
        first(table).size = torch.Size(shape)
        first(table).chunks[0].sizes = torch.Size(shape)
        first(table).chunks[0].offsets = torch.Size([0] * len(shape))

    return change


METADATAS: dict[str, Callable[[Place], Any]] = {
    "code": c.raw_metadata(pickle.dumps(c.Ran())),
    "code in a state": c.in_metadata(lambda t: setattr(t, "planner_data", c.Ran())),
    "another pickle": c.raw_metadata(b"\x80\x04N."),
    "no table": c.in_metadata(lambda t: t.__dict__.clear()),
    "tensors that are a list": c.in_metadata(lambda t: setattr(t, "state_dict_metadata", [1])),
    "places that are a list": c.in_metadata(lambda t: setattr(t, "storage_data", [1])),
    "a name that is a number": c.in_metadata(lambda t: t.state_dict_metadata.update({1: first(t)})),
    "a name with escape codes": c.in_metadata(lambda t: t.state_dict_metadata.update({"\x1b[2J": first(t)})),
    "a size of 10^400": c.in_metadata(lambda t: setattr(first(t), "size", [10**400])),
    "a size of 2^62 x 2^62": c.in_metadata(sized(2**62, 2**62)),
    "a size of 2^40": c.in_metadata(sized(2**40)),
    "a size that is text": c.in_metadata(lambda t: setattr(first(t), "size", "12")),
    "a size that is null": c.in_metadata(lambda t: setattr(first(t), "size", None)),
    "chunks that are null": c.in_metadata(lambda t: setattr(first(t), "chunks", None)),
    "a chunk that is text": c.in_metadata(lambda t: setattr(first(t), "chunks", ["x"])),
    "a dtype that is text": c.in_metadata(lambda t: setattr(first(t).properties, "dtype", "\x1b[2J")),
    "a dtype of 8 bytes": c.in_metadata(lambda t: setattr(first(t).properties, "dtype", torch.float64)),
    "a length of 2^62": c.in_metadata(lambda t: setattr(places(t)[0], "length", 2**62)),
    "a length of nothing": c.in_metadata(lambda t: setattr(places(t)[0], "length", 0)),
    "all in one place": c.in_metadata(lambda t: [one.__dict__.update(places(t)[0].__dict__) for one in places(t)]),
    "a path outside": c.in_metadata(lambda t: setattr(places(t)[0], "relative_path", "../../../outside/canary")),
    "a path of escape codes": c.in_metadata(lambda t: setattr(places(t)[0], "relative_path", "\x1b[2J")),
    "an extension with escape codes": c.in_metadata(lambda t: setattr(places(t)[0], "transform_descriptors", ["\x1b[2J"])),
    "extensions that are shared lists": c.in_metadata(lambda t: setattr(places(t)[0], "transform_descriptors", _shared(40))),
}  # fmt: skip
ITEMS: dict[str, Callable[[Place], Any]] = {
    "a dtype of 4 bytes": c.in_metadata(lambda t: setattr(first(t).properties, "dtype", torch.int32)),
    "a place of 2^62": c.in_metadata(lambda t: setattr(places(t)[0], "offset", 2**62)),
}


def _shared(depth: int) -> list[Any]:
    one: list[Any] = ["x"]
    for _ in range(depth):
        one = [one, one]
    return one


def item(raw: bytes | None = None, content: object = None) -> Callable[[Place], Any]:
    """Replace a part of a tensor by another file of torch.save."""

    def change(place: Place) -> None:
        table = pickle.loads((place.checkpoint / ".metadata").read_bytes())
        found = places(table)[0]
        path = place.checkpoint / found.relative_path
        made = io.BytesIO()
        if raw is not None:
            with zipfile.ZipFile(made, "w") as file:
                for name, record in {
                    "data.pkl": raw,
                    "byteorder": b"little",
                    "version": b"3\n",
                    "data/0": b"\0" * 64,
                }.items():
                    file.writestr(f"archive/{name}", record)
        else:
            torch.save(content, made)
        with zipfile.ZipFile(made, "a") as file:
            file.writestr("padding", b"\0" * 5000)  # an item must not be shorter than its values
        found.offset, found.length = path.stat().st_size, len(made.getvalue())
        with open(path, "ab") as file_:
            file_.write(made.getvalue())
        c.raw_metadata(pickle.dumps(table))(place)

    return change


ITEMS |= {
    "code": item(content=c.Ran()),
    "a list": item(content=[1]),
    "an expanded tensor": item(content=torch.ones(1).expand(2**30)),
}
JSONS: dict[str, Callable[[Place], Any]] = {
    "no values": c.in_json(lambda content: content.pop("values")),
    "a checksum that is a list": c.in_json(lambda content: content.update(metadata_xxh3=[])),
    "a checksum with escape codes": c.in_json(lambda content: content.update(metadata_xxh3="\x1b[2J")),
    "keys with escape codes": lambda place: c.reseal(place.checkpoint / "hpctrain.json", b'"\\u001b[2J":1}'),
    "values that are a list": c.in_json(lambda content: content.update(values=[])),
    "a million deep": lambda place: c.reseal(place.checkpoint / "hpctrain.json", b'"values":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
}  # fmt: skip
DCP = [
    *_replaced("dcp", f"{CHECKPOINT}/.metadata", LOOKING, REFUSED),
    *_replaced("dcp", f"{CHECKPOINT}/hpctrain.json", LOOKING, REFUSED),
    *_replaced("dcp", f"{CHECKPOINT}/hpctrain__0_0.distcp", LOOKING, UNREADABLE),
    *_cases("dcp", ".metadata", METADATAS, REFUSED),
    *_cases("dcp", "parts", ITEMS, UNREADABLE),
    *_cases("dcp", "hpctrain.json", JSONS, REFUSED),
]

# ------------------------------------------------------------------ weights


def one(dtype: object = "F32", shape: object = (2,), ends: object = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": ends}}


SAFETENSORS: dict[str, Callable[[Place], Any]] = {
    "a header of 2^63": c.safetensors(one(), length=2**63),
    "a header of 2^40": c.safetensors(one(), length=2**40),
    "a header beyond the file": c.safetensors(one(), length=1000),
    "a header of nothing": c.safetensors(b"", length=0),
    "a header a million deep": c.safetensors(b"[" * 10**6 + b"]" * 10**6),
    "a shape of 2^62": c.safetensors(one(shape=[2**62]), b"\0" * 8),
    "a shape of 10^400": c.safetensors(one(shape=[10**400]), b"\0" * 8),
    "a shape that overflows": c.safetensors(one(shape=[2**32, 2**32]), b"\0" * 8),
    "a shape below zero": c.safetensors(one(shape=[-2]), b"\0" * 8),
    "ends below begins": c.safetensors(one(ends=[8, 0]), b"\0" * 8),
    "ends beyond the file": c.safetensors(one(ends=[0, 2**40]), b"\0" * 8),
    "an unknown dtype": c.safetensors(one(dtype="X9\x1b[2J"), b"\0" * 8),
    "a dtype nothing holds": c.safetensors(one(dtype="F4", shape=[16]), b"\0" * 8),
    "a name with escape codes": c.safetensors({"\x1b[2J": one()["a"]}, b"\0" * 8),
    "metadata that is a list": c.safetensors({"__metadata__": [], **one()}, b"\0" * 8),
    "5000 empty tensors": c.safetensors({str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(5_000)}),
    "2^62 rows of nothing": c.safetensors(one(shape=[2**62, 0], ends=[0, 0])),
}  # fmt: skip
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpu%stQ%s%s%sI00\nccollections\nOrderedDict\n)RtR"
)


def tensor(numel: bytes = b"K\x1e", offset: bytes = b"K\x00", shape: bytes = b"(K\x06K\x05t", stride: bytes = b"(K\x05K\x01t") -> bytes:  # fmt: skip
    return b"\x80\x02}X\x01\x00\x00\x00a" + TENSOR % (numel, offset, shape, stride) + b"s."


TORCH: dict[str, Callable[[Place], Any]] = {
    "code": c.saved(c.Ran()),
    "code in a dict": c.saved({"a": c.Ran()}),
    "a storage below zero": c.pickled(tensor(numel=b"J\xff\xff\xff\xff")),
    "an offset beyond": c.pickled(tensor(offset=b"J\xff\xff\xff\x7f")),
    "an offset below zero": c.pickled(tensor(offset=b"J\xff\xff\xff\xff")),
    "a shape beyond": c.pickled(tensor(shape=b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft")),
    "a shape of text": c.pickled(tensor(shape=b"(X\x01\x00\x00\x00xt")),
    "strides below zero": c.pickled(tensor(stride=b"(J\xff\xff\xff\xffK\x01t")),
    "a name with escape codes": c.saved({"\x1b[2J": torch.ones(1)}),
    "a name that is a number": c.saved({1: torch.ones(1)}),
    "no tensor": c.saved({"a": 1}),
    "a repeated value": c.saved({"a": torch.ones(1).expand(2**30)}),
    "1000 names for all": c.saved(dict.fromkeys(map(str, range(1000)), torch.ones(2**18).expand(64, 2**18))),
    "no pickle": c.in_zip("w.pt", lambda records: [records.pop(name) for name in list(records) if name.endswith("pkl")]),
    "no record": c.in_zip("w.pt", lambda records: [records.pop(name) for name in list(records) if "/data/" in name]),
    "another byte order": c.in_zip("w.pt", lambda records: records.update({name: b"\x1b[2J" for name in records if "order" in name})),
}  # fmt: skip
INDEXES: dict[str, Callable[[Place], Any]] = {
    "a list": c.index([]),
    "a map that is a list": c.index({"weight_map": []}),
    "a file that is a number": c.index({"weight_map": {"a": 1}}),
    "a file outside": c.index({"weight_map": {"a": "../outside/canary"}}),
    "a file that isn't there": c.index({"weight_map": {"a": "x\x1b[2J"}}),
    "a name with escape codes": c.index({"weight_map": {"\x1b[2J": "a.safetensors"}}),
    "a million deep": c.index(b"[" * 10**6 + b"]" * 10**6),
    "a long number": c.index(b'{"weight_map":' + b"1" * 10**6 + b"}"),
}
WEIGHTS_USAGE = {
    name: {"import": 2} for name in ("a_pipe", "a_link_to__dev_zero", "a_link_to_itself", "a_socket", "a_link_to_nothing_outside", "a_directory")
}  # fmt: skip


def _weights(file: str, crafts: dict[str, Callable[[Place], Any]], codes: dict[str, int]) -> list[Case]:
    return [
        Case(f"{file}: {name}", "weights", change, [["checkpoint", "import", file, "out"]], {**REFUSED, **({"import": codes[name]} if name in codes else {})})
        for name, change in crafts.items()
    ]  # fmt: skip


def _replaced_weights(file: str) -> list[Case]:
    return [
        one
        for one in _replaced("weights", file, [["checkpoint", "import", file, "out"]], REFUSED, **WEIGHTS_USAGE)
        if "link outside" not in one.name  # caches of weights consist of links
    ]


WEIGHTS = [
    *_replaced_weights("w.safetensors"),
    *_replaced_weights("w.pt"),
    *_replaced_weights("shards/model.safetensors.index.json"),
    *_weights("w.safetensors", SAFETENSORS, {"5000 empty tensors": 0, "2^62 rows of nothing": 0}),
    *_weights("w.pt", TORCH, {}),
    *_weights("shards/model.safetensors.index.json", INDEXES, {}),
    Case("old.pt: code", "weights", lambda place: torch.save(c.Ran(), place.root / "old.pt", _use_new_zipfile_serialization=False), [["checkpoint", "import", "old.pt", "out"]], REFUSED),
]  # fmt: skip

# ------------------------------------------------------------------ run directories that are only looked at

SEEN: Codes = dict.fromkeys(("runs", "top", "status", "report"), 0)
NO_RUN: Codes = {**SEEN, "top": 2, "status": 2, "report": 2}
IN_VIEW = [
    *(one for file in ("metrics.jsonl", "lock", "log/rank-00000.log", "starts.jsonl") for one in _replaced("hdf5", f"run/{file}", VIEWING, SEEN)),
    *_replaced("hdf5", "run/job.resolved.toml", VIEWING, NO_RUN, a_link_outside=SEEN,
               **{"10_GB_of_nothing": SEEN, "a_megabyte_of_anything": SEEN, "an_empty_file": SEEN}),
    *_replaced("hdf5", "run/submissions.jsonl", VIEWING, {**SEEN, "status": 2}),
    Case("submissions: escape codes", "hdf5", lambda place: (place.root / "run" / "submissions.jsonl").write_text(
        '{"target": "\\u001b[2J\\u0007", "id": "17"}\n'), VIEWING, {**SEEN, "status": 2}),
    *(Case(f"rows: {name}", "hdf5", lines(*rows), VIEWING, SEEN) for name, rows in ROWS.items()),
    *(Case(f"resolved: {name}", "hdf5", toml(text), VIEWING, SEEN) for name, text in TOMLS.items()),
    *(
        Case(f"{name}: a directory outside", "hdf5", c.directory_outside(f"run/{name}"), VIEWING, SEEN)
        for name in ("log", "checkpoints")
    ),
]  # fmt: skip


def _looked_at(cases: list[Case]) -> list[Case]:
    """A file in another one's place is refused where all files are opened: with one of them the default tests do."""
    return [
        replace(
            one,
            name=f"looked at, {one.name}",
            tier="nightly" if one.name.startswith("run/") and "submissions" not in one.name else one.tier,
        )
        for one in cases
    ]


CASES = [*IN_RUN, *_looked_at(IN_VIEW), *HDF5, *DCP, *WEIGHTS]
assert len({(case.base, case.name) for case in CASES}) == len(CASES)
