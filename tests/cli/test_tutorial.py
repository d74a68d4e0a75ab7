"""The tutorial as its reader does it: its files, its commands in their order, and what they print.

A block that begins with the line `# NAME` is the file NAME. A bash block has commands, and the block without a language that
follows has lines of what they print, apart from numbers.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import INTERRUPT, Finished, hpctrain, run, started, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
INTERRUPTED = "# then Ctrl-C"
DRAWN = "─"
OWN = r"^step .* ETA|/home/me|^\.\.\.$|^ranks |^continue with"
"""Lines that differ from reader to reader: progress by the clock, paths, threads, how the command was typed."""


def blocks() -> Iterator[tuple[str, str]]:
    """Language and content of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        yield found[1], found[2]


def words_of(line: str) -> list[str]:
    program, *words = shlex.split(line, comments=True)
    assert program in ("hpctrain", "python"), line
    return hpctrain(*words) if program == "hpctrain" else [sys.executable, *words]


def interrupted(words: list[str], directory: Path) -> Finished:
    """Ctrl-C while it trains."""
    rows = directory / "runs" / "arms" / "metrics.jsonl"
    with started(words, directory) as command:
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") > 210, 200, "it trains")
        command.process.send_signal(INTERRUPT)
        return command.finish(100)


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.,:]+", "0", line).strip()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_tutorial_works_as_it_stands(tmp_path: Path) -> None:
    printed, files, commands = "", [], 0
    for language, content in blocks():
        name = re.match(r"# (\S+\.(?:py|toml))\n", content)
        if name:
            (tmp_path / name[1]).write_text(content)
            files.append(name[1])
        elif language == "bash":
            printed = ""
            for line in content.splitlines():
                stops = line.endswith(INTERRUPTED)
                done = interrupted(words_of(line), tmp_path) if stops else run(words_of(line), tmp_path, 500)
                assert done.code == (75 if stops else 0), (line, done)
                printed += done.out + done.err
                commands += 1
        elif not language and printed and DRAWN not in content:
            known = {without_numbers(line) for line in printed.splitlines()}
            told = [line for line in content.splitlines() if not re.search(OWN, line)]
            missing = [line for line in told if without_numbers(line) not in known]
            assert not missing, (missing, printed)
    assert files == ["my.py", "arms.toml", "compare.py", "use.py"] and commands == 15
