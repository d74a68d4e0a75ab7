"""The times at which the loop saves, and the meaning of a failed save."""

from __future__ import annotations

from hpctrain.errors import EXIT_DONE, EXIT_STOPPED, CheckpointError, TrainingError, reason
from hpctrain.exchange import broadcast_value
from hpctrain.loop.session import Session

_LOSABLE = 60.0
"""Seconds of training. A save before every evaluation would write twice as much; one at each start costs little."""


def save_if_due(session: Session, stop_agreed: bool) -> int:
    """Save if due, at the end, and if asked to stop. Return the exit code of the training so far.

    The result of a background save is reported at the first step after it has ended.
    """
    last = session.progress.done
    final = stop_agreed or last
    due = final or session.saving.is_due()
    excused = session.job.checkpoint.on_error == "continue"
    if due or session.saving.is_over():
        finish_saving(session, excused or final)  # a failure of the previous save doesn't prevent the final one
    if due:
        try:
            session.deadline.save_begins()
            with session.hooks.phase("save", session.progress.step):
                session.saving.save(final)
            if final or not session.job.checkpoint.asynchronous:
                session.deadline.saved()
        except (OSError, CheckpointError) as error:
            save_failed(session, session.progress.step, error, excused and not final)
    return EXIT_STOPPED if stop_agreed and not last else EXIT_DONE


def save_before_evaluation(session: Session) -> None:
    """Save before the first evaluation of this start, which may fail, if that would lose more than _LOSABLE. Collective.

    Later evaluations do what the first one did. Where saving changes the training (error feedback is summed, ranks' own weights are
    averaged), it waits until the job asks for it.
    """
    job, parts, progress, saving = session.job, session.parts, session.progress, session.saving
    has_evaluated = progress.evaluation is not None and progress.evaluation[0] > progress.first_step
    if (
        has_evaluated
        or progress.step == progress.first_step
        or parts.sharding.ranks_diverge
        or job.compression.name != "none"
    ):
        return
    if not broadcast_value(saving.seconds_unsaved > _LOSABLE):
        return
    finish_saving(session, excused=True)
    try:
        session.deadline.save_begins()
        with session.hooks.phase("save", progress.step):
            saving.save(final=True)  # complete before the evaluation begins
        session.deadline.saved()
        session.report.say(f"saved        step {progress.step}, before its evaluation: {saving.newest}")
    except (OSError, CheckpointError) as error:
        save_failed(session, progress.step, error, excused=True)


def finish_saving(session: Session, excused: bool) -> None:
    """Wait for a background save. Its failure is printed if `excused`; otherwise it ends the training."""
    try:
        session.saving.finish()
        session.deadline.saved()
    except (OSError, CheckpointError) as error:
        save_failed(session, session.saving.step, error, excused)


def save_failed(session: Session, step: int, error: Exception, excused: bool) -> None:
    """Print the failure and go on, or stop with exit 4. Older checkpoints stay unchanged."""
    if not excused:
        newest = session.saving.newest or "none"
        message = f"step {step} could not be saved: {reason(error)} (newest checkpoint: {newest})"
        raise TrainingError(message, everywhere=True) from error
    session.report.say(f"step {step} could not be saved, training goes on: {reason(error)}")
