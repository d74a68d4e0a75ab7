"""Sends rows to MLflow: a server, or a database in the run's directory."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpctrain.api import EXIT_ENVIRONMENT, Field, Logger, Options, Plan, Problem, hookimpl, make_directory
from hpctrain_plugins.logger.background import Run, Sender
from hpctrain_plugins.logger.rows import flat, kept_rows, numbers, resolved_job
from hpctrain_plugins.logger.run_id import keep_id, kept_id

_FOR_DATABASES = ("sqlalchemy", "alembic")
# the most that MLflow takes at once
_MOST_METRICS, _MOST_PARAMS = 1000, 100
# characters of a parameter that every version of MLflow takes
_LONGEST_VALUE = 500


class MLflowOptions(Options):
    experiment: str = Field(default="hpctrain", min_length=1, description="experiment of the run")
    run: str | None = Field(default=None, min_length=1, description="the run's name (default: [job] name)")
    tracking_uri: str | None = Field(
        default=None,
        description='a server or database, such as "https://mlflow.site" (default: $MLFLOW_TRACKING_URI, else the file '
        "output_dir/mlflow/mlflow.db)",
    )


class MLflow(Logger):
    """MLflow: a run on a server, or in the file output_dir/mlflow/mlflow.db."""

    name = "mlflow"
    Options = MLflowOptions
    options: MLflowOptions

    def problems(self, plan: Plan) -> list[Problem]:
        found, uri = [], self.options.tracking_uri or ""
        needed = ("mlflow", *(() if uri.startswith("http") else _FOR_DATABASES))
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            why = f"the package {missing[0]} is not installed; pip install 'hpctrain[mlflow]', or leave this logger out"
            found.append(Problem(why, exit_code=EXIT_ENVIRONMENT))
        if "@" in urlsplit(uri).netloc:
            why = (
                "tracking_uri holds a name or password, which would be written into the run's files; use MLFLOW_TRACKING_USERNAME "
                "and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI"
            )
            found.append(Problem(why))
        return found

    def open(self, output_dir: Path, resumed_step: int) -> Sender:
        directory = output_dir / "mlflow"
        make_directory(directory)
        uri = self.options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{directory.absolute() / 'mlflow.db'}"
        run_id = kept_id(directory) if resumed_step else None
        job = resolved_job(output_dir)
        kept = kept_rows(output_dir, resumed_step)
        return Sender(lambda: MLflowRun(self.options, uri, run_id, job, directory), "mlflow", kept)


class MLflowRun(Run):
    """A run of MLflow's client."""

    def __init__(
        self, options: MLflowOptions, uri: str, run_id: str | None, job: dict[str, Any], directory: Path
    ) -> None:
        """run_id: of the run to continue. directory: where the new run's id is kept, and its artifacts without a server."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its reports go over the network
        from mlflow import MlflowClient  # here: it is an extra, and slow to import

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells the screen of the tables that it makes
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = (run_id and self._continued(run_id)) or self._created(options, job["job"]["name"], directory)
        newest = self._client.get_run(self._run_id).data.to_proto().metrics
        self._steps: dict[str, int] = {metric.key: metric.step for metric in newest}
        keep_id(directory, self._run_id)
        self._log_job({_name(key): str(value)[:_LONGEST_VALUE] for key, value in flat(job)})

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for row in rows:
            step, found = row["step"], {_name(key): value for key, value in numbers(row).items()}
            # MLflow takes nothing back: steps that run again stay as they are. An evaluation repeats the epoch of its step.
            new = {key: value for key, value in found.items() if self._steps.get(key, 0) < step}
            metrics += [Metric(key, value, round(row["time"] * 1000), step) for key, value in new.items()]
            self._steps |= dict.fromkeys(new, step)
        for i in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _MOST_METRICS])

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _continued(self, run_id: str) -> str | None:
        """The run's id; None if this server does not know it."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run_id

    def _created(self, options: MLflowOptions, name: str, directory: Path) -> str:
        from mlflow.exceptions import MlflowException

        if self._client.get_experiment_by_name(options.experiment) is None:
            with suppress(MlflowException):  # another job may have been faster
                self._client.create_experiment(options.experiment)
        experiment = self._client.get_experiment_by_name(options.experiment)
        if experiment is None:
            raise RuntimeError(f"the experiment {options.experiment!r} can't be created")
        run_id: str = self._client.create_run(experiment.experiment_id, run_name=options.run or name).info.run_id
        return run_id

    def _log_job(self, job: Mapping[str, str]) -> None:
        """Log the job as parameters. MLflow's never change: what a resume has changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        params = [Param(key, value) for key, value in job.items() if key not in known]
        tags = [RunTag(f"resumed.{key}", value) for key, value in job.items() if known.get(key, value) != value]
        for i in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[i : i + _MOST_PARAMS])
        self._client.log_batch(self._run_id, tags=tags)


def _name(key: str) -> str:
    """`key` in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", key)


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [MLflow]
