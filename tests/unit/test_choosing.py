"""The choice of thorough tests in CI: what changed comes first, the rest gets its turn, and the time is kept."""

from __future__ import annotations

from choosing import choose, room_of, rooms_of, slow_ones

TESTS = [f"tests/slurm/test_submit.py::test_{number}" for number in range(6)] + [
    f"tests/unit/test_hosts.py::test_{number}[case]" for number in range(6)
]
TIMES = {test.partition("[")[0]: 10.0 for test in TESTS}


def test_rooms_are_those_that_a_test_imports_or_reaches_through_commands() -> None:
    assert room_of("hpctrain/checkpoint/store.py") == "checkpoint" and room_of("hpctrain/api.py") == "api"
    assert room_of("plugins/hpctrain_plugins/metric/accuracy.py") == "metric" and room_of("docs/commands.md") is None
    assert room_of("plugins/hpctrain_tools/submit/record.py") == "submit"
    assert "launch" in rooms_of("tests/unit/test_hosts.py") and "submit" in rooms_of("tests/slurm/test_submit.py")
    assert "submit" not in rooms_of("tests/unit/test_hosts.py")


def test_what_changed_comes_first_and_the_time_is_kept() -> None:
    chosen = choose(TESTS, TIMES, {"plugins/hpctrain_tools/submit/record.py"}, 75.0, "a commit")
    assert [reason for _, reason in chosen] == ["of submit"] * 6 + ["its turn"]
    assert {test for test, reason in chosen if reason == "of submit"} == set(TESTS[:6])
    first = choose(TESTS, TIMES, {"plugins/hpctrain_tools/submit/record.py"}, 75.0, "a commit", TESTS[6:8])
    assert [reason for _, reason in first] == ["with every change"] * 2 + ["of submit"] * 5
    own = choose(TESTS, TIMES, {"tests/unit/test_hosts.py"}, 60.0, "a commit")
    assert {test for test, _ in own} == set(TESTS[6:]) and {reason for _, reason in own} == {"its file changed"}


def test_the_rest_takes_turns_with_the_commit() -> None:
    turns = [{test for test, _ in choose(TESTS, TIMES, set(), 30.0, str(commit))} for commit in range(40)]
    assert all(len(turn) == 3 for turn in turns) and set().union(*turns) == set(TESTS)
    assert choose(TESTS, TIMES, set(), 30.0, "x") == choose(list(reversed(TESTS)), TIMES, set(), 30.0, "x")
    assert len(choose(["tests/unit/test_hosts.py::test_new"], {}, set(), 19.0, "x")) == 0, "an unknown test costs much"


def test_the_default_tier_keeps_quick_cases_and_the_quickest_of_a_slow_test() -> None:
    seconds = {
        "a[1]": 0.2,
        "a[2]": 1.0,
        "b[1]": 1.8,
        "b[2]": 1.5,
        "b[3]": 30.0,
        "c": 1.9,
        "d": 2.0,
        "e[x]": 9.0,
        "e[y]": 6.0,
    }
    assert slow_ones(seconds) == {"a[2]", "b[1]", "b[3]", "d", "e[x]", "e[y]"}
    test = "tests/unit/test_hosts.py::test_0"
    chosen = choose([f"{test}[1]", f"{test}[2]"], {test: 30.0, f"{test}[1]": 8.0}, set(), 10.0, "x")
    assert [one for one, _ in chosen] == [f"{test}[1]"], "a case's own time comes before the mean of its test"
