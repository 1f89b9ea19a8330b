"""Looks at the database itself, past every proxy and server: what has ended, what is blocked, who has what on lease.

One connection, made anew whenever a fault has broken it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from fencepost_server.domain.model import FINAL_STATES, RunState
from tests.fixtures.waiting import paced

INTERVAL = 0.1
LIMIT = 10.0
AWAY = 300.0
"""Seconds that the database may be away, with all its recoveries, before a question is given up."""

_CHAINS: LiteralString = """
select coalesce(chain_id, run_id)::text as chain, run_id::text as run_id, state, next_seq - 1 as last_seq
from run where coalesce(chain_id, run_id) = any(%(chains)s::uuid[]) and state <> %(continued)s
"""


class Watcher:
    """Questions to the database, each repeated until it is answered."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.AsyncConnection[dict[str, Any]] | None = None
        self._lock = asyncio.Lock()
        self._states: dict[str, dict[str, Any]] = {}
        self._wanted: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            await self._connection.close()

    async def fetch(self, statement: LiteralString, **params: Any) -> list[dict[str, Any]]:
        """Ask; waits while the database is away, but for longer than AWAY: then its error is raised."""
        end = time.monotonic() + AWAY
        while True:
            try:
                async with self._lock, asyncio.timeout(LIMIT):
                    return await self._ask(statement, params)
            except (psycopg.Error, OSError):  # TimeoutError is one too
                await self._drop()
                if time.monotonic() > end:
                    raise
                await paced(INTERVAL)

    async def _ask(self, statement: LiteralString, params: dict[str, Any]) -> list[dict[str, Any]]:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, row_factory=dict_row, connect_timeout=5, application_name="soak-watcher"
            )
        cursor = await self._connection.execute(statement, params)
        return await cursor.fetchall() if cursor.description else []

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    # Runs that are waited for

    async def watch(self) -> None:
        """Look again and again how the chains that somebody waits for stand; runs until it is cancelled."""
        while True:
            if self._wanted:
                rows = await self.fetch(_CHAINS, chains=list(self._wanted), continued=int(RunState.CONTINUED))
                async with self._changed:
                    self._states.update({row["chain"]: row for row in rows})
                    self._changed.notify_all()
            await paced(INTERVAL)

    async def until(self, run_id: str, *, last_seq: int = 0, state: RunState | None = None) -> RunState:
        """Wait until the last run of a chain has so many events, is in a state, or is in a final one; its state."""
        self._wanted[run_id] += 1
        try:
            async with self._changed:
                while True:
                    row = self._states.get(run_id)
                    if row is not None:
                        now = RunState(row["state"])
                        if now in FINAL_STATES or now is state or (last_seq and row["last_seq"] >= last_seq):
                            return now
                    await self._changed.wait()
        finally:
            self._wanted[run_id] -= 1
            if not self._wanted[run_id]:
                del self._wanted[run_id]
                self._states.pop(run_id, None)
