"""Deletes runs that ended long ago, so that the tables do not grow for ever.

Nothing of a run that has not ended is touched, however old it is, and nobody ever sees half of a run. Each step is one
bounded transaction: a page of runs read without locks, then those of them that are due locked (skipping what others
hold), looked at again and deleted; or a slice of a run with a long history, which is hidden before. Where a step
is too much for the database in the time of a transaction, the next one is smaller. One that fails and can't be smaller
is left for the next turn, so that a run which can't be deleted keeps no other one, and no turn from its end. A step is
followed by a rest as long as it took, so that a mountain of old runs takes no more than half of one connection.

No index knows when runs ended (such a column would cost every step of every run), but none ended before it was created:
so each workflow's runs are gone through from the oldest, as far as they are old enough. Long-lived runs at that end
are passed by: a place in memory says how far a turn has come, and the next turn begins when all workflows are through.
Any number of servers may do this at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Collection, Sequence

from fencepost_server.config import Config
from fencepost_server.domain.durations import parse_duration
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine.loops import Loop
from fencepost_server.store import batch, retention
from fencepost_server.store.connection import Database
from fencepost_server.store.pipeline import Session
from fencepost_server.store.retention import DefinitionKey, OldRun, Range

log = logging.getLogger("fencepost.retention")

TURN = 60.0
"""Seconds between turns."""
_LOOK = 1.0  # seconds between pages on which there was nothing to delete
_PAGE, _RANGES, _MANIFESTS, _KEYS = 1000, 500, 50, 1000
_MAX_LEFT = 100  # runs that one turn finds it can't delete: then it is not for the runs that it fails


class Retention:
    """See the module. One step is ``run_once``."""

    def __init__(self, config: Config, database: Database) -> None:
        self._config = config
        self._database = database
        self._keeps: dict[bytes, float | None] = {}
        """By definition: for how many seconds its ended runs are kept; None: as configured."""
        self._ranges: deque[Range] = deque()
        self._key_place = retention.FIRST_KEY
        self._runs = config.retention_batch
        self._events = config.retention_batch_events
        self._turn_began = False
        self._left: set[str] = set()
        """Runs that could not be deleted in this turn."""
        self._rest_failed = False
        """What comes behind the runs of all workflows failed: the turn is over, and the next one tries it again."""
        self._told = 0
        self.deleted = 0
        """Runs that this server has deleted."""
        self._started = False
        self.loop = Loop("retention", self._paced)

    async def _paced(self) -> float:
        """The first turn is not at once, when a server has better things to do."""
        if not self._started:
            self._started = True
            return TURN
        return await self.run_once()

    async def run_once(self) -> float:
        """One step. Returns seconds until the next one."""
        began = asyncio.get_running_loop().time()
        try:
            worked = await self._step()
        except Exception as error:
            # Perhaps one of the runs can't be deleted: with less it shows which. Perhaps the database is away, and
            # perhaps this was too much for it: then less will do.
            self._runs = max(1, self._runs // 2)
            if isinstance(error, DatabaseUnavailable):
                self._events = max(1, self._events // 2)
            raise
        if worked is None:
            return TURN
        if not worked:
            return _LOOK
        self._runs = min(self._config.retention_batch, self._runs * 2)
        self._events = min(self._config.retention_batch_events, self._events * 2)
        return asyncio.get_running_loop().time() - began

    async def _step(self) -> bool | None:
        """Returns whether anything was done but looking; None: the turn is over."""
        if not self._turn_began:
            self._ranges.extend(await self._find_ranges())
            self._left.clear()
            self._turn_began = True
            return True
        if self._ranges:
            return await self._pass_through(self._ranges.popleft()) > 0
        left = len(self._left)
        try:
            if not self._rest_failed and (await self._delete_hidden() or await self._forget_keys()):
                return True
        except Exception as error:
            self._rest_failed = len(self._left) == left and self._smallest(1, error)
            raise
        if self.deleted > self._told:
            log.info("deleted %d runs that ended long ago", self.deleted - self._told)
        self._told, self._turn_began, self._rest_failed = self.deleted, False, False
        return None

    def _smallest(self, runs: int, error: BaseException) -> bool:
        """Whether a step with so many runs failed although it could not have been smaller."""
        return runs <= 1 and (self._events == 1 or not isinstance(error, DatabaseUnavailable))

    def _leave(self, run_id: str, error: BaseException) -> None:
        """A run stays until the next turn."""
        self._left.add(run_id)
        log.warning("run %s can't be deleted, the next turn tries it again: %s", run_id, error)

    # Runs

    async def _find_ranges(self) -> list[Range]:
        """The workflows that have runs as old as any of their definitions lets go."""
        shortest: dict[tuple[str, str], float] = {}
        last, known = retention.FIRST_DEFINITION, self._keeps
        self._keeps = {}
        while True:
            found = await retention.definitions(self._database, last, _PAGE)
            self._keeps |= {hash_: known[hash_] for _, _, hash_ in found if hash_ in known}
            await self._read(found)
            for namespace, workflow_id, hash_ in found:
                if keep := self._keep(hash_):
                    place = (namespace, workflow_id)
                    shortest[place] = min(keep, shortest.get(place, keep))
            if len(found) < _PAGE:
                break
            last = found[-1]
        ranges = [Range(namespace, workflow_id, keep) for (namespace, workflow_id), keep in shortest.items()]
        old: list[Range] = []
        for start in range(0, len(ranges), _RANGES):
            old += await retention.old(self._database, ranges[start : start + _RANGES])
        return old

    async def _read(self, definitions: Collection[DefinitionKey]) -> None:
        """Read how long definitions keep their runs, once."""
        missing = sorted({hash_ for _, _, hash_ in definitions} - set(self._keeps))
        for start in range(0, len(missing), _MANIFESTS):
            async with self._database.transaction() as session:
                manifests = await batch.read_definitions(session, missing[start : start + _MANIFESTS])
            for hash_, manifest in manifests.items():
                try:
                    self._keeps[hash_] = _retention_of(manifest)
                except (ValueError, TypeError, AttributeError) as error:  # of another release: its runs stay, no others
                    log.warning("the runs of definition %s stay: its retention can't be read: %s", hash_.hex(), error)

    def _keep(self, definition_hash: bytes) -> float:
        """For how many seconds ended runs of a definition are kept; 0: for ever."""
        keep = self._keeps.get(definition_hash)
        return self._config.retention if keep is None else keep

    def _due(self, definition_hash: bytes, ended_since: float | None) -> bool:
        keep = self._keep(definition_hash)
        return definition_hash in self._keeps and bool(keep) and ended_since is not None and ended_since > keep

    async def _pass_through(self, range_: Range) -> int:
        """Delete the first runs of a range that are due; after other workflows it goes on behind them. Returns how
        many.
        """
        due: list[OldRun] = []
        try:
            found = await retention.page(self._database, range_, _PAGE)
            due, reached = self._first_due(found)
            deleted = await self._delete(due) if due else 0
        except Exception as error:
            self._put_back(range_, due, error)
            raise
        if reached is not None and (reached is not found[-1] or len(found) == _PAGE):
            self._ranges.append(range_.after(reached))
        return deleted

    def _first_due(self, found: Sequence[OldRun]) -> tuple[list[OldRun], OldRun | None]:
        """The first runs of a page that are due, as many as one step deletes, and the last run before the next one."""
        due: list[OldRun] = []
        reached: OldRun | None = None
        events = 0
        for run in found:
            if self._due(run.definition_hash, run.ended_since):
                events += run.events
                if due and (len(due) == self._runs or events > self._events):
                    break
                due.append(run)
            reached = run
        return due, reached

    def _put_back(self, range_: Range, due: Sequence[OldRun], error: Exception) -> None:
        """What failed is tried again behind the other workflows, which may fare better; or in the next turn, if there
        is nothing smaller to try.
        """
        if not self._smallest(len(due), error):
            self._ranges.append(range_)
        elif due and len(self._left) < _MAX_LEFT:
            self._leave(due[0].run_id, error)
            self._ranges.append(range_.after(due[0]))

    async def _delete(self, runs: Sequence[OldRun]) -> int:
        """Delete those of the runs that are still due, or hide the only one. Returns how many are gone."""
        async with self._database.transaction() as session:
            run_ids = await self._lock_due(session, [run.run_id for run in runs])
            if not run_ids:
                return 0
            if len(runs) == 1 and runs[0].events > self._events:
                await retention.hide(session, run_ids[0], self._config.key_memory)
            else:
                await retention.delete(session, run_ids, self._config.key_memory)
        self.deleted += len(run_ids)
        return len(run_ids)

    async def _lock_due(self, session: Session, run_ids: Collection[str]) -> list[str]:
        """Lock those of the runs that are still due. What was true on the page may have changed: a FAILED run is live
        again when it is retried.
        """
        locked = await retention.lock(session, run_ids)
        due = [run.run_id for run in locked if self._due(run.definition_hash, run.ended_since)]
        needed = await retention.needed(session, due) if due else set()
        return [run_id for run_id in due if run_id not in needed]

    async def _delete_hidden(self) -> bool:
        """A slice of a run that was hidden, by whichever server."""
        run_id: str | None = None
        if len(self._left) >= _MAX_LEFT:
            return False
        try:
            async with self._database.transaction() as session:
                run_id = await retention.lock_hidden(session, self._left)
                if run_id is not None:
                    await retention.delete_slice(session, run_id, self._events)
        except Exception as error:
            if run_id is not None and self._smallest(1, error):
                self._leave(run_id, error)
            raise
        return run_id is not None

    # Keys

    async def _forget_keys(self) -> bool:
        """Give keys that outlived their run their time, and delete those whose time has passed."""
        self._key_place = await retention.outlived(self._database, self._key_place, _KEYS, self._config.key_memory)
        return await retention.forget_keys(self._database, _KEYS) == _KEYS


def _retention_of(manifest: str) -> float | None:
    """Seconds, of a registered manifest."""
    text = json.loads(manifest).get("retention")
    return None if text is None else parse_duration(text) / 1000
