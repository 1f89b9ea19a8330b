"""What a run must have come to, computed from what its history says that happened, and from nothing that ran.

There is no event loop in here. A node begins by some event and ends by another, or never; it ends with a value, a
failure, or cancelled; what it ends with follows from how its parts do. Cancellations are events too: of a timer that
fired, of a branch that was first, of the run's end.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any, Literal

from tests.determinism.facts import SIGNAL_TIMEOUT, End, Facts
from tests.determinism.programs import Node, Program

NEVER = float(1 << 60)
_SOON = 0.5
"""Between an event and the next: what an event cancels ends after what it ends itself."""

Kind = Literal["value", "failure", "cancelled", "open"]


@dataclass(frozen=True, slots=True)
class Out:
    """A node ended by event ``at``; open ones never did. ``value`` is the code of a failure."""

    kind: Kind
    at: float
    value: Any = None


OPEN = Out("open", NEVER)
Cancels = tuple[float, ...]
"""The events that cancel the task which a node runs in."""


def fold(last: int, value: object) -> int:
    """All that came before, as a number; a program counts it alike."""
    return zlib.crc32(json.dumps([last, value], separators=(",", ":"), sort_keys=True).encode())


class Expected:
    """What the function of one run must have done, as far as its history goes."""

    def __init__(self, program: Program, facts: Facts) -> None:
        self._facts = facts
        self._ending = NEVER
        if facts.ending is not None and facts.ending[1] == "RUN_STATE_CANCELLED":
            self._ending = facts.ending[0]
        self._chosen: list[int] = []
        self._chance: dict[int, tuple[int, str]] = {}
        self._draws: dict[int, float] = {}
        self.begun: dict[int, tuple[float, int]] = {}
        """By site: the event at which it was asked for, and what it was given."""
        self.patched: set[str] = set()
        """Patches that were asked for."""
        self.clean_ups: set[int] = set()
        """Sites of clean-up that was asked for after the run was about to end."""
        tree = program.trees[facts.input["part"]]
        carry = facts.input["carry"]
        # Values of chance depend on which draws were made before, which is not known before all have been found: what
        # draws is found first, and what it drew is filled in then.
        self._run(tree, carry)
        self._fill_chance()
        self.out, self.sum = self._run(tree, carry)

    def _run(self, tree: Node, carry: int) -> tuple[Out, int]:
        self.begun, self._draws, self.clean_ups, self.patched = {}, {}, set(), set()
        out = self._node(tree, 1, (), carry)
        return out, fold(carry, out.value)

    def _fill_chance(self) -> None:
        numbers, ids = (self._seeded(use) for use in ("random", "uuid4"))
        for site in sorted(self._draws, key=lambda site: self._draws[site]):
            number = numbers.randrange(10**6)
            self._chance[site] = (number, str(uuid.UUID(int=ids.getrandbits(128), version=4)))

    def _seeded(self, use: str) -> Random:
        digest = blake2b(f"{self._facts.run_id}/{use}".encode(), digest_size=16).digest()
        return Random(int.from_bytes(digest, "big"))

    # One thing after the other

    def _node(self, node: Node, start: float, cancels: Cancels, last: int, *, shielded: bool = False) -> Out:
        evaluate = _BY_KIND.get(node.kind)
        if evaluate is not None:
            return evaluate(self, node, start, cancels, last)
        if node.kind in {"now", "attributes"}:
            return self._at_once(node, start, last)
        return self._leaf(node, start, cancels, last, shielded=shielded)

    def _at_once(self, node: Node, start: float, last: int) -> Out:
        if node.kind == "now":
            return Out("value", start, self._facts.times[int(start)])
        if start < self._ending:
            self.begun[node.site] = (start, last)
        return Out("value", start, None)

    def _leaf(self, node: Node, start: float, cancels: Cancels, last: int, *, shielded: bool) -> Out:
        """A wait for something durable."""
        if node.kind == "patch":
            # That is no wait: nothing keeps a run that is about to end from it.
            self.patched.add(f"p{node.site}")
        ending = NEVER if shielded else self._ending
        if start >= ending:
            return Out("cancelled", start)
        if start >= self._ending and shielded:
            self.clean_ups.add(node.site)
        self.begun[node.site] = (start, last)
        ended = self._ended(node, start)
        cancel = min([ending, *(cancel for cancel in cancels if cancel > start)])
        if ended.at < cancel:
            return ended
        return OPEN if cancel == NEVER else Out("cancelled", cancel)

    def _ended(self, node: Node, start: float) -> Out:
        """How what it waits for ended, whether or not it waited so long."""
        facts = self._facts
        if node.kind in {"sleep", "asleep"}:
            fired = facts.timers.get(node.site)
            return OPEN if fired is None else Out("value", fired, None)
        if node.kind in {"signal", "signals", "contend"}:
            return self._signalled(node, start)
        end = facts.steps.get(node.site)
        if end is None:
            return OPEN
        return self._with_value(node, end)

    def _with_value(self, node: Node, end: End) -> Out:
        if end.code:
            return Out("failure", end.seq, end.code)
        return Out("value", end.seq, ["new", end.output["v"]] if node.kind == "patch" else end.output["v"])

    def _signalled(self, node: Node, start: float) -> Out:
        came = self._facts.signals.get(node.signal, [])
        timeout = self._facts.timeouts.get(node.signal, NEVER) if node.kind == "signal" else NEVER
        at = NEVER if len(came) < node.count else max(start, came[node.count - 1][0])
        if timeout < at:
            return Out("failure", timeout, SIGNAL_TIMEOUT)
        if at == NEVER:
            return OPEN
        got = [payload for _, payload in came[: node.count]]
        return Out("value", at, got[0] if node.kind == "signal" else got)

    def _caught(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        out = self._node(node, start, cancels, last)
        return Out("value", out.at, ["error", out.value]) if out.kind == "failure" else out

    def _seq(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        values = []
        for part in node.parts:
            out = (self._node if node.kind == "seq" else self._caught)(part, start, cancels, last)
            if out.kind != "value":
                return out
            values.append(out.value)
            start, last = out.at, fold(last, out.value)
        return Out("value", start, values)

    def _draw(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        out = self._node(node.parts[0], start, cancels, last)
        if out.kind != "value":
            return out
        self._draws[node.site] = out.at
        return Out("value", out.at, list(self._chance.get(node.site, (0, ""))))

    def _choice(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        out = self._node(node.parts[0], start, cancels, last)
        if out.kind != "value":
            return out
        return self._node(node.parts[1 + out.value % 2], out.at, cancels, last)

    def _clean_up(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        body = self._node(node.parts[0], start, cancels, last)
        if body.kind == "open":
            return body
        after = self._node(node.parts[1], body.at, cancels, last, shielded=True)
        return after if after.kind != "value" else Out(body.kind, after.at, body.value)

    def _timeout(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        # Once the run is about to end, a timer is none any more; one that was there may fire yet.
        fires = self._facts.timers.get(node.site, NEVER) if start < self._ending else NEVER
        waits = self._caught if node.kind == "wait_for" else self._node
        body = waits(node.parts[0], start, tuple(sorted((*cancels, fires))), last)
        if body.kind == "cancelled" and fires <= body.at:
            others = [cancel for cancel in cancels if start < cancel <= body.at]
            return body if others or self._ending < fires else Out("value", body.at, "late")
        if node.kind == "wait_for" and body.kind == "value":
            return Out("value", body.at, ["in time", body.value])
        return body

    # Side by side. The first of a task's cancellations reaches its branches; they wait for nothing then.

    def _is_cancelled(self, cancel: float, over: float) -> bool:
        """Whether a cancellation comes before the end; what it ends itself ends with it."""
        first = min(cancel, self._ending)
        return first <= over and first < NEVER

    def _first(self, start: float, cancels: Cancels) -> float:
        return min((cancel for cancel in cancels if cancel > start), default=NEVER)

    def _found(self) -> tuple[dict[int, tuple[float, int]], dict[int, float], set[int], set[str]]:
        return dict(self.begun), dict(self._draws), set(self.clean_ups), set(self.patched)

    def _branches(self, node: Node, start: float, cancel: float, last: int, *, caught: bool) -> list[Out]:
        play = self._caught if caught else self._node
        return [play(part, start, (cancel,), last) for part in node.parts]

    def _together(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        """gather and results."""
        before = self._found()
        cancel = self._first(start, cancels)
        ends = self._branches(node, start, NEVER, last, caught=node.kind == "results")
        over = max(end.at for end in ends)
        failed = min((end for end in ends if end.kind == "failure"), key=lambda end: end.at, default=None)
        if failed is not None:
            over = failed.at
        if self._is_cancelled(cancel, over):
            self.begun, self._draws, self.clean_ups, self.patched = before
            self._branches(node, start, cancel, last, caught=node.kind == "results")
            return Out("cancelled", max(start, min(cancel, self._ending)))
        if failed is not None:
            return failed
        if over == NEVER:
            return OPEN
        return Out("value", over, [end.value for end in ends])

    def _group(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        before = self._found()
        cancel = self._first(start, cancels)
        ends = self._branches(node, start, cancel, last, caught=False)
        failed = min((end for end in ends if end.kind == "failure"), key=lambda end: end.at, default=None)
        over = max(end.at for end in ends) if failed is None else failed.at
        if self._is_cancelled(cancel, over):
            return Out("cancelled", max(start, min(cancel, self._ending)))
        if failed is not None:
            # The others are cancelled where they stand.
            self.begun, self._draws, self.clean_ups, self.patched = before
            self._branches(node, start, failed.at + _SOON, last, caught=False)
            return Out("value", failed.at, ["group", failed.value])
        return OPEN if over == NEVER else Out("value", over, [end.value for end in ends])

    def _race(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        before = self._found()
        cancel = self._first(start, cancels)
        ends = self._branches(node, start, cancel, last, caught=True)
        first = min(range(len(ends)), key=lambda number: ends[number].at)
        over = ends[first].at
        if self._is_cancelled(cancel, over):
            # The first branch that ends by it ends the race, which cancels the others: also amid their clean-up.
            self.clean_ups = before[2]
            return Out("cancelled", max(start, min(cancel, self._ending)))
        if over == NEVER:
            return OPEN
        self.begun, self._draws, self.clean_ups, self.patched = before
        self._branches(node, start, over + _SOON, last, caught=True)
        return Out("value", over, [first, ends[first].value])

    def _all_caught(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        """completed and queue: values in the order in which they came."""
        cancel = self._first(start, cancels)
        ends = self._branches(node, start, cancel, last, caught=True)
        over = max(end.at for end in ends)
        if self._is_cancelled(cancel, over):
            return Out("cancelled", max(start, min(cancel, self._ending)))
        if over == NEVER:
            return OPEN
        order = sorted(range(len(ends)), key=lambda number: ends[number].at)
        values = [[number, ends[number].value] if node.kind == "queue" else ends[number].value for number in order]
        return Out("value", over, values)

    def _lock(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        cancel = self._first(start, cancels)
        values, at = [], start
        for part in node.parts:
            out = self._caught(part, at, (cancel,), last)
            if out.kind != "value":
                return out
            values.append(out.value)
            at = out.at
        return Out("value", at, values)

    def _event(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        cancel = self._first(start, cancels)
        first = self._caught(node.parts[0], start, (cancel,), last)
        if first.kind != "value":
            return first
        ends = [first, *(self._caught(part, first.at, (cancel,), last) for part in node.parts[1:])]
        cancelled = [end for end in ends if end.kind == "cancelled"]
        if cancelled:
            return cancelled[0]
        over = max(end.at for end in ends)
        return OPEN if over == NEVER else Out("value", over, [end.value for end in ends])

    def _stop(self, node: Node, start: float, cancels: Cancels, last: int) -> Out:
        cancel = self._first(start, cancels)
        until = self._caught(node.parts[1], start, cancels, last)
        body = self._caught(node.parts[0], start, (min(cancel, until.at + _SOON),), last)
        if until.kind != "value":
            return until
        return Out("value", until.at, "stopped" if body.kind != "value" else body.value)


_BY_KIND: dict[str, Callable[[Expected, Node, float, Cancels, int], Out]] = {
    "seq": Expected._seq,
    "tries": Expected._seq,
    "chance": Expected._draw,
    "choice": Expected._choice,
    "clean_up": Expected._clean_up,
    "timeout": Expected._timeout,
    "wait_for": Expected._timeout,
    "gather": Expected._together,
    "results": Expected._together,
    "group": Expected._group,
    "race": Expected._race,
    "completed": Expected._all_caught,
    "queue": Expected._all_caught,
    "lock": Expected._lock,
    "event": Expected._event,
    "stop": Expected._stop,
}
