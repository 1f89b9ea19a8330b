"""Ends the runs of removed definitions.

The removal itself is a short transaction (``engine.definitions``). After it no run can begin under the definition,
so one walk over the runs of its workflow, the oldest first, meets all that are left: each is told once, in its own
lane like everything that happens to a run. What was told is written down; a run that has steps to undo then ends
by itself. So a walk that has come to its end is never needed again.

The server that is asked to remove walks at once; every server looks for removals once a minute, and walks those
that it has not walked since its start (I13): the caller and the first server may both die. Walks that cross each
other tell some runs twice, which changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from fencepost_server.domain.errors import FailedPrecondition, FencepostError, NotFound, Overloaded, ServerDraining
from fencepost_server.engine.loops import Loop
from fencepost_server.engine.operations import Command, CommandKind
from fencepost_server.store import definitions
from fencepost_server.store.connection import Database
from fencepost_server.store.definitions import FIRST, LAST, LivePage, Position, Removal

MAX_COUNTED = 10_000
"""So many live runs are counted, no more."""

_PAUSE = 1.0
_PATIENCE = 5.0
_COUNTING = 2.0
_MAX_REMEMBERED = 10_000
# Runs of a definition are not older than it, nor younger than its removal; as far as the database's clock was right.
_CLOCK_SLACK = timedelta(days=1)


@dataclass(slots=True, eq=False)
class Walk:
    """A walk over the runs of one removed definition."""

    removal: Removal
    position: Position
    """Every live run up to here was told."""
    until: Position
    oldest: Position
    """No run up to here is alive."""
    newest: Position = FIRST
    """The last live run that was met."""
    missed: Position | None = None
    """Before the first run that could not be told: the walk begins here again when it has come to the end."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @staticmethod
    def of(removal: Removal) -> Walk:
        """A walk that has not begun."""
        begin = (removal.created_at - _CLOCK_SLACK, FIRST[1])
        return Walk(removal, begin, (removal.removed_at + _CLOCK_SLACK, LAST[1]), begin)


class Remover:
    """Walks. ``reads`` is for those who ask how far a removal is; ``submit`` queues a command into the lane of its
    run.
    """

    def __init__(self, database: Database, reads: Database, submit: Callable[[Command], None]) -> None:
        self._database = database
        self._reads = reads
        self._submit = submit
        self._walks: OrderedDict[tuple[str, str, bytes], Walk] = OrderedDict()
        self._next_look = 0.0
        self._looked = ("", "", b"")
        self.look_interval = 60.0
        """Seconds from one look for removals to the next."""
        self.look_page = 1000
        """Removals that one look finds; the next one goes on from there."""
        self.scan = 10_000
        """Runs that one statement reads."""
        self.batch = 200
        """Runs that are told at the same time."""
        self.loop = Loop("removal", self.run_once)

    async def end_runs(self, removal: Removal) -> int:
        """End the runs of a removed definition, as far as this takes some seconds; the loop goes on with it. Returns
        how many have not ended, up to MAX_COUNTED; 0 only if all have.
        """
        walk = self._walk(removal)
        self.loop.wake()
        try:
            async with asyncio.timeout(_PATIENCE):
                await walk.ended.wait()
        except TimeoutError:
            return max(1, await self._count(walk, walk.until))
        return await self._count(walk, walk.newest)

    async def run_once(self) -> float:
        """Look for removals if it is time, and tell the next page of runs of each that has not come to its end: in
        turn, so that a large one keeps no small one waiting.
        """
        clock = asyncio.get_running_loop().time
        if clock() >= self._next_look:
            await self._look()
        walks = [walk for walk in self._walks.values() if not walk.ended.is_set()]
        whole = True
        for walk in walks:
            try:
                whole = await self._step(walk) and whole  # a run that can't be told holds up no other walk
            except ServerDraining:
                return self.look_interval
        if not whole:
            return _PAUSE
        return 0.0 if walks else max(self._next_look - clock(), 0.0)

    def _walk(self, removal: Removal) -> Walk:
        walk = self._walks.get(removal.key)
        if walk is None:
            walk = self._walks[removal.key] = Walk.of(removal)
            if len(self._walks) > _MAX_REMEMBERED:
                ended = next((key for key, old in self._walks.items() if old.ended.is_set()), removal.key)
                del self._walks[ended]
        return walk

    async def _look(self) -> None:
        """Find removals, the next page of them."""
        found = await definitions.removals(self._database, self._looked, self.look_page)
        for removal in found:
            self._walk(removal)
        self._looked = found[-1].key if len(found) == self.look_page else ("", "", b"")
        self._next_look = asyncio.get_running_loop().time() + self.look_interval

    async def _step(self, walk: Walk) -> bool:
        """Tell the next page. Returns whether all of it could be told."""
        before = walk.position
        page = await definitions.live_runs(
            self._database, walk.removal, walk.position, walk.until, self.scan, self.batch
        )
        told = await self._tell(walk.removal, page)
        if not told and walk.missed is None:
            walk.missed = before
        if page.runs:
            walk.newest = max(walk.newest, page.runs[-1])
        elif page.reached is not None and walk.oldest == before:
            walk.oldest = page.reached
        if page.reached is not None:
            walk.position = page.reached
        elif walk.missed is not None:
            walk.position, walk.missed = walk.missed, None
        else:
            walk.ended.set()
        return told

    async def _tell(self, removal: Removal, page: LivePage) -> bool:
        """Tell runs that their definition was removed. Returns whether all know, or are gone."""
        commands = []
        whole = True
        for _at, run_id in page.runs:
            command = Command(CommandKind.REMOVE, run_id, removal.namespace)
            try:
                self._submit(command)
            except Overloaded:
                whole = False
                break
            commands.append(command)
        outcomes = await asyncio.gather(*(command.result for command in commands))
        return whole and all(_settled(outcome) for outcome in outcomes)

    async def _count(self, walk: Walk, until: Position) -> int:
        """Live runs, up to MAX_COUNTED; if that takes long, those that were found, and one at least."""
        clock = asyncio.get_running_loop().time
        end = clock() + _COUNTING
        position: Position | None = walk.oldest
        found = 0
        while position is not None and position < until and found < MAX_COUNTED:
            if clock() >= end:
                return max(1, found)
            page = await definitions.count_live_runs(self._reads, walk.removal, position, until, self.scan)
            if not found and not page.runs and page.reached is not None:
                walk.oldest = page.reached
            found += page.runs
            position = page.reached
        return min(found, MAX_COUNTED)


def _settled(outcome: object) -> bool:
    """Whether a run needs to be told no more: it knows, has ended, or is gone."""
    return not isinstance(outcome, FencepostError) or isinstance(outcome, NotFound | FailedPrecondition)
