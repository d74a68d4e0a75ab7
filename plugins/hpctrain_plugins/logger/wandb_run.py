"""Sends rows to Weights & Biases, or keeps them for `wandb sync`."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hpctrain.api import (
    EXIT_ENVIRONMENT,
    EnvironmentUnfitError,
    Field,
    Logger,
    Options,
    Plan,
    Problem,
    hookimpl,
    make_directory,
)
from hpctrain_plugins.logger.background import FINISH_SECONDS, Run, Sender
from hpctrain_plugins.logger.rows import is_evaluation, kept_rows, numbers, resolved_job
from hpctrain_plugins.logger.run_id import keep_id, kept_id
from hpctrain_plugins.logger.wandb_files import cut_off_after

LOG = logging.getLogger("hpctrain")
# how long the server may take to answer when a run begins; rows wait in memory meanwhile. Less than `Sender.close` waits.
_START_SECONDS = 15.0


class WandbOptions(Options):
    project: str = Field(default="hpctrain", min_length=1, description="project of the run")
    run: str | None = Field(default=None, min_length=1, description="the run's name (default: [job] name)")
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: write to output_dir/wandb, for `wandb sync`; online: send to the server, too",
    )


class Wandb(Logger):
    """Weights & Biases: a run in output_dir/wandb, sent to the server with mode = "online"."""

    name = "wandb"
    Options = WandbOptions
    options: WandbOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if importlib.util.find_spec("wandb") is not None:
            return []
        why = "the package wandb is not installed; pip install 'hpctrain[wandb]', or leave this logger out"
        return [Problem(why, exit_code=EXIT_ENVIRONMENT)]

    def open(self, output_dir: Path, resumed_step: int) -> Sender:
        """Raises EnvironmentUnfitError if the server asks for a key and there is none."""
        directory = output_dir / "wandb"
        make_directory(directory)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else errors are reported over the network
        import wandb  # here: it is an extra, and slow to import

        wandb.setup(wandb.Settings(silent=True))  # else it tells the screen where it found the key
        if self.options.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise EnvironmentUnfitError(
                "[[logger]] name = 'wandb': there is no API key for Weights & Biases; call `wandb login`, set WANDB_API_KEY, or "
                'use mode = "offline"'
            )
        run_id = (kept_id(directory) if resumed_step else None) or secrets.token_hex(4)
        keep_id(directory, run_id)
        job = resolved_job(output_dir)
        kept = kept_rows(output_dir, resumed_step)
        return Sender(lambda: WandbRun(self.options, run_id, job, output_dir, resumed_step), "wandb", kept)


class WandbRun(Run):
    """A run of wandb's client, which has a process of its own."""

    def __init__(
        self, options: WandbOptions, run_id: str, job: dict[str, Any], output_dir: Path, resumed_step: int
    ) -> None:
        import wandb

        # the last row before is sent again: an evaluation of its step may join it
        self._known = cut_off_after(output_dir / "wandb", run_id, resumed_step - 1) if resumed_step else -1

        def begin(mode: Literal["offline", "online"]) -> Any:
            return wandb.init(
                project=options.project,
                name=options.run or job["job"]["name"],
                id=run_id,
                resume="allow",
                config=job,
                allow_val_change=True,
                mode=mode,
                dir=str(output_dir.absolute()),  # its process may have another current directory
                settings=settings,
            )

        settings = wandb.Settings(
            console="off",  # the screen belongs to the launcher
            silent=True,
            disable_git=True,  # uncommitted changes may hold anything
            init_timeout=_START_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        try:
            self._run = begin(options.mode)
        except wandb.errors.CommError as error:
            if options.mode == "offline":
                raise
            said, kept = " ".join(str(error).split()), output_dir / "wandb" / "offline-run-*"
            LOG.warning("wandb: the server can't be reached (%s); the run is kept: wandb sync %s", said, kept)
            wandb.teardown()  # its process still has the run
            self._run = begin("offline")
        if self._run.starting_step:  # of a run that the server has, which takes no row twice
            self._known = self._run.starting_step - 1
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation_*", step_metric="evaluation_step")

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            # a row is taken once one of a later step comes: an evaluation joins the row of its step, or the next one if a server
            # has that already
            if is_evaluation(row):
                self._run.log({**numbers(row), "evaluation_step": row["step"]}, step=max(row["step"], self._known + 1))
            elif row["step"] > self._known:
                self._run.log({**numbers(row), "step": row["step"]}, step=row["step"])

    def refill(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.send([row for row in rows if row["step"] > self._known])

    def finish(self) -> None:
        self._run.finish()


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [Wandb]
