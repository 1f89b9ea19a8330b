"""The system outside that the soak's steps act on, as docs/reliability.md teaches it, and a log of all that reached it.

For each step, under its idempotency key, it keeps the largest fencing token and refuses smaller ones, and it keeps
whether the effect was had. An undo goes by the key of the step that it undoes. The tables are in a server of their own,
which no fault reaches. What was tried is logged in the transaction that decided, so the order of the log is that of
the decisions for each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, LiteralString

from psycopg.rows import class_row

from fencepost import StepContext
from tests.faults.sink import Outside

Verdict = Literal["accepted", "known", "refused"]
"""The effect was had now; it had been had before; the token is smaller than one that came before."""

_SCHEMA: LiteralString = """
create table fence (step text primary key, token bigint not null);
create table effect (step text primary key, run_id text not null, undone boolean not null);
create table trial (
    number bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    step text not null, run_id text not null, undo boolean not null,
    token bigint not null, attempt integer not null, largest bigint not null,
    verdict text not null, worker text not null
);
create index trial_at on trial (at) where verdict <> 'refused';
create table saved (step text not null, number integer not null, token bigint not null);
create index saved_step on saved (step);
create table forgotten (step text not null, token bigint not null, found integer not null, saved integer not null);
create table told (step text not null, undo boolean not null, token bigint not null);
create table pardon (run_id text primary key);
create function act(p_step text, p_run text, p_undo boolean, p_token bigint, p_attempt integer, p_worker text)
returns text language plpgsql as $$
declare largest bigint; verdict text;
begin
    insert into fence values (p_step, 0) on conflict (step) do nothing;
    select token into largest from fence where step = p_step for update;
    if p_token < largest then
        verdict := 'refused';
    else
        update fence set token = p_token where step = p_step;
        insert into effect as e values (p_step, p_run, p_undo)
        on conflict (step) do update set undone = true where p_undo and not e.undone;
        verdict := case when found then 'accepted' else 'known' end;
    end if;
    insert into trial (step, run_id, undo, token, attempt, largest, verdict, worker)
    values (p_step, p_run, p_undo, p_token, p_attempt, largest, verdict, p_worker);
    return verdict;
end $$;
"""
_ACT = "select act(%s, %s, %s, %s, %s, %s)"
_BEGIN = """
insert into forgotten select %(step)s, %(token)s, %(found)s, max(number) from saved
where step = %(step)s and token < %(token)s having max(number) > %(found)s
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """One time that a step or an undo reached the sink; ``largest`` is the largest token before it."""

    number: int
    step: str
    run_id: str
    undo: bool
    token: int
    attempt: int
    largest: int
    verdict: str
    worker: str


def _lease(ctx: StepContext, number: int) -> tuple[str, int, int]:
    return ctx.idempotency_key, number, ctx.fencing_token


class ConditionalSink(Outside):
    """One connection to it, for any number of threads. ``worker`` is who acts."""

    schema = _SCHEMA

    def __init__(self, dsn: str, worker: str = "") -> None:
        super().__init__(dsn)
        self._worker = worker

    def act(self, ctx: StepContext) -> str:
        """Have the effect of a step, or undo it; the verdict."""
        undo = bool(ctx.step_idempotency_key)
        key = ctx.step_idempotency_key or ctx.idempotency_key
        with self._lock:
            row = self._connection.execute(
                _ACT, [key, ctx.run_id, undo, ctx.fencing_token, ctx.attempt, self._worker]
            ).fetchone()
        assert row is not None
        return str(row[0])

    def save(self, ctx: StepContext, number: int) -> None:
        """Note that a checkpoint of a step was acknowledged."""
        with self._lock:
            self._connection.execute("insert into saved values (%s, %s, %s)", [*_lease(ctx, number)])

    def begin(self, ctx: StepContext, found: int) -> None:
        """Note if an attempt has not found the newest checkpoint that was acknowledged to one before it."""
        with self._lock:
            self._connection.execute(_BEGIN, dict(zip(("step", "found", "token"), _lease(ctx, found), strict=True)))

    def tell(self, step: str, token: int, *, undo: bool) -> None:
        """Note that a worker was told: what this attempt has come to is recorded."""
        with self._lock:
            self._connection.execute("insert into told values (%s, %s, %s)", [step, undo, token])

    def told(self) -> list[tuple[str, bool, int]]:
        """The results that were acknowledged: step, whether it is of its undo, and the token."""
        with self._lock:
            rows = self._connection.execute("select distinct step, undo, token from told").fetchall()
        return [(str(step), bool(undo), int(token)) for step, undo, token in rows]

    def pardon(self, run_id: str) -> None:
        """Let the steps of a run that fail for good do so no more: somebody is about to retry it."""
        with self._lock:
            self._connection.execute("insert into pardon values (%s) on conflict do nothing", [run_id])

    def is_pardoned(self, run_id: str) -> bool:
        """Whether somebody has."""
        with self._lock:
            return self._connection.execute("select 1 from pardon where run_id = %s", [run_id]).fetchone() is not None

    def forgotten(self) -> list[str]:
        """The attempts that have not found the newest checkpoint."""
        with self._lock:
            rows = self._connection.execute("select f::text from forgotten f").fetchall()
        return [str(row[0]) for row in rows]

    def trials(self) -> list[Trial]:
        """The whole log, in order."""
        with self._lock, self._connection.cursor(row_factory=class_row(Trial)) as cursor:
            cursor.execute(
                "select number, step, run_id, undo, token, attempt, largest, verdict, worker from trial order by number"
            )
            return cursor.fetchall()

    def effects(self) -> dict[str, bool]:
        """Every step that has acted, and whether that is undone."""
        with self._lock:
            return {str(step): bool(undone) for step, undone in self._connection.execute(
                "select step, undone from effect"
            ).fetchall()}  # fmt: skip
