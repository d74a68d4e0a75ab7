"""What loggers write, read back with the readers of their libraries: a run, its resume, and a service that does not answer."""

from __future__ import annotations

import csv
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

import hpctrain
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.job.problems import JobError
from hpctrain.plugins.registry import build_registry


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one, and no account of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_SERVICE", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def train(steps: int, *loggers: dict[str, Any], **tables: dict[str, Any]) -> dict[str, Any]:
    job = json.loads(json.dumps(TINY)) | {"evaluation": {"every_steps": 2}, "logger": [*loggers], **tables}
    job["job"]["steps"] = steps
    job["checkpoint"] = {"every_steps": 2}
    return hpctrain.run(job)


def rows(of: str) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl that have the key `of`, by step."""
    found = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found if of in row}


def table(name: str) -> list[dict[str, str]]:
    with Path("out", name).open(newline="") as file:
        return list(csv.DictReader(file))


def logger(slot_name: str, **options: Any) -> Any:
    cls: Any = build_registry().find("logger", slot_name).cls
    return cls(cls.Options(**options))


# --- csv


def test_csv_has_every_value_of_a_run_and_its_resume() -> None:
    for steps in (4, 6):
        train(steps, {"name": "csv"})
    steps, evaluations = table("metrics.csv"), table("evaluations.csv")
    assert [int(row["step"]) for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [int(row["step"]) for row in evaluations] == [2, 4, 6]
    for row in steps:
        truth = rows("loss")[int(row["step"])]
        memory = truth.pop("memory_bytes")
        truth |= {f"memory_bytes.{key}": value for key, value in memory.items()}
        assert {key: float(value) for key, value in row.items()} == truth
    for row in evaluations:
        assert {key: float(value) for key, value in row.items()} == rows("evaluation_loss")[int(row["step"])]


def test_csv_drops_rows_after_the_checkpoint_and_of_an_earlier_run() -> None:
    train(6, {"name": "csv"})
    with Path("out/metrics.csv").open("a") as file:
        file.write("7,0.1")  # as a crash leaves it
    first = Path("out/metrics.csv").read_bytes()
    logger("csv").open(Path("out"), 4).close()
    assert [row["step"] for row in table("metrics.csv")] == ["1", "2", "3", "4"]
    assert first.startswith(Path("out/metrics.csv").read_bytes())  # nothing else has changed
    assert [row["step"] for row in table("evaluations.csv")] == ["2", "4"]
    logger("csv").open(Path("out"), 0).close()
    assert not Path("out/metrics.csv").exists() and not Path("out/evaluations.csv").exists()


def test_csv_takes_new_keys_and_any_text_and_is_readable_after_each_row() -> None:
    Path("out").mkdir()
    writer = logger("csv").open(Path("out"), 0)
    writer.log({"step": 1, "loss": 0.1})
    assert table("metrics.csv") == [{"step": "1", "loss": "0.1"}]
    writer.log({"step": 2, "loss": float("nan"), "note": 'a, "b"\nc', "inner": {"deep": {"x": 1}}})
    writer.log({"step": 3})
    assert table("metrics.csv") == [
        {"step": "1", "loss": "0.1", "note": "", "inner.deep.x": ""},
        {"step": "2", "loss": "nan", "note": 'a, "b"\nc', "inner.deep.x": "1"},
        {"step": "3", "loss": "", "note": "", "inner.deep.x": ""},
    ]
    logger("csv").open(Path("out"), 2).log({"step": 3, "loss": 0.3, "other": True})
    assert [row["other"] for row in table("metrics.csv")] == ["", "", "True"]
    assert table("metrics.csv")[1]["note"] == 'a, "b"\nc'


def test_csv_follows_no_link_and_keeps_a_file_that_is_none_of_its_own() -> None:
    Path("out").mkdir()
    Path("mine.csv").write_text("a,b\n1,2\n")
    Path("out/metrics.csv").symlink_to(Path("mine.csv").absolute())
    with pytest.raises(EnvironmentUnfitError, match=r"\[\[logger\]\] name = 'csv': .*symbolic link"):
        from hpctrain.training.report import Records

        Records(Path("out"), [logger("csv")], 2)
    logger("csv").open(Path("out"), 0).log({"step": 1})
    assert Path("mine.csv").read_text() == "a,b\n1,2\n" and table("metrics.csv") == [{"step": "1"}]


# --- MLflow


def histories(uri: str) -> tuple[Any, dict[str, dict[int, float]]]:
    """The only run, and the values of each of its metrics by step."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hpctrain")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    found = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    assert all(len({one.step for one in ones}) == len(ones) for ones in found.values())
    return run, {key: {one.step: one.value for one in ones} for key, ones in found.items()}


def test_mlflow_has_a_run_and_its_resume() -> None:
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    for steps in (4, 6):
        train(steps, {"name": "mlflow"})
    run, found = histories(f"sqlite:///{Path.cwd()}/out/mlflow/mlflow.db")
    for key in ("loss", "lr", "tokens"):
        assert found[key] == {step: row[key] for step, row in rows("loss").items()}
    assert found["evaluation_loss"] == {step: row["evaluation_loss"] for step, row in rows("evaluation_loss").items()}
    assert found["memory_bytes.rank_max"][6] == rows("loss")[6]["memory_bytes"]["rank_max"]
    assert run.info.run_name == "tiny" and run.info.status == "FINISHED"
    params = run.data.params
    assert params["model.hidden_size"] == "16" and params["optimizer.betas"] == "[0.9, 0.999]"
    assert params["job.steps"] == "4" and run.data.tags["resumed.job.steps"] == "6"


def test_mlflow_begins_another_run_if_the_store_does_not_know_the_first() -> None:
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    train(2, {"name": "mlflow"})
    uri = f"sqlite:///{Path.cwd()}/elsewhere.db"
    train(4, {"name": "mlflow", "tracking_uri": uri, "run": "again"})
    run, found = histories(uri)
    assert run.info.run_name == "again" and sorted(found["loss"]) == [3, 4]


def test_a_password_in_a_uri_is_refused_and_not_repeated() -> None:
    with pytest.raises(JobError, match="MLFLOW_TRACKING_PASSWORD") as error:
        train(2, {"name": "mlflow", "tracking_uri": "https://me:s3cret@mlflow.site/"})
    assert "s3cret" not in str(error.value) and not Path("out").exists()


# --- Weights & Biases


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log of LevelDB in blocks of 32 KiB, of protobuf messages. The library has no reader of it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, message = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record.FromString(message)
            message = b""
            yield record


def read_offline(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The run's record, and its history."""
    found = list(records(path))
    [run] = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
        for one in found
        if one.WhichOneof("record_type") == "history"
    ]
    return run, history


def test_wandb_offline_has_a_run_and_its_resume() -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    for steps in (4, 6):
        train(steps, {"name": "wandb", "project": "mine"})
        time.sleep(1)  # the files' names have seconds
    (first, before), (second, after) = (
        read_offline(path) for path in sorted(Path("out/wandb").glob("offline-*/*.wandb"))
    )
    assert first.run_id == second.run_id == Path("out/wandb/run-id").read_text().strip()
    assert first.project == "mine" and first.display_name == "tiny"
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["model"]["hidden_size"] == 16 and config["optimizer"]["betas"] == [0.9, 0.999]
    history = before + after
    assert {row["step"]: row["loss"] for row in history if "loss" in row} == {
        step: row["loss"] for step, row in rows("loss").items()
    }
    assert {row["step"]: row["evaluation_loss"] for row in history if "evaluation_loss" in row} == {
        step: row["evaluation_loss"] for step, row in rows("evaluation_loss").items()
    }
    assert after[0]["step"] == 5 and "memory_bytes.rank_max" in after[0]


def test_wandb_online_without_a_key_is_told_at_the_start() -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    with pytest.raises(EnvironmentUnfitError, match=r"no API key .* WANDB_API_KEY, or use mode = \"offline\""):
        train(2, {"name": "wandb", "mode": "online"})


# --- both


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_without_its_package_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        JobError, match=rf"the package {name} is not installed; pip install 'hpctrain\[{name}\]'"
    ) as error:
        train(2, {"name": name})
    assert error.value.exit_code == 3


RUNS = """
import json, sys
import hpctrain
from hpctrain_plugins.logger import background, wandb_run

background.FINISH_SECONDS, wandb_run._START_SECONDS = float(sys.argv[2]), 3
print("DONE", hpctrain.run(json.loads(sys.argv[1]))["step"])
"""
"""With other limits than a minute."""


@pytest.fixture(params=["refuses", "silent"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that refuses connections, or takes them and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        uri = f"http://127.0.0.1:{opened.getsockname()[1]}"
        if request.param == "refuses":
            opened.close()
        yield uri


def run_with(finish_seconds: float, **logger: str) -> str:
    """What a run of four steps says; it must end by itself and with 0."""
    tables = {**TINY, "logger": [logger]}
    words = [sys.executable, "-c", RUNS, json.dumps(tables), str(finish_seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "DONE 4" in done.stdout and len(rows("loss")) == 4, done
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_wandb_keeps_a_run_whose_server_does_not_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    monkeypatch.setenv("WANDB_BASE_URL", server)
    monkeypatch.setenv("WANDB_API_KEY", key := "0123456789" * 4)
    assert "the run is kept: wandb sync out/wandb/offline-run-*" in run_with(20, name="wandb", mode="online")
    [path] = Path("out/wandb").glob("offline-*/*.wandb")
    assert [row["loss"] for row in read_offline(path)[1]] == [row["loss"] for row in rows("loss").values()]
    assert not [path for path in Path().glob("**/*") if path.is_file() and key.encode() in path.read_bytes()]


@pytest.mark.thorough
def test_mlflow_ends_no_training_whose_server_does_not_answer(server: str) -> None:
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    said = run_with(-3, name="mlflow", tracking_uri=server)  # 2 seconds in all
    assert "logger mlflow failed and gets no more rows: TimeoutError: the last rows were not taken within 2 s" in said
