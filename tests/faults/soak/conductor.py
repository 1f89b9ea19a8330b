"""Brings the faults of a plan upon the stage, one every few seconds, and measures what comes of each."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.faults.soak.faults import KINDS, Act, Fault
from tests.faults.soak.recovery import (
    BOUNDS,
    DATABASE_BACK,
    NO_PROGRESS,
    OF_KIND,
    Measured,
    Recoveries,
    measure,
    needs,
    until_progress,
)
from tests.faults.soak.stage import Stage
from tests.faults.soak.watcher import Watcher
from tests.fixtures.waiting import paced

SETTLED = 2.0
"""How long what a recovery needs has to have been left alone before it is measured."""
PUT_OFF = 8
"""How many faults may go before one that would be in another's way."""
NEXT_LIMIT = 600.0
"""Seconds. No fault and recovery takes as long, so one that is still in the way then will be for ever."""
LOOK = 0.1


class Conductor:
    """One plan. ``counts`` has how many faults of each kind there were."""

    def __init__(
        self, stage: Stage, watcher: Watcher, acts: Mapping[str, Act] = KINDS, *, verbose: bool = True
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.recoveries = Recoveries()
        self._stage = stage
        self._watcher = watcher
        self._acts = acts
        self._verbose = verbose
        self._busy: Counter[str] = Counter()
        self._needed: Counter[str] = Counter()
        self._left: dict[str, float] = {}
        self._begin = time.monotonic()

    def _say(self, text: str) -> None:
        if self._verbose:
            sys.stderr.write(f"{time.monotonic() - self._begin:7.1f} s  {text}\n")

    async def run(self, plan: Sequence[Fault], every: float) -> None:
        """All faults, so many seconds apart; returns when the last one is over and its recovery measured."""
        waiting = list(plan)
        self._begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(len(plan)):
                await paced(max(0.0, self._begin + number * every - time.monotonic()))
                fault = await self._next(waiting)
                wanted = needs(self._stage, fault)
                alone = bool(wanted) and self._is_settled(wanted)
                self._busy.update(fault.touches)
                self.counts[fault.kind] += 1
                self._say(f"{fault.kind} {fault.target}")
                group.create_task(self._one(fault, wanted if alone else frozenset()))

    async def _next(self, waiting: list[Fault]) -> Fault:
        """The first that is in nobody's way; if it can be, one in whose recovery's way nobody is. Raises TimeoutError
        when all have been in somebody's way for NEXT_LIMIT.
        """
        end = time.monotonic() + NEXT_LIMIT
        while time.monotonic() < end:
            for strict in (True, False):
                for fault in waiting[:PUT_OFF]:
                    if self._is_free(fault) and (not strict or self._is_settled(needs(self._stage, fault))):
                        waiting.remove(fault)
                        return fault
            await paced(LOOK)
        raise TimeoutError(f"no fault can begin: busy {+self._busy}, needed {+self._needed}, next {waiting[:PUT_OFF]}")

    def _is_free(self, fault: Fault) -> bool:
        return not any(self._busy[part] or self._needed[part] for part in fault.touches)

    def _is_settled(self, parts: frozenset[str]) -> bool:
        now = time.monotonic()
        return all(not self._busy[part] and now - self._left.get(part, 0.0) > SETTLED for part in parts)

    async def _one(self, fault: Fault, wanted: frozenset[str]) -> None:
        """Play a fault. ``wanted`` is what has to be left alone for its recovery; nothing: it is held to no bound."""
        self._needed.update(wanted)
        try:
            measured = await measure(self._stage, self._watcher, fault)
            async with asyncio.TaskGroup() as group:
                acting = group.create_task(self._act(fault))
                for bound, made_good in measured.items():
                    group.create_task(self._bounded(bound, made_good, alone=bool(wanted)))
            ended = acting.result()
            if DATABASE_BACK in OF_KIND.get(fault.kind, ()):
                seconds = await until_progress(self._watcher, ended, steps=True)
                self._note(DATABASE_BACK, NO_PROGRESS if seconds is None else seconds, alone=bool(wanted))
            seconds = await until_progress(self._watcher, ended)
            if seconds is None:
                self.recoveries.none.append(f"{fault.kind} {fault.target}")
            else:
                self.recoveries.after[fault.kind].append(seconds)
        finally:
            self._needed.subtract(wanted)

    async def _act(self, fault: Fault) -> float:
        """Do it; when it was over, by this machine's clock."""
        try:
            await self._acts[fault.kind](self._stage, fault)
        finally:
            self._busy.subtract(fault.touches)
            self._left.update(dict.fromkeys(fault.touches, time.monotonic()))
        return time.time()

    async def _bounded(self, bound: str, made_good: Measured, *, alone: bool) -> None:
        self._note(bound, await made_good(), alone=alone)

    def _note(self, bound: str, seconds: float, *, alone: bool) -> None:
        late = " LATE" if seconds > BOUNDS[bound] else ""
        self._say(f"    {bound}: {seconds:.2f} s{late if alone else ', not alone'}")
        (self.recoveries.bounded if alone else self.recoveries.disturbed)[bound].append(seconds)
