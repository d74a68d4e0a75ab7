"""The loggers `prometheus` and `opentelemetry`, read with their libraries' parsers: a run, its resume, receivers that fail."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from launching import wait_until
from logged import forget_checkpoint, logger, prepare, rows, train

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import job_id
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.logger import Logger, LogWriter
from hpctrain.job.problems import JobError
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.report import Report

prometheus_client = pytest.importorskip("prometheus_client", reason="needs hpctrain[prometheus]")
metrics_service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason="needs hpctrain[opentelemetry]"
)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs hpctrain[opentelemetry]")

SECRET = "s3cret-0123456789"
LOCAL = {"name": "prometheus", "host": "127.0.0.1"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one, in no job of a scheduler, and no collector of the user's."""
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith("OTEL_") or name in ("SLURM_JOB_ID", "PBS_JOBID", "FLUX_JOB_ID"):
            monkeypatch.delenv(name)


@contextmanager
def receiver(*statuses: int) -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """An HTTP server, and what it got: path, headers and body. statuses: of its first answers; then it says 200."""
    got: list[tuple[str, dict[str, str], bytes]] = []
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            got.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
            self.send_response(left.pop(0) if left else 200)
            self.end_headers()

        do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=["refuses", "silent"])
def dead(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a receiver that refuses connections, or takes them and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        uri = f"http://127.0.0.1:{opened.getsockname()[1]}"
        if request.param == "refuses":
            opened.close()
        yield uri


def no_file_has(text: str) -> bool:
    return not [path for path in Path().glob("**/*") if path.is_file() and text.encode() in path.read_bytes()]


# --- Prometheus


def scrape(target: str | None = None, accept: str = "text/plain") -> str:
    target = target or json.loads(Path("out/prometheus.json").read_text())[0]["targets"][0]
    request = urllib.request.Request(f"http://{target}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values by name, then by labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in values, "a series has one value"
            values[labels] = sample.value
    return found


SCRAPES = """
import json, urllib.request
from pathlib import Path
from hpctrain.api import hookimpl

@hookimpl
def hpctrain_step_end(step):
    if step in (3, 7):
        [one] = json.loads(Path("out/prometheus.json").read_text())
        with urllib.request.urlopen(f"http://{one['targets'][0]}/metrics", timeout=30) as answer:
            Path(f"scrape-{step}").write_bytes(answer.read())
"""
"""Reads the endpoint from inside the run, when it has the rows of the step before."""


def free_port() -> int:
    """A port that nobody uses, below those that systems give to connections: it is still free for the second start."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.mark.thorough
def test_prometheus_reads_the_newest_values_of_a_run_and_of_its_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("scrapes.py").write_text(SCRAPES)
    monkeypatch.syspath_prepend(".")
    monkeypatch.setenv("PBS_JOBID", "12.pbs")
    port = free_port()
    for steps in (6, 8):
        train(steps, {**LOCAL, "port": port}, plugins={"load": ["scrapes"]})
        assert not Path("out/prometheus.json").exists(), "nothing serves any more"
        if steps == 6:
            forget_checkpoint(6)
    assert f"prometheus: http://127.0.0.1:{port}/metrics" in Path("out/log/rank-00000.log").read_text()
    run = (("job_id", "12.pbs"), ("run", "tiny"))
    for step, trained in ((2, [1, 2]), (6, [5, 6])):  # the second process begins with step 5
        found, row = samples(Path(f"scrape-{step + 1}").read_text()), rows("loss")[step]
        for key in ("loss", "lr", "grad_norm", "step_seconds", "tokens_per_second", "epoch", "step"):
            if step == 6 or key not in ("step_seconds", "tokens_per_second"):
                assert found[f"hpctrain_{key}"] == {run: row[key]}, key
        for table in ("memory_bytes", "seconds") if step == 6 else ("memory_bytes",):
            kinds = {dict(labels)["kind"]: value for labels, value in found[f"hpctrain_{table}"].items()}
            assert kinds == row[table] and all({*run} < {*one} for one in found[f"hpctrain_{table}"])
        assert found["hpctrain_batch_tokens"] == {run: row["tokens"]}
        assert found["hpctrain_evaluation_loss"] == {run: rows("evaluation_loss")[step]["evaluation_loss"]}
        assert found["hpctrain_last_row_timestamp_seconds"] == {run: rows("evaluation_loss")[step]["time"]}
        assert found["hpctrain_steps_total"] == {run: 2}
        assert found["hpctrain_tokens_total"] == {run: sum(rows("loss")[one]["tokens"] for one in trained)}
    assert rows("loss").keys() == {*range(1, 9)}


def test_prometheus_takes_any_row_in_both_of_its_formats() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    writer = logger("prometheus", host="127.0.0.1").open(prepare('a \\"b\\"'), 0)
    assert samples(scrape())["hpctrain_steps_total"] == {(("run", 'a "b"'),): 0}
    writer.log(
        {"step": 1, "time": 5.5, "loss": float("nan"), "grad_norm": float("inf"), "skipped": True, "guard": "oom"}
    )
    histogram = {"weights": {"norm": {"low": 0.0, "high": 1.0, "counts": [1, 2]}}}
    writer.log(
        {"step": 2, "loss_a b-c.d": 1, "steps": 9, "histograms": histogram, "x": {"y": 2, "z": "no"}, "samples": 12}
    )
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        text = scrape(accept=accept)
        if "openmetrics" in accept:
            families = list(text_string_to_metric_families(text))
            assert len({family.name for family in families}) == len(families)
            continue
        found = {name: [*values.values()] for name, values in samples(text).items()}
        assert math.isnan(found.pop("hpctrain_loss")[0])
        assert found == {
            "hpctrain_grad_norm": [math.inf],
            "hpctrain_step": [2],
            "hpctrain_last_row_timestamp_seconds": [5.5],
            "hpctrain_loss_a_b_c_d": [1],
            "hpctrain_batch_steps": [9],
            "hpctrain_x": [2],
            "hpctrain_batch_samples": [12],
            "hpctrain_steps_total": [2],
            "hpctrain_samples_total": [12],
        }
    writer.close()


def test_a_port_that_is_taken_is_told_before_the_training() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EnvironmentUnfitError, match=rf"port {port} of 127.0.0.1 can't be had \(Address already in use"
        ) as error:
            train(2, {"name": "csv"}, {**LOCAL, "port": port})
    assert error.value.exit_code == 3 and not rows("loss") and not Path("out/prometheus.json").exists()
    with pytest.raises(EnvironmentUnfitError, match=r"of 192\.0\.2\.1 can't be had .*an address of this node"):
        logger("prometheus", host="192.0.2.1").open(Path("out"), 0)  # an address of nobody (RFC 5737)


def test_two_runs_of_a_process_have_an_endpoint_each_and_a_port_is_free_at_once() -> None:
    """Also while a forked worker still has the socket."""
    opened = [logger("prometheus", host=host) for host in ("127.0.0.1", "0.0.0.0")]
    out, targets = prepare(), []
    writers = []
    for number, one in enumerate(opened):
        writers.append(one.open(out, 0))
        writers[-1].log({"step": number + 1})
        targets.append(json.loads(Path("out/prometheus.json").read_text())[0]["targets"][0])
    name, _, port = targets[1].rpartition(":")
    assert name == socket.gethostname()
    found = [samples(scrape(target)) for target in (targets[0], f"127.0.0.1:{port}")]
    assert [[*one["hpctrain_step"].values()] for one in found] == [[1], [2]]
    worker = os.fork()
    if worker == 0:
        signal.pause()
        os._exit(0)
    try:
        for writer in writers:
            writer.close()
        again = logger("prometheus", host="127.0.0.1", port=int(port)).open(out, 4)
        assert [*samples(scrape())["hpctrain_steps_total"].values()] == [0]
        again.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_readers_that_break_off_or_wait_disturb_nobody(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain_plugins.logger import prometheus_server

    monkeypatch.setattr(prometheus_server, "_REQUEST_SECONDS", 1.0)
    writer = logger("prometheus", host="127.0.0.1").open(prepare(), 0)
    host, _, port = json.loads(Path("out/prometheus.json").read_text())[0]["targets"][0].partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as silent:
        assert silent.recv(1) == b"", "the server waits for a while only"
    silent = socket.create_connection((host, int(port)))
    for words in (b"", b"GET /metrics", b"\xff\x00\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port))) as one:
            one.sendall(words)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, not an orderly end
    assert "hpctrain_steps_total" in scrape()
    begin = time.monotonic()
    writer.close()
    assert time.monotonic() - begin < 10, "one that still waits holds up no end"
    silent.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_a_pushgateway_gets_the_values_at_the_end_and_a_resume_replaces_them() -> None:
    with receiver() as (uri, got):
        for steps in (2, 4):
            train(steps, {"name": "prometheus", "pushgateway": uri})
    assert not Path("out/prometheus.json").exists()
    assert len({path for path, _, _ in got}) == 1 and got[0][0].startswith("/metrics/job/hpctrain/")
    assert "/run/tiny" in got[0][0] and "/instance@base64/" in got[0][0]
    for (_, _, body), step in zip(got, (2, 4), strict=True):
        found = {name: [*values.values()] for name, values in samples(body.decode()).items()}
        assert found["hpctrain_step"] == [step] and found["hpctrain_loss"] == [rows("loss")[step]["loss"]]
        assert found["hpctrain_steps_total"] == [2]


@pytest.mark.cases(thorough=["silent"])
def test_a_dead_pushgateway_ends_no_training(
    dead: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain_plugins.logger import prometheus_server

    monkeypatch.setattr(prometheus_server, "_REQUEST_SECONDS", 1.0)
    begin = time.monotonic()
    train(2, {"name": "prometheus", "pushgateway": dead})
    assert time.monotonic() - begin < 60 and rows("loss").keys() == {1, 2}
    said = capfd.readouterr().err
    assert (
        said.count("hpctrain: warning: logger prometheus failed and gets no more rows") == 1 and "Traceback" not in said
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pushgateway": f"http://me:{SECRET}@gateway"}, "holds a name or password"),
        ({"pushgateway": f"http://me:{SECRET}@gateway:x"}, "holds a name or password"),
        ({"pushgateway": "gateway:9091"}, "found 'gateway:9091', expected an address such as"),
        ({"pushgateway": "http://gateway:x"}, "expected an address such as"),
        ({"pushgateway": "http://gateway", "port": 9000}, "leave one out"),
        ({"port": 70000}, "less than or equal to 65535"),
        ({"name": "opentelemetry", "endpoint": f"https://me:{SECRET}@site"}, "use OTEL_EXPORTER_OTLP_HEADERS"),
        ({"name": "opentelemetry", "endpoint": "site:4318"}, "expected an address such as"),
    ],
)
def test_options_that_cannot_be_are_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why) as error:
        train(2, {"name": "prometheus", **options})
    assert SECRET not in str(error.value) and no_file_has(SECRET) and not Path("out").exists()


# --- OpenTelemetry


def points(body: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """The attributes of the resource; each metric by name, with its values by kind."""
    request = metrics_service.ExportMetricsServiceRequest.FromString(body)
    [resource] = request.resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    [scope] = resource.scope_metrics
    found: dict[str, Any] = {}
    for metric in scope.metrics:
        values = getattr(metric, metric.WhichOneof("data"))
        kinds = {
            "".join(one.value.string_value for one in point.attributes): point.as_double or point.as_int
            for point in values.data_points
        }
        assert len(kinds) == len(values.data_points)
        found[metric.name] = (metric.WhichOneof("data"), metric.unit, kinds)
    return attributes, found


@pytest.mark.thorough
def test_a_collector_gets_the_newest_values_of_a_run_and_of_its_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{SECRET}")
    monkeypatch.setenv("FLUX_JOB_ID", "f23")
    with receiver() as (uri, got):
        train(6, {"name": "opentelemetry", "endpoint": uri})
        forget_checkpoint(6)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", uri)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        train(8, {"name": "opentelemetry"})
    assert len(got) == 2
    for (path, headers, body), step, trained, service in zip(got, (6, 8), (6, 4), ("hpctrain", "ours"), strict=True):
        assert path == "/v1/metrics" and headers["authorization"] == f"Bearer {SECRET}"
        attributes, found = points(body)
        assert attributes["service.name"] == service
        assert attributes["service.instance.id"] == str(Path("out").absolute())
        assert attributes["hpctrain.run"] == "tiny" and attributes["hpctrain.job_id"] == "f23"
        row = rows("loss")[step]
        assert found["hpctrain.loss"] == ("gauge", "", {"": row["loss"]})
        assert found["hpctrain.steps"] == ("sum", "", {"": trained}) and found["hpctrain.tokens"][2] == {
            "": trained * 96
        }
        assert found["hpctrain.step"][2] == {"": step} and found["hpctrain.batch_tokens"][2] == {"": 96}
        assert found["hpctrain.evaluation_loss"][2] == {"": rows("evaluation_loss")[step]["evaluation_loss"]}
        assert found["hpctrain.memory_bytes"][:2] == ("gauge", "By")
        if step == 8:
            assert found["hpctrain.memory_bytes"][2] == row["memory_bytes"]
            assert found["hpctrain.step_seconds"] == ("gauge", "s", {"": row["step_seconds"]})
    assert no_file_has(SECRET)


def test_a_collector_that_fails_at_first_gets_the_values_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with receiver(400, 401) as (uri, got):
        writer = logger("opentelemetry", endpoint=f"{uri}/v1/metrics/").open(prepare(), 0)
        writer.log({"step": 1, "loss": float("nan"), "lr": math.inf, "memory_bytes": {"rank_max": 5}})
        wait_until(lambda: len(got) > 3, 60, "4 exports")
        writer.log({"step": 2, "extra": 1.5})
        before = len(got)
        wait_until(lambda: len(got) > before + 1, 60, "an export of the second row")
        children = os.fork()
        if children == 0:  # a worker's copy sends nothing
            os._exit(threading.active_count())
        assert os.waitstatus_to_exitcode(os.waitpid(children, 0)[1]) == 1
        writer.close()
    found = points(got[-1][2])[1]
    assert not {"hpctrain.loss", "hpctrain.lr"} & found.keys(), "OpenTelemetry has finite numbers only"
    assert found["hpctrain.extra"][2] == {"": 1.5}
    assert found["hpctrain.memory_bytes"][2] == {"rank_max": 5} and found["hpctrain.steps"][2] == {"": 2}
    [told] = [record.getMessage() for record in caplog.records if record.name == "hpctrain"]
    assert "the values were not taken, and are sent again: Failed to export " in told and "batch code: 400" in told
    assert capfd.readouterr().err == ""


@pytest.mark.cases(nightly=["silent"], rest="thorough")
def test_a_dead_collector_ends_no_training(
    dead: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", dead.replace("http://", f"http://me:{SECRET}@"))
    begin = time.monotonic()
    train(4, {"name": "opentelemetry"})
    assert time.monotonic() - begin < 60 and rows("loss").keys() == {1, 2, 3, 4}
    said = capfd.readouterr().err
    assert said.count("logger opentelemetry failed and gets no more rows: ConnectionError: ") == 1
    assert all(line.startswith("hpctrain: warning: ") for line in said.splitlines()) and len(said.splitlines()) <= 2
    assert SECRET not in said and no_file_has(SECRET)


@pytest.mark.parametrize(("name", "value"), [("COMPRESSION", "zip"), ("TIMEOUT", "soon")])
def test_a_variable_that_the_library_cannot_read_is_told(
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Versions of the library differ: one refuses it, another says what it does instead."""
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with receiver() as (uri, got):
        try:
            logger("opentelemetry", endpoint=uri).open(prepare(), 0).close()
        except EnvironmentUnfitError as error:
            told = [str(error)]
        else:
            told = [one.getMessage() for one in caplog.records if one.name == "hpctrain"]
            assert len(got) == 1
    assert len(told) == 1 and "opentelemetry" in told[0] and value in told[0]
    assert capfd.readouterr().err == ""


# --- both


@pytest.mark.parametrize("name", ["prometheus", "opentelemetry"])
def test_a_monitor_without_its_package_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match=rf"installed; pip install 'hpctrain\[{name}\]'") as error:
        train(2, {"name": name})
    assert error.value.exit_code == 3


def test_the_number_of_the_job() -> None:
    assert job_id({}) is None and job_id({"SLURM_JOB_ID": "", "PBS_JOBID": "1.pbs"}) == "1.pbs"
    assert job_id({"FLUX_JOB_ID": "f1", "SLURM_JOB_ID": "7"}) == "7"


class Taken(Logger):
    """Can't be opened, as one whose port another program has."""

    name = "taken"

    def open(self, output_dir: Path, resumed_step: int) -> LogWriter:
        raise EnvironmentUnfitError("the port is taken")


class Silent(Logger, LogWriter):
    name = "silent"
    closed = 0

    def open(self, output_dir: Path, resumed_step: int) -> LogWriter:
        return self

    def log(self, row: Any) -> None:
        return

    def close(self) -> None:
        Silent.closed += 1


def test_a_logger_that_cannot_be_opened_leaves_none_open() -> None:
    report = Report(Identity(), RankChannel())
    with pytest.raises(EnvironmentUnfitError, match="the port is taken"):
        report.open(Path("out"), [Silent(Silent.Options()), Taken(Taken.Options())], 0)
    assert Silent.closed == 1
