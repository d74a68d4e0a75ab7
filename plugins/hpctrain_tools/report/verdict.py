"""The verdict on a run: how it ended, what limited it, and the one next step to try."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain_tools.report.endings import AFTER, told_ending
from hpctrain_tools.report.facts import Facts
from hpctrain_tools.report.finding import Finding
from hpctrain_tools.report.limits import LIMITS


@dataclass(frozen=True)
class Verdict:
    """ended: in a sentence. findings: the first one names the limit and the next step; the others come after it. level: "good",
    "warning" or "bad"."""

    ended: str
    level: str
    findings: list[Finding]

    @property
    def first(self) -> Finding:
        """The limit, and the next step."""
        return self.findings[0]


def judge(facts: Facts) -> Verdict:
    """Apply all rules: those about a failure come first, then those by the share of the time that they cost."""
    failures = [found for rule in AFTER if (found := rule(facts)) is not None]
    limits = [found for rule in LIMITS if (found := rule(facts)) is not None]
    limits.sort(key=lambda one: -one.cost)
    has_failed = facts.ending.how in ("failed", "killed")
    level = "bad" if has_failed else "warning" if limits or failures else "good"
    findings = [*failures[:1], *limits]
    if not findings:
        findings = [healthy(facts)]
    return Verdict(told_ending(facts), level, findings)


def healthy(facts: Facts) -> Finding:
    """Nothing stands out."""
    if not facts.rows.steady_steps:
        return Finding("healthy", "too few steps to judge: a run of two or more tells where its time goes", "", 0.0)
    computing = sum(facts.steady_share(part) for part in ("forward", "backward", "optimizer"))
    told = f"nothing stands out: {computing:.0%} of the steps' time computes"
    if facts.rows.newest is not None and facts.rows.newest.mfu is not None:
        told += f", mfu {facts.rows.newest.mfu:.1%}"
    return Finding("healthy", told, "hpctrain profile show RUN_DIR tells which operators take it", 0.0)
