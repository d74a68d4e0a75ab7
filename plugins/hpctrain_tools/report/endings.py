"""How a run ended, in a sentence, and the next step after an end that nobody wanted."""

from __future__ import annotations

import re
from collections.abc import Callable

from hpctrain.toolkit.commands import escaped
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.finding import Finding
from hpctrain_tools.report.limits import calmer

_LONGEST = 300
_MEMORY = re.compile(r"ran out of memory|out of memory|OutOfMemoryError|MemoryError")
_NOT_FINITE = re.compile(r"expected finite numbers|not finite|is above .* the median")
_HELPS = re.compile(r"what helps, the cheapest first: ([^;]+)")
_HANGS = re.compile(r"watchdog|did not move")
_STEP = re.compile(r"\bstep (\d{1,12})\b")
_ENDED = re.compile(r"(?:done +step|stopped at step) (\d{1,12})\b")


def told_ending(facts: Facts) -> str:
    """The ending in a sentence."""
    newest, ending, failure = facts.rows.newest, facts.ending, facts.ending.failure
    step, last = newest.step if newest is not None else 0, facts.job.last_step(newest)
    of, logged, in_step = f" of {last}" if last else "", _logged(facts), _STEP.search(ending.why)
    at = f"at step {logged[0] if logged else step}{of}" if logged or step else "before its first step"
    if ending.how in ("failed", "killed"):
        if in_step is not None and int(in_step[1]) >= step:
            at = f"in step {in_step[1]}{of}"
        elif step:
            at = f"after step {step}{of}"
    match ending.how:
        case "done":
            return f"Finished {at}"
        case "stopped" if logged is not None:
            return (
                f"Stopped by {'its time limit' if 'time is nearly over' in logged[1] else 'a signal'} {at}, and saved"
            )
        case "running":
            return f"Still running, {at}"
        case "stopped":
            return f"Stopped by a signal or its time limit {at}, and saved"
        case "cancelled":
            return f"Cancelled {at}, and saved"
        case "pending":
            return "Submitted, not started"
        case "killed":
            return f"Killed {at}" + (f", rank {failure.rank}" if failure else ": its log ends without a word")
        case "failed" if failure is not None and not failure.is_shared and not _NOT_FINITE.search(ending.why):
            return f"{kind_of(facts)} {at}, rank {failure.rank}"
        case "failed":
            return f"{kind_of(facts)} {at}"
    return f"Its end is unknown, {at}"


def _logged(facts: Facts) -> tuple[int, str] | None:
    """The step at which the run has ended by rank 0's log, and the line; None if rows are newer."""
    step = facts.rows.newest.step if facts.rows.newest is not None else 0
    found = [(int(match[1]), line.text) for line in facts.log if (match := _ENDED.match(line.text))]
    is_over = facts.ending.how in ("done", "stopped", "cancelled")
    return found[-1] if is_over and found and found[-1][0] >= step else None


def rows_cut(facts: Facts) -> Finding | None:
    """metrics.jsonl lacks steps that were trained."""
    rows, logged = facts.rows, _logged(facts)
    newest = rows.newest.step if rows.newest is not None else 0
    is_resumed = any(line.text.startswith(("resumed", "weights")) for line in facts.log)
    first = rows.points[0].first if rows.points and is_resumed else 1
    trained = max(newest, logged[0] if logged else 0) + 1 - first
    counted = rows.weight if rows.read == rows.weight else newest + 1 - first  # of a large file rows are drawn
    if counted >= trained:
        return None
    return Finding(
        "rows", f"metrics.jsonl has {counted:.0f} of {trained} steps, and all that follows is about these", "", 1.0
    )


def kind_of(facts: Facts) -> str:
    """The kind of a failure in words."""
    kind, why = facts.ending.failure.kind if facts.ending.failure else "", facts.ending.why
    if _MEMORY.search(f"{kind} {why}"):
        return "Out of memory"
    if _NOT_FINITE.search(why):
        return "Loss not finite (NaN)" if "finite" in why else "Loss spike"
    return "Ended by the watchdog, as it hung," if _HANGS.search(f"{kind} {why}") else "Failed"


def out_of_memory(facts: Facts) -> Finding | None:
    """A rank lacked memory."""
    if facts.ending.how != "failed" or kind_of(facts) != "Out of memory":
        return None
    advised = _HELPS.search(facts.ending.why)
    micro = facts.count("batch", "micro_size") or 1
    step = f"[batch] micro_size = {micro // 2}" if micro > 1 else '[activation_checkpointing] mode = "full"'
    return Finding("out of memory", _short(facts.ending.why), advised[1].strip() if advised else step, 1.0)


def not_finite(facts: Facts) -> Finding | None:
    """The loss became NaN, or rose beyond a guard's limit."""
    if facts.ending.how != "failed" or kind_of(facts) not in ("Loss not finite (NaN)", "Loss spike"):
        return None
    return Finding("not finite", _short(facts.ending.why), calmer(facts), 1.0)


def hung(facts: Facts) -> Finding | None:
    """The watchdog ended it."""
    if facts.ending.how != "failed" or not kind_of(facts).startswith("Ended by the watchdog"):
        return None
    return Finding("hang", _short(facts.ending.why), f"the stacks of all ranks are in {_log(facts)}", 1.0)


def failed(facts: Facts) -> Finding | None:
    """Any other error."""
    if facts.ending.how != "failed":
        return None
    return Finding("error", _short(facts.ending.why) or "an error", f"the traceback is in {_log(facts)}", 1.0)


def killed(facts: Facts) -> Finding | None:
    """Nothing in the files says why it ended."""
    if facts.ending.how != "killed":
        return None
    if facts.scheduler is not None and facts.scheduler[0] == "slurm":
        ask = f"sacct -j {escaped(facts.scheduler[1])} --format=JobID,State,ExitCode,MaxRSS tells why"
    else:
        ask = "dmesg tells of processes that lacked memory, the scheduler of a time limit"
    why = _short(facts.ending.why) or "no rank has said why it ended"
    return Finding("killed", why, f"{_again(facts)}; {ask}", 1.0)


def stopped(facts: Facts) -> Finding | None:
    """Saved before its last step."""
    return (
        Finding("stopped", "it has not reached its last step", _again(facts), 0.0)
        if facts.ending.how == "stopped"
        else None
    )


def _again(facts: Facts) -> str:
    if not facts.checkpoints:
        return "start it again, with [checkpoint] every_steps so that it has something to go on from"
    return f"give the same command again: it goes on from step {facts.checkpoints[-1][0]}"


def _log(facts: Facts) -> str:
    failure = facts.ending.failure
    return f"log/{escaped(failure.log.name)}" if failure is not None else "log/rank-00000.log"


def _short(why: str) -> str:
    text = escaped(" ".join(why.partition("\n")[0].split()))
    text = text.partition("; what helps, the cheapest first")[0]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


AFTER: tuple[Callable[[Facts], Finding | None], ...] = (
    out_of_memory,
    not_finite,
    hung,
    failed,
    killed,
    rows_cut,
    stopped,
)
"""The first one that speaks counts."""
