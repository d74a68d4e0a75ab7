"""Rules about what limits a run, each with its threshold and the one next step to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev

from hpctrain_tools.report.against_plan import against
from hpctrain_tools.report.curves import mean_of
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.finding import CHANGES, STEPS, WORKERS, Finding
from hpctrain_tools.report.waits import (
    PIPELINE,
    communication_bound,
    pipeline_idle,
    pipeline_share,
    slow_share,
    straggling,
)
from hpctrain_tools.report.wall_time import WallTime

DATA, LOST, SAVING, EVALUATION, STARTING, IDLE = 0.15, 0.05, 0.1, 0.25, 0.25, 0.25
"""The least shares of the time at which a rule speaks."""
MEMORY = 0.5
"""The share of an accelerator's memory below which it counts as unused."""
SKIPPED = 0.02
PLANNED = 1.1
"""The measured peak of memory to the planned one."""
# the least rise of a loss, as a share, and the number of evaluations from which on they tell anything
_RISE, _EVALUATIONS = 0.05, 3
# windows of a run and points in each at least; the share of the fall of the loss, and standard errors, by which it has risen
# again
_WINDOWS, _POINTS, _FALL, _ERRORS = 10, 4, 0.3, 4.0
# learning rates above which a smaller one is the first to try
_LARGEST_OF_ADAM, _LARGEST = 0.05, 1.0
# wall time from which on shares of it do: every short run mostly starts
_SECONDS = 60.0
_GB = 1e9


def data_bound(facts: Facts) -> Finding | None:
    """Steps wait for samples."""
    share = facts.steady_share("data")
    if share - slow_share(facts, "data") < DATA or facts.rows.steady_steps < STEPS:
        return None
    workers = facts.count("dataset", "workers") or 0
    more = WORKERS if workers == 0 else 2 * workers
    return Finding("data", f"{share:.0%} of each step waits for data", f"[dataset] workers = {more}", share)


def memory_unused(facts: Facts) -> Finding | None:
    """Accelerators have room for larger micro batches, which use them better."""
    peak, whole = facts.rows.memory_peak, facts.device_bytes
    if peak is None or not whole or peak / whole >= MEMORY:
        return None
    limit = f"peak {peak / _GB:.3g} of {whole / _GB:.3g} GB"
    mode = facts.key("activation_checkpointing", "mode")
    if isinstance(mode, str) and mode != "none":
        return Finding("memory", limit, '[activation_checkpointing] mode = "none": computes nothing twice', 0.1)
    micro, every = facts.count("batch", "micro_size"), facts.count("batch", "global_size")
    ranks = facts.layout.data_ranks if facts.layout is not None else 1
    if not micro or pipeline_share(facts) >= PIPELINE:  # larger ones would be fewer, and leave a pipeline emptier
        return None
    grown = f"[batch] micro_size = {2 * micro}, now {micro}"
    if every is not None and every < 2 * micro * ranks:
        grown += f", with global_size = {2 * micro * ranks}{CHANGES}"
    return Finding("memory", limit, grown, 0.1)


def above_plan(facts: Facts) -> Finding | None:
    """More memory was taken than planned."""
    found = against(facts)
    if found is None or found.ratio is None or found.ratio <= PLANNED:
        return None
    planned, measured = found.plan.largest.most_bytes / _GB, (found.measured or 0.0) / _GB
    return Finding("plan", f"peak {measured:.3g} GB, {found.ratio - 1:.0%} above the planned {planned:.3g} GB", "", 0.0)


def losing(facts: Facts) -> Finding | None:
    """Steps were trained again after restarts or rollbacks."""
    wall = facts.wall
    if wall is None or wall.share("lost steps") < LOST:
        return None
    share = wall.share("lost steps")
    limit = f"{share:.0%} of the time went into {wall.lost_steps} lost steps, which were trained again"
    # a loss costs half of the steps between two saves on average
    now = facts.count("checkpoint", "every_steps") or 2 * wall.lost_steps // max(1, len(facts.starts.lost))
    every = _every(facts, wall)
    if every < now:
        step = f"[checkpoint] every_steps = {every}"
    elif facts.key("checkpoint", "asynchronous") is not True:
        step = "[checkpoint] asynchronous = true: more saves would cost more than they keep, unless they are cheaper"
    else:
        step = "fewer losses: the events tell when they came, the logs why; more saves would cost more than they keep"
    return Finding("lost", limit, step, share)


def _every(facts: Facts, wall: WallTime) -> int:
    """Steps between saves that lose least, rounded down: the root of twice a save's time and the time between losses (Young,
    1974)."""
    each = facts.step_seconds or 1.0
    save = wall.of["saving"] / facts.rows.saves if facts.rows.saves else each
    best = math.sqrt(2 * max(save, 1e-3) * wall.seconds / max(1, len(facts.starts.lost))) / max(each, 1e-6)
    return _round(max(1, best))


def _round(number: float) -> int:
    """A number of one digit and zeros."""
    digit = 10 ** int(math.log10(number)) if number >= 1 else 1
    return int(number // digit * digit)


def saving(facts: Facts) -> Finding | None:
    """Saves hold the training up."""
    wall = facts.wall
    if wall is None or wall.seconds < _SECONDS or wall.share("saving") < SAVING:
        return None
    share, every = wall.share("saving"), facts.count("checkpoint", "every_steps") or 0
    step = f"[checkpoint] every_steps = {2 * every}" if every else "[checkpoint] every_epochs larger"
    if facts.key("checkpoint", "asynchronous") is not True:
        step = "[checkpoint] asynchronous = true"
    return Finding("saving", f"{share:.0%} of the time went into saves", step, share)


def evaluating(facts: Facts) -> Finding | None:
    """Evaluations hold the training up."""
    wall, every = facts.wall, facts.count("evaluation", "every_steps") or 0
    if wall is None or wall.seconds < _SECONDS or wall.share("evaluation") < EVALUATION:
        return None
    share = wall.share("evaluation")
    step = f"[evaluation] every_steps = {2 * every}" if every else "[evaluation] every_epochs larger"
    return Finding("evaluation", f"{share:.0%} of the time went into evaluations", step, share)


def starting(facts: Facts) -> Finding | None:
    """Much of the time went into restarts."""
    wall = facts.wall
    if wall is None or wall.starts < 2 or wall.seconds < _SECONDS or wall.share("start and end") < STARTING:
        return None
    share = wall.share("start and end")
    limit = f"{share:.0%} of the time went into {wall.starts} starts and their ends"
    return Finding("start", limit, "longer jobs: sbatch --time, fewer restarts", share)


def waiting(facts: Facts) -> Finding | None:
    """The job was not running."""
    wall = facts.wall
    if wall is None or wall.seconds < _SECONDS or wall.share("not running") < IDLE:
        return None
    share = wall.share("not running")
    limit = f"{share:.0%} of the time since the first start, no job was running"
    return Finding(
        "idle", limit, "sbatch --requeue, or the next job beforehand: hpctrain submit JOB.toml --after RUN_DIR", share
    )


def skipping(facts: Facts) -> Finding | None:
    """Guards left steps out."""
    newest = facts.rows.newest
    count = newest.skipped_steps if newest is not None else None
    if not count or newest is None or count < SKIPPED * newest.step:
        return None
    kinds = ", ".join(sorted(facts.rows.guards)) or "guards"
    return Finding("skipped", f"{count} steps were left out by {kinds}", calmer(facts), count / max(1, newest.step))


def overfitting(facts: Facts) -> Finding | None:
    """Evaluations get worse while the training's loss falls."""
    curve, best = facts.rows.losses, facts.rows.best
    if len(curve) < _EVALUATIONS or best is None:
        return None
    (at, lowest), (step, now) = best, curve[-1]
    before, after = (_training_loss(facts, one) for one in (at, step))
    if now - lowest <= _RISE * abs(lowest) or before is None or after is None or after >= before:
        return None
    limit = (
        f"overfitting: the evaluation's loss has risen from {lowest:.4g} at step {at} to {now:.4g} at step {step}, while the "
        f"training's fell from {before:.4g} to {after:.4g}"
    )
    kept = (
        f"the checkpoint of step {at} is the best"
        if at in dict(facts.checkpoints)
        else "[checkpoint] keep_best = 1 keeps the best one"
    )
    return Finding(
        "overfitting", limit, f"{kept}; more data, [optimizer] weight_decay, dropout or fewer steps help{CHANGES}", 1.0
    )


def _training_loss(facts: Facts, step: int) -> float | None:
    """The mean of the steps up to this one, a tenth of the run."""
    rows = facts.rows
    width = max(1, (rows.newest.step if rows.newest is not None else 0) // _WINDOWS)
    return mean_of([one for one in rows.points if step - width < one.last <= step], "loss")


def unstable(facts: Facts) -> Finding | None:
    """The training's loss rises, or has risen far above where it began."""
    points = [one for one in facts.rows.points if one.counts["loss"]]
    size = max(_POINTS, len(points) // _WINDOWS)
    means = [
        (part[-1].last, fmean(values), stdev(values) / math.sqrt(len(values)))
        for begin in range(0, len(points) - size + 1, size)
        if (part := points[begin : begin + size])
        and (values := [one.sums["loss"] / one.counts["loss"] for one in part])
    ]
    if len(means) < 3:
        return None
    (at, low, error), (step, now, error_now) = min(means, key=lambda one: one[1]), means[-1]
    peak_at, peak, error_of_peak = max(means, key=lambda one: one[1])
    fall, noise = means[0][1] - low, _ERRORS * math.hypot(error, error_now)
    if now - low > max(_RISE * abs(low), _FALL * fall, noise):
        limit = f"the training's loss rises: {low:.4g} on average up to step {at}, {now:.4g} up to step {step}"
    elif peak_at != means[0][0] and peak - means[0][1] > max(
        _FALL * abs(means[0][1]), _ERRORS * math.hypot(error_of_peak, means[0][2])
    ):
        limit = (
            f"the training's loss is unstable: {means[0][1]:.4g} on average at first, {peak:.4g} up to step {peak_at}"
        )
    else:
        return None
    return Finding("unstable", limit, calmer(facts), 1.0)


def calmer(facts: Facts) -> str:
    """A step against losses that are not finite."""
    if facts.key("precision", "mode") == "fp16":
        return f'[precision] mode = "bf16": its numbers reach further{CHANGES}'
    lr, name = facts.key("optimizer", "lr"), str(facts.key("optimizer", "name"))
    is_number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if is_number and lr > (_LARGEST_OF_ADAM if "adam" in name.lower() else _LARGEST):
        return f"[optimizer] lr = {lr} is far above what trains, such as {1e-3 if 'adam' in name.lower() else 0.1:g}{CHANGES}"
    if facts.key("optimizer", "clip_norm") is None:
        return f"[optimizer] clip_norm = 1.0{CHANGES}"
    return f"[optimizer] lr = {lr / 2:g}{CHANGES}" if is_number else f"[optimizer] lr half as large{CHANGES}"


LIMITS: tuple[Callable[[Facts], Finding | None], ...] = (
    data_bound, communication_bound, straggling, pipeline_idle, memory_unused, above_plan, losing, saving, evaluating, starting,
    waiting, skipping, overfitting, unstable,
)  # fmt: skip
