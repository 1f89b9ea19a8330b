"""The ledger as the demo sees it: made before the first order, watched while the steps write to it.

The steps themselves use ledger.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from examples.northwind.dataset import Dataset

DATABASE = "northwind"
TABLES = Path(__file__).with_name("ledger.sql")

StepOfOrder = tuple[int, str]
"""An order's id and the name of a step."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """The first time that a step which a dead worker had held ran elsewhere."""

    order_id: int
    step: str
    worker: str
    at: datetime


def create(server_dsn: str, dataset: Dataset) -> str:
    """Make the ledger beside the database of ``server_dsn``, with what is in stock; return its DSN."""
    with psycopg.connect(server_dsn, autocommit=True) as db:
        db.execute(f"create database {DATABASE}")
    dsn = make_conninfo(server_dsn, dbname=DATABASE)
    with psycopg.connect(dsn) as db:
        fill(db, dataset)
    return dsn


def fill(db: psycopg.Connection, dataset: Dataset) -> None:
    """Make the tables of the ledger and enter what there is before the first order."""
    db.execute(TABLES.read_bytes())
    with db.cursor() as cursor:
        cursor.executemany("insert into customer values (%s, %s)", list(dataset.companies.items()))
        cursor.executemany("insert into product values (%s, %s)", list(dataset.stock.items()))


class Books:
    """Answers questions about the ledger while it is written to. Not for several threads."""

    def __init__(self, db: psycopg.Connection) -> None:
        self._db = db

    def effects(self) -> Mapping[str, int]:
        """How many effects each step has had so far."""
        return dict(self._db.execute("select step, count(*) from effect group by step").fetchall())

    def without_effect(self) -> Mapping[str, int]:
        """How many attempts had no effect: ``repeated`` ones, and those with a ``stale`` token."""
        return dict(self._db.execute("select why, count(*) from without_effect group by why").fetchall())

    def now(self) -> datetime:
        """The time, by the clock that all entries of the ledger have."""
        now: datetime = self._db.execute("select clock_timestamp()").fetchall()[0][0]
        return now

    def first_takeover(self, steps: Collection[StepOfOrder], dead_worker: str) -> Takeover | None:
        """Find which of the steps that a dead worker had held was the first to run elsewhere, if any was."""
        found = self._db.execute(
            """
            select order_id, step, worker, seen_at
            from fence
            join unnest(%s::int[], %s::text[]) as held (order_id, step) using (order_id, step)
            where worker <> %s
            order by seen_at
            limit 1
            """,
            [[order_id for order_id, _ in steps], [step for _, step in steps], dead_worker],
        ).fetchone()
        return Takeover(*found) if found else None
