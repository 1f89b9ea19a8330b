"""How a step has its effect exactly once, although it may run more than once.

Fencepost runs a step again when it can't know how an attempt ended: the worker was killed, the network broke.
So a step *runs* at least once, and two attempts may even overlap: one on a worker that was thought to be dead,
one on its successor. Two things that Fencepost gives to every attempt make one *effect* of that:

- ``ctx.fencing_token`` grows with every lease of the step. The ledger keeps the largest it has seen, and refuses
  an attempt with a smaller one: that one has lost its lease to another.
- ``ctx.idempotency_key`` is the same for all attempts of the step. The ledger keeps it with the effect; an attempt
  that finds it there has nothing to do but to give the same answer as the first.

Undoing a step is a task of its own, with a key of its own, and has its effect once in the same way. Its tokens go on
from the step's, and the fence that it raises is the step's: no late attempt of the step acts after it was undone.

Both happen in the same transaction as the effect. That is the whole trick: there is no moment at which the one is
true without the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from psycopg import Connection
from psycopg_pool import ConnectionPool

from fencepost import StepContext

T = TypeVar("T")

# Inserts the first token, raises a smaller one, and returns no row when the stored one is larger. The row stays locked
# until the transaction ends: a second attempt of the same step waits here, and then sees what the first has done.
RAISE_FENCE = """
    insert into fence (step_key, token, worker, order_id, step)
    values (%(fence_key)s, %(token)s, %(worker)s, %(order_id)s, %(step)s)
    on conflict (step_key) do update
        set token = excluded.token, worker = excluded.worker, step = excluded.step, seen_at = excluded.seen_at
        where excluded.token >= fence.token
    returning token
"""
FIND_ANSWER = "select answer from effect where step_key = %(step_key)s"
REMEMBER = """
    insert into effect (step_key, order_id, step, answer)
    values (%(step_key)s, %(order_id)s, %(step)s, %(answer)s)
"""
COUNT = """
    insert into without_effect (step_key, token, worker, why)
    values (%(step_key)s, %(token)s, %(worker)s, %(why)s)
"""


class StaleToken(Exception):
    """This attempt has lost its lease: another one has come with a larger token. Nothing was written."""


class Entry:
    """What one attempt of a step writes, in one transaction: ``db`` is its connection."""

    def __init__(self, db: Connection, attempt: dict[str, Any]) -> None:
        self.db = db
        self._attempt = attempt
        found = db.execute(FIND_ANSWER, attempt).fetchone()
        self._answer: str | None = found[0] if found else None
        if self.is_repeat:
            db.execute(COUNT, {**attempt, "why": "repeated"})

    @property
    def is_repeat(self) -> bool:
        """Whether an attempt before this one has had the effect."""
        return self._answer is not None

    def first_answer(self, kind: type[T]) -> T:
        """What the step returned when it had its effect; only of a repeat."""
        assert self._answer is not None
        return msgspec.json.decode(self._answer, type=kind)

    def remember(self, answer: T) -> T:
        """Note that the step has had its effect, and what it returns."""
        text = msgspec.json.encode(answer).decode()
        self.db.execute(REMEMBER, {**self._attempt, "answer": text})
        return answer


class Ledger:
    """The ledger as the steps of a worker see it. Safe to use from many threads."""

    def __init__(self) -> None:
        self._worker = ""
        self._pool: ConnectionPool | None = None

    @contextmanager
    def connected(self, dsn: str, *, worker: str, connections: int) -> Iterator[Ledger]:
        """Have connections to the ledger, one for each step that runs at a time, until the block ends."""
        with ConnectionPool(dsn, min_size=connections, max_size=connections, open=True) as pool:
            self._worker, self._pool = worker, pool
            yield self

    @contextmanager
    def entry(self, ctx: StepContext, order_id: int, step: str) -> Iterator[Entry]:
        """Open a transaction for the effect of a step on an order; it commits when the block ends well.

        ``step`` is what the ledger calls the step, or the undoing of one.

        Raises StaleToken before the block begins.
        """
        assert self._pool is not None, "connected() comes first"
        attempt = {
            "fence_key": ctx.step_idempotency_key or ctx.idempotency_key,
            "step_key": ctx.idempotency_key,
            "token": ctx.fencing_token,
            "worker": self._worker,
            "order_id": order_id,
            "step": step,
        }
        with self._pool.connection() as db:
            is_ours = db.execute(RAISE_FENCE, attempt).fetchone()
            if is_ours:
                yield Entry(db, attempt)
            else:
                db.execute(COUNT, {**attempt, "why": "stale"})
        if not is_ours:
            raise StaleToken(f"token {ctx.fencing_token} of {ctx.idempotency_key} is not the newest")
