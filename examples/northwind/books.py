"""The ledger as the demo sees it: made before the first order, watched while the steps write to it.

The steps themselves use ledger.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from examples.northwind.dataset import Dataset

DATABASE = "northwind"
TABLES = Path(__file__).with_name("ledger.sql")

StepOfOrder = tuple[int, str]
"""An order's id, and the ledger's name for a step or the undoing of one."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """When a step that a dead worker had begun ran elsewhere."""

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
        cursor.executemany(
            "insert into product values (%s, %s, %s)",
            [(product_id, units, product_id in dataset.discontinued) for product_id, units in dataset.stock.items()],
        )


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

    @contextmanager
    def refund_stalled(self, order_id: int) -> Iterator[None]:
        """Let the refund of an order wait until the block ends, as for a payment provider that does not answer."""
        self._db.execute("select pg_advisory_lock(%s)", [order_id])
        yield
        # After an error the end of the connection lets go of it: an interrupt may have come amid a statement, and one
        # more on this connection would only hide it.
        self._db.execute("select pg_advisory_unlock(%s)", [order_id])

    def takeover(self, step: StepOfOrder, dead_worker: str) -> Takeover | None:
        """Find out who does a step that a dead worker had begun, if anyone does yet."""
        found = self._db.execute(
            "select order_id, step, worker, seen_at from fence where order_id = %s and step = %s and worker <> %s",
            [*step, dead_worker],
        ).fetchone()
        return Takeover(*found) if found else None
