"""Mutants of valid job files, drawn by Hypothesis: mistakes of users, and malicious files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli
import tomli_w
from hypothesis import strategies as st
from jobs import TINY

from hpctrain.checking.check import check
from hpctrain.checking.resolved import resolved_tables
from hpctrain.job.raw import RawJob
from hpctrain.registry.registry import build_registry
from hpctrain.registry.slots import SLOTS

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
TEMPLATES = ROOT / "hpctrain" / "cli" / "templates"

ODD_SOURCES = """
import torch
def raises(*args, **options): raise RuntimeError("raised on purpose")
def none(**options): return None
def number(**options): return 3
def leaves(**options): raise SystemExit(3)
def no_parameter(**options): return torch.nn.ReLU()
def linear(**options): return torch.nn.Linear(4, 2)
def looks_at_values(**options):
    module = torch.nn.Linear(4, 2)
    assert module.weight.sum().item() != 0
    return module
class Data:
    def __init__(self, split="train", fault="", count=8): self.fault, self.count = fault, count
    def __len__(self):
        if self.fault == "len": raise KeyError("no length")
        return {"negative": -1, "text": "8", "huge": 10**30, "empty": 0}.get(self.fault, self.count)
    def __getitem__(self, index):
        if self.fault == "getitem": raise OSError("no such sample")
        if self.fault == "lambda": return lambda: 0
        return torch.zeros(4), torch.tensor(1)
class Described(Data):
    def lengths(self):
        if self.fault == "lengths": raise ValueError("no lengths")
        return {"words": ["a", "b"], "few": [1], "none": [], "nested": [[1, 2], [3]], "zero": [0] * self.count}.get(
            self.fault, [4] * self.count
        )
    def fingerprint(self):
        if self.fault == "fingerprint": raise TypeError("no fingerprint")
        return None if self.fault == "no fingerprint" else "f"
"""
"""A module with faulty models, datasets and optimizers, and with callables that are none of these."""

REFERENCES = [
    "odd_callables:raises", "odd_callables:none", "odd_callables:number", "odd_callables:leaves",
    "odd_callables:no_parameter", "odd_callables:linear", "odd_callables:looks_at_values", "odd_callables:Data",
    "odd_callables:Described", "odd_callables:gone", "odd_callables:ODD.x", "gone:x", "torch.nn:Linear",
    "torch.nn:Module", "torch.nn:ReLU", "torch.nn.functional:cross_entropy", "torch.optim:Adagrad",
    "torch.optim:LBFGS", "builtins:dict", "builtins:int", "os:getcwd", "math:sqrt", "sys:exit", "torch:nn",
    "torch:zeros", "json:loads", "os.path:join", "a:", ":a", "..:..", "a.b:c.d", "1:2", "cnn:build",
    "cnn:samples", "cnn:Images", "llama:build", "llama:loss",
]  # fmt: skip
FAULTS = [
    "len", "negative", "text", "huge", "empty", "getitem", "lambda", "lengths", "words", "few", "none", "nested", "zero",
    "fingerprint", "no fingerprint",
]  # fmt: skip
LITERALS = {
    "@digits": "9" * 5000,
    "@hexadecimal": "0x" + "f" * 5000,
    "@lists": "[" * 90 + "]" * 90,
    "@many lists": "[" * 3000 + "]" * 3000,
    "@tables": "{a=" * 90 + "1" + "}" * 90,
    "@many tables": "{a=" * 500 + "1" + "}" * 500,
    "@dotted table": "{" + "a." * 2000 + "a = 1}",
    "@float": "1e400",
    "@date": "1979-05-27T07:32:00Z",
    "@time": "07:32:00",
    "@nothing": "",
}
"""Literals that tomli_w doesn't write; they replace these texts."""
PATHS = [
    "a" * 300, "a/" * 3000, "a\0b", ".", "..", "/", "loop.toml", "self.toml", "base.toml", "chain.toml", "directory", "/dev/null",
    "/dev/zero", "/proc/self/mem", "corpus", "corpus/*", "corpus/a.txt", "tokens.bin", "tokens.npy", "~", "\udcff", "gone/x",
    "é" * 130, "file/out", "unreadable", "job.toml",
]  # fmt: skip
INTEGERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    -1,
    255,
    2**31,
    2**31 - 1,
    2**32,
    2**40,
    2**60,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**18,
    10**25,
    10**400,
    10**6,
]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, 1.5, -1.0, float("nan"), float("inf"), float("-inf"), 1e18, 1e-9]
TEXTS = [
    "", " ", "a", "*", "[", "[!", "**", "a" * 100_000, "\x1b[31m", "\n", "\r\n", "\x7f", "\u202e", "\ud7ff", "漢" * 99, "auto",
    "none",
    "fp8", "tf32", "fp16", "fp64", "bf16", "dcp", "hdf5", "gpt", "adamw", "sgd", "adamw-8bit", "top-k", "powersgd", "stdlib-text",
    "text", "tokens", "synthetic", "tensorboard", "selective", "full", "cosine", "linear", "mpi", "nccl", "gloo", "1GB", "1e9GB",
    "9" * 400 + "GB", "0", "1", "true", "{", "%s", "{0}", "layers.*", "*.bias", "block", "colwise", "rowwise",
]  # fmt: skip

integers = st.one_of(st.sampled_from(INTEGERS), st.integers(-5, 40), st.integers())
floats = st.one_of(st.sampled_from(FLOATS), st.floats())
texts = st.one_of(
    st.sampled_from([*TEXTS, *PATHS, *REFERENCES, *FAULTS]), st.text(st.characters(codec="utf-8"), max_size=12)
)
scalars = st.one_of(integers, floats, texts, st.booleans(), st.sampled_from(list(LITERALS)))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts.filter(bool), inner, max_size=3)),
    max_leaves=4,
)


@dataclass(frozen=True)
class Mutant:
    """The bytes of a job file, and the words after `hpctrain check`."""

    content: bytes
    words: tuple[str, ...]


def lay_out(directory: Path) -> None:
    """The files that valid jobs and mutants name, in an empty directory."""
    for file in ("images/cnn.py", "llama/llama.py"):
        shutil.copy(EXAMPLES / file, directory)
    images, labels = np.zeros((100, 16, 16), np.uint8), np.arange(100, dtype=np.uint8) % 10
    splits = ("train", "validation")
    np.savez(
        directory / "images.npz", **{f"{s}_{n}": a for s in splits for n, a in (("images", images), ("labels", labels))}
    )
    (directory / "my_project.py").write_text(
        "import torch\n"
        "def build(width): return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))\n"
        "def samples(split): return [(torch.ones(4), torch.tensor(1))] * 8\n"
    )
    (directory / "odd_callables.py").write_text(ODD_SOURCES)
    (directory / "corpus").mkdir()
    (directory / "corpus" / "a.txt").write_text("the quick brown fox\njumps over the lazy dog\n" * 99)
    (directory / "directory").mkdir()
    (directory / "tokens.bin").write_bytes(bytes(range(64)) * 64)
    (directory / "file").write_text("")
    (directory / "weights").write_text("")
    (directory / "loop.toml").symlink_to("loop.toml")
    (directory / "base.toml").write_text('[optimizer]\nname = "sgd"\nlr = 0.1\n')
    (directory / "self.toml").write_text('extends = "self.toml"\n')
    (directory / "chain.toml").write_text('extends = "base.toml"\n[job]\nname = "chain"\n')


def _small(tables: dict[str, Any]) -> dict[str, Any]:
    """An example made small enough to be checked in milliseconds."""
    if tables["model"]["name"] == "gpt":
        tables["model"] |= {"hidden_size": 16, "layers": 2, "attention_heads": 2, "max_seq_length": 8}
    if tables["model"]["name"] == "llama:build":
        tables["model"] |= {"hidden_size": 16, "layers": 1}
    if tables["dataset"]["name"] == "stdlib-text":
        tables["dataset"]["max_bytes"] = 100_000
    if "weights" in tables["model"]:
        tables["model"]["weights"] = "weights"
    if "seq_length" in tables["dataset"]:
        tables["dataset"]["seq_length"] = 8
    tables["job"]["output_dir"] = "out"
    tables["batch"] = {"global_size": 4, "micro_size": 2}
    return tables


def _variants() -> list[dict[str, Any]]:
    """Jobs with the tables that no example has."""
    parallel = {"tensor": {"size": 2, "plan": {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}}}
    pipeline = {"pipeline": {"size": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2}, "context": 1}
    return [
        TINY | {"parallelism": parallel, "sharding": {"stage": 2, "reduce_bucket_size": "1MB"}},
        TINY | {"parallelism": pipeline, "model": TINY["model"] | {"layers": 4}, "activation_checkpointing": {"mode": "full"}},
        TINY | {"parallelism": {"context": {"size": 2, "method": "ulysses"}}, "compile": {"enabled": True}},
        TINY | {"batch": {"tokens": 64, "micro_tokens": 16}, "dataset": {"name": "synthetic", "min_length": 2, "samples": 90}},
        TINY | {"compression": {"name": "top-k"}, "logger": [{"name": "tensorboard"}], "sharding": {"stage": 2}},
        TINY | {"hook": [{"name": "early-stopping", "patience": 2}], "evaluation": {"every_steps": 2}, "sharding": {"stage": 3}},
        TINY | {"precision": {"mode": "fp16"}, "checkpoint": {"every_steps": 2, "keep": 2, "format": "dcp"}},
        TINY | {
            "dataset": {"name": "text", "files": ["corpus/*.txt"], "documents": "line"},
            "batch": {"tokens": 64, "micro_tokens": 16},
        },
        TINY | {"dataset": {"name": "tokens", "path": "tokens.bin", "dtype": "uint8"}, "compression": {"name": "powersgd"}},
        TINY | {
            "model": {"name": "odd_callables:linear", "loss": "torch.nn.functional:cross_entropy"},
            "dataset": {"name": "odd_callables:Described", "fault": ""},
        },
    ]  # fmt: skip


BASES = [_small(tomli.loads(file.read_text())) for file in (*EXAMPLES.glob("**/*.toml"), *TEMPLATES.glob("*.toml"))]
BASES += [resolved_tables(check(RawJob(tables, {}, "job.toml"), None)) for tables in _variants()[:-1]]
BASES += _variants()
OPTIONS = sorted(
    {(slot, key) for (slot, _), entry in build_registry().entries.items() for key in entry.cls.Options.model_fields}
)
"""Every key that a plugin takes, with its slot."""


PLUGINS = sorted((slot, name) for slot, name in build_registry().entries)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*place, key) for key, _ in items]
    return found + [one for key, inner in items for one in _places(inner, (*place, key))]


@st.composite
def changed_tables(draw: st.DrawFn) -> dict[str, Any]:
    """A valid job with one to three changes of its tables."""
    tables: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(BASES))))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        _change(draw, tables)
    return tables


def _change(draw: st.DrawFn, tables: dict[str, Any]) -> None:
    kind = draw(
        st.sampled_from(
            [
                "value",
                *["alike"] * 6,
                *["plugin"] * 2,
                "option",
                *["fault"] * 2,
                "take away",
                "rename",
                "swap",
                "extends",
            ]
        )
    )
    places = _places(tables)
    if kind == "extends":
        tables["extends"] = draw(st.one_of(st.sampled_from(PATHS), values))
    elif kind == "fault":  # of the user's own code
        if draw(st.booleans()):
            name, key = (
                draw(st.sampled_from(["odd_callables:Data", "odd_callables:Described"])),
                draw(st.sampled_from(FAULTS)),
            )
            tables["dataset"] = {"name": name, "fault": key, "count": draw(st.sampled_from([8, 8, 10**6, -3, 0]))}
        else:
            slot = draw(st.sampled_from(["model", "dataset", "optimizer"]))
            own = (
                {"loss": draw(st.sampled_from(REFERENCES))}
                if slot == "model"
                else {"lr": 0.1}
                if slot == "optimizer"
                else {}
            )
            tables[slot] = {"name": draw(st.sampled_from(REFERENCES)), **own}
    elif kind == "plugin":
        slot, name = draw(st.sampled_from(PLUGINS))
        if slot == "parallelism":
            tables[slot] = {name: draw(st.sampled_from([1, 2, 3]))}
        elif slot == "scheduler":
            tables[slot] = {name: {}}
        elif slot in ("logger", "hook"):
            tables[slot] = [{"name": name}]
        else:
            chosen: dict[str, Any] = {SLOTS[slot].key or "name": name}
            if slot == "sharding" and draw(st.booleans()):
                chosen = {"stage": int(name.removeprefix("zero-"))}
            before = tables.get(slot)
            kept = (
                {key: value for key, value in before.items() if key in ("lr", "samples")}
                if isinstance(before, dict)
                else {}
            )
            tables[slot] = chosen | (kept if slot in ("optimizer", "dataset") else {})
    elif kind == "option":
        slot, key = draw(st.sampled_from(OPTIONS))
        table = tables.setdefault(slot, {})
        if isinstance(table, dict):
            table[key] = draw(values)
    elif places:
        *above, key = draw(st.sampled_from(places))
        holder: Any = tables
        for part in above:
            holder = holder[part]
        if kind == "take away":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(key)
        elif kind == "swap":
            holder[key] = json.loads(json.dumps(_at(tables, draw(st.sampled_from(places)))))
        else:
            holder[key] = draw(_alike(holder[key]) if kind == "alike" else values)


def _alike(value: Any) -> st.SearchStrategy[Any]:
    """Odd values of the same type, which get further than others."""
    kinds = {bool: st.booleans(), int: integers, float: floats, str: texts, list: st.lists(scalars, max_size=3)}
    return kinds.get(type(value), values)


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for part in place:
        value = value[part]
    return value


def written(tables: dict[str, Any]) -> str:
    """The tables as TOML, with the literals in place."""
    text = tomli_w.dumps(tables)
    for name, literal in LITERALS.items():
        text = text.replace(f'"{name}"', literal)
    return text


@st.composite
def changed_text(draw: st.DrawFn, text: str) -> bytes:
    """Text changed by a slip in the editor: cut, doubled, left out, overwritten."""
    content, lines = text.encode("utf-8", "surrogateescape"), text.split("\n")
    at = draw(st.integers(0, len(content)))
    kind = draw(st.sampled_from(["cut", "insert", "double", "leave out", "overwrite", "carriage returns", "mark"]))
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        odd = st.sampled_from(
            [b"\0", b"\xff", b"[", b"]" * 9, b'"', b"'''", b"=", b"[" * 3000, b"a." * 2000, b"\n[job]\n", b"{", b","]
        )
        return content[:at] + draw(st.one_of(odd, st.binary(max_size=4))) + content[at:]
    if kind == "overwrite":
        return content[:at] + draw(st.binary(min_size=1, max_size=3)) + content[at + 1 :]
    if kind == "carriage returns":
        return content.replace(b"\n", draw(st.sampled_from([b"\r\n", b"\r", b"\n\n", b"\x0b"])))
    if kind == "mark":
        return b"\xef\xbb\xbf" * draw(st.integers(1, 2)) + content
    line = draw(st.integers(0, len(lines) - 1))
    changed = lines[:line] + (lines[line : line + 1] * 2 if kind == "double" else []) + lines[line + 1 :]
    return "\n".join(changed).encode("utf-8", "surrogateescape")


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """A --set."""
    if draw(st.integers(0, 9)) == 0:
        return draw(
            st.one_of(texts, st.sampled_from(["a." * 2000 + "a=1", "=", "a.b", ".=.", "job.steps==1"]))
        ).replace("\0", "")
    *table, key = [str(part) for part in draw(st.sampled_from(_places(draw(st.sampled_from(BASES)))))]
    value = draw(values)
    text = written({"value": value}).partition("=")[2] if draw(st.booleans()) else str(value)[:6000]
    return ".".join([*(table or ["job"]), key]) + "=" + text.strip().replace("\0", "")


@st.composite
def mutants(draw: st.DrawFn) -> Mutant:
    """A job file with changed tables, changed text, --set or all of them, checked for some number of ranks."""
    kinds = draw(
        st.sampled_from([("tables",), ("tables",), ("text",), ("set",), ("tables", "text"), ("tables", "set")])
    )
    tables = draw(changed_tables()) if "tables" in kinds else draw(st.sampled_from(BASES))
    text = written(tables)
    content = draw(changed_text(text)) if "text" in kinds else text.encode("utf-8", "surrogateescape")
    words = [
        word
        for one in (draw(st.lists(overrides(), min_size=1, max_size=2)) if "set" in kinds else [])
        for word in ("--set", one)
    ]
    ranks = draw(st.sampled_from([None, None, "1", "2", "4", "7", "0", "1000000000000000000000"]))
    return Mutant(content, (*words, *(["-n", ranks] if ranks else [])))


@st.composite
def small_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Changed tables that, if valid, train two steps within a second on one rank."""
    tables = draw(changed_tables())
    for slot in ("model", "batch", "dataset", "evaluation", "checkpoint", "job"):
        table = tables.get(slot)
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, int) and value > 1000 and (slot, key) != ("dataset", "count"):
                table[key] = 8
    for slot, key, value in (("job", "steps", 2), ("compile", "enabled", False), ("dataset", "workers", 0)):
        if isinstance(tables.setdefault(slot, {}), dict):
            tables[slot][key] = value
    for slot, key in (("job", "epochs"), ("model", "weights"), ("job", "output_dir")):
        if isinstance(tables.get(slot), dict):
            tables[slot].pop(key, None)
    for axis in ("tensor", "pipeline", "context", "replicate"):
        if isinstance(tables.get("parallelism"), dict) and draw(st.integers(0, 3)):
            tables["parallelism"].pop(axis, None)
    return tables
