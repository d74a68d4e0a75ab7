"""Rules about what limits a run, each with its threshold and the one next step to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain_plugins.report.facts import Facts
from hpctrain_plugins.report.wall_time import WallTime

DATA, COMMUNICATION, LOST, STRAGGLER, SAVING, EVALUATION, STARTING, IDLE = 0.15, 0.3, 0.05, 0.05, 0.1, 0.25, 0.25, 0.25
"""The least shares of the time at which a rule speaks."""
MEMORY = 0.5
"""The share of an accelerator's memory below which it counts as unused."""
SKIPPED = 0.02
_STEPS = 5
"""Steps from which on shares of their time tell anything."""
_SECONDS = 60.0
"""Wall time from which on shares of it do: every short run mostly starts."""
_WORKERS = 4
_NAMES = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
"""The keys of [parallelism] by the axes of the mesh, which rows name. An axis of another package may have the same for both."""
_GB = 1e9


@dataclass(frozen=True)
class Finding:
    """rule: its name. limit: what limits the run. step: to try next, in the words of the job file or the shell; "" if none. cost:
    about the share of the time that it costs."""

    rule: str
    limit: str
    step: str
    cost: float


def data_bound(facts: Facts) -> Finding | None:
    """Steps wait for samples."""
    share = facts.steady_share("data")
    if share < DATA or facts.rows.steady_steps < _STEPS:
        return None
    workers = facts.count("dataset", "workers") or 0
    more = _WORKERS if workers == 0 else 2 * workers
    return Finding("data", f"{share:.0%} of each step waits for data", f"[dataset] workers = {more}", share)


def communication_bound(facts: Facts) -> Finding | None:
    """Steps wait for communication that computing does not hide."""
    share = facts.steady_share("communication")
    if share < COMMUNICATION or facts.rows.steady_steps < _STEPS:
        return None
    most = max(facts.rows.exposed.items(), key=lambda one: one[1], default=None)
    where = f", most of it for {most[0]}" if most is not None else ""
    limit = f"{share:.0%} of each step waits for communication{where}"
    return Finding("communication", limit, _less_communication(facts, most[0] if most else ""), share)


def _less_communication(facts: Facts, operation: str) -> str:
    axis, layout = operation.partition(".")[0], facts.layout
    name = _NAMES.get(axis, axis)
    size = facts.count("parallelism", name, "size") if name else None
    if size is not None and size > 1:
        if layout is not None and size > layout.per_host:
            return f"[parallelism.{name}] size = {layout.per_host}: the ranks of a node, so that it stays inside"
        return f"[parallelism.{name}] size = {size // 2}, if the model fits"
    if facts.count("sharding", "stage") == 3:
        return "[sharding] stage = 2, if memory allows: it gathers no parameters in each micro batch"
    hosts = len(set(layout.hosts)) if layout is not None else 1
    if hosts > 1 and facts.key("compression", "name") == "none":
        return '[compression] name = "bf16": half the bytes between nodes'
    whole = facts.count("batch", "global_size")
    if whole:
        return f"[batch] global_size = {2 * whole}: as many samples with half the sums of gradients"
    return "larger batches: the same samples with fewer sums of gradients"


def straggling(facts: Facts) -> Finding | None:
    """The ranks wait for one of them."""
    if not facts.rows.stragglers or not facts.step_seconds:
        return None
    (rank, node, cause), (steps, seconds) = max(facts.rows.stragglers.items(), key=lambda one: one[1][1])
    share = seconds / (facts.step_seconds * max(1.0, facts.rows.steady_steps))
    if share < STRAGGLER:
        return None
    where = f"rank {rank} on {node}" if node else f"rank {rank}"
    limit = f"{where} is slow: its {cause} takes {seconds / steps:.3g} s longer a step than that of the others, which wait for it"
    # a slow rank is why others wait, so it comes before what they wait for
    waits = facts.steady_share("communication") + facts.steady_share("data")
    return Finding("straggler", limit, _without_slow(facts, node, cause), min(0.99, max(share, waits) + 0.01))


def _without_slow(facts: Facts, node: str, cause: str) -> str:
    several = facts.layout is not None and len(set(facts.layout.hosts)) > 1
    if cause == "data":
        workers = facts.count("dataset", "workers") or 0
        return f"[dataset] workers = {2 * workers or _WORKERS}; if the rank stays slow, look at its files and its node"
    if cause == "save":
        return "[checkpoint] asynchronous = true; look at the file system of that node"
    if several and node:
        return f"sbatch --exclude={node}; hpctrain doctor tells what is wrong with it"
    return "see what else computes on its cores or its device: top, nvidia-smi; hpctrain doctor"


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
    if not micro:
        return None
    grown = f"[batch] micro_size = {2 * micro}, now {micro}"
    if every is not None and every < 2 * micro * ranks:
        grown += f", with global_size = {2 * micro * ranks}"
    return Finding("memory", limit, grown, 0.1)


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


def calmer(facts: Facts) -> str:
    """A step against losses that are not finite."""
    if facts.key("precision", "mode") == "fp16":
        return '[precision] mode = "bf16": its numbers reach further'
    if facts.key("optimizer", "clip_norm") is None:
        return "[optimizer] clip_norm = 1.0"
    lr = facts.key("optimizer", "lr")
    return f"[optimizer] lr = {lr / 2:g}" if isinstance(lr, float) else "[optimizer] lr half as large"


LIMITS: tuple[Callable[[Facts], Finding | None], ...] = (
    data_bound, communication_bound, straggling, memory_unused, losing, saving, evaluating, starting, waiting, skipping,
)  # fmt: skip
