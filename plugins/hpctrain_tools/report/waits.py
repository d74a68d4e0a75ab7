"""Rules about ranks that wait for each other."""

from __future__ import annotations

from hpctrain_tools.report.curves import mean_of
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.finding import CHANGES, STEPS, WORKERS, Finding

COMMUNICATION, STRAGGLER, PIPELINE = 0.3, 0.05, 0.2
"""The least shares of the time at which a rule speaks."""
# seconds for which a rank has to be slow before rows name it
_UNNAMED = 5.0
# the share of a pipeline's waiting below which its schedule does not explain it
_EXPLAINED = 0.5
# the keys of [parallelism] by the axes of the mesh, which rows name. An axis of another package may have the same for both.
_NAMES = {"tp": "tensor", "cp": "context", "pp": "pipeline"}


def communication_bound(facts: Facts) -> Finding | None:
    """Steps wait for communication that computing does not hide."""
    share = facts.steady_share("communication") - slow_share(facts)  # straggling tells of that
    if share < COMMUNICATION or facts.rows.steady_steps < STEPS:
        return None
    most = _most_waited(facts)
    if most.startswith("pp.") and pipeline_share(facts) >= PIPELINE:  # pipeline_idle tells of the same waiting
        return None
    where = f", most of it for {most}" if most else ""
    besides = ", besides the wait for the slow rank" if slow_share(facts) else ""
    limit = f"{share:.0%} of each step waits for communication{besides}{where}"
    return Finding("communication", limit, _less_communication(facts, most), share)


def _most_waited(facts: Facts) -> str:
    """The operation that ranks wait for most, as rows name it; "" if that is not known."""
    return max(facts.rows.exposed.items(), key=lambda one: one[1], default=("", 0.0))[0]


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
        return '[compression] name = "bf16": half the bytes' + CHANGES
    whole = facts.count("batch", "global_size")
    if whole:
        return f"[batch] global_size = {2 * whole}: as many samples with half the sums of gradients{CHANGES}"
    return f"larger batches: the same samples with fewer sums of gradients{CHANGES}"


def straggling(facts: Facts) -> Finding | None:
    """The ranks wait for one of them."""
    share = slow_share(facts)
    if not share:
        return None
    (rank, node, cause), (steps, seconds) = _slowest(facts)
    where = f"rank {rank} on {node}" if node else f"rank {rank}"
    limit = f"{where} is slow: its {cause} takes {seconds / steps:.3g} s longer a step than that of the others, which wait for it"
    # a slow rank is why others wait, so it comes before what they wait for
    waits = max(facts.steady_share("communication") + facts.steady_share("data"), pipeline_share(facts))
    return Finding("straggler", limit, _without_slow(facts, node, cause), min(0.99, max(share, waits) + 0.01))


def _slowest(facts: Facts) -> tuple[tuple[int, str, str], tuple[float, float]]:
    return max(facts.rows.stragglers.items(), key=lambda one: one[1][1])


def slow_share(facts: Facts, cause: str = "") -> float:
    """The share of the steps' time for which the others wait for the slow rank: 0 below the least one, or if the cause is another.
    Its first steps, in which it is not named yet, count."""
    if not facts.rows.stragglers or not facts.step_seconds or (cause and _slowest(facts)[0][2] != cause):
        return 0.0
    steps, seconds = _slowest(facts)[1]
    slow = min(facts.rows.steady_steps, steps + max(STEPS, _UNNAMED / facts.step_seconds))
    share = seconds / steps * slow / (facts.step_seconds * max(1.0, facts.rows.steady_steps))
    return min(1.0, share) if share >= STRAGGLER else 0.0


def _without_slow(facts: Facts, node: str, cause: str) -> str:
    several = facts.layout is not None and len(set(facts.layout.hosts)) > 1
    if cause == "data":
        workers = facts.count("dataset", "workers") or 0
        return f"[dataset] workers = {2 * workers or WORKERS}; if the rank stays slow, look at its files and its node"
    if cause == "save":
        return "[checkpoint] asynchronous = true; look at the file system of that node"
    if several and node:
        return f"sbatch --exclude={node}; hpctrain doctor tells what is wrong with it"
    return "see what else computes on its cores or its device: top, nvidia-smi; hpctrain doctor"


def pipeline_share(facts: Facts) -> float:
    """About the share of a step in which ranks of a pipeline have nothing to compute, 0 without one. Rows have it as a share of the
    time of a pipeline's schedule."""
    bubble = mean_of(facts.rows.points, "pipeline_bubble")
    if bubble is None or (facts.count("parallelism", "pipeline", "size") or 1) < 2:
        return 0.0
    schedule = sum(facts.steady_share(part) for part in ("forward", "backward", "communication", "other"))
    return min(1.0, max(0.0, bubble)) * schedule


def pipeline_idle(facts: Facts) -> Finding | None:
    """The ranks of a pipeline wait for each other."""
    share = pipeline_share(facts)
    if share < PIPELINE or facts.rows.steady_steps < STEPS:
        return None
    limit, bubble = f"for {share:.0%} of each step, ranks of the pipeline have nothing to compute", _by_schedule(facts)
    step = _fuller(facts)
    if bubble is not None:
        planned, micro_batches = bubble
        measured = mean_of(facts.rows.points, "pipeline_bubble") or 1.0
        limit += f"; its schedule with {micro_batches} micro batches leaves {planned * share / measured:.0%}"
        if planned < _EXPLAINED * measured:
            step = "[parallelism.pipeline] split: blocks of each stage, so that all take as long; more micro batches fill little"
    # on CPUs rows count the same waiting as communication
    is_told = _most_waited(facts).startswith("pp.")
    cost = max(share, facts.steady_share("communication") + 0.01) if is_told else share
    return Finding("pipeline", limit, step, min(0.99, cost))


def _by_schedule(facts: Facts) -> tuple[float, int] | None:
    """The share of the schedule's time in which a rank waits before its first and after its last micro batch (Narayanan et al.,
    2021), and the number of micro batches; None if the job does not tell it. Schedules that split backward wait less."""
    size, layout = facts.count("parallelism", "pipeline", "size") or 1, facts.layout
    per_rank = facts.count("parallelism", "pipeline", "stages_per_rank") or 1
    every, micro = facts.count("batch", "global_size"), facts.count("batch", "micro_size")
    if not every or not micro or layout is None or not layout.axes:
        return None
    count = max(1, every // (micro * layout.data_ranks))
    return (size - 1) / (per_rank * count + size - 1), count


def _fuller(facts: Facts) -> str:
    """More micro batches, or stages in turn."""
    micro = facts.count("batch", "micro_size") or 0
    if micro and micro % 2 == 0:
        return f"[batch] micro_size = {micro // 2}, now {micro}: twice as many micro batches fill the pipeline"
    if facts.key("parallelism", "pipeline", "schedule") in ("gpipe", "1f1b"):
        return '[parallelism.pipeline] schedule = "interleaved-1f1b", with stages_per_rank = 2: ranks wait half as long'
    whole = facts.count("batch", "global_size")
    larger = f"[batch] global_size = {2 * whole}" if whole else "[batch] global_size larger"
    return f"{larger}: more micro batches fill the pipeline{CHANGES}"
