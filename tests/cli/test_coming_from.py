"""The pages on own loops and long sequences, and for those who come from other libraries, as their readers do them: each file, each
command, in order.

A block with title="NAME" is the file NAME; one that a command has written already is what the command must have written.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from launching import hpctrain, run

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {
    "own-loop": 2,
    "long-sequences": 2,
    "from-accelerate": 3,
    "from-deepspeed": 2,
    "from-lightning": 2,
    "from-torchtitan": 2,
}


def words_of(line: str) -> list[str]:
    """The words of a command, of whose programs those of this environment come first, whether it is activated or not."""
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    if words[0] == "hpctrain":
        return hpctrain(*words[1:])
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return [shutil.which(words[0], path=here) or words[0], *words[1:]]


@pytest.mark.cases(thorough=["own-loop"], rest="nightly")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", COMMANDS)
def test_a_page_works_as_it_stands(tmp_path: Path, page: str) -> None:
    files = re.findall(
        r'^```\w+ title="([^"]+)"\n(.*?)^```$', (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    ran = 0
    made = {"ds.toml", "layout.toml"}
    for name, content in files:
        if name not in made:
            (tmp_path / name).write_text(content)
    for block in re.findall(r"^```bash\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            done = run(words_of(line), tmp_path, 300)
            assert done.code == 0, (line, done)
            ran += 1
    assert ran == COMMANDS[page]
    for name, content in files:
        assert (tmp_path / name).read_text() == content, name
