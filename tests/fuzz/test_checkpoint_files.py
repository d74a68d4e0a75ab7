"""Changes files of checkpoints and weights at random: bytes, operations of a pickle, any values in JSON, with matching
checksums. Every command must end with a sentence, in seconds, and read nothing else.

    python -m pytest tests/fuzz/test_checkpoint_files.py --draws 2000

draws this many of each kind instead of the few of every run.
"""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crafting as c
import pytest
from confined import Confined, confined
from crafting import CHECKPOINT, Place
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

LOOKING = [
    ["checkpoint", "verify", CHECKPOINT],
    ["checkpoint", "show", CHECKPOINT],
    ["checkpoint", "diff", CHECKPOINT, "whole"],
    ["checkpoint", "list", "run"],
    ["checkpoint", "export", CHECKPOINT, "--to", "torch", "exported"],
    ["restore", CHECKPOINT],
]
NASTY = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**400, 1.5, 1e308, "", "\x1b[2J", "x" * 5000, "../x"]),
    st.sampled_from([[], {}, [[]], [0], [2**62, 2**62], [1] * 3000, {"": 0}, {"$tuple": 1}, {"$dict": [[[], 0]]}, {"$": 1}]),
    st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([float("inf"), float("nan")]),
)  # fmt: skip
Draw = Callable[[st.SearchStrategy[Any]], Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Confined]:
    with confined() as one:
        yield one


@pytest.fixture(scope="module")
def bases(server: Confined, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return c.make_bases(tmp_path_factory.mktemp("bases"), server)


# ------------------------------------------------------------------ mutations


def other_bytes(draw: Draw, raw: bytes) -> bytes:
    """A few bytes changed, removed, inserted or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        length = draw(st.integers(0, 16))
        what = draw(st.sampled_from(["set", "insert", "delete", "repeat", "cut"]))
        new = draw(st.binary(min_size=1, max_size=8)) if what in ("set", "insert") else b""
        if what == "cut":
            raw = raw[:at]
        elif what == "repeat":
            raw = raw[: at + length] + raw[at:]
        else:
            raw = raw[:at] + new + raw[at + {"set": len(new), "insert": 0, "delete": length}[what] :]
    return raw


def other_json(draw: Draw, content: Any) -> Any:
    """An odd value somewhere, an entry removed, or an entry doubled."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        here, place = None, content
        while isinstance(place, (dict, list)) and place and (here is None or draw(st.integers(0, 3))):
            here, key = (
                place,
                draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place))))),
            )
            place = here[key]
        if here is None:
            return nasty(draw)
        what = draw(st.sampled_from(["put", "put", "near", "delete", "repeat", "move"]))
        if what == "near" and type(place) is int:
            here[key] = place + draw(st.sampled_from([-1, 1, 8, 2**32, 2**62]))
        elif what == "delete":
            del here[key]
        elif what == "repeat" and isinstance(here, list):
            here.insert(key, place)
        elif what == "move" and isinstance(here, dict):
            here[draw(st.one_of(st.text(max_size=4), st.sampled_from(["\x1b[2J", "a/../b", "$x"])))] = here.pop(key)
        else:
            here[key] = nasty(draw)
    return content


def nasty(draw: Draw) -> Any:
    """An odd value of one's own: the next change may be inside it, and NASTY must stay as it is."""
    return copy.deepcopy(draw(NASTY))


def other_operations(draw: Draw, raw: bytes) -> bytes:
    """Operations of a pickle removed, repeated and exchanged."""
    places = [place for _, _, place in pickletools.genops(raw)]
    operations = [raw[begin:end] for begin, end in zip(places, [*places[1:], len(raw)], strict=True)]
    for _ in range(draw(st.integers(1, 6))):
        one, other = (draw(st.integers(0, len(operations) - 1)) for _ in range(2))
        what = draw(st.sampled_from(["delete", "repeat", "exchange", "many"]))
        if what == "delete" and len(operations) > 1:
            del operations[one]
        elif what == "exchange":
            operations[one], operations[other] = operations[other], operations[one]
        else:
            operations[other:other] = [operations[one]] * (draw(st.integers(2, 2000)) if what == "many" else 1)
    return b"".join(operations)


def other_attributes(draw: Draw, table: Any) -> None:
    """An odd value in one of DCP's records."""
    tensors, places = list(table.state_dict_metadata.values()), list(table.storage_data.values())
    records = [
        *tensors,
        *(one.properties for one in tensors),
        *(chunk for one in tensors for chunk in one.chunks),
        *places,
    ]
    for _ in range(draw(st.integers(1, 3))):
        record = draw(st.sampled_from(records))
        key = draw(st.sampled_from(sorted(vars(record))))
        old = getattr(record, key)
        value = draw(NASTY)
        if type(old) is int and draw(st.booleans()):
            value = old + draw(st.sampled_from([-1, 1, 64, 2**31, 2**62]))
        setattr(record, key, draw(st.sampled_from([value, getattr(draw(st.sampled_from(records)), key, value)])))


# ------------------------------------------------------------------ kinds


def sealed_bytes(draw: Draw, path: Path) -> str:
    """Change the bytes after the first line of a sealed file; return the matching checksum."""
    rest = path.read_bytes().partition(b"\n")[2]
    return c.reseal(path, other_bytes(draw, rest))


def sealed_json(draw: Draw, path: Path) -> str:
    changed = other_json(draw, c.content_of(path))
    return c.reseal(path, json.dumps(changed).encode()[1:] if isinstance(changed, dict) else b'"x":1}')


def manifest(draw: Draw, place: Place) -> None:
    draw(st.sampled_from([sealed_json, sealed_json, sealed_bytes]))(draw, place.checkpoint / "manifest.json")


def table(draw: Draw, place: Place) -> None:
    change = draw(st.sampled_from([sealed_json, sealed_json, sealed_bytes]))
    checksum = change(draw, place.checkpoint / "shard-00000.json")
    c.rewrite(place.checkpoint / "manifest.json", lambda content: content["shards"][0].update(table=checksum))


def shard(draw: Draw, place: Place) -> None:
    path = place.checkpoint / "shard-00000.h5"
    path.write_bytes(other_bytes(draw, path.read_bytes()))


def metadata(draw: Draw, place: Place) -> None:
    raw = (place.checkpoint / ".metadata").read_bytes()
    kind = draw(st.sampled_from(["bytes", "operations", "attributes", "attributes"]))
    if kind == "attributes":
        table = pickle.loads(raw)
        other_attributes(draw, table)
        try:
            raw = pickle.dumps(table)
        except RuntimeError:  # torch doesn't write some of them
            reject()
    c.raw_metadata({"bytes": other_bytes, "operations": other_operations}.get(kind, lambda _, same: same)(draw, raw))(
        place
    )


def dcp_files(draw: Draw, place: Place) -> None:
    path = place.checkpoint / draw(st.sampled_from(["hpctrain__0_0.distcp", "hpctrain.json"]))
    if path.suffix == ".json":
        sealed_json(draw, path)
    else:
        path.write_bytes(other_bytes(draw, path.read_bytes()))


def safetensors(draw: Draw, place: Place) -> None:
    path = place.root / "w.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if draw(st.booleans()):
        path.write_bytes(other_bytes(draw, raw))
    else:
        header = json.dumps(other_json(draw, json.loads(raw[8 : 8 + length]))).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def torch_file(draw: Draw, place: Place) -> None:
    name = draw(st.sampled_from(["w.pt", "w.pt", "old.pt"]))
    kind = draw(st.sampled_from([other_bytes, other_operations]))
    if name == "old.pt" or (kind is other_bytes and draw(st.booleans())):
        (place.root / name).write_bytes(other_bytes(draw, (place.root / name).read_bytes()))
        return
    with zipfile.ZipFile(place.root / name) as saved:
        pkl = next(one for one in saved.namelist() if one.endswith("data.pkl"))
        changed = kind(draw, saved.read(pkl))
    c.in_zip(name, lambda records: records.update({pkl: changed}))(place)


def index(draw: Draw, place: Place) -> None:
    path = place.root / "shards" / "model.safetensors.index.json"
    path.write_text(json.dumps(other_json(draw, json.loads(path.read_text()))))


IMPORTS = [
    ["checkpoint", "import", name, name.replace(".", "-").replace("/", "-")]
    for name in ("w.safetensors", "w.pt", "old.pt")
]
IMPORTS.append(["checkpoint", "import", "shards/model.safetensors.index.json", "index"])
KINDS: dict[str, tuple[Callable[[Draw, Place], None], str, list[list[str]]]] = {
    "manifest": (manifest, "hdf5", LOOKING),
    "table": (table, "hdf5", LOOKING),
    "shard": (shard, "hdf5", LOOKING),
    "metadata": (metadata, "dcp", LOOKING),
    "dcp files": (dcp_files, "dcp", LOOKING),
    "safetensors": (safetensors, "weights", IMPORTS[:1]),
    "torch": (torch_file, "weights", IMPORTS[1:3]),
    "index": (index, "weights", IMPORTS[3:]),
}


@pytest.mark.cases(thorough=["safetensors"], rest="nightly")
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files(
    kind: str, bases: dict[str, Path], server: Confined, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    change, base, commands = KINDS[kind]
    draws = pytestconfig.getoption("--draws") or 40

    @settings(max_examples=draws, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def one(data: st.DataObject) -> None:
        root = tmp_path / "x"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(bases[base], root)
        place = Place(root)
        place.sing()
        change(data.draw, place)
        faults = [
            f"{' '.join(ended.words)}: {fault}" for ended in server.run(root, *commands) for fault in ended.faults()
        ]
        assert not faults + place.silence()

    one()
