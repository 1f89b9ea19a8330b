"""The plans of all statements on 50,000 rows: each uses the index that its comment names, and touches few rows.

``PLAN_ROWS=1000000 python -m pytest tests/plans -o faulthandler_timeout=3600`` looks at a million.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import psycopg

from fencepost_server import store
from fencepost_server.store.queries import query, statements
from tests.plans.calls_and_loops import CALLS_AND_LOOPS
from tests.plans.extra import EXTRA
from tests.plans.planned import faults
from tests.plans.rows import N
from tests.plans.schedules import SCHEDULES
from tests.plans.writes import WRITES

PLANNED = {**CALLS_AND_LOOPS, **EXTRA, **SCHEDULES, **WRITES}
assert len(PLANNED) == sum(map(len, (CALLS_AND_LOOPS, EXTRA, SCHEDULES, WRITES))), "two have the same name"

INSERTS = "it only inserts"
NO_TABLE = "it reads no table"
ONE_ROW = "its table has one row"
OWN_PROCESS = "it asks what its own process of Postgres has in memory"
IN_TESTS = "only databases of tests know it"
WITHOUT_PLAN = {
    # statements of which no plan is looked at, and why
    **dict.fromkeys((("batch", name) for name in ("begin", "commit", "rollback", "prelude")), NO_TABLE),
    **dict.fromkeys((("cluster", name) for name in ("notify", "time")), NO_TABLE),
    **dict.fromkeys((("definition", name) for name in ("lock_children", "wait_longer")), NO_TABLE),
    ("run", "in_order"): NO_TABLE,
    **dict.fromkeys((("cluster", "backend"), ("cluster", "prepared")), OWN_PROCESS),
    **dict.fromkeys((("batch", "read_clock"), ("cluster", "raise_epoch")), ONE_ROW),
    **dict.fromkeys((("batch", f"insert_{what}") for what in ("keys", "runs", "tasks", "events")), INSERTS),
    **dict.fromkeys((("extra", name) for name in statements("extra") if name.startswith("insert_")), INSERTS),
    **dict.fromkeys((("definition", "insert"), ("definition", "insert_deployment"), ("schedule", "insert")), INSERTS),
    **dict.fromkeys((("cluster", "open_session"), ("query", "post")), INSERTS),
    ("extra", "take_key"): "it inserts, and looks only at what it has inserted",
    **dict.fromkeys((("shifted_clock", name) for name in statements("shifted_clock")), IN_TESTS),
}
HOT = {
    # What runs send per batch, claim, heartbeat or look; all others serve calls and people, or once a minute a loop.
    "batch": set(statements("batch")),
    "cluster": {"probe", "notify"},
    "definition": {"read_for_starts"},
    "extra": set(statements("extra")),
    "run": {"progress", "in_order"},
    "schedule": {"lock_due", "running", "advance", "first_due", "settle", "hurry"},
    "task": set(statements("task")) - {"open_steps"},
}
"""The hot path. None of its plans may read a table from end to end."""


def sql_files() -> Iterator[str]:
    """The names of all files of statements."""
    for file in (files(store) / "sql").iterdir():
        if file.name.endswith(".sql"):
            yield file.name.removesuffix(".sql")


def test_every_statement_uses_its_index_and_touches_few_rows(databases: dict[str, psycopg.Connection[Any]]) -> None:
    """I12: the cost of none of them grows with what lies around. Nor does a plan rest on statistics: a table that was
    analyzed while it was empty is taken for empty when a million rows have come.
    """
    found = {
        (name, size, f"analyzed {how}", "one plan for all" if generic else "planned for its parameters"): some
        for name, planned in PLANNED.items()
        for size, sized in planned.sizes(20, N).items()
        for how, connection in databases.items()
        for generic in (False, True)
        if (some := faults(connection, sized, generic=generic))
    }
    assert found == {}


def test_every_statement_is_looked_at_or_there_is_a_reason() -> None:
    everything = {(file, name) for file in sql_files() for name in statements(file)}
    looked_at = {(planned.file, planned.statement) for planned in PLANNED.values()}
    assert everything - looked_at - WITHOUT_PLAN.keys() == set(), "add it to a table of tests/plans"
    assert looked_at & WITHOUT_PLAN.keys() == set()
    assert (looked_at | WITHOUT_PLAN.keys()) - everything == set(), "gone: take it off"


def test_a_reason_to_look_at_no_plan_is_true() -> None:
    looks = re.compile(rb"^(?!--).*\b(where|join|from (?!unnest|cluster))\b", re.MULTILINE)
    reads = {key for key, reason in WITHOUT_PLAN.items() if reason in {INSERTS, NO_TABLE} and looks.search(query(*key))}
    assert reads == set()


def test_no_hot_statement_may_read_a_table_from_end_to_end() -> None:
    """Except for the first row of one, and sessions that ended of late."""
    assert all(names <= statements(file).keys() for file, names in HOT.items())
    scanning = {
        planned.statement
        for planned in PLANNED.values()
        if planned.scans and planned.statement in HOT.get(planned.file, ())
    }
    assert scanning == {"probe"}


def test_every_statement_that_looks_something_up_says_which_index_it_uses() -> None:
    """The comment stays in the text, so that it shows up in pg_stat_activity."""
    silent = []
    for file in sql_files():
        for name, text in statements(file).items():
            if WITHOUT_PLAN.get((file, name)) in {IN_TESTS, OWN_PROCESS}:
                continue
            comment = b"\n".join(line for line in text.splitlines() if line.startswith(b"--"))
            if re.search(rb"\bwhere\b", text) and b"index:" not in comment and b"HOT" not in comment:
                silent.append(f"{file}.{name}")
    assert silent == []
