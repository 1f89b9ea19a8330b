"""Old runs, and the turns of retention over them."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from fencepost_server.domain.model import RunState
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.retention import TURN, Retention
from tests.engine.rows import execute, fetch

DAY = 86_400


class Scene:
    """A database with a server that serves callers and leaves retention to the test."""

    def __init__(self, dsn: str, engine: Engine) -> None:
        self.dsn = dsn
        self._engine = engine

    def retention(self, **settings: Any) -> Retention:
        """The loop of a server of its own."""
        settings = {"retention": 10.0 * DAY, **settings}
        return Retention(dataclasses.replace(self._engine.config, **settings), self._engine.database)

    async def runs(self, n: int, days: float, *, state: RunState = RunState.COMPLETED, **columns: Any) -> list[str]:
        """Runs of the workflow ``wf`` that were made so many days ago, and if the state is final ended soon after."""
        run_ids = [str(uuid.uuid4()) for _ in range(n)]
        row = {"namespace": "default", "workflow_id": "wf", "request_key": "", "parent_run_id": None, "events": 3}
        row |= {"days": days, "state": int(state), "final": state.final} | columns
        await execute(
            self.dsn,
            """with hash as (
                   select coalesce((select hash from definition where workflow_id = %(workflow_id)s
                                    order by created_at desc limit 1), '') as hash
               ), made as (
                   insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority,
                                    state, node_index, next_seq, last_event_at, created_at, ended_at, parent_run_id)
                   select run_id, %(namespace)s, %(workflow_id)s, hash, '', %(request_key)s, 3, %(state)s, 0,
                          %(events)s + 1, now(), at, case when %(final)s then at + interval '1 s' end, %(parent_run_id)s
                   from hash, unnest(%(run_ids)s::uuid[]) run_id, (select now() - %(days)s * interval '1 day') x(at)
               )
               insert into event (run_id, seq, type, at, payload)
               select run_id, seq, 1, now(), '1'
               from unnest(%(run_ids)s::uuid[]) run_id, generate_series(1, %(events)s) seq
            """,
            {**row, "run_ids": run_ids},
        )
        return run_ids

    async def left(self) -> set[str]:
        """The runs that there are."""
        return {str(row[0]) for row in await fetch(self.dsn, "select run_id from run")}


async def turn(loop: Retention, most: int = 500) -> int:
    """One turn to its end. Returns how many steps it had."""
    for step in range(1, most + 1):
        if await loop.run_once() == TURN:
            return step
    raise AssertionError(f"a turn is not over after {most} steps")
