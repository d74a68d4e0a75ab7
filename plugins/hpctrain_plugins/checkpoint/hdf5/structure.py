"""Lists the HDF5 objects that do not belong in a shard.

Runs as a separate script and imports nothing of hpctrain: a crafted or damaged file can crash HDF5 or keep it busy for
ever, and then only the child process is lost. Prints a JSON list with one sentence per fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import h5py
from h5py import h5a, h5d, h5g, h5l, h5t

_LINKS = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "an external link"}

Place = tuple[int, int, str, list[int]]
"""First byte, number of bytes, the encoded HDF5 datatype in hexadecimal, and the shape."""
Expected = dict[str, Place]
"""The table's datasets by their paths."""


def faults(path: str, expected: Expected) -> list[str]:
    """A sentence per object that isn't a plain dataset of the table, and per missing dataset."""
    found: set[str] = set()
    sentences: list[str] = []
    with h5py.File(path, "r", locking=False) as file:
        root = h5g.open(file.id, b"/")
        for name, fault in (("/", _attribute_fault(root)), *_walk(root, "", expected, set())):
            found.add(name)
            if fault is not None:
                sentences.append(f"{name} {fault}")
    return sentences + [f"{name} is missing" for name in expected if name not in found]


def _walk(
    group: h5g.GroupID, prefix: str, expected: Expected, visited: set[tuple[int, int]]
) -> Iterator[tuple[str, str | None]]:
    """Each object's path with its fault. Follows only hard links to groups, each group once."""
    for raw in group:
        name = prefix + raw.decode(errors="backslashreplace")
        kind = group.links.get_info(raw).type
        if kind != h5l.TYPE_HARD:
            yield name, f"is {_LINKS.get(kind, 'a link of an unknown type')}; only datasets belong into a shard"
            continue
        item = h5py.h5o.open(group, raw)
        place = h5py.h5o.get_info(item)
        if (place.fileno, place.addr) in visited:
            yield name, "is a second link to the same object"
            continue
        visited.add((place.fileno, place.addr))
        if isinstance(item, h5g.GroupID):
            yield name, _attribute_fault(item)
            yield from _walk(item, name + "/", expected, visited)
        elif isinstance(item, h5d.DatasetID):
            yield name, _dataset_fault(item, expected.get(name))
        else:
            yield name, f"is a {type(item).__name__}; only datasets belong into a shard"


def _dataset_fault(dataset: h5d.DatasetID, place: Place | None) -> str | None:
    """The fault of a dataset that isn't contiguous, internal and unfiltered, with the manifest's type and place."""
    creation = dataset.get_create_plist()
    layout = creation.get_layout()
    if layout == h5d.VIRTUAL:
        return "is a virtual dataset, which reads other files"
    if creation.get_external_count():
        return f"has its data in another file, {creation.get_external(0)[0].decode(errors='backslashreplace')!r}"
    if creation.get_nfilters():
        return f"goes through the filter {creation.get_filter(0)[3].decode(errors='backslashreplace')!r}"
    if layout != h5d.CONTIGUOUS:
        return "isn't stored contiguously"
    if place is None:
        return "isn't in the table"
    if not dataset.get_type().equal(h5t.decode(bytes.fromhex(place[2]))):
        return "isn't of the type that the manifest says"
    if list(dataset.shape) != place[3]:
        return f"has the shape {list(dataset.shape)}, in the table {place[3]}"
    nbytes = dataset.get_space().get_simple_extent_npoints() * dataset.get_type().get_size()
    if (dataset.get_offset() or 0, nbytes) != place[:2]:
        return f"has {nbytes} bytes from byte {dataset.get_offset()} on, in the table {place[1]} from {place[0]} on"
    return _attribute_fault(dataset)


def _attribute_fault(item: h5d.DatasetID | h5g.GroupID) -> str | None:
    """The fault of any attribute but `dtype`, a text of fixed length: others can refer to anything. None without a fault."""
    for number in range(h5a.get_num_attrs(item)):
        attribute = h5a.open(item, index=number)
        kind = attribute.get_type()
        if attribute.name != b"dtype" or kind.get_class() != h5t.STRING or kind.is_variable_str():
            return f"has the attribute {attribute.name.decode(errors='backslashreplace')!r}"
    return None


if __name__ == "__main__":
    try:
        answer = faults(sys.argv[1], {name: tuple(place) for name, place in json.load(sys.stdin).items()})
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        answer = [f"HDF5 can't read it: {error}"]
    print(json.dumps(answer))
