"""`hpctrain report` of real runs, and its page in a real browser."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hpctrain_tools.report.gathering import gather
from hpctrain_tools.report.pages import html_page, markdown
from hpctrain_tools.report.plan_file import JobPlan, read_plan
from jobs import JobFile
from launching import KILL, hpctrain, in_process, run, started, wait_until
from packages import need_commands
from planted_runs import GB, STORIES, healthy, killed_and_resumed, planted_plan

import hpctrain as package

pytestmark = pytest.mark.timeout(240)

SLOW = ("--set", "plugins.load=['slow']")


@pytest.mark.nightly
def test_the_time_of_a_run_that_was_killed_and_resumed_adds_up(job: JobFile) -> None:
    job.set(job={"steps": 24}, checkpoint={"every_steps": 10}).sleeps(0.05)
    begin = time.time()
    with started(hpctrain("run", "job.toml", *SLOW), job.directory) as command:
        wait_until((job.output / "starts.jsonl").exists, 90, "the start")
        seen = time.time()
        job.wait_for_steps(14)
        command.process.send_signal(KILL)
        command.process.wait(timeout=30)
    killed, before = time.time(), job.rows()
    told = in_process("report", "out", "--format", "markdown", cwd=job.directory)
    assert told.code == 0 and f"**Killed after step {before[-1]['step']} of 24" in told.out, told
    assert "goes on from step 10" in told.out, told
    again = time.time()
    assert run(hpctrain("run", "job.toml", *SLOW), job.directory).code == 0
    end = time.time()
    (found,) = json.loads(in_process("report", "out", "--format", "json", cwd=job.directory).out)
    wall, lost = found["wall"], [row for row in before if row["step"] > 10]
    assert found["state"] == "done" and len(found["starts"]) == 2 and len(lost) >= 4
    wrote = (job.output / "log" / "rank-00000.log").stat().st_mtime
    assert wrote - seen - 0.1 <= wall["seconds"] <= end - begin
    assert sum(wall["of"].values()) == pytest.approx(wall["seconds"])
    assert min(wall["of"].values()) >= 0
    assert found["lost"][0]["steps"] == len(lost)
    assert wall["of"]["lost steps"] == pytest.approx(sum(sum(row["seconds"].values()) for row in lost))
    stepping = ("forward", "backward", "communication", "optimizer", "other")
    assert wall["of"]["stepping"] == pytest.approx(sum(row["seconds"][part] for row in job.rows() for part in stepping))
    assert wall["of"]["not running"] > 0.9 * (again - killed)


@pytest.mark.thorough
def test_a_real_plan_is_compared_with_a_run_of_its_job(job: JobFile) -> None:
    job.set(precision={"mode": "fp32"})
    planned = run(hpctrain("plan", "job.toml", "-n", "1", "--json"), job.directory).out
    (job.directory / "plan.json").write_text(planned)
    plan, most = read_plan(job.directory / "plan.json"), json.loads(planned)["peak_bytes"]
    job.set(job={"output_dir": str(job.directory / "out")}, optimizer={"lr": 0.02})
    assert package.run(job.tables)["exit_code"] == 0
    told = markdown([gather(job.output, plan=plan)])
    assert "Not compared: the run had no accelerator" in told and told.count("Not compared") == 1, told
    # as if it had run on an accelerator, which takes a quarter more than planned
    _change_rows(job.output / "starts.jsonl", device="NVIDIA H100 80GB HBM3", device_bytes=2 * most)
    _change_rows(job.output / "metrics.jsonl", memory_bytes={"rank_max": 1.25 * most, "rank_mean": 1.25 * most})
    told = markdown([gather(job.output, plan=plan)])
    assert "25% above the planned" in told and "| 125% |\n| mean over" in told and "Not compared" not in told, told
    assert '"micro_size": 1,' in planned
    (job.directory / "plan.json").write_text(planned.replace('"micro_size": 1,', '"micro_size": 2,'))
    told = markdown([gather(job.output, plan=read_plan(job.directory / "plan.json"))])
    assert "the plan is of another job: batch.micro\\_size is 2, not 1\n" in told and "above the planned" not in told, (
        told
    )


def _change_rows(path: Path, **keys: Any) -> None:
    rows = [json.loads(line) | keys for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_matplotlib_the_default_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy(tmp_path / "run")
    monkeypatch.setattr("hpctrain_tools.commands.report.find_spec", lambda name: None)
    done = in_process("report", "run", cwd=tmp_path)
    assert done.code == 0 and done.out.startswith("# run") and "pip install 'hpctrain[plots]'" in done.err, done


@pytest.mark.thorough
def test_a_page_is_refused_where_matplotlib_is_broken_and_a_text_is_not(tmp_path: Path) -> None:
    planted = healthy(tmp_path / "run")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError('not here')\n")
    env = {"PYTHONPATH": str(hidden)}
    refused = run(hpctrain("report", str(planted.directory)), tmp_path, env=env)
    assert refused.code == 3 and "pip install 'hpctrain[plots]'" in refused.err, refused
    told = run(hpctrain("report", "run", "--format", "markdown"), tmp_path, env=env)
    assert told.code == 0 and "# run" in told.out, told


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    need_commands("chromium", "chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    found.set_page_load_timeout(60)
    try:
        yield found
    finally:
        found.quit()


LOOK = """
const shown = [...document.querySelectorAll('.plot svg')].filter(one => one.getBoundingClientRect().height > 50);
return {
  wide: document.documentElement.scrollWidth, room: window.innerWidth,
  plots: shown.map(one => one.closest('.plot').dataset.plot),
  paths: Math.min(...shown.map(one => one.querySelectorAll('path').length)),
  small: Math.min(...shown.flatMap(one => [...one.querySelectorAll('text')].map(text => text.getBoundingClientRect().height))),
  paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  text: getComputedStyle(document.querySelector('.plot svg text')).fill,
  titles: [...document.querySelectorAll('h2')].filter(one => one.getBoundingClientRect().height > 10).map(one => one.innerText),
  scripts: document.scripts.length,
};
"""
PLOTS = ["loss", "lr", "throughput", "mfu", "parts", "memory", "communication", "goodput"]


def looked_at(page: Path, driver: Any, width: int, scheme: str) -> dict[str, Any]:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.get(page.as_uri())
    assert driver.get_log("browser") == []
    found: dict[str, Any] = driver.execute_script(LOOK)
    return found


def lightness(color: str) -> float:
    """The mean of the channels of "rgb(1, 2, 3)"."""
    channels = [int(one) for one in color.partition("(")[2].rstrip(")").split(",")[:3]]
    return sum(channels) / len(channels)


@pytest.mark.thorough
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    plan = JobPlan.model_validate(planted_plan(*(number * GB for number in range(45, 51))))
    page.write_text(html_page([gather(killed_and_resumed(tmp_path / "run").directory, plan=plan)]))
    with browser() as driver:
        for width, scheme in ((390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")):
            found = looked_at(page, driver, width, scheme)
            assert found["plots"] == PLOTS and found["paths"] > 1 and found["scripts"] == 0, found
            assert found["wide"] <= found["room"] == width and found["small"] >= 8, found
            assert "Memory against the plan" in found["titles"], found
            paper, ink = lightness(found["paper"]), lightness(found["ink"])
            assert (paper > 200 and ink < 80) if scheme == "light" else (paper < 50 and ink > 200), found
            assert abs(lightness(found["text"]) - paper) > 120, found


@pytest.mark.nightly
def test_the_pages_of_all_stories_in_a_browser(tmp_path: Path) -> None:
    pages = []
    for plant in STORIES:
        directory = plant(tmp_path / plant.__name__).long_ago().directory
        assert in_process("report", str(directory), cwd=tmp_path).code == 0
        pages.append(directory / "report.html")
    several = [str(tmp_path / plant.__name__) for plant in STORIES]
    assert in_process("report", *several, "-o", "all.html", cwd=tmp_path).code == 0
    with browser() as driver:
        for page in [*pages, tmp_path / "all.html"]:
            for width, scheme in ((390, "dark"), (1280, "light")):
                found = looked_at(page, driver, width, scheme)
                assert found["wide"] <= width and found["paths"] > 1 and {*found["plots"]} >= {*PLOTS}, (page, found)
                printed = driver.execute_cdp_cmd("Page.printToPDF", {})["data"]
                assert base64.b64decode(printed).startswith(b"%PDF-")
