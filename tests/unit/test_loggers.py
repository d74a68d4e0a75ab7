"""Output of loggers of files and tracking services, read back with the readers of their libraries: a run that went on after a
crash, and a service that does not answer.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from jobs import TINY
from launching import wait_until
from logged import forget_checkpoint, histories, is_whole, logger, prepare, read_offline, rows, scalars, table, train

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.contracts.identity import Identity
from hpctrain.job.problems import JobError
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.report import Report

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


def alone(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Work in `directory`, without an account of the user's."""
    patch.chdir(directory)
    patch.setenv("NETRC", str(directory / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_SERVICE", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        patch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went on: with step 5 from its checkpoint of step 4, when it had trained and logged 6, and to step 8.

    first.jsonl has the rows of the first 6.
    """
    directory = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, directory)
        for steps in (6, 8):
            train(steps, *({"name": name} for name in ("csv", *INSTALLED)))
            if steps == 6:
                pieces()
                forget_checkpoint(6)
                shutil.copy("out/metrics.jsonl", "first.jsonl")
    return directory


@pytest.fixture
def run(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the run that went on, as the current one."""
    monkeypatch.chdir(resumed)
    assert [rows(of).keys() for of in ("loss", "evaluation_loss")] == [{*range(1, 9)}, {2, 4, 6, 8}]
    assert rows("loss")[5]["step_seconds"] != rows("loss", Path("first.jsonl"))[5]["step_seconds"]
    return resumed


# --- csv


@pytest.mark.usefixtures("run")
def test_csv_has_every_value_of_a_run_that_went_on() -> None:
    steps, evaluations = table("metrics.csv"), table("evaluations.csv")
    assert [int(row["step"]) for row in steps] == [*range(1, 9)]
    assert [int(row["step"]) for row in evaluations] == [2, 4, 6, 8]
    for row in steps:
        truth: dict[str, float] = {}
        for key, value in rows("loss")[int(row["step"])].items():
            truth |= {f"{key}.{kind}": one for kind, one in value.items()} if isinstance(value, dict) else {key: value}
        assert {key: float(value) for key, value in row.items()} == truth
    for row in evaluations:
        assert {key: float(value) for key, value in row.items()} == rows("evaluation_loss")[int(row["step"])]


@pytest.mark.thorough
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


@pytest.mark.cases(default=["True-csv"], rest="thorough")
@pytest.mark.parametrize("name", ["csv", *INSTALLED])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_store_that_lacks_steps_is_refilled_by_a_resume(name: str, is_new: bool) -> None:
    """It was killed before it had taken its last rows, or was no logger of the first start."""
    train(6, *([] if is_new else [{"name": name}]))
    forget_checkpoint(6)
    if not is_new:
        cut_store(name, after=2)
    train(8, {"name": name})
    steps, evaluations = rows("loss"), rows("evaluation_loss")
    assert ([*steps], [*evaluations]) == ([*range(1, 9)], [2, 4, 6, 8])
    for key, truth in (("loss", steps), ("evaluation_loss", evaluations)):
        assert stored(name, key) == [(step, pytest.approx(row[key], rel=1e-6)) for step, row in truth.items()]


def cut_store(name: str, after: int) -> None:
    """Take the rows after this step from a store."""
    if name == "csv":
        for path in Path("out").glob("*.csv"):
            path.write_text("".join(line for line in path.open() if not "3" <= line[0] <= "6"))
    elif name == "tensorboard":
        shutil.rmtree("out/events")
        writer = logger(name).open(Path("out"), 0)
        for one in (1, 2):
            writer.log(rows("loss")[one])
        writer.log(rows("evaluation_loss")[2])
        writer.close()
    elif name == "wandb":
        from hpctrain_plugins.logger.wandb_files import cut_off_after

        assert cut_off_after(Path("out/wandb"), Path("out/wandb/run-id").read_text().strip(), after) == after
    else:
        with closing(sqlite3.connect("out/mlflow/mlflow.db")) as database:
            for of in ("metrics", "latest_metrics"):
                database.execute(f"delete from {of} where step > {after}")
            for key in ("loss", "evaluation_loss"):
                found = rows(key)[after]
                database.execute(
                    "insert into latest_metrics select key, value, timestamp, step, is_nan, run_uuid from metrics "
                    f"where key = '{key}' and step = {after}"
                ) if found else None
            database.commit()


def stored(name: str, key: str) -> list[tuple[int, float]]:
    if name == "csv":
        content = table("metrics.csv" if key == "loss" else "evaluations.csv")
        return [(int(row["step"]), float(row[key])) for row in content]
    if name == "tensorboard":
        return scalars(Path("out/events"))[key]
    if name == "wandb":
        history = [row for path in pieces() for row in read_offline(path)[1]]
        assert all(row["_step"] == row["step"] for row in history), "wandb's step is the training's"
        return [(row["step"], row[key]) for row in history if key in row]
    return [*histories(f"sqlite:///{Path.cwd()}/out/mlflow/mlflow.db")[1][key].items()]


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
        Report(Identity(), RankChannel()).open(Path("out"), [logger("csv")], 2)
    logger("csv").open(Path("out"), 0).log({"step": 1})
    assert Path("mine.csv").read_text() == "a,b\n1,2\n" and table("metrics.csv") == [{"step": "1"}]


# --- TensorBoard


@pytest.mark.usefixtures("run")
def test_tensorboard_shows_each_step_of_a_run_that_went_on_once() -> None:
    pytest.importorskip("tensorboard", reason="needs hpctrain[tensorboard]")
    found = scalars(Path("out/events"))
    for of, keys in (("loss", ("loss", "lr", "step_seconds")), ("evaluation_loss", ("evaluation_loss",))):
        for key in keys:
            steps, values = zip(*found[key], strict=True)
            assert list(steps) == [*rows(of)]
            assert values == pytest.approx([row[key] for row in rows(of).values()], rel=1e-6)  # in 32 bits
    memory = [row["memory_bytes"]["rank_max"] for row in rows("loss").values()]
    assert [value for _, value in found["memory_bytes.rank_max"]] == pytest.approx(memory, rel=1e-6)


def test_tensorboard_has_each_row_as_soon_as_it_is_logged() -> None:
    """A killed process closes nothing, and its checkpoint may be of the last step."""
    pytest.importorskip("tensorboard", reason="needs hpctrain[tensorboard]")
    writer = logger("tensorboard").open(Path("out"), 0)
    for step in (1, 2):
        writer.log({"step": step, "loss": step / 2, "histograms": {}})
        assert scalars(Path("out/events")) == {"loss": [(one, one / 2) for one in range(1, step + 1)]}
    writer.close()


# --- MLflow


@pytest.mark.usefixtures("run")
def test_mlflow_has_each_step_of_a_run_that_went_on_once() -> None:
    """Steps that ran twice have the values of the first time."""
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    run, found = histories(f"sqlite:///{Path.cwd()}/out/mlflow/mlflow.db")
    steps, evaluations = (rows(of) | rows(of, Path("first.jsonl")) for of in ("loss", "evaluation_loss"))
    for key in ("loss", "lr", "tokens", "step_seconds"):
        assert found[key] == {step: row[key] for step, row in steps.items()}
    assert found["evaluation_loss"] == {step: row["evaluation_loss"] for step, row in evaluations.items()}
    assert found["memory_bytes.rank_max"][8] == rows("loss")[8]["memory_bytes"]["rank_max"]
    assert run.info.run_name == "tiny" and run.info.status == "FINISHED"
    params = run.data.params
    assert params["model.hidden_size"] == "16" and params["optimizer.betas"] == "[0.9, 0.999]"
    assert params["job.steps"] == "6" and run.data.tags["resumed.job.steps"] == "8"


@pytest.mark.thorough
def test_mlflow_begins_another_run_if_the_store_does_not_know_the_first() -> None:
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    (prepare() / "mlflow").mkdir()
    Path("out/mlflow/run-id").write_text("0" * 32 + "\n")
    uri = f"sqlite:///{Path.cwd()}/elsewhere.db"
    writer = logger("mlflow", tracking_uri=uri, run="again").open(Path("out"), 2)
    for step in (3, 4):
        writer.log({"step": step, "time": 0.5, "loss": float("nan") if step == 4 else 0.5})
    writer.close()
    run, found = histories(uri)
    assert run.info.run_name == "again" and run.info.run_id == Path("out/mlflow/run-id").read_text().strip()
    assert found["loss"][3] == 0.5 and math.isnan(found["loss"][4])


def test_a_password_in_a_uri_is_refused_and_not_repeated() -> None:
    with pytest.raises(JobError, match="MLFLOW_TRACKING_PASSWORD") as error:
        train(2, {"name": "mlflow", "tracking_uri": "https://me:s3cret@mlflow.site/"})
    assert "s3cret" not in str(error.value) and not Path("out").exists()


# --- Weights & Biases


def pieces() -> list[Path]:
    """The files of the run, in the order in which `wandb sync` sends them, once the last one has its end: wandb's client waits
    until rows are taken, not until its process has written them."""
    found = sorted(Path("out/wandb").glob("offline-*/*.wandb"))
    wait_until(lambda: is_whole(found[-1]), 20, f"{found[-1]} has its end")
    return found


@pytest.mark.usefixtures("run")
def test_wandb_offline_has_each_step_of_a_run_that_went_on_once() -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    (first, before), (second, after) = map(read_offline, pieces())
    assert first.run_id == second.run_id == Path("out/wandb/run-id").read_text().strip()
    assert second.resume, "wandb sync adds it to the first"
    assert first.project == "hpctrain" and first.display_name == "tiny"
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["model"]["hidden_size"] == 16 and config["optimizer"]["betas"] == [0.9, 0.999]
    history = before + after
    for of in ("loss", "evaluation_loss"):
        found = [(row["step"], row[of]) for row in history if of in row]
        assert found == [(step, row[of]) for step, row in rows(of).items()]
    assert after[0]["step"] == 4, "an evaluation of it may come yet"
    assert after[1]["memory_bytes.rank_max"] == rows("loss")[5]["memory_bytes"]["rank_max"]
    numbers = [row["_step"] for row in history]
    assert all(one < other for one, other in pairwise(numbers)), "a server takes no other order"


def test_wandb_cuts_no_file_that_a_server_has_nor_one_it_cannot_read(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    from hpctrain_plugins.logger.wandb_files import cut_off_after

    prepare()
    writer = logger("wandb").open(Path("out"), 0)
    for step in range(1, 400):  # several blocks of the file
        writer.log(
            {"step": step, "time": 0.5, "loss": step / 2, "text": "x", "more": {str(key): key for key in range(20)}}
        )
    writer.close()
    [path] = pieces()
    whole, run_id = path.read_bytes(), Path("out/wandb/run-id").read_text().strip()
    assert len(whole) > 3 * 2**15 and [row["loss"] for row in read_offline(path)[1]] == [
        step / 2 for step in range(1, 400)
    ]
    mark = path.with_name(f"{path.name}.synced")
    mark.touch()
    cut_off_after(Path("out/wandb"), run_id, 300)
    assert path.read_bytes() == whole
    mark.unlink()
    path.write_bytes(whole + b"\0\1\2")  # as a crash leaves it
    cut_off_after(Path("out/wandb"), run_id, 300)
    assert whole.startswith(path.read_bytes()) and [row["step"] for row in read_offline(path)[1]] == [*range(1, 301)]
    path.write_bytes(damaged := whole[:20] + b"\xff" * 20 + whole[40:])
    cut_off_after(Path("out/wandb"), run_id, 300)
    assert path.read_bytes() == damaged
    [told] = [one.getMessage() for one in caplog.records if one.name == "hpctrain"]
    assert "can't be cut; steps that run again are in it twice: " in told


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
    """The output of a run of four steps; it must end by itself and with 0."""
    tables = {**TINY, "logger": [logger]}
    words = [sys.executable, "-c", RUNS, json.dumps(tables), str(finish_seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "DONE 4" in done.stdout and len(rows("loss")) == 4, done
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_wandb_keeps_a_run_whose_server_does_not_answer(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs hpctrain[wandb]")
    monkeypatch.setenv("WANDB_BASE_URL", server)
    monkeypatch.setenv("WANDB_API_KEY", key := "0123456789" * 4)
    assert "the run is kept: wandb sync out/wandb/offline-run-*" in run_with(20, name="wandb", mode="online")
    [path] = Path("out/wandb").glob("offline-*/*.wandb")
    assert [row["loss"] for row in read_offline(path)[1]] == [row["loss"] for row in rows("loss").values()]
    assert not [path for path in Path().glob("**/*") if path.is_file() and key.encode() in path.read_bytes()]


@pytest.mark.nightly
def test_mlflow_ends_no_training_whose_server_does_not_answer(server: str) -> None:
    pytest.importorskip("mlflow", reason="needs hpctrain[mlflow]")
    said = run_with(-3, name="mlflow", tracking_uri=server)  # 2 seconds in all
    assert "logger mlflow failed and gets no more rows: TimeoutError: the last rows were not taken within 2 s" in said
