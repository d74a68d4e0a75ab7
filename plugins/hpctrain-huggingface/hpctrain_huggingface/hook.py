"""The hook `huggingface-export`: at the end of a run, the model as from_pretrained() loads it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.api import ExportableModel, Field, Hook, HpctrainError, Identity, Job, Options, Plan, Problem, hookimpl

LOG = logging.getLogger("hpctrain")


class ExportOptions(Options):
    directory: Path | None = Field(
        default=None, description="the new directory to write (default: export in the run's directory)"
    )
    merged: bool = Field(default=False, description="add an adapter to the model that it adapts")
    weights_of: str | None = Field(default=None, description='a hook that keeps weights in checkpoints, such as "ema"')


class Export(Hook):
    """Exports the last checkpoint of a run that has come to its end, as `hpctrain checkpoint export --to huggingface` does."""

    name = "huggingface-export"
    Options = ExportOptions
    options: ExportOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if isinstance(plan.model, ExportableModel):
            return []
        return [
            Problem(f"the model {plan.model.name!r} is none that other libraries load from a directory; leave it out")
        ]

    def start(self) -> _Exporting:
        return _Exporting(self.options)


class _Exporting:
    def __init__(self, options: ExportOptions) -> None:
        self._options, self._rank = options, 0
        self._directory: Path | None = options.directory

    @hookimpl
    def hpctrain_job_start(self, job: Job, identity: Identity) -> None:
        self._rank = identity.rank
        self._directory = self._options.directory or job.output_dir / "export"

    @hookimpl
    def hpctrain_job_end(self, result: Mapping[str, Any]) -> None:
        """Write on rank 0. A training that is done does not fail for an export, which a command can make later."""
        checkpoint, out = result["checkpoint"], self._directory
        if self._rank or result["exit_code"] or checkpoint is None or out is None:
            return
        if out.exists():
            LOG.warning("the model is not exported: %s exists already", out)
            return
        from hpctrain_tools.checkpoint.pretrained import export_pretrained

        try:
            told = export_pretrained(Path(checkpoint), out, self._options.weights_of, self._options.merged)
        except (HpctrainError, OSError) as error:
            LOG.warning("the model is not exported: %s", error)
        else:
            LOG.info("exported     %s: %s", out, told)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Export]
