"""Profiling of jobs as a user types it: windows of [profile], `hpctrain profile --now`, the merged trace, the tables."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import JobFile
from launching import TERMINATE, Finished, hpctrain, run, started
from packages import need_commands

NAME = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
"""The names that TensorBoard's plugin (torch-tb-profiler) takes for traces: the rank's name, and a time."""


def trace_of(job: JobFile, window: str, rank: int, output: str = "out") -> dict[str, Any]:
    path = job.directory / output / "profile" / window / f"rank-{rank:05d}.pt.trace.json.gz"
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def index_of(job: JobFile, window: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.output / "profile" / window / "window.json").read_text())
    return found


def windows(job: JobFile) -> list[str]:
    return sorted(path.name for path in (job.output / "profile").iterdir())


def trained(job: JobFile, *sets: str, ranks: int = 2) -> Finished:
    words = [word for one in sets for word in ("--set", one)]
    done = run(hpctrain("run", "job.toml", "-n", str(ranks), *words), job.directory)
    told = [line for line in done.err.splitlines() if "allocated before the profiling started" not in line]
    assert done.code == 0 and not told, done
    return done


def refuse_disorder(merged: Path) -> dict[str, Any]:
    """The merged trace, whose times must not fall in any thread."""
    content: dict[str, Any] = json.loads(gzip.decompress(merged.read_bytes()))
    newest: dict[tuple[int, object], float] = {}
    for event in content["traceEvents"]:
        if "ts" in event:
            thread = event["pid"], event.get("tid")
            assert event["ts"] >= newest.get(thread, 0.0), event
            newest[thread] = event["ts"]
    return content


@pytest.mark.thorough
def test_a_window_is_traced_merged_and_put_into_tables(job: JobFile) -> None:
    done = trained(job, "profile.wait=1", "profile.record=2", "profile.memory=true", "profile.shapes=true")
    assert "steps 3 to 4: out/profile/step-00000003" in done.out, done
    window = "step-00000003"
    index = index_of(job, window)
    assert [one["rank"] for one in index["ranks"]] == [0, 1] and not index["missing"] and not index["cut"], index
    assert [*index["groups"].values()] == ["dp_replicate"]

    events = trace_of(job, window, 1)["traceEvents"]
    annotations = Counter(one["name"] for one in events if one.get("cat") == "user_annotation")
    # 12 samples over 2 ranks, one by one
    expected = {"ProfilerStep#3": 1, "ProfilerStep#4": 1, "data": 2, "forward": 12, "backward": 12, "optimizer": 2}
    assert {name: annotations[name] for name in expected} == expected
    assert any("Input Dims" in one.get("args", {}) for one in events)
    names = [NAME.match(path.name) for path in (job.output / "profile" / window).glob("rank-*")]
    assert sorted(one[1] for one in names if one) == ["rank-00000", "rank-00001"]

    shown = run(hpctrain("profile", "out", "--json"), job.directory)
    assert shown.code == 0, shown
    figures = json.loads(shown.out)
    called = [
        Counter(e["name"] for e in trace_of(job, window, r)["traceEvents"] if e.get("cat") == "cpu_op") for r in (0, 1)
    ]
    assert [one["label"] for one in figures["ranks"]] == [
        f"rank {rank} (dp_replicate {rank}) node {os.uname().nodename}" for rank in (0, 1)
    ]
    for rank, of_rank in enumerate(figures["ranks"]):
        calls = {one["name"]: one["calls"] for one in of_rank["operators"]}
        assert calls["aten::embedding"] == called[rank]["aten::embedding"] == 24  # of tokens and of places
    everyone = {one["name"]: one for one in figures["operators"]}
    assert everyone["aten::embedding"]["calls"] == 48 and everyone["aten::empty"]["self_cpu_bytes"] > 0
    table = run(hpctrain("profile", "show", "out", "--ranks", "1", "--top", "3"), job.directory).out.splitlines()
    assert table[1] == "By time, rank 1" and table[7] == "By memory, rank 1" and len(table) == 12, table

    merged = run(hpctrain("profile", "merge", "out"), job.directory)
    assert merged.code == 0, merged
    content = refuse_disorder(job.output / "profile" / window / "merged.json.gz")
    named = {e["args"]["name"]: e["pid"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert {label for label in named if ":" not in label} == {one["label"] for one in figures["ranks"]}
    of_rank = Counter(e["name"] for e in content["traceEvents"] if e["pid"] == named[figures["ranks"][1]["label"]])
    assert (
        of_rank["aten::embedding"] == 24
        and f"{len([e for e in content['traceEvents'] if 'ts' in e])} events" in merged.out
    )


@pytest.mark.cases(thorough=["0"], rest="nightly")
@pytest.mark.parametrize("sharding", [0, 3])
def test_profiled_steps_have_the_same_bits(sharding: int, job: JobFile) -> None:
    job.set(sharding={"stage": sharding})
    trained(job, "job.output_dir=plain")
    trained(
        job, *(f"profile.{key}=true" for key in ("shapes", "memory", "stacks")), "profile.wait=0", "profile.record=2"
    )
    assert job.losses() == job.losses("plain") and windows(job)


@pytest.mark.nightly
def test_windows_repeat_and_a_resumed_run_has_its_own(job: JobFile) -> None:
    sets = ("profile.wait=0", "profile.warmup=0", "profile.record=1", "profile.repeat=2", "profile.ranks=[1]")
    trained(job, "job.steps=3", *sets)
    assert windows(job) == ["step-00000001", "step-00000002"]
    assert [one["rank"] for one in index_of(job, "step-00000002")["ranks"]] == [1]
    before = job.losses()
    trained(job, "job.steps=9", *sets)
    assert windows(job) == [f"step-{step:08d}" for step in (1, 2, 4, 5)]
    shutil.rmtree(job.output / "checkpoints")
    trained(job, "job.steps=9", *sets)  # from the first step, with the same names
    assert windows(job)[:4] == ["step-00000001", "step-00000001.2", "step-00000002", "step-00000002.2"]
    assert job.losses()[: len(before)] == before


@pytest.mark.cases(thorough=["hpctrain"], rest="nightly")
@pytest.mark.parametrize("launcher", ["hpctrain", "mpiexec"])
def test_a_signal_within_a_window_keeps_its_traces(launcher: str, job: JobFile) -> None:
    job.sleeps(0.05).set(
        job={"steps": 10**6}, plugins={"load": ["slow"]}, profile={"wait": 0, "record": 10**6, "warmup": 2}
    )
    words = hpctrain("run", "job.toml", *(["-n", "2"] if launcher == "hpctrain" else []))
    if launcher == "mpiexec":
        words = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *words]
    with started(words, job.directory) as command:
        job.wait_for_steps(6)
        command.process.send_signal(TERMINATE)
        done = command.finish(60)
    last = job.rows()[-1]["step"]
    assert f"stopped at step {last} of" in done.out, done
    if launcher == "hpctrain":  # mpiexec's code depends on which rank ends first
        assert done.code == 75, done
    index = index_of(job, "step-00000003")
    assert index["cut"] and (index["first"], index["last"]) == (3, last), index
    for rank in (0, 1):
        names = {one["name"] for one in trace_of(job, "step-00000003", rank)["traceEvents"]}
        assert {f"ProfilerStep#{step}" for step in range(3, last + 1)} <= names
        assert not {"ProfilerStep#2", f"ProfilerStep#{last + 1}"} & names


@pytest.mark.nightly
def test_a_running_job_is_profiled_as_often_as_asked(job: JobFile) -> None:
    job.sleeps(0.02).set(job={"steps": 10**6}, plugins={"load": ["slow"]})
    with started(hpctrain("run", "job.toml", "-n", "2"), job.directory) as command:
        job.wait_for_steps(2)
        first = run(hpctrain("profile", "out", "--now", "--record", "2", "--stacks"), job.directory)
        assert first.code == 0 and "recording    steps " in first.err and "By time, 2 ranks together" in first.out, (
            first
        )
        second = run(hpctrain("profile", "out", "--now", "--ranks", "1", "--json"), job.directory)
        assert second.code == 0, second
        figures = json.loads(second.out)
        assert [one["rank"] for one in figures["ranks"]] == [1] and figures["last"] - figures["first"] == 2, figures
        refused = run(hpctrain("profile", "out", "--now", "--ranks", "1,7"), job.directory)
        assert refused.code == 2 and "the job does not record: expected ranks from 0 to 1, found 7" in refused.err, (
            refused
        )
        command.process.send_signal(TERMINATE)
        assert command.finish(60).code == 75
    assert len(windows(job)) == 2
    assert any(one.get("cat") == "python_function" for one in trace_of(job, windows(job)[0], 0)["traceEvents"])
    assert not [path.name for path in job.output.iterdir() if "profile." in path.name], "no question is left"


@pytest.mark.thorough
def test_a_request_during_a_window_is_refused(job: JobFile) -> None:
    job.sleeps(0.05).set(job={"steps": 10**6}, plugins={"load": ["slow"]}, profile={"wait": 0, "record": 10**6})
    with started(hpctrain("run", "job.toml", "-n", "2"), job.directory):
        job.wait_for_steps(3)
        refused = run(hpctrain("profile", "out", "--now"), job.directory)
    assert refused.code == 2 and "it records a window already" in refused.err, refused


HANGS = """
import os, time
from hpctrain.api import hookimpl

asked = []

@hookimpl
def hpctrain_request(request):
    asked.append(request.name)

@hookimpl
def hpctrain_step_end(step):
    time.sleep(0.05)
    if asked and os.environ["RANK"] == "1":
        time.sleep(10_000)  # between two steps
"""


@pytest.mark.nightly
def test_ranks_whose_traces_do_not_come_are_named(job: JobFile) -> None:
    (job.directory / "hangs_later.py").write_text(HANGS)
    job.set(job={"steps": 10**6}, plugins={"load": ["hangs_later"]})
    with started(hpctrain("run", "job.toml", "-n", "2"), job.directory):
        job.wait_for_steps(2)
        done = run(hpctrain("profile", "out", "--now", "--wait", "5"), job.directory)
    assert done.code == 2 and "the traces of ranks 0, 1 have not come within 5 s" in done.err, done
    assert "rank 1 on" in done.err and "time.sleep(10_000)  # between two steps" in done.err, done


SHIFT = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
  long code = syscall(SYS_clock_gettime, clock, time);
  const char *seconds = getenv("SHIFTED_BY");
  if (code == 0 && clock == CLOCK_REALTIME && seconds) time->tv_sec += atoi(seconds);
  return code;
}
"""


@pytest.mark.nightly
def test_shifted_clocks_are_aligned(job: JobFile) -> None:
    """Rank 1's clock is 50 s late; the end of each sum over the ranks must come at the same time on both."""
    need_commands("cc")
    (job.directory / "shift.c").write_text(SHIFT)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", "shift.so", "shift.c"], cwd=job.directory, check=True, timeout=60
    )
    job.set(job={"steps": 8}, profile={"wait": 1, "record": 5})
    command = hpctrain("run", "job.toml")
    shifted = ["-env", "LD_PRELOAD", str(job.directory / "shift.so"), "-env", "SHIFTED_BY", "-50", "-n", "1", *command]
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    done = run([mpiexec, "-n", "1", *command, ":", *shifted], job.directory)
    assert done.code == 0, done
    offsets = [one["offset_ns"] / 1e9 for one in index_of(job, "step-00000003")["ranks"]]
    assert offsets[0] == 0 and offsets[1] == pytest.approx(-50, abs=0.01)

    merged = run(hpctrain("profile", "merge", "out", "-o", "all.json.gz"), job.directory)
    assert merged.code == 0, merged
    content = refuse_disorder(job.directory / "all.json.gz")
    ends: dict[int, list[float]] = {}
    for event in content["traceEvents"]:
        if event["name"] == "optimizer" and "dur" in event:  # it follows an exchange of all ranks
            ends.setdefault(event["pid"], []).append(event["ts"])
    first, second = ends.values()
    apart = [abs(one - other) / 1e6 for one, other in zip(first, second, strict=True)]
    assert len(apart) == 5 and min(apart) < 0.01, apart


@pytest.mark.nightly
def test_nodes_without_a_disk_in_common(job: JobFile) -> None:
    """Rank 1 runs in another directory, and so has another output_dir; its trace comes to rank 0's."""
    other = job.directory / "other"
    other.mkdir()
    job.set(profile={"wait": 0, "record": 1})
    command = hpctrain("run", str(job.path))
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    words = [mpiexec, "-n", "1", "-wdir", str(job.directory), *command, ":", "-n", "1", "-wdir", str(other), *command]
    done = run(words, job.directory)
    assert done.code == 0, done
    assert (other / "out" / "log" / "rank-00001.log").exists() and not (other / "out" / "profile").exists()
    assert [trace_of(job, "step-00000002", rank)["distributedInfo"]["rank"] for rank in (0, 1)] == [0, 1]


@pytest.mark.nightly
def test_a_window_over_two_axes(job: JobFile) -> None:
    job.set(
        parallelism={"tensor": 2}, profile={"wait": 0, "record": 1}, checkpoint={"asynchronous": True, "every_steps": 1}
    )
    trained(job, ranks=4)
    shown = json.loads(run(hpctrain("profile", "out", "--json"), job.directory).out)
    node = os.uname().nodename
    assert [one["label"] for one in shown["ranks"]] == [
        f"rank {rank} (dp_replicate {rank // 2}, tp {rank % 2}) node {node}" for rank in range(4)
    ]


@pytest.mark.thorough
def test_a_failing_rank_keeps_what_it_has_recorded(job: JobFile) -> None:
    (job.directory / "fails.py").write_text(
        "import os\nfrom hpctrain.api import hookimpl\n\n\n@hookimpl\ndef hpctrain_outputs(step):\n"
        "    if step == 3 and os.environ['RANK'] == '1':\n        raise ValueError('planted')\n"
    )
    job.set(plugins={"load": ["fails"]}, profile={"wait": 0, "record": 10})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 4 and "planted" in done.err, done
    names = {one["name"] for one in trace_of(job, "failed-step-00000002", 1)["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
