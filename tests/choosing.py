"""Chooses thorough tests for `.ci/run`: those marked `every_change`, those of what changed, then others in turn, as many as a time
allows.

    python tests/choosing.py SECONDS FILE

writes the tests to FILE, a line each, for `pytest @FILE`, and prints the choice with its reasons. A change is the commits of the
last day before HEAD. A test belongs to the rooms (hpctrain/ROOM, plugins/ROOM) that its file and the helpers it imports import, and
that its folder tests through commands. The rest is shuffled with the commit as the seed: all get their turn.
Times are those of tests/times.json, which `pytest --times` refreshes; a test without one counts 20 s. Cases without a
marker of their own that take too long by it are in the thorough tier, too (`slow_ones`, conftest.py).
"""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TIMES = TESTS / "times.json"
NOTED = 1.0
"""Seconds of a case that gets into times.json."""
QUICK, BEARABLE = 1.0, 2.0
"""Seconds of a case in the default tier; and of the quickest case of a test of which none is quick."""
_DAY = 24 * 3600
_FIRST = "with every change"
"""The reason for tests marked `every_change`."""
_UNKNOWN = 20.0
"""Seconds of a test that has no time yet."""
_COMMANDS = {
    "cli": {
        "cli",
        "launch",
        "submit",
        "scheduler",
        "job",
        "checking",
        "doctor",
        "training",
        "runs",
        "hpctrain_horovod",
    },
    "faults": {"launch", "watchdog", "ranks", "mpi", "hpctrain_horovod", "checkpoint"},
    "slurm": {"launch", "submit", "scheduler", "runs", "ranks", "store", "watchdog", "doctor"},
    "outside": {"plugins", "contracts", "toolkit", "user_code"},
    "fuzz": {"job", "checking", "checkpoint", "hdf5"},
    "test_ranks.py": {
        "mpi",
        "model",
        "gradients",
        "training",
        "sharding",
        "axes",
        "pipeline_schedule",
        "compression",
        "hpctrain_horovod",
    },
}
"""Rooms that a folder of tests reaches through commands or ranks."""
FIRST_PARTY = ("hpctrain_plugins", "hpctrain_tools")
"""The packages of plugins in hpctrain's own distribution. Other distributions have a folder each, and are a room each."""
_OF_RANKS = "tests/test_ranks.py"
"""Runs tests/ranks and plugins/*/tests/ranks."""


def function_of(test: str) -> str:
    """A test's id without its parameters."""
    return test.partition("[")[0]


def slow_ones(seconds: Mapping[str, float]) -> set[str]:
    """The cases that take too long for the default tier. seconds: of all cases of each test."""
    of_test: dict[str, list[str]] = {}
    for case in seconds:
        of_test.setdefault(function_of(case), []).append(case)
    kept = {min(cases, key=lambda case: seconds[case]) for cases in of_test.values()}
    return {case for case, taken in seconds.items() if taken >= (BEARABLE if case in kept else QUICK)}


def read_times() -> dict[str, float]:
    """Seconds by case, or by test as a mean, of those that take long."""
    found: dict[str, float] = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    return found


def changed_files() -> set[str]:
    """Files that the commits of the last day before HEAD touch, with all that a merge has brought."""
    when = int(_git("log", "-1", "--format=%ct"))
    return set(
        _git("log", "--first-parent", "--diff-merges=1", f"--since={when - _DAY}", "--name-only", "--format=").split()
    )


def room_of(path: str) -> str | None:
    """The room of a source file, such as "checkpoint", a plugin's slot, or the package of a distribution under plugins/."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "plugins":
        parts = parts[1:] if parts[1] in FIRST_PARTY else parts[2:]
    if parts[0] == "hpctrain":  # the innermost folder
        folder = next((one for one in Path(*parts).parents if (ROOT / one).is_dir()), None)
        return None if folder is None or len(parts) == 1 else folder.name if len(folder.parts) > 1 else parts[1]
    if parts[0] in FIRST_PARTY:
        return parts[1] if len(parts) > 1 else None
    return parts[0] if parts[0] in _packages() else None


def room_of_tests(path: Path) -> str:
    """The first name below the folder of tests: "cli" for tests/cli/test_run.py and plugins/NAME/tests/cli/test_more.py."""
    return path.parts[path.parts.index("tests") + 1]


@cache
def _packages() -> frozenset[str]:
    """The packages of the distributions under plugins/."""
    return frozenset(path.parent.name for path in (ROOT / "plugins").glob("*/*/__init__.py")) - {*FIRST_PARTY}


def choose(
    tests: Iterable[str],
    times: dict[str, float],
    changed: set[str],
    seconds: float,
    seed: str,
    first: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Tests with the reasons for them, in the order of choice, that take `seconds` at most. first: tests that come first."""
    touched = {room for path in changed if (room := room_of(path)) is not None}
    tests = sorted(tests)
    random.Random(seed).shuffle(tests)

    def why(test: str) -> tuple[int, str]:
        file = test.partition("::")[0]
        if test in first:
            return -1, _FIRST
        if file in changed or (file == _OF_RANKS and any("tests/ranks/" in path for path in changed)):
            return 0, "its file changed"
        rooms = rooms_of(file) & touched
        return (1, f"of {', '.join(sorted(rooms))}") if rooms else (2, "its turn")

    reasons = {test: why(test) for test in tests}
    chosen, left = [], seconds
    for test in sorted(tests, key=lambda test: reasons[test][0]):  # stable: shuffled within each
        cost = _seconds(test, times)
        if cost <= left:
            chosen.append((test, reasons[test][1]))
            left -= cost
    return chosen


def _seconds(test: str, times: Mapping[str, float]) -> float:
    return times.get(test, times.get(function_of(test), _UNKNOWN))


@cache
def rooms_of(file: str) -> frozenset[str]:
    """The rooms that a test's file reaches."""
    path = ROOT / file
    seen, rooms = {path}, set(_COMMANDS.get(room_of_tests(Path(file)), ()))
    queue = [path]
    while queue:
        for name in _imports(queue.pop()):
            rooms |= {room} if (room := room_of(name.replace(".", "/") + ".py")) else set()
            for helper in (TESTS / f"{name}.py", path.parent / f"{name}.py"):
                if helper.exists() and helper not in seen:
                    seen.add(helper)
                    queue.append(helper)
    return frozenset(rooms)


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout


def _collected(which: str) -> list[str]:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", f"{which} and not large and not nightly"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    return [line for line in done.stdout.splitlines() if line.startswith(("tests/", "plugins/")) and "::" in line]


def main(seconds: float, file: Path, tell: Callable[[str], None] = print) -> None:
    times, tests, commit = read_times(), _collected("thorough"), _git("rev-parse", "HEAD").strip()
    chosen = choose(tests, times, changed_files(), seconds, commit, _collected("every_change and slow"))
    first = [test for test, reason in chosen if reason == _FIRST]  # which no lack of time leaves out
    in_order = [*first, *(test for test in tests if test in dict(chosen) and test not in first)]
    file.write_text("\n".join(in_order) + "\n")
    total = sum(_seconds(test, times) for test in in_order)
    tell(f"{len(in_order)} of {len(tests)} thorough tests, about {total:.0f} s of {seconds:.0f} s:")
    by_reason: dict[tuple[str, str], int] = {}
    for test, reason in chosen:
        key = test.partition("::")[0], reason
        by_reason[key] = by_reason.get(key, 0) + 1
    for (name, reason), number in by_reason.items():
        tell(f"  {number:3} of {name}: {reason}")


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
