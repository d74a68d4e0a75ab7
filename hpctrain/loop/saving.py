"""The checkpoints of a session: what it restores, when it saves, and what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.agreement import together
from hpctrain.checkpoint.retention import EVALUATION_LOSS
from hpctrain.checkpoint.state import (
    COMPRESSION,
    compression_pieces,
    create_state,
    group_numbers,
    group_options,
    model_pieces,
    optimizer_numbers,
    restore_group_numbers,
    restore_numbers,
    restore_quantized,
    state_pieces,
)
from hpctrain.checkpoint.store import CheckpointStore, Restored
from hpctrain.checkpoint.weights import TIED, load_weights
from hpctrain.contracts.pieces import Piece, State
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.loop.session import Session

_REQUIRED = ("samples_seen", "fingerprint", "precision", "optimizer_numbers")
"""The values that a training goes on with."""


class Saving:
    """Every method is collective over all ranks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.newest: Path | None = None
        """The newest checkpoint of this run."""
        self.step = 0
        """The step of the newest save in the background."""
        table, world_group = session.job.checkpoint, dist.group.WORLD
        assert world_group is not None
        self._group = world_group
        self._store = CheckpointStore(
            session.job.output_dir.absolute() / "checkpoints", session.parts.checkpoint, session.parts.formats, table.keep,
            world_group, dist.new_group() if table.asynchronous else None, table.keep_every, table.keep_best,
        )  # fmt: skip

    def restore(self, resume: str) -> None:
        """Bring the session to where a checkpoint left it, or to its beginning. `resume` is "auto", "never" or a path."""
        optimizer = self._session.optimizer
        self._made = group_options(optimizer)
        create_state(optimizer)
        # Also where nothing is restored: state that can't be saved is to be told before the first step.
        pieces, restored = together(self._group, lambda: self._pieces(optimizer)), None
        together(self._group, lambda: self._numbers(optimizer))
        if resume != "never":
            path = None if resume == "auto" else Path(resume)
            restored = self._store.restore(pieces, path, optional=(COMPRESSION,), required=_REQUIRED)
        if restored is None:
            self._begin_anew()
        else:
            self._go_on(restored, pieces)

    def _go_on(self, restored: Restored, pieces: list[Piece]) -> None:
        session, values = self._session, restored.values
        _check_values(restored)
        if values["fingerprint"] != session.fingerprint:
            raise CheckpointError(
                f"{restored.path} was trained on other data (dataset fingerprint {values['fingerprint']}, found "
                f"{session.fingerprint}); restore the data, or start anew in another output_dir"
            )
        session.step, session.samples_seen = restored.step, values["samples_seen"]
        if EVALUATION_LOSS in values:
            session.evaluation = restored.step, values[EVALUATION_LOSS]
        session.parts.precision.restore(values["precision"])
        restore_quantized(session.pieces, session.optimizer, pieces)
        restore_numbers(session.pieces, session.optimizer, values["optimizer_numbers"])
        restore_group_numbers(session.optimizer, self._made, values.get("optimizer_groups", []))
        session.optimizer_begun = values.get("optimizer_begun", True)
        if not session.optimizer_begun:
            session.optimizer = session.new_optimizer()
        session.parts.sharding.refresh()
        self.newest = _shown(restored.path)
        self._tell_of_absent(restored.absent)

    def _begin_anew(self) -> None:
        session = self._session
        session.optimizer = session.new_optimizer()  # without the state that was made to be filled
        weights = session.job.model.weights
        if weights is not None:
            pieces = model_pieces(session.module, session.pieces)
            load_weights(weights, session.parts.formats, pieces, self._group, session.tied)
            session.parts.sharding.refresh()

    def _tell_of_absent(self, names: list[str]) -> None:
        """What compression remembers may not be in the checkpoint: that was saved without, or with another."""
        count = self._session.total(len(names))
        if count:
            self._session.say(
                f"compression  {count} of its tensors are not in {self.newest}; they begin as in a new run"
            )

    def is_due(self) -> bool:
        """Whether the job asks for a checkpoint of this step."""
        session, table = self._session, self._session.job.checkpoint
        if table.every_steps and session.step % table.every_steps == 0:
            return True
        period = table.every_epochs * len(session.training)
        return period > 0 and session.samples_seen // period > session.samples_before // period

    def save(self, final: bool) -> None:
        """Save this step, in the background where the job says so and training goes on (it isn't `final`)."""
        session = self._session
        session.sums.settle()
        session.agree_on_buffers()
        optimizer = session.optimizer
        if not session.optimizer_begun:  # all steps were left out; a resume looks for its tensors, and takes none
            optimizer = session.new_optimizer()
            create_state(optimizer)
        state = State(self._pieces(optimizer), self._values(optimizer))
        if session.job.checkpoint.asynchronous and not final:
            self._store.save_in_background(session.step, state)
            self.step = session.step
        else:
            self._saved(self._store.save(session.step, state), session.step)

    def is_over(self) -> bool:
        """Whether a save in the background has ended on all ranks, well or not."""
        return self._store.is_over()

    def finish(self) -> None:
        """Wait for a save in the background, raising its error."""
        path = self._store.finish()
        if path is not None:
            self._saved(path, self.step)

    def _saved(self, path: Path, step: int) -> None:
        self.newest = _shown(path)
        self._session.hooks.hpctrain_checkpoint_saved(step=step, path=path)

    def _pieces(self, optimizer: torch.optim.Optimizer) -> list[Piece]:
        """All of a checkpoint's tensors on this rank."""
        session = self._session
        return [
            *state_pieces(session.module, session.pieces, optimizer),
            *compression_pieces(session.sums.pieces()),
        ]

    def _numbers(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """The optimizer's state on this rank that is no tensor: by parameter, and by parameter group."""
        return optimizer_numbers(self._session.pieces, optimizer), group_numbers(optimizer, self._made)

    def _values(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        session, (numbers, groups) = self._session, self._numbers(optimizer)
        values = {
            "samples_seen": session.samples_seen,
            "fingerprint": session.fingerprint,
            "precision": session.parts.precision.state(),
            "optimizer_numbers": session.totals.merged(numbers),
            "optimizer_begun": session.optimizer_begun,
            "job": session.job.job.name,
            "layout": session.layout.axes,
        }
        if any(groups):
            values["optimizer_groups"] = groups
        if session.tied:
            values[TIED] = session.tied
        if session.evaluation is not None and session.evaluation[0] == session.step:
            values[EVALUATION_LOSS] = session.evaluation[1]
        return values


def _check_values(restored: Restored) -> None:
    """CheckpointError for values of a kind that no training saves."""
    values = restored.values
    seen, numbers, groups = values["samples_seen"], values["optimizer_numbers"], values.get("optimizer_groups", [])
    fits = {
        "samples_seen": type(seen) is int and 0 <= seen < 2**63,
        "precision": isinstance(values["precision"], dict),
        "optimizer_numbers": isinstance(numbers, dict) and all(isinstance(one, dict) for one in numbers.values()),
        "optimizer_groups": isinstance(groups, list) and all(isinstance(one, dict) for one in groups),
    }
    odd = [key for key, good in fits.items() if not good]
    if odd:
        raise CheckpointError(
            f"{restored.path}: its {', '.join(odd)} can't be what a training saved; take another with --resume PATH"
        )


def _shown(path: Path) -> Path:
    """As a person at rank 0 would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
