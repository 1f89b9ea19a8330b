"""What a soak prints: a table for people, and as its last line one JSON object."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.soak.checker import told
from tests.faults.soak.findings import Finding, Rule
from tests.faults.soak.levels import LONG_ENOUGH, Level
from tests.faults.soak.recovery import BOUNDS, Recoveries
from tests.faults.soak.stage import SERVERS

LONG = 1200.0
"""Seconds after which every kind of fault has come often."""
CALLS = ("start", "signal", "cancel", "terminate", "pause", "resume", "retry")


def _spread(seconds: Sequence[float]) -> str:
    """The median and the longest of some times, in two columns."""
    if not seconds:
        return f"{'-':>10}{'-':>10}"
    return f"{statistics.median(seconds):8.2f} s{max(seconds):8.2f} s"


@dataclass
class Report:
    """The figures of a soak; ``findings`` must be empty."""

    seed: int
    seconds: float = 0.0
    programs: int = 0
    runs: int = 0
    events: int = 0
    trials: int = 0
    refused: int = 0
    known: int = 0
    acknowledged: Counter[str] = field(default_factory=Counter)
    """Calls that were answered, by what they asked for."""
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: Recoveries = field(default_factory=Recoveries)
    levels: list[Level] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    disk_full: str = ""
    stories: dict[str, str] = field(default_factory=dict)
    """Histories of the runs that findings name."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def missing(self) -> list[Finding]:
        """What a long soak must have measured, and has not: it says nothing of that."""
        if self.seconds < LONG:
            return []
        unmeasured = [name for name in BOUNDS if not self.recoveries.bounded.get(name)]
        never = [what for what in CALLS if not self.acknowledged[what]]
        told = [f"not once measured without other faults: {name}" for name in unmeasured]
        found = [Finding(Rule.BOUND, text) for text in (*told, *(f"not once acknowledged: {what}" for what in never))]
        return found + [Finding(Rule.LEVELS, f"server {number} was never judged") for number in self._unjudged]

    @property
    def _unjudged(self) -> list[int]:
        """The servers of which it is not known whether they grow."""
        return sorted(set(range(SERVERS)) - {level.server for level in self.levels})

    def count(self, *rules: Rule) -> int:
        """How many findings there are of some rules."""
        return sum(finding.rule in rules for finding in self.findings)

    def as_json(self) -> str:
        """One line."""
        after = self.recoveries.after
        figures: dict[str, Any] = {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "programs": self.programs,
            "runs": self.runs,
            "events": self.events,
            "acknowledged": self.acknowledged.total(),
            "acknowledged_calls": dict(sorted(self.acknowledged.items())),
            "effects_tried": self.trials,
            "effects_refused": self.refused,
            "effects_known": self.known,
            "faults": dict(sorted(self.faults.items())),
            "faults_total": self.faults.total(),
            "recoveries": sum(map(len, after.values())),
            "longest_recovery": round(self.recoveries.longest, 2),
            "bounded": {
                name: {"count": len(each), "longest": round(max(each), 2), "bound": BOUNDS[name]}
                for name, each in sorted(self.recoveries.bounded.items())
            },
            "servers_judged_for_growth": len({level.server for level in self.levels}),
            "disturbed": {
                name: {"count": len(each), "longest": round(max(each), 2)}
                for name, each in sorted(self.recoveries.disturbed.items())
            },
            "disk_full": self.disk_full,
            "lost": self.count(Rule.LOST),
            "repeated": self.count(Rule.REPEATED),
            "stuck": self.count(Rule.STUCK),
            "other_findings": len(self.findings) - self.count(Rule.LOST, Rule.REPEATED, Rule.STUCK),
            "holds": self.holds,
        }
        return json.dumps(figures)

    def lines(self) -> Iterator[str]:
        """The table."""
        yield f"{'fault':34}{'times':>6}{'median':>10}{'longest':>10}  until the next progress of any run"
        for kind, times in sorted(self.faults.items()):
            after = self.recoveries.after.get(kind, [])
            yield f"{kind:34}{times:6}{_spread(after)}"
        yield ""
        yield f"{'recovery with a bound':42}{'times':>6}{'median':>10}{'longest':>10}{'bound':>8}"
        for name, bound in BOUNDS.items():
            each = self.recoveries.bounded.get(name, [])
            yield f"{name:42}{len(each):6}{_spread(each)}{bound:6g} s"
            if disturbed := self.recoveries.disturbed.get(name):
                yield f"{'  amid other faults, held to nothing':42}{len(disturbed):6}{_spread(disturbed)}"
        yield ""
        for number in self._unjudged:
            yield f"server {number}: no process of it lived long enough ({LONG_ENOUGH:g} s) to tell whether it grows"
        if not self.levels:
            yield "no server lived long enough: nothing is said of growth"
        for level in self.levels:
            memory = " to ".join(f"{each / (1 << 20):.0f}" for each in level.memory)
            files = " to ".join(map(str, level.files))
            yield f"server {level.server} over {level.seconds:.0f} s: {memory} MiB, {files} descriptors"
        yield f"disk full: {self.disk_full}"
        yield (
            f"{self.seconds:.0f} s, {self.programs} programs, {self.runs} runs, {self.events} events, "
            f"{self.acknowledged.total()} acknowledged calls, {self.trials} effects tried "
            f"({self.known} were known, {self.refused} refused as they had to be)"
        )
        yield (
            f"{self.faults.total()} faults; lost {self.count(Rule.LOST)}, repeated {self.count(Rule.REPEATED)}, "
            f"stuck {self.count(Rule.STUCK)}, all findings {len(self.findings)}"
        )
        for finding in self.findings:
            yield f"  {told(finding)}"
