"""Profiles in one process: figures of operators against torch's own, merged traces, and what costs nothing."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hpctrain_tools.profile import merging, recording
from hpctrain_tools.profile.communication import Communication
from hpctrain_tools.profile.hta_report import Report
from hpctrain_tools.profile.merging import write_merged
from hpctrain_tools.profile.operators import Operator, operators_in
from hpctrain_tools.profile.options import TorchProfilerOptions
from hpctrain_tools.profile.recording import Ranges
from hpctrain_tools.profile.table import Figures
from hpctrain_tools.profile.traces import Events, stored_window
from hypothesis import given
from hypothesis import strategies as st
from jobs import TINY
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import hpctrain
from hpctrain.base.errors import EnvironmentUnfitError, UsageError
from hpctrain.cli import execute
from hpctrain.contracts.identity import Identity
from hpctrain.registry.hookspecs import hookimpl
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.registry.registry import build_registry

BASE = 1_790_857_026_000_000_000


SUM = {
    "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2,
    "Process Group Name": "0", "Process Group Description": "default_pg",
}  # fmt: skip
"""What kineto says of the kernel of a sum over all ranks."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def span(
    name: str, begin: float, length: float, cat: str = "cpu_op", pid: Any = 1, tid: Any = 1, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length, "args": args}


def write_trace(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"schemaVersion": 1, **head, "baseTimeNanoseconds": BASE, "traceEvents": events, "traceName": "x"}
    path.write_bytes(gzip.compress(json.dumps(content, indent=2).encode()))
    return path


def write_window(run: Path, of_ranks: Mapping[int, list[dict[str, Any]]], offset_ns: int = 0, **head: Any) -> Path:
    """A run with one window; rank 1's clock is later by `offset_ns`."""
    window = run / "profile" / "step-00000003"
    ranks = []
    for rank, events in of_ranks.items():
        file = write_trace(window / f"rank-{rank:05d}.pt.trace.json.gz", events, **head)
        ranks.append(
            {"rank": rank, "node": "n2", "place": {"pp": [0, 1], "dp": [rank, 2], "tp": [0, 2]}, "offset_ns": offset_ns * rank,
             "error_ns": 5000, "files": [[file.name, 1]]}
        )  # fmt: skip
    groups = {"default_pg": "dp", "mesh_tp": "tp"}
    index = {
        "format": 1,
        "first": 3,
        "last": 4,
        "cut": False,
        "size": 2,
        "ranks": ranks,
        "missing": {},
        "groups": groups,
    }
    (window / "window.json").write_text(json.dumps(index))
    return run


def accelerated(rank: int) -> list[dict[str, Any]]:
    """Two steps of a rank with an accelerator. Of 200 us of communication, 90 are behind computing."""
    cpu, gpu = 100 + rank, rank
    events: list[dict[str, Any]] = []
    for pid, label in ((cpu, "CPU"), (gpu, f"GPU {rank}")):
        events += [
            {"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 0, "args": args}
            for name, args in (("process_name", {"name": "python"}), ("process_labels", {"labels": label}))
        ]
    number = 0
    for step in (3, 4):
        begin = 1000.0 * step
        events.append(span(f"ProfilerStep#{step}", begin, 900, "user_annotation", cpu, cpu))
        for place, (operator, kernel, at, length, stream) in enumerate(
            (
                ("aten::mm", "sgemm", 50, 100, 7),
                ("nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING", 120, 200, 20),
                ("aten::mm", "sgemm", 200, 60, 7),
                ("aten::add", "elementwise", 400, 50, 7),
            )
        ):
            number += 1
            at_cpu = begin + 5 + 40 * place
            of = {"External id": number, "correlation": number}
            told = SUM if kernel.startswith("nccl") else {}
            events += [
                span(operator, at_cpu, 30, "cpu_op", cpu, cpu, **{"External id": number}),
                span("cudaLaunchKernel", at_cpu + 10, 10, "cuda_runtime", cpu, cpu, cbid=211, **of),
                {"ph": "s", "id": number, "pid": cpu, "tid": cpu, "ts": at_cpu + 10, "cat": "ac2g", "name": "ac2g"},
                span(kernel, begin + at, length, "kernel", gpu, stream, device=gpu, context=1, stream=stream, **of, **told),
                {"ph": "f", "id": number, "pid": gpu, "tid": stream, "ts": begin + at, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            ]  # fmt: skip
    return events


@pytest.mark.parametrize("stacks", [False, True])
def test_figures_of_operators_are_those_of_torch(stacks: bool, tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=stacks) as running:
        for _ in range(2):
            with record_function("forward"):
                loss = model(torch.randn(4, 16, 32)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    running.export_chrome_trace(str(tmp_path / "whole.json"))
    packed = tmp_path / "rank.pt.trace.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "whole.json").read_bytes()))
    found = operators_in(Events(packed))
    expected = {one.key: one for one in running.key_averages()}
    assert found.keys() - {"[memory]"} <= expected.keys() and len(found) > 50
    assert found["aten::addmm"].self_cpu_bytes > 0
    for name, one in found.items():
        if name == "[memory]":
            continue
        torchs = expected[name]
        assert (one.calls, one.self_cpu_bytes) == (torchs.count, torchs.self_cpu_memory_usage), name
        assert one.self_cpu_us == pytest.approx(torchs.self_cpu_time_total, abs=0.01 * one.calls), name
        assert one.cpu_us == pytest.approx(torchs.cpu_time_total, abs=0.01 * one.calls), name


def test_time_on_a_device_belongs_to_the_operator_that_launched() -> None:
    memory = {"ph": "i", "name": "[memory]", "pid": 100, "tid": 100, "args": {"Bytes": 64, "Device Type": 1}}
    taken = [{**memory, "ts": 3006.0}, {**memory, "ts": 3800.0, "args": {"Bytes": -16, "Device Type": 1}}]
    found = operators_in([*accelerated(0), span("memset", 4950, 7, "gpu_memset", 0, 7), *taken])
    assert found["aten::mm"] == Operator("aten::mm", 4, 80, 120, 320, 0, 64)
    assert found["nccl:all_reduce"].self_device_us == 400 and found["memset"] == Operator("memset", self_device_us=7)
    assert found["cudaLaunchKernel"] == Operator("cudaLaunchKernel", 8, 80, 80)
    assert found["[memory]"].self_device_bytes == -16


KERNELS = st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from([None, "dp", "tp", "default_pg", "batch"]))


@given(st.lists(KERNELS, max_size=12))
def test_exposed_communication_is_what_no_kernel_computes_beside(kernels: list[tuple[int, int, str | None]]) -> None:
    """Counted microsecond by microsecond."""
    events, computing, expected = [], set[int](), dict[str, list[set[int]]]()
    for begin, length, group in kernels:
        covered = set(range(begin, begin + length))
        said = group if group in (None, "default_pg") else f"mesh_{group}"
        told = {} if group is None else {**SUM, "Process Group Description": said}
        events.append(span("kernel", begin, length, "kernel", **told))
        if group is None:
            computing |= covered
        else:
            expected.setdefault({"default_pg": "world", "batch": "other"}.get(group, group), []).append(covered)
    seeing = Communication({"mesh_dp": "dp", "mesh_tp": "tp"})
    assert list(seeing.seeing(events)) == events
    found = {one.name: (one.calls, one.us, one.exposed_us, one.bytes) for one in seeing.figures()}
    assert found == {
        f"{axis}.all_reduce": (
            len(all_),
            sum(map(len, all_)),
            sum(len(one - computing) for one in all_),
            2000 * len(all_),
        )
        for axis, all_ in expected.items()
    }


def test_kernels_that_communicate_and_say_nothing_compute_nothing() -> None:
    """A receive counts what comes; torch has no group apart for an axis of all ranks. A time below zero is none."""
    received = {**SUM, "Collective name": "recv", "In msg nelems": 0, "dtype": "Float"}
    events = [
        span("ncclDevKernel_SendRecv", 0, 9, "kernel"),
        span("ncclDevKernel_SendRecv", 5, 9, "kernel", **received),
    ]
    seeing = Communication({"default_pg": "pp"})
    list(seeing.seeing([*events, span("gemm", 8, -5, "kernel")]))
    assert [(one.name, one.us, one.exposed_us, one.bytes) for one in seeing.figures()] == [
        ("other.unknown", 9, 9, 0),
        ("pp.recv", 9, 9, 4000),
    ]


def test_a_merged_trace_is_on_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted in pieces of 2 kB on disk; rank 1's clock is a day late."""
    monkeypatch.setattr(merging, "_SORTED", 2000)
    day = 86_400_000_000_000
    late = [{**one, "ts": one["ts"] - day / 1000} for one in accelerated(1)]
    inside = [span("inner", 3990, 3), span("outer", 3990, 8), span("whole", 100, 5, pid="Spans", tid="profiler")]
    run = write_window(Path("run"), {0: [*accelerated(0), *inside], 1: late}, -day)
    path, count = write_merged(stored_window(run, None), None)
    assert path == run / "profile" / "step-00000003" / "merged.json.gz"
    merged = json.loads(gzip.decompress(path.read_bytes()))
    events = [one for one in merged["traceEvents"] if one["ph"] != "M"]
    assert count == len(events) == 2 * 42 + 3
    assert [one["ts"] for one in events] == sorted(one["ts"] for one in events) and events[0]["ts"] == 0
    assert merged["baseTimeNanoseconds"] == BASE + 100_000
    names = {one["pid"]: one["args"]["name"] for one in merged["traceEvents"] if one["name"] == "process_name"}
    labels = [f"rank {rank} (dp {rank}, tp 0) node n2" for rank in (0, 1)]
    assert {f"{label}{of}" for label in labels for of in ("", ": GPU 0", ": GPU 1")} - {
        f"{labels[0]}: GPU 1",
        f"{labels[1]}: GPU 0",
    } <= {*names.values()}
    # the same kernels at the same times, with arrows of their own
    kernels: dict[str, list[Any]] = {}
    for one in events:
        if one.get("cat") == "kernel":
            kernels.setdefault(names[one["pid"]].partition(" (")[0], []).append((one["name"], one["ts"], one["dur"]))
    assert kernels["rank 0"] == kernels["rank 1"] and len(kernels["rank 0"]) == 8
    assert {one["id"] for one in events if one["ph"] == "s"} == {f"{rank}.{n}" for rank in (0, 1) for n in range(1, 9)}
    nested = [one["name"] for one in events if one["name"] in ("inner", "outer")]
    assert nested == ["outer", "inner"], "an event that holds another one comes first"
    assert not list(path.parent.glob(".*"))


def test_a_window_without_traces_is_refused_with_the_reasons(tmp_path: Path) -> None:
    window = tmp_path / "profile" / "step-00000003"
    window.mkdir(parents=True)
    missing = {"0": "its trace could not be written: No space left on device"}
    index = {"first": 3, "last": 5, "size": 1, "ranks": [], "missing": missing, "groups": {}}
    (window / "window.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"found no trace of any rank .rank 0: .*No space left on device"):
        write_merged(stored_window(tmp_path, None), None)
    assert execute(["profile", str(tmp_path)]) == 2 and not list(window.glob("*.gz"))


@pytest.mark.parametrize("target", ["file.txt/merged.json.gz", "nowhere/merged.json.gz"])
def test_a_merged_trace_that_cannot_be_written_is_a_sentence(target: str) -> None:
    Path("file.txt").touch()
    run = write_window(Path("run"), {0: accelerated(0)})
    with pytest.raises(UsageError, match=f"{target} can't be written: .*; -o takes another file"):
        write_merged(stored_window(run, None), Path(target))


def test_tables_of_time_and_memory() -> None:
    run = write_window(Path("run"), {0: accelerated(0), 1: accelerated(1)})
    lines = Figures(stored_window(run, None), []).lines(2)
    assert lines[0] == "By time on the device, 2 ranks together" and len(lines) == 8
    assert lines[2].split() == ["nccl:all_reduce", "4", "0.080", "16.7", "0.120", "0.800", "48.8"]
    assert lines[5] == "Communication of the device, 2 ranks together"
    assert lines[7].split() == ["dp.all_reduce", "4", "0.800", "0.360", "0.440", "55.0", "0.008", "0.01"]
    with pytest.raises(UsageError, match="found the traces of ranks 0, 1, expected one of 7"):
        Figures(stored_window(run, None), [7])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a whole trace"),
        ('{"traceEvents":[{"ph":"X"}CUT', "expected a whole trace"),
        ('{"traceEvents":[{"ph":"X","name":"a","cat":"cpu_op"', "expected a whole trace"),
        ('{"traceEvents":[7]}', "found 7 among its events"),
        ('{"traceEvents":[{"ph":"X","ts":"now"}]}', "among its events"),
        ('{"traceEvents":[{"ph":"i","name":"[memory]","ts":1}]}', "expected a trace"),
        ('{"traceEvents":[{"ph":"X","ts":1e999}]}', "among its events"),
        ('{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","args":{"Collective name":["x"]}}]}', "expected a trace"),
        (
            '{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","args":{"Collective name":"send","In msg nelems":"x"}}]}',
            "expected a trace",
        ),
        (
            '{"traceEvents":[{"ph":"X","cat":"kernel","name":"k","args":{"Collective name":"send","In msg nelems":1e30}}]}',
            "expected a trace",
        ),
    ],
)
def test_a_damaged_trace_is_a_sentence(text: str, says: str) -> None:
    packed = gzip.compress(text.removesuffix("CUT").encode())
    content = packed[:-9] if text.endswith("CUT") else packed if text else b"no gzip"
    run = write_window(Path("run"), {0: []})
    stored = stored_window(run, "step-00000003")
    stored.ranks[0].trace.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        Figures(stored, [])


def test_a_run_without_windows_is_a_sentence() -> None:
    Path("run").mkdir()
    with pytest.raises(UsageError, match=r"found none, expected a window of steps; \[profile\] record = 3"):
        stored_window(Path("run"), None)
    write_window(Path("run"), {0: []})
    with pytest.raises(UsageError, match="found step-00000003, expected step-00000009"):
        stored_window(Path("run"), "step-00000009")
    Path("run/profile/step-00000003/window.json").write_text("[]")
    with pytest.raises(UsageError, match="expected the index of a window"):
        stored_window(Path("run"), None)


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values of a JSON object."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from places(value, (*place, key))


@pytest.mark.parametrize("kind", ["pipe", "link", "linked window", "linked folder"])
def test_files_of_a_crafted_run_are_not_followed_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    """As an index or a trace; a window elsewhere would be written to by a merge."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "window.json").write_text("{}")
    (run / "profile").mkdir(parents=True)
    window = run / "profile" / "step-1"
    if kind == "linked window":
        window.symlink_to(outside)
    elif kind == "linked folder":
        (run / "profile").rmdir()
        (tmp_path / "away" / "step-1").mkdir(parents=True)
        (tmp_path / "away" / "step-1" / "window.json").write_text("{}")
        (run / "profile").symlink_to(tmp_path / "away")
    else:
        window.mkdir()
        for name in ("window.json", "trace.json.gz"):
            os.mkfifo(window / name) if kind == "pipe" else (window / name).symlink_to(outside / "window.json")
        with pytest.raises(UsageError, match=r"it is (no regular file|a symbolic link)"):
            list(Events(window / "trace.json.gz"))
    with pytest.raises(UsageError, match=r"it is (no regular file|a symbolic link)|found step-1, expected a window"):
        stored_window(run, None)


def test_a_damaged_index_is_a_sentence() -> None:
    """Each of its values gives way to each of these, or is missing."""
    run = write_window(Path("run"), {0: [span("aten::mm", 1, 2)]})
    path, told = run / "profile" / "step-00000003" / "window.json", 0
    whole = path.read_text()
    for place in places(json.loads(whole)):
        for wrong in (None, [], {}, "x", -1, 1e999, [[]], {"x": []}, "missing"):
            content = inner = json.loads(whole)
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            if wrong == "missing":
                del inner[place[-1]]
            path.write_text(json.dumps(content))
            try:
                stored = stored_window(run, None)
                Figures(stored, []).lines(1)
                write_merged(stored, None)
            except UsageError:
                told += 1
    assert told > 50


def test_hta_is_asked_where_it_is_installed() -> None:
    run = write_window(Path("run"), {0: [span("aten::mm", 1, 2)]})
    try:
        import hta  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentUnfitError, match=r"pip install 'hpctrain\[hta\]'"):
            Report(stored_window(run, None))
        pytest.skip("needs hpctrain[hta]")
    with pytest.raises(UsageError, match="found no event of an accelerator"):
        Report(stored_window(run, None))
    both = {rank: accelerated(rank) for rank in (0, 1)}
    report = Report(stored_window(write_window(Path("both"), both), None))
    assert not report.failed, report.failed
    assert [one["comp_comm_overlap_pctg"] for one in report.overlap] == [45.0, 45.0]
    assert [one.exposed_us / one.us for one in Figures(report.window, []).communication[1]] == [1 - 0.45]
    assert [one["compute_time(us)"] for one in report.times] == [420.0, 420.0]
    assert {one["stream"] for one in report.idle} == {7, 20}
    assert [one["rank"] for one in report.path] == [0, 1] and "gpu_compute_bound" in report.path[0]
    json.dumps(report.as_dict())
    assert "Critical path of the first step, in percent" in report.lines()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"ranks": [2]}, "expected ranks from 0 to 1, found 2"),
        ({"ranks": []}, "expected ranks from 0 to 1, found none"),
        ({"record": 0}, "found 0"),
        ({"record": "many"}, "record: .* found 'many'"),
        ({"repeat": 4}, "found repeat, expected some of"),
    ],
)
def test_a_wrong_request_is_a_sentence(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TorchProfilerOptions().asked(values, 2)
    merged = TorchProfilerOptions(memory=True, ranks=[1]).asked({"record": 2}, 2)
    assert (merged.memory, merged.record, merged.wait, merged.chosen(2)) == (True, 2, 0, [1])


def test_ranges_end_with_the_one_around_them() -> None:
    """A forward without memory ends without a call."""
    told: list[str] = []
    ranges = Ranges(told.append, lambda: told.append("end"))
    for name in ("step", "forward"):
        ranges.begin(name)
    ranges.end("step")
    ranges.end("step")
    ranges.begin("data")
    ranges.end("forward")
    ranges.end_all()
    assert told == ["step", "forward", "end", "end", "data", "end"]


def trained(**tables: Any) -> list[float]:
    job = {**json.loads(json.dumps(TINY)), **tables}
    found: list[float] = hpctrain.run(job, resume="never")["losses"]
    return found


@pytest.mark.thorough
def test_a_profiled_run_is_the_same_and_says_what_a_cpu_lacks(capfd: pytest.CaptureFixture[str]) -> None:
    plain = trained()
    profiled = trained(
        profile={"wait": 0, "warmup": 0, "record": 2, "repeat": 2, "snapshot": True, "ranges": True, "shapes": True}
    )
    assert profiled == plain
    assert sorted(path.name for path in Path("out/profile").iterdir()) == ["step-00000001", "step-00000003"]
    shown = capfd.readouterr()
    assert "[profile] snapshot: torch keeps no history of the memory of cpu" in shown.err
    assert "[profile] ranges: no profiler of a vendor's shows ranges of cpu ranks" in shown.err
    assert "USDT" not in shown.err and "profile      steps 3 to 4: out/profile/step-00000003" in shown.out


@pytest.mark.thorough
def test_a_window_that_the_end_cuts_keeps_its_steps(capfd: pytest.CaptureFixture[str]) -> None:
    trained(profile={"wait": 1, "record": 50})
    index = json.loads(Path("out/profile/step-00000003/window.json").read_text())
    assert (index["first"], index["last"], index["cut"]) == (3, 4, True)
    trained(profile={"wait": 2, "warmup": 5, "record": 50})
    assert "nothing was recorded" in capfd.readouterr().out and not Path("out/profile").exists()


@pytest.mark.thorough
def test_a_trace_that_fails_does_not_end_a_training(capfd: pytest.CaptureFixture[str]) -> None:
    with profile(activities=[ProfilerActivity.CPU]):  # the program's own
        losses = trained(profile={"wait": 0, "record": 1})
    assert len(losses) == 4 and "rank 0: torch.profiler did not start: another profiler" in capfd.readouterr().err
    Path("plain").mkdir()
    Path("plain/profile").write_text("no folder")
    table = {**TINY["job"], "output_dir": "plain"}
    found = hpctrain.run({**TINY, "job": table, "profile": {"wait": 0, "record": 1}})
    assert found["losses"] == losses and "plain/profile/step-00000002 could not be written" in capfd.readouterr().err


class History:
    """An accelerator's history of memory, which a CPU lacks."""

    is_kept = True
    told: ClassVar[list[str]] = []

    def __init__(self, _: torch.device) -> None:
        pass

    def begin(self, _: int) -> None:
        self.told.append("begin")

    def write(self, path: str) -> None:
        self.told.append(Path(path).name)

    def end(self) -> None:
        self.told.append("end")


def failing_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first call finds no room."""
    calls = itertools.count()

    def called(*values: Any, **named: Any) -> Any:
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*values, **named)

    return called


def test_a_history_of_memory_ends_with_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the directory of the first window, and none for the trace of the second one."""
    monkeypatch.setattr(recording, "MemoryHistory", History)
    monkeypatch.setattr(tempfile, "mkdtemp", failing_once(tempfile.mkdtemp))
    monkeypatch.setattr(profile, "export_chrome_trace", failing_once(profile.export_chrome_trace))
    trained(profile={"wait": 0, "warmup": 0, "record": 1, "repeat": 3, "snapshot": True})
    assert History.told == ["begin", "end"] * 2 + ["begin", "rank-00000.memory.pickle", "end"]


def test_no_hook_is_called_outside_of_windows() -> None:
    registry = build_registry()
    made = registry.find("profile", "torch").cls
    life = LifeCycle(registry, Identity(), [], made(made.Options()))
    each_step = ("hpctrain_step_end", "hpctrain_phase_begin", "hpctrain_phase_end", "hpctrain_outputs")
    assert not any(getattr(registry.manager.hook, hook).get_hookimpls() for hook in each_step) and not life.can_end
    calls: list[str] = []

    class Part:
        @hookimpl
        def hpctrain_phase_begin(self, phase: str) -> None:
            calls.append(phase)

    part = Part()
    with life.phase("data", 0):
        life.join(part)
    with life.phase("forward", 0):
        life.leave(part)
    with life.phase("backward", 0):
        pass
    life.close()
    assert calls == ["forward"]
    with pytest.raises(TypeError, match="object can't join the run: it implements no hook"):
        life.join(object())
