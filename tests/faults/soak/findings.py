"""What the checker may find, by the rule that is broken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rule(Enum):
    """The value says what is wrong where it is broken."""

    LOST = "something that was acknowledged is not there"
    REPEATED = "an effect was accepted again, or out of the order of tokens"
    STUCK = "a run has not ended"
    ILLEGAL = "a history is none that the rules allow"
    ROWS = "the tables say something else than the history"
    EFFECTS = "effects, or how a run ended, are not what they must be"
    SCHEDULE = "a schedule has not fired once at each of its times"
    LEVELS = "a server's memory or descriptors have grown"
    FAULT = "a process has told of an error that no fault from outside explains"
    BOUND = "a recovery has taken longer than it may"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not be."""

    rule: Rule
    text: str

    def __str__(self) -> str:
        return f"{self.rule.name}: {self.text}"
