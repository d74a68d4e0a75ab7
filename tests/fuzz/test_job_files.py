"""Mutants of job files through `hpctrain check`, and accepted ones through `hpctrain run`.

    python -m pytest tests/fuzz --draws 20000 --timeout 7200

draws this many instead of the few of every run, and trains one of every hundred. A failure shows the number of faults by kind,
and one mutant of each kind.
"""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from commands import directory, ending  # noqa: F401  (a fixture)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from mutants import Mutant, mutants, small_jobs, written

T = TypeVar("T")
MUTANTS, TRAINED = 300, 8
"""The number of draws in every run."""


pytestmark = pytest.mark.usefixtures("directory")


class Faults:
    """Counts the faults by kind, with a mutant for each."""

    def __init__(self) -> None:
        self.tried = 0
        self._found: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def note(self, fault: str | None, mutant: Mutant) -> None:
        self.tried += 1
        if fault is not None:
            self._found[fault] += 1
            self._examples.setdefault(
                fault, f"{mutant.content[:3000].decode('utf-8', 'replace')}\n{str(mutant.words)[:500]}"
            )
        if self.tried % 1000 == 0:
            gc.collect()
            print(f"{self.tried} mutants, {sum(self._found.values())} faults", flush=True)

    def refuse(self) -> None:
        shown = [f"{count} x {fault}\n{self._examples[fault]}" for fault, count in self._found.most_common()]
        assert not shown, f"{sum(self._found.values())} of {self.tried} mutants\n" + "\n\n".join(shown)


def draw(strategy: SearchStrategy[T], draws: int, always: bool, each: Callable[[T], None]) -> None:
    """Call `each` with this many draws. always: draw the same ones every time."""
    given(strategy)(
        settings(
            max_examples=draws, phases=[Phase.generate], database=None, derandomize=always,
            suppress_health_check=list(HealthCheck),
        )(each)
    )()  # fmt: skip


@pytest.mark.thorough
def test_mutants_are_checked(pytestconfig: pytest.Config) -> None:
    draws, faults = pytestconfig.getoption("--draws"), Faults()

    def each(mutant: Mutant) -> None:
        Path("job.toml").write_bytes(mutant.content)
        code, printed, fault = ending(60, "check", "job.toml", *mutant.words)
        if (
            fault is None and code not in (0, 2, 3, 5) and " raised " not in printed
        ):  # an error of the user's own code is exit 4
            fault = f"exit code {code}: {printed[:200]}"
        faults.note(fault, mutant)
        shutil.rmtree("out", ignore_errors=True)

    draw(mutants(), draws or MUTANTS, draws is None, each)
    faults.refuse()


@pytest.mark.nightly
def test_accepted_mutants_are_trained(pytestconfig: pytest.Config) -> None:
    """`run` refuses only jobs that `check` refuses. Except after a note, it ends with 0, or with 4 if training fails."""
    draws, faults = pytestconfig.getoption("--draws"), Faults()
    wanted, codes = draws // 100 if draws else TRAINED, Counter[int]()
    kinds = Counter[str]()

    def each(tables: dict[str, object]) -> None:
        kind = str([tables.get(slot, {}) for slot in ("model", "dataset", "precision")])
        if faults.tried >= wanted or kinds[kind] > wanted // 20:  # Hypothesis often repeats earlier draws
            return
        mutant = Mutant(
            written(tables).encode("utf-8", "surrogateescape"), ("--set", "job.output_dir=trained", "-n", "1")
        )
        Path("job.toml").write_bytes(mutant.content)
        code, said, fault = ending(60, "check", "job.toml", *mutant.words)
        if code or fault:
            return  # the other test's
        code, printed, fault = ending(60, "run", "job.toml", *mutant.words)
        if fault is None and code not in (0, 4) and not (code == 3 and "note:" in said):
            fault = f"exit code {code}: {printed[-300:]}"
        codes[code] += 1
        kinds[kind] += 1
        faults.note(fault, mutant)
        shutil.rmtree("trained", ignore_errors=True)

    draw(small_jobs(), 30 * wanted, draws is None, each)
    print(f"{faults.tried} trained, with the exit codes {dict(codes)}")
    faults.refuse()
    assert codes[0] >= wanted // 2
