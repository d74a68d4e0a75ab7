"""`hpctrain report --plan`: planned and measured memory of planted runs, plans of something else, and files that are no plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hpctrain_tools.report.gathering import gather
from hpctrain_tools.report.pages import as_json, markdown
from hpctrain_tools.report.plan_file import JobPlan, read_plan
from hpctrain_tools.report.verdict import judge
from planted_runs import GB, Planted, out_of_memory, planted_plan

from hpctrain.cli import execute

TABLES = {
    "batch": {"micro_size": 8, "global_size": 256},
    "optimizer": {"lr": 0.1},
    "parallelism": {"tensor": {"size": 4}},
}


def plan(*most: int, **keys: Any) -> JobPlan:
    """The plan of a planted run, whose ranks need so many bytes."""
    return JobPlan.model_validate(planted_plan(*most, **{"job": TABLES, **keys}))


def trained(directory: Path, memory: float = 60 * GB) -> Planted:
    return Planted(directory).starts().trains(20, memory=memory).ends()


def test_planned_and_measured_memory_are_told_side_by_side(tmp_path: Path) -> None:
    facts = gather(trained(tmp_path / "run").directory, plan=plan(58 * GB, 50 * GB))
    told = markdown([facts])
    assert (
        "| largest rank | 58.00 | 60.00 | 103% |" in told and "| mean over the ranks | 54.00 | 54.00 | 100% |" in told
    ), told
    assert "| of it, activations and buffers | 29.00 |" in told and "| rank 1: peak | 50.00 |" in told, told
    (found,) = json.loads(as_json([facts]))
    assert found["plan"]["ratio"] == pytest.approx(60 / 58) and found["plan"]["of_ranks"][1]["most_bytes"] == 50 * GB
    assert found["plan"]["remarks"] == [] and [one.rule for one in judge(facts).findings] == ["healthy"]
    without = gather(tmp_path / "run")
    assert "the plan" not in markdown([without]) and json.loads(as_json([without]))[0]["plan"] is None


def test_the_verdict_tells_only_of_a_peak_far_above_the_plan(tmp_path: Path) -> None:
    directory = trained(tmp_path / "run").directory
    for planned, rules in ((55 * GB, ["healthy"]), (50 * GB, ["plan"]), (90 * GB, ["healthy"])):
        found = judge(gather(directory, plan=plan(planned))).findings
        assert [one.rule for one in found] == rules, found
    first = judge(gather(directory, plan=plan(50 * GB))).first
    assert first.limit == "peak 60 GB, 20% above the planned 50 GB" and not first.step
    failed = gather(out_of_memory(tmp_path / "failed").long_ago().directory, plan=plan(50 * GB))
    assert [one.rule for one in judge(failed).findings] == ["out of memory", "plan"]
    assert "- Also: peak 79 GB, 58% above the planned 50 GB\n" in markdown([failed])


@pytest.mark.parametrize(
    ("keys", "remark"),
    [
        ({"ranks": 8, "axes": {"dp_shard": 8}}, "the plan is for 8 ranks, the run had 16"),
        ({"axes": {"dp_shard": 16, "tp": 1}}, "the layout of the plan is dp_shard 16, that of the run dp_shard 4 x tp 4"),
        ({"job": {**TABLES, "batch": {"micro_size": 4, "global_size": 256}}}, "another job: batch.micro_size is 4, not 8"),
        ({"job": {"model": {f"k{n}": 1 for n in range(5)}}}, "model.k2 is 1, not unset, and 2 more keys differ"),
    ],
)  # fmt: skip
def test_a_plan_of_something_else_is_a_remark(keys: dict[str, Any], remark: str, tmp_path: Path) -> None:
    facts = gather(trained(tmp_path / "run").directory, plan=plan(30 * GB, **keys))
    (found,) = json.loads(as_json([facts]))
    assert len(found["plan"]["remarks"]) == 1 and remark in found["plan"]["remarks"][0], found["plan"]
    assert found["plan"]["ratio"] is None and found["plan"]["measured_peak_bytes"] == 60 * GB
    assert judge(facts).first.rule == "healthy" and "Not compared: the " in markdown([facts])


def test_precision_is_compared_as_the_device_decided_it(tmp_path: Path) -> None:
    for ran, remarks in (("bf16", []), ("fp32", ["the plan is of another job: precision.mode is bf16, not fp32"])):
        planted = Planted(tmp_path / ran, precision={"mode": "auto"}).starts().says(f"precision    {ran} (auto)")
        facts = gather(planted.trains(5).directory, plan=plan(60 * GB, job={**TABLES, "precision": {"mode": "bf16"}}))
        assert json.loads(as_json([facts]))[0]["plan"]["remarks"] == remarks


def test_runs_without_an_accelerator_or_rows_are_not_compared(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "cpu").starts(device="", device_bytes=None).trains(20).ends()
    told = markdown([gather(one.directory, plan=plan(GB)) for one in (planted, Planted(tmp_path / "begun").starts())])
    assert "Not compared: the run had no accelerator" in told and "no row of the run has the memory" in told, told
    assert told.count("| largest rank | 1.00 | - | - |") == 2 and "above the planned" not in told


def test_a_restart_on_other_ranks_counts_for_itself(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts(ranks=8, hosts=["node1"], ranks_of_hosts=[8]).trains(10, memory=75 * GB)
    planted.now += 5
    planted.starts().trains(10, memory=50 * GB)
    (found,) = json.loads(as_json([gather(planted.ends().directory, plan=plan(50 * GB))]))
    assert found["plan"]["ratio"] == 1.0 and found["memory_peak_bytes"] == 75 * GB


def test_several_runs_have_a_ratio_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(trained(tmp_path / name, memory).directory) for name, memory in (("a", 60 * GB), ("b", 45 * GB))]
    (tmp_path / "plan.json").write_text(plan(50 * GB).model_dump_json())
    assert execute(["report", *runs, "--format", "markdown", "--plan", str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert "| peak to plan | 120% | 90% |" in told and told.count("Memory against the plan") == 2, told


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"layout        dp_shard 8", "it is no plan: Invalid JSON"),
        (b'{"fitting": [], "others": []}', "it is no plan: ranks: Field required"),
        (b"\xff\xfe", "it is no plan: Invalid JSON"),
        (b"[" * 100_000, "it is no plan: Invalid JSON: recursion limit"),
        (json.dumps({"ranks": True, "axes": {}, "job": {}, "of_ranks": []}).encode(), "ranks: Input should be a valid integer"),
        (None, "it cannot be read: No such file or directory"),
    ],
    ids=["text", "a search", "bytes", "nested", "types", "missing"],
)  # fmt: skip
def test_a_file_that_is_no_plan_is_refused(
    content: bytes | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    assert execute(["report", str(trained(tmp_path / "run").directory), "--format", "json", "--plan", str(path)]) == 2
    told = capsys.readouterr().err
    assert why in told and "expected what `hpctrain plan JOB.toml -n RANKS --json` prints" in told, told


def test_a_crafted_plan_stays_text(tmp_path: Path) -> None:
    hostile = "<script>|`\x1b[31m"
    crafted = plan(50 * GB, job={"model": {hostile * 1000: {hostile: hostile}}}).model_dump()
    crafted["of_ranks"][0]["at_peak_bytes"] = {hostile * 1000: 5}
    (tmp_path / "plan.json").write_text(json.dumps(crafted))
    told = markdown([gather(trained(tmp_path / "run").directory, plan=read_plan(tmp_path / "plan.json"))])
    assert "<script" not in told and "\x1b" not in told and len(told) < 10_000
