"""A system outside of Fencepost that steps act on, as docs teach it: it keeps the highest fencing token of each step
and refuses lower ones.

What was accepted is counted, so that a step that acted twice shows, also with one token. Gates let a test hold steps of
other processes until it says so. The table is in a database of its own: no fault of the server's database reaches it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar, LiteralString

import psycopg

_SCHEMA: LiteralString = """
create table effect (
    key text primary key, token bigint not null, accepted int not null, refused int not null
);
create table gate (name text primary key);
"""
_ACT = """
insert into effect as e values (%(key)s, %(token)s, 1, 0)
on conflict (key) do update set
    token = greatest(e.token, excluded.token),
    accepted = e.accepted + (excluded.token >= e.token)::int,
    refused = e.refused + (excluded.token < e.token)::int
returning token = %(token)s
"""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one step has done: how often it was let, and how often a stale token was refused."""

    accepted: int
    refused: int


ONCE = Effect(1, 0)


class Outside:
    """One connection to a system outside, for any number of threads; ``schema`` makes its tables."""

    schema: ClassVar[LiteralString]

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._lock = threading.Lock()
        self._connection = psycopg.connect(dsn, autocommit=True, connect_timeout=30)

    def create(self) -> None:
        """Make the tables."""
        self._connection.execute(self.schema)

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()


class Sink(Outside):
    """The outside system that keeps tokens, counts and gates."""

    schema = _SCHEMA

    def act(self, key: str, token: int) -> bool:
        """Have the effect of the step ``key`` (its idempotency key). False: refused, the token is stale."""
        with self._lock:
            row = self._connection.execute(_ACT, {"key": key, "token": token}).fetchone()
        return row is not None and bool(row[0])

    def effects(self) -> dict[str, Effect]:
        """Every step that has acted, by idempotency key."""
        with self._lock:
            rows = self._connection.execute("select key, accepted, refused from effect").fetchall()
        return {key: Effect(accepted, refused) for key, accepted, refused in rows}

    def open(self, gate: str) -> None:
        """Let the steps behind a gate go on."""
        with self._lock:
            self._connection.execute("insert into gate values (%s) on conflict do nothing", [gate])

    def is_open(self, gate: str) -> bool:
        """Whether it was opened."""
        with self._lock:
            return self._connection.execute("select 1 from gate where name = %s", [gate]).fetchone() is not None
