"""A window on a GPU: its kernels, the snapshot of memory, the analyses of HTA; profiled steps keep their losses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpctrain_tools.profile.hta_report import Report
from hpctrain_tools.profile.table import Figures
from hpctrain_tools.profile.traces import stored_window
from on_gpu import job, losses, needs_gpu, trained

pytestmark = [needs_gpu, pytest.mark.timeout(180)]


def test_a_window_on_a_gpu(tmp_path: Path) -> None:
    plain = trained(job(tmp_path / "plain", job={"deterministic": True}))
    profile = {"wait": 2, "record": 2, "memory": True, "snapshot": True, "ranges": True}
    profiled = trained(job(tmp_path / "profiled", job={"deterministic": True}, profile=profile))
    assert losses(profiled) == losses(plain)
    window = stored_window(tmp_path / "profiled", None)
    figures = Figures(window, [])
    assert figures.total["aten::mm"].self_device_us > 0 and figures.lines(3)[0] == "By time on the device, rank 0"
    assert sum(one.self_device_bytes > 0 for one in figures.total.values()) > 3
    assert (window.directory / "rank-00000.memory.pickle").stat().st_size > 10_000
    pytest.importorskip("hta", reason="needs hpctrain[hta]")
    report = Report(window)
    assert not report.failed and report.times[0]["compute_time(us)"] > 0 and report.path
