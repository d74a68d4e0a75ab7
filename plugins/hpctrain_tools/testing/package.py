"""`hpctrain plugins new`: a package with one plugin, the example of its slot's page, that passes the kit at once."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from hpctrain.api import UsageError
from hpctrain.version import __version__

_PROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "{sentence}"
requires-python = ">=3.10"
dependencies = ["hpctrain>={version}"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points.hpctrain]
"{slot}.{name}" = "{package}.plugin"

[tool.setuptools]
packages = ["{package}"]
"""
_TEST = '''\
"""The plugin keeps the promises of its slot: https://hpctrain.github.io/hpctrain/plugins/testing/."""

from hpctrain.testing import check_plugin
from {package}.plugin import {cls}


def test_it_keeps_its_promises() -> None:
    check_plugin({cls})
'''
_README = """\
# {distribution}

{sentence}

    pip install -e '.[test]'
    pytest

A job chooses it in [{slot}]: `hpctrain plugins show {slot} {name}` prints its options.
"""
_WORKFLOW = """\
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with: {python-version: "3.11"}
      - run: pip install -e '.[test]' 'hpctrain[mpich]'
      - run: pytest
"""


def write_package(slot: str, name: str, directory: Path) -> None:
    """Write the package into `directory`, which must not exist. Raises UsageError."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UsageError(
            f"found the name {name!r}, expected small letters, digits and single dashes, such as my-{slot}"
        )
    cls = "".join(word.capitalize() for word in name.split("-"))
    values = {"slot": slot, "name": name, "cls": cls, "version": __version__, "distribution": f"hpctrain-{name}"}
    values["package"] = values["distribution"].replace("-", "_")
    code = _renamed((files("hpctrain_tools") / "templates" / "plugins" / f"{slot}.txt").read_text(), cls, name)
    values["sentence"] = code.split('"""')[1].splitlines()[0]
    texts = {
        "pyproject.toml": _PROJECT.format(**values),
        "README.md": _README.format(**values),
        f"{values['package']}/__init__.py": f'"""{values["sentence"]}"""\n',
        f"{values['package']}/plugin.py": code,
        f"tests/test_{name.replace('-', '_')}.py": _TEST.format(**values),
        ".github/workflows/test.yml": _WORKFLOW,
    }
    try:
        directory.mkdir(parents=True)
        for path, text in texts.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} can't be made: {error.strerror}; expected the name of a new directory") from None


def _renamed(code: str, cls: str, name: str) -> str:
    """The example with a class and a name of the user's. Classes that begin with the old one's name follow."""
    old = re.findall(r"return \[(\w+)\]", code)[-1]
    body = code.index(f"class {old}(")
    named = re.search(r'^    name = "([^"]+)"', code[body:], re.MULTILINE)
    assert named is not None  # a test makes each of them
    code = code[:body] + code[body:].replace(named[0], f'    name = "{name}"', 1)
    code = code.replace(f"] {named[1]}:", f"] {name}:")
    return re.sub(rf"\b{old}(?=[A-Z]|\b)", cls, code)
