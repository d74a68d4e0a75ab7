"""The pages say what is there: every slot's README, the keys of a job file, the exit codes, the decisions, and every link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llms_page
import pytest
import reference_pages
import yaml

from hpctrain.base import errors
from hpctrain.job.tables import Job
from hpctrain.registry.registry import build_registry
from hpctrain.registry.slots import SLOTS

ROOT = Path(__file__).parent.parent.parent
SOURCE = "https://github.com/hpctrain/hpctrain/blob/main/"
"""The address of files outside of docs/, which the site does not have."""
PLUGINS, TOOLS = ROOT / "plugins" / "hpctrain_plugins", ROOT / "plugins" / "hpctrain_tools"
DISTRIBUTIONS = [path.parent / "README.md" for path in (ROOT / "plugins").glob("*/pyproject.toml")]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").glob("**/*.md") if page.parent != reference_pages.PAGES),
    *PLUGINS.glob("*/README.md"),
    *TOOLS.glob("*/README.md"),
    *DISTRIBUTIONS,
]


def without_code(page: Path) -> str:
    """A page's prose: neither fenced blocks nor inline code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> Iterator[str]:
    """The links of a page to files of the repository, relative to it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if target.startswith(SOURCE):
            yield os.path.relpath(ROOT / target.removeprefix(SOURCE), page.parent)
        elif not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    blocks = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", blocks, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_has_a_readme_that_names_its_plugins(slot: str) -> None:
    page = next((TOOLS if (TOOLS / slot).is_dir() else PLUGINS).glob(f"{slot}/README.md"), PLUGINS / slot / "README.md")
    assert page.is_file(), f"{page} is missing: write what the slot decides, its plugins, its contract, how to add one"
    text = page.read_text()
    entries = build_registry().entries
    ours = {name for (of, name), entry in entries.items() if of == slot and entry.source.distribution == "hpctrain"}
    rows = re.findall(r"^\| (`[^|]+`) \|(?! \|)", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named == ours, f"{page}: the first column of its table names the plugins of the slot, no more and no less"
    assert SLOTS[slot].hook in text and SLOTS[slot].contract.__name__ in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_made = target.parent == reference_pages.PAGES and target.name in reference_pages.WRITTEN
        assert is_made or target.exists(), f"{page.relative_to(ROOT)}: {link} leads nowhere"
        if anchor:
            text = reference_pages.page(target.name) if is_made else target.read_text()
            assert anchor in anchors(text), f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_no_line_of_a_page_is_long() -> None:
    """Apart from tables, code and addresses."""
    long = []
    for page in PAGES:
        is_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if len(re.sub(r"\(https:[^)]*\)", "", line)) > 120 and not is_code and not line.startswith(("|", "    ")):
                long.append(f"{page.relative_to(ROOT)}:{number}")
    assert not long


def test_the_pages_are_found_from_the_readme() -> None:
    """By links, however many: a page that none leads to is not read."""
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
            waiting += [target for target in targets if target.suffix == ".md" and target.is_file()]
    homes = (ROOT / "docs", ROOT / "docs" / "decisions", ROOT / "docs" / "plugins")
    expected = {page for page in PAGES if page.parent in homes}
    assert not expected.union(DISTRIBUTIONS) - found


def test_every_key_of_a_job_file_is_documented() -> None:
    guide, reference = (ROOT / "docs" / "job-file.md").read_text(), reference_pages.page("job-file.md")
    schema = Job.model_json_schema()
    for table in schema["properties"]:
        assert f"[{table}]" in guide, table
    for table, content in schema["$defs"].items():
        for key in content.get("properties", {}):
            assert re.search(rf"`(\w+\.)?{key}`", reference), (table, key)


def test_the_site_has_every_page_and_only_these() -> None:
    """The navigation of mkdocs.yml, and the list for programs that is made of it (`python tests/llms_page.py`)."""
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(llms_page.flat(sections))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    there |= {f"reference/{name}" for name in reference_pages.WRITTEN}
    assert listed == {page for page in there if not re.match(r"decisions/\d", page)}
    assert llms_page.PAGE.read_text() == llms_page.page()


def test_the_lines_of_own_loops_are_those_counted() -> None:
    """`python benchmarks/own_loops/count.py` prints the table anew."""
    words = [sys.executable, str(ROOT / "benchmarks" / "own_loops" / "count.py")]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"\n\n{printed}\n" in (ROOT / "docs" / "own-loop.md").read_text()
    assert (
        "\n| classifier | 7 | 6 |" in printed
    )  # counted by hand: with, setup, two fors, backward, step, zero_grad; the job


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for name, code in vars(errors).items():
        if name.startswith("EXIT_"):
            assert f"\n| {code} |" in text, name


def test_decisions_have_numbers_of_their_own_and_are_listed() -> None:
    files = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert len({name[:4] for name in files}) == len(files)
    for name in files:
        assert re.match(rf"# {name[:4]}: .", (ROOT / "docs" / "decisions" / name).read_text()), name
    assert sorted(link for link in links(ROOT / "docs" / "decisions" / "README.md") if "/" not in link) == files
