"""Where another user of the node, or the author of a file, could reach in: each place of the sources, with the helper that it
uses.

A new place fails until it uses the helper, or has its reason here. `python tests/unit/test_reachable_by_others.py` prints all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from sources import sources  # noqa: E402

STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)|os\.(exec\w+|spawn\w+|posix_spawnp?|system|popen)"
    r"|pty\.spawn|asyncio\.create_subprocess_\w+|multiprocessing\.(get_context|Process|Pool)|concurrent\.futures\.ProcessPoolExecutor"
    r"|sys\.executable"
)
CHILDREN = re.compile(r"python_(module|code)|guard_multiprocessing|keep_from_children")
OTHER_PROGRAMS = {
    "plugins/hpctrain_tools/plan/fit.py": "multiprocessing forks",
    "plugins/hpctrain_tools/testing/scripts.py": "bash, which runs a scheduler's script with stand-ins for what starts ranks",
    "plugins/hpctrain_tools/plan/processes.py": "multiprocessing forks",
    "hpctrain/training/starts.py": "git",
    "hpctrain/toolkit/scripts.py": "a scheduler's commands",
    "plugins/hpctrain_tools/launch/mpiexec.py": "mpiexec; with_parent.py by its path",
    "plugins/hpctrain_tools/launch/on_hosts.py": "a sentence",
    "plugins/hpctrain_tools/launch/processes.py": "the command of the caller",
    "plugins/hpctrain_tools/launch/with_parent.py": "the command of the caller",
    "hpctrain/base/store/credentials.py": "munge, unmunge",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/as_worker.py": "the user's program",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/hosts.py": "the user's script of hosts",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/ranks.py": "as_worker.py and supervised.py by their paths",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/supervised.py": "the user's program",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/workers.py": "the command of the caller; ssh",
    "plugins/hpctrain-horovod/hpctrain_horovod/top_level/horovod/__init__.py": "a sentence",
    "plugins/hpctrain_plugins/checkpoint/hdf5/verify.py": "structure.py by its path",
    "plugins/hpctrain-dilated-attention/benchmarks/lengths.py": "itself by its path",
}
WRITERS = re.compile(
    r"shlex\.(quote|join)|jinja2\.Environment|markupsafe\.Markup|html\.escape|yaml\.(dump|dump_all|safe_dump|safe_dump_all|load\w*)"
    r"|tomli_w\.dumps?"
)
WRITTEN = {
    "hpctrain/toolkit/scripts.py": "shell: `quoted` and `filled`, the helpers",
    "plugins/hpctrain_tools/launch/start.py": "shell: a command that is shown",
    "hpctrain/training/starts.py": "shell: a command that is shown",
    "hpctrain/cli/run.py": "shell: a command that is shown",
    "plugins/hpctrain-horovod/hpctrain_horovod/starter/workers.py": "shell: a command for ssh, in which a quoted line end is one",
    "plugins/hpctrain_tools/report/pages.py": "HTML: autoescape, `_printable`; Markup is matplotlib's SVG; Markdown: `_plain`",
    "plugins/hpctrain_tools/convert/reading.py": "yaml: a safe loader without aliases",
    "plugins/hpctrain_tools/convert/conversion.py": "TOML: `one_line` and tomli_w, read again and compared",
    "plugins/hpctrain_plugins/scheduler/kubernetes/__init__.py": "YAML: read again and compared",
    "plugins/hpctrain_tools/plan/fitted.py": "TOML: tomli_w",
    "plugins/hpctrain_tools/testing/runs.py": "TOML: tomli_w",
    "hpctrain/checking/resolved.py": "TOML: tomli_w",
    "plugins/hpctrain_tools/submit/prepare.py": "TOML: tomli_w",
    "plugins/hpctrain_tools/commands/bench.py": "TOML: tomli_w",
    "plugins/hpctrain-ray/hpctrain_ray/running.py": "TOML: tomli_w",
}
PRINTS = re.compile(r"click\.(echo|secho)|print|sys\.(stdout|stderr)\.write")
PRINTED = {
    "hpctrain/cli/options.py": "`say`, the helper",
    "hpctrain/cli/__init__.py": "errors, which escape their messages",
    "plugins/hpctrain_tools/commands/sample.py": "a model's text, without control characters on a terminal",
    "plugins/hpctrain_tools/runs/screen.py": "control sequences of its own",
    "plugins/hpctrain_tools/runs/top.py": "the lines of runs/lines.py, which escapes what it reads",
}
COMMANDS = ("hpctrain/cli/", "plugins/hpctrain_tools/runs/", "/commands/", "hpctrain_tools/profile/asking.py")
SHARED = re.compile(
    r"tempfile(\.\w+)?|pathlib\.Path\.home|os\.path\.expand(user|vars)|shutil\.rmtree"
    r"|closed_directory|scratch_directory|own_directory|temporary_place|cache_directory|sweep|sweep_memory|(/tmp|/dev/shm|/var/tmp|~)(/.*)?"
)
HELPERS = re.compile(
    r"closed_directory|scratch_directory|own_directory|temporary_place|cache_directory|sweep|sweep_memory"
)
PLACES = re.compile(r"(/tmp|/dev/shm|/var/tmp|~)(/[\w.-]*)*")
DIRECTORIES = {
    "hpctrain/base/safe_files.py": "the helpers",
    "hpctrain/base/store/credentials.py": "~/.hpctrain by `own_directory`; a file that is not closed is not read",
    "hpctrain/job/environment.py": "compilers' caches: `own_directory`, and nobody else can rename it; /tmp after $TMPDIR",
    "plugins/hpctrain_tools/launch/processes.py": "/dev/shm: MPICH's files of this user that no process has mapped",
    "plugins/hpctrain_tools/doctor/node.py": "/dev/shm: its size; the home: a scratch directory",
    "plugins/hpctrain_tools/commands/bench.py": "rank 0's scratch directory, on other nodes",
    "plugins/hpctrain_tools/doctor/directory.py": "its own",
    "hpctrain/ranks/rank_channel.py": "its starter's",
    "plugins/hpctrain_tools/launch/channel_directory.py": "its own; `sweep`: closed, with a pipe that nobody reads",
    "hpctrain/toolkit/checkpoint/files.py": "a file without a name",
    "plugins/hpctrain_tools/profile/merging.py": "a file without a name",
    "plugins/hpctrain_tools/kernels/hook.py": "runs unused for 30 days, in the user's cache",
    "plugins/hpctrain_tools/checkpoint/writing.py": "its own temporary name beside the target",
    "hpctrain/checkpoint/directory.py": "checkpoints of the run, no links",
    "plugins/hpctrain-ray/hpctrain_ray/cluster.py": "its own; a short path in /tmp, for sockets",
    "plugins/hpctrain-ray/hpctrain_ray/private_directories.py": "its own",
    "plugins/hpctrain-ray/hpctrain_ray/attendant.py": "its own",
    "plugins/hpctrain-ray/hpctrain_ray/rank.py": "its own; checkpoints that were sent to it",
    "plugins/hpctrain_tools/profile/gathering.py": "its own temporary name beside the target",
    "plugins/hpctrain_tools/profile/windows.py": "its own",
    "plugins/hpctrain_tools/commands/bench_checkpoint.py": "its own",
    "plugins/hpctrain_tools/bench/checkpoint.py": "its own",
    "plugins/hpctrain_tools/bench/running.py": "the job's, on other nodes",
    "plugins/hpctrain_plugins/scheduler/kubernetes/manifests.py": "/dev/shm: a container's mount",
}
READERS = (
    "plugins/hpctrain_tools/runs/",
    "hpctrain/checking/",
    "hpctrain/checkpoint/",
    "hpctrain/training/",
    "plugins/hpctrain_tools/submit/",
    "hpctrain_tools/report/",
    "hpctrain_tools/profile/",
    "hpctrain_plugins/logger/",
    "hpctrain_plugins/checkpoint/",
    "hpctrain_tools/convert/",
    "hpctrain_tools/inference/",
    "hpctrain_tools/checkpoint/",
    "hpctrain_ray/ids.py",
    "hpctrain_ray/detached.py",
)
"""Files that read a run's files or a checkpoint's."""
OPENS = re.compile(r"open|io\.open|os\.open|gzip\.open|\?\.(open|read_text|read_bytes|write_text|write_bytes)")
DESCRIPTORS = ("fd", "descriptor", "output", "packed", "os.devnull")
OF_FILES = re.compile(r"open_regular|open_to_change|reading|read_bytes|created|replacing")
OPENED = {
    "hpctrain/training/report.py": "a logger's open()",
    "hpctrain/training/assembly.py": "the report's open()",
    "plugins/hpctrain_tools/inference/prediction.py": "the file that this rank has made under a temporary name",
    "hpctrain/checkpoint/sources.py": "weights may be links; `open_weights` refuses what is no file",
    "plugins/hpctrain_tools/checkpoint/conversion.py": "a new file with O_EXCL under a temporary name",
    "plugins/hpctrain_tools/profile/recording.py": "files in this rank's closed directory",
    "plugins/hpctrain_tools/profile/gathering.py": "files in this rank's closed directory",
    "plugins/hpctrain_tools/profile/merging.py": "a new file with O_EXCL under a temporary name",
}


class Place(NamedTuple):
    """A name in the sources. bare: with "?" for what an object is. node: the call, if it is called."""

    file: str
    line: int
    name: str
    bare: str
    node: ast.Call | None


@cache
def places() -> list[Place]:
    """Each name of the sources, as it is called in the module that it comes from."""
    found = []
    for path in sources():
        file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        imported, called = _imported(tree), {}
        for node in ast.walk(tree):  # a call comes before what it calls
            if isinstance(node, ast.Call):
                called[node.func] = node
            elif isinstance(node, (ast.Name, ast.Attribute)):
                root: ast.expr = node
                while isinstance(root, ast.Attribute):
                    root = root.value
                name = _name(node, imported)
                is_module = isinstance(root, ast.Name) and root.id in imported
                bare = name if is_module or "." not in name else f"?.{name.rpartition('.')[2]}"
                found.append(Place(file, node.lineno, name, bare, called.get(node)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACES.fullmatch(node.value):
                found.append(Place(file, node.lineno, node.value, node.value, None))
    return found


def _imported(tree: ast.Module) -> Mapping[str, str]:
    """The imported names of a file, each with what it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _name(node: ast.expr, imported: Mapping[str, str]) -> str:
    """The dotted name of an expression, from its module on; "?" for what isn't a name. Helpers have only their own."""
    if isinstance(node, ast.Name):
        whole = imported.get(node.id, node.id)
        return whole.rpartition(".")[2] if whole.startswith("hpctrain") else whole
    return f"{_name(node.value, imported)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def matching(pattern: re.Pattern[str], rooms: tuple[str, ...] = ("",)) -> list[Place]:
    """The places whose names match, in files of these rooms."""
    return [
        one
        for one in places()
        if (pattern.fullmatch(one.name) or pattern.fullmatch(one.bare)) and any(room in one.file for room in rooms)
    ]


Listed = Iterator[tuple[str, int, str, str]]
"""File, line, name, and the helper or the reason."""


def children() -> Listed:
    """Each start of a program, with the helper."""
    by_file: dict[str, set[str]] = {}
    for one in matching(CHILDREN):
        by_file.setdefault(one.file, set()).add(one.name)
    for one in matching(STARTS):
        if one.node or one.name == "sys.executable":
            helpers = ", ".join(sorted(by_file.get(one.file, ())))
            yield one.file, one.line, one.name, OTHER_PROGRAMS.get(one.file) or helpers


def writers() -> Listed:
    """Each text in another language, with the helper."""
    yield from ((one.file, one.line, one.name, WRITTEN.get(one.file, "")) for one in matching(WRITERS) if one.node)


def shared() -> Listed:
    """Each directory where others may write, and each that is removed, with the helper."""
    for one in matching(SHARED):
        yield one.file, one.line, one.name, one.name if HELPERS.fullmatch(one.name) else DIRECTORIES.get(one.file, "")


def readers() -> Listed:
    """Each file that is opened where a run's or a checkpoint's are read, with the helper."""
    for one in matching(OPENS, READERS):
        if one.node:
            first = ast.unparse(one.node.args[0]) if one.node.args else ""
            is_open = first in DESCRIPTORS or first.startswith(("open_regular(", "open_to_change("))
            yield one.file, one.line, one.name, "a descriptor" if is_open else OPENED.get(one.file, "")
    yield from ((one.file, one.line, one.name, one.name) for one in matching(OF_FILES, READERS) if one.node)


def printers() -> Listed:
    """Each line that a command prints by itself."""
    yield from (
        (one.file, one.line, one.name, PRINTED.get(one.file, "")) for one in matching(PRINTS, COMMANDS) if one.node
    )
    yield from ((one.file, one.line, one.name, one.name) for one in matching(re.compile("say"), COMMANDS) if one.node)


LISTS = {
    "programs that are started": (children, OTHER_PROGRAMS),
    "texts in another language": (writers, WRITTEN),
    "lines on a terminal": (printers, PRINTED),
    "directories where others may write, and what is removed": (shared, DIRECTORIES),
    "files of runs and checkpoints": (readers, OPENED),
}


@pytest.mark.parametrize("name", LISTS)
def test_each_place_uses_the_helper(name: str) -> None:
    walk, reasons = LISTS[name]
    places = [one for one in walk() if one[0] not in ("hpctrain/base/child_python.py", "hpctrain/base/safe_files.py")]
    assert len(places) > 10
    assert not [one for one in places if not one[3]], "use the helper, or give the reason in this file"
    assert not {*reasons} - {one[0] for one in places} - {"hpctrain/base/safe_files.py"}, "reasons for nothing"


def test_temporary_names_are_made_in_one_file() -> None:
    """A temporary file has none."""
    made = {
        one.file for one in matching(SHARED) if one.node and re.fullmatch(r"tempfile\.(?!TemporaryFile)\w+", one.name)
    }
    assert made == {"hpctrain/base/safe_files.py"}


def test_only_the_helper_runs_modules_and_texts() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())) if "sys.executable" in path.read_text() else ():
            words = [ast.unparse(one) for one in getattr(node, "elts", [])]
            assert "sys.executable" not in words or not {"'-m'", "'-c'"} & {*words} or path.name == "child_python.py", (
                path
            )


def test_multiprocessing_forks_or_is_guarded() -> None:
    guarded = {one.file for one in matching(CHILDREN) if one.name == "keep_from_children"}
    used = [one for one in matching(STARTS) if one.name == "multiprocessing.get_context" and one.node]
    assert len(used) > 2
    for one in used:
        assert one.file in guarded or (one.node and ast.unparse(one.node.args[0]) == "'fork'"), one


FIXED = {
    "cpus", "program", "time", "key", "line", "name",  # `program` is quoted by shell.py, a `line` is the user's shell
    "launch.nodes", "launch.ranks_per_node", "launch.cpus_per_rank", "launch.seconds", "launch.save_seconds",
    "launch.seconds - launch.save_seconds", "launch.runs|length - 1", "'{'",
}  # fmt: skip


def test_templates_quote_what_they_write() -> None:
    scripts, pages = sorted(ROOT.glob("**/*.sh.j2")), sorted(ROOT.glob("**/*.html.j2"))
    assert len(scripts) >= 4 and pages
    for path in scripts:
        for words in re.findall(r"\{\{ (.*?) \}\}", path.read_text()):
            assert words.endswith(("|q", "|words")) or words in FIXED, (path, words)
    for path in pages:
        assert not re.search(r"\|\s*safe|autoescape|<script", path.read_text()), path


if __name__ == "__main__":
    for title, (walk, _) in LISTS.items():
        print(f"\n{title}\n")
        for place, line, name, helper in sorted(walk()):
            print(f"{place}:{line}: {name}: {helper or '???'}")
