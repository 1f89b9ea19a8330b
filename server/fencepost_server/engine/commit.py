"""One batch of a lane: lock, read, decide, write, commit, then tell.

The order of locks is that of the whole server: deployments (share), runs by id, tasks by id, messages, keys (sorted).
Keys come last because only valid starts may bring one; whoever waits for a key holds all the runs that it will
ever need, so nobody who holds a key waits for a run. What a decision rests on is read by a later statement than
the one that locked it. Nobody is told anything before the commit (I1).

What a decision needs to see beyond the locked rows is read when it asks, for all runs of the batch at once, and after
what was decided so far has been written: within its transaction a batch always reads its own decisions.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    DatabaseUnavailable,
    DefinitionRemoved,
    FencepostError,
    InputSchemaMismatch,
    UnknownDefinition,
    UnknownWorkflow,
)
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import Ended
from fencepost_server.engine import delivery
from fencepost_server.engine.catalog import Catalog
from fencepost_server.engine.changes import Changes, Eager, Limits, Rows, Sticky, Taker
from fencepost_server.engine.context import Environment, UndoOrders
from fencepost_server.engine.fold import Act, Fold, Folding
from fencepost_server.engine.keys import REQUEST_ID, Keys, dedupe_key_of, has_keys, keys_of
from fencepost_server.engine.operations import Deliver, Operation, Report, Start, Started, WorkerSession
from fencepost_server.store import batch, extras
from fencepost_server.store.batch import Clock, Key, KeyRow, Locked
from fencepost_server.store.connection import transaction
from fencepost_server.store.extras import Need
from fencepost_server.store.pipeline import Connection, Session

_KEY_TRIES = 50


@dataclass(slots=True)
class Decided:
    """What a committed batch has to tell: the changes, and the starts that were answered without making a run."""

    changes: Changes
    answered: list[tuple[Start, Started | FencepostError]]


class Committer:
    """Commits batches. ``eager``, ``taker`` and ``sticky`` decide on leasing a task at once (see engine.changes);
    ``told`` gets every committed batch.
    """

    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        eager: Eager,
        taker: Taker,
        sticky: Sticky,
        told: Callable[[Decided], None],
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._eager = eager
        self._taker = taker
        self._sticky = sticky
        self._told = told
        self._limits = Limits(
            config.free_redeliveries,
            config.max_payload_bytes,
            config.max_map_items,
            config.max_pending_signals,
            config.cancel_grace,
            config.max_history_events,
        )
        self._undo_orders = UndoOrders()
        self.after_commit: Callable[[], Awaitable[None]] | None = None
        """Called between commit and send, when set: where tests cut."""

    async def work(self, connection: Connection, operations: list[Operation], skip_locked: bool) -> list[Operation]:
        """A lane's ``work``. Returns the operations whose runs another transaction holds."""
        given: list[WorkerSession] = []
        try:
            async with transaction(connection, self._config) as session:
                decided, skipped = await self._decide(session, operations, skip_locked, given)
                _write(session, decided.changes)
                _free_keys(session, decided.changes)
            for rows in decided.changes.undo_logs:
                self._undo_orders.keep(rows)
            if self.after_commit is not None:
                await self.after_commit()
            self._told(decided)
        finally:
            for holder in given:
                holder.reserve(-1)
        return skipped

    async def _decide(
        self, session: Session, operations: list[Operation], skip_locked: bool, given: list[WorkerSession]
    ) -> tuple[Decided, list[Operation]]:
        starts = [op for op in operations if isinstance(op, Start)]
        acts: list[Act] = [op for op in operations if not isinstance(op, Start)]
        reports = [op for op in acts if isinstance(op, Report)]
        keeping: list[Report] = []
        leaving: list[Report] = []
        for report in reports:
            (keeping if report.keeps_lease else leaving).append(report)
        delivers = [op for op in acts if isinstance(op, Deliver)]
        again = [op.run_id for op in starts if op.again]
        locked = await batch.lock_and_read(
            session,
            {(op.namespace, op.workflow_id) for op in starts}
            | delivery.workflows(delivers)
            | {(op.namespace, op.workflow_id) for op in reports if op.workflow_id},
            {op.run_id for op in acts},
            {(op.run_id, op.task_id) for op in leaving},
            {op.run_id for op in keeping},
            skip_locked=skip_locked,
        )
        existing = await batch.read_runs(session, again) if again else {}
        skipped: list[Operation] = []
        if skip_locked:
            known = await batch.read_runs(session, [op.run_id for op in acts if op.run_id not in locked.runs])
            skipped = [op for op in acts if op.run_id in known]
            acts = [op for op in acts if op.run_id not in known]
        changes = Changes(locked.clock.now)
        if delivers:
            acts = await delivery.deliverable(session, acts, changes)
        going_on = {(op.namespace, op.workflow_id) for op in reports if op.workflow_id}
        active = {key: locked.active[key] for key in going_on if key in locked.active}
        active = {key: hash_ for key, hash_ in active.items() if hash_ not in locked.removed[key]}
        graphs = await self._catalog.graphs(
            session, {run.definition_hash for run in locked.runs.values()} | set(active.values())
        )
        fold = Fold(
            Environment(
                locked.clock.now, locked.clock.epoch, self._hold_until(locked.clock), self._limits, random.random,
                self._eager, partial(_reserving, given, self._taker), changes, self._undo_orders,
                partial(_reserving, given, self._sticky),
                {key: graphs[hash_] for key, hash_ in active.items() if not graphs[hash_].broken},
                locked.removed,
            ),
            locked.runs, locked.tasks, locked.deciders, await _read_outcomes(session, leaving, locked), graphs,
        )  # fmt: skip
        answered: list[tuple[Start, Started | FencepostError]] = []
        making: list[tuple[Start, Graph]] = []
        if starts:
            making, answered = await self._start(session, starts, locked, existing)
        if delivers:
            born, acts = await self._new_children(session, acts, locked, changes)
            making += born
        await self._drive(session, fold.foldings(making, acts), changes)
        return Decided(changes, answered), skipped

    async def _drive(self, session: Session, foldings: list[Folding], changes: Changes) -> None:
        """Run the foldings of all runs; answer their needs together, a round trip for each round of them."""
        asking: list[tuple[Folding, Need]] = []
        try:
            for folding in foldings:
                _step(folding, None, asking)
            while asking:
                _write(session, changes)
                found = await extras.read(session, [need for _, need in asking], changes.now)
                asked, asking = asking, []
                for (folding, _need), rows in zip(asked, found, strict=True):
                    _step(folding, rows, asking)
        finally:
            for folding in foldings:
                folding.close()  # of a batch that fails, some have not even begun

    async def _new_children(
        self, session: Session, acts: list[Act], locked: Locked, changes: Changes
    ) -> tuple[list[tuple[Start, Graph]], list[Act]]:
        """The children that are to be started; the others of them have answers for their parents."""
        wanted, acts = await delivery.wanted(session, acts, locked, changes)
        graphs = await self._catalog.graphs_for_starts(session, [start for start, _ in wanted], locked.active)
        making = []
        for start, deliver in wanted:
            outcome = _checked(start, graphs, locked)
            if isinstance(outcome, FencepostError):
                delivery.refuse(deliver, outcome, changes)
            else:
                making.append((start, outcome))
        return making, acts

    def _hold_until(self, clock: Clock) -> datetime:
        """Until when no lease expires. A last pass that is older than an outage means that nobody has noticed its end
        yet: this batch may be the first thing that happens after it.
        """
        gap = timedelta(seconds=self._config.outage_gap)
        return clock.now + gap if clock.now - clock.last_pass_at > gap else clock.hold_until

    async def _start(
        self, session: Session, starts: list[Start], locked: Locked, existing: dict[str, bytes]
    ) -> tuple[list[tuple[Start, Graph]], list[tuple[Start, Started | FencepostError]]]:
        """The starts that make runs, and the others with their answers."""
        answered: list[tuple[Start, Started | FencepostError]] = []
        graphs = await self._catalog.graphs_for_starts(session, starts, locked.active)
        valid: list[tuple[Start, Graph]] = []
        refused: list[tuple[Start, FencepostError]] = []
        for start in starts:
            if start.run_id in existing:
                # The try before was committed, only its answer was lost.
                answered.append((start, Started(start.run_id, True, existing[start.run_id])))
            elif isinstance(outcome := _checked(start, graphs, locked), FencepostError):
                refused.append((start, outcome))
            else:
                valid.append((start, outcome))
        if refused:
            answered.extend(await _remembered(session, refused))
        keyed = [(start, graph) for start, graph in valid if has_keys(start)]
        bound = await self._bind(session, keyed, locked) if keyed else {}
        answered.extend((start, bound[start.run_id]) for start, _ in valid if start.run_id in bound)
        return [(start, graph) for start, graph in valid if start.run_id not in bound], answered

    async def _bind(
        self, session: Session, starts: list[tuple[Start, Graph]], locked: Locked
    ) -> dict[str, Started | FencepostError]:
        """Claim the keys of starts. Returns, by run id, the answers of those that make no run: bound, repeated,
        or in conflict.

        Within one batch the first start of a key wins, as if they had come one after the other.
        """
        now = locked.clock.now
        expires = now + timedelta(seconds=self._config.request_memory)
        rows: dict[Key, tuple[KeyRow, datetime | None]] = {}
        for start, graph in starts:
            for key, fingerprint in keys_of(start):
                expiry = expires if key[1] == REQUEST_ID else None
                rows.setdefault(key, (KeyRow(start.run_id, graph.hash, fingerprint, True), expiry))
        keys = Keys(await _claim_keys(session, rows))
        answers = {
            start.run_id: answer for start, graph in starts if (answer := keys.claim(start, graph.hash)) is not None
        }
        if keys.rebound:
            batch.update_keys(session, list(keys.rebound.items()))
        if keys.released:
            batch.delete_keys(session, list(keys.released.items()))
        return answers


def _reserving(
    given: list[WorkerSession], choose: Callable[..., WorkerSession | None], *arguments: Any
) -> WorkerSession | None:
    """Keeps room for each task that a batch gives to a session, until the session has been told: nothing else in this
    batch, nor in another lane, may count on it.
    """
    session = choose(*arguments)
    if session is not None:
        session.reserve(1)
        given.append(session)
    return session


async def _claim_keys(session: Session, rows: dict[Key, tuple[KeyRow, datetime | None]]) -> dict[Key, KeyRow]:
    """Insert keys and read what they stand for. A key that somebody held at the insert can be gone at the read, when
    its run has ended or its time has passed in between: it is free then, and inserted again.
    """
    stored: dict[Key, KeyRow] = {}
    for _ in range(_KEY_TRIES):
        missing = [key for key in rows if key not in stored]
        if not missing:
            break
        batch.insert_keys(session, [(key, *rows[key]) for key in missing])
        stored.update(await batch.read_keys(session, missing))
    else:
        raise DatabaseUnavailable("a key changed hands too often")
    return stored


async def _remembered(
    session: Session, refused: list[tuple[Start, FencepostError]]
) -> list[tuple[Start, Started | FencepostError]]:
    """The answers of starts that can't make a run: memory is asked before state (I6), so a repeat finds its run
    although the definition that is active by now would refuse its input.
    """
    names = {key for start, _ in refused for key, _fingerprint in keys_of(start)}
    keys = Keys(await batch.read_keys(session, list(names)) if names else {})
    return [(start, keys.recall(start) or error) for start, error in refused]


def _checked(start: Start, graphs: dict[tuple[str, str, bytes], Graph], locked: Locked) -> Graph | FencepostError:
    """The definition that a start takes, or why it can't."""
    active = locked.active.get((start.namespace, start.workflow_id))
    if active is None:
        return UnknownWorkflow(f"no definition is registered for workflow {start.workflow_id!r}")
    hash_ = start.definition_hash or active
    if hash_ in locked.removed[start.namespace, start.workflow_id]:
        return DefinitionRemoved(f"definition {hash_.hex()} of workflow {start.workflow_id!r} was removed")
    graph = graphs.get((start.namespace, start.workflow_id, hash_))
    if graph is None:
        wanted = (start.definition_hash or active).hex()
        return UnknownDefinition(f"workflow {start.workflow_id!r} has no definition {wanted}")
    if graph.broken:
        return UnknownDefinition(graph.broken)
    if start.input.binary is None and (faults := graph.input_violations(start.value)):
        return InputSchemaMismatch(f"the input breaks the schema of workflow {start.workflow_id!r}", violations=faults)
    return graph


async def _read_outcomes(session: Session, reports: list[Report], locked: Locked) -> dict[tuple[str, int], Ended]:
    """How the tasks ended that are reported and gone."""
    missing = {key for op in reports if (key := (op.run_id, op.task_id)) not in locked.tasks}
    missing = {key for key in missing if key[0] in locked.runs}
    return await batch.read_outcomes(session, missing) if missing else {}


def _step(folding: Folding, rows: extras.Rows | None, asking: list[tuple[Folding, Need]]) -> None:
    """Let a folding go on until it asks for something, or is done."""
    try:
        asking.append((folding, folding.send(rows)))
    except StopIteration:
        return


def _write(session: Session, changes: Changes) -> None:
    """Write what was decided since the last time. It travels with what is sent next: the commit, or what is read."""
    rows = changes.take_rows()
    if rows.new_runs:
        new = [
            (run.row, run.request_key, run.attributes, run.parent_run_id, run.chain_id)
            for run in rows.new_runs.values()
        ]
        batch.insert_runs(session, new)
    if rows.changed_runs:
        batch.update_runs(session, rows.changed_runs.values())
    if rows.gone_tasks:
        batch.delete_tasks(session, rows.gone_tasks)
    if rows.changed_tasks:
        batch.update_tasks(session, rows.changed_tasks.values())
    if rows.new_tasks:
        batch.insert_tasks(session, [(new_task.row, new_task.namespace) for new_task in rows.new_tasks])
    if rows.events:
        batch.insert_events(session, rows.events)
    _write_extras(session, rows)


def _write_extras(session: Session, rows: Rows) -> None:
    for scope in rows.changed_scopes.values():
        rows.add("update_scope", scope.run_id, scope.scope_id, scope.done, scope.next_item, scope.output_bytes)
    if rows.extra:
        extras.write(session, rows.extra)


def _free_keys(session: Session, changes: Changes) -> None:
    if changes.freed_keys:
        batch.delete_keys(session, sorted((dedupe_key_of(run), run.run_id) for run in changes.freed_keys))
