"""The plans of the statements of schedules on 20,000 rows, also where the table was analyzed while it was empty: each
uses its index and touches few rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from fencepost_server.store import arrays
from fencepost_server.store.arrays import Ints, Texts, Times, Uuids
from fencepost_server.store.queries import query, statements
from tests.plans.rows import walk

BUILD = """
insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state, node_index,
                 next_seq, last_event_at, created_at, ended_at)
select md5('r' || n)::uuid, 'default', 'wf', '\\x00', '', '', 3, 3, 0, 5, now(), now(),
       case when n % 2 = 0 then now() end
from generate_series(1, 20000) n;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
select 'default', 4, '', '', 'k' || n, md5('r' || n)::uuid, '\\x00', '\\x00', true from generate_series(1, 20000) n;
insert into schedule (namespace, schedule_id, uuid, spec, paused, next_fire_at, due_at, last_run_id, pending_at)
select 'default', 's' || n, md5('s' || n)::uuid, '{}', false, now() + (n - 300) * interval '1 s',
       case when n % 3 > 0 then now() + (n - 300) * interval '1 s' end, md5('r' || n)::uuid, now()
from generate_series(1, 20000) n;
"""
NOW = datetime.now(UTC)
SOME = Uuids(f"{n:08x}-0000-0000-0000-000000000000" for n in range(20))
TIMES = Times([NOW] * 20)
ONE = {"namespace": "default", "schedule_id": "s77"}
PAYLOAD = {"spec": "{}", "input": None, "input_binary": None, "input_metadata": None}
LOOKED_AT: dict[str, tuple[dict[str, Any], set[str], int]] = {
    # statement: parameters, indexes that may be used, rows that may be touched
    "lock_due": ({"limit": 100}, {"schedule_due"}, 320),
    "running": ({"run_ids": SOME}, {"run_pkey", "run_chain"}, 60),
    "advance": (
        {
            "uuids": SOME,
            **dict.fromkeys(("next_fire_ats", "starting_ats", "pending_ats", "last_fire_ats", "due_ats"), TIMES),
            **dict.fromkeys(("skipped_overlaps", "skipped_misseds"), Ints([1] * 20)),
        },
        {"schedule_uuid"},
        60,
    ),
    "park": ({"uuid": SOME[0], "due_at": NOW, "error": "x"}, {"schedule_uuid"}, 3),
    "first_due": ({}, {"schedule_due"}, 3),
    "settle": (
        {"uuids": SOME, "fire_ats": TIMES, "run_ids": SOME, "errors": Texts([""] * 20)},
        {"schedule_uuid"},
        100,
    ),
    "hurry": ({"uuids": SOME}, {"schedule_uuid"}, 60),
    "started": ({"uuid": SOME[0], "run_id": SOME[0], "runs": 1}, {"schedule_uuid"}, 3),
    "lock": (ONE, {"schedule_pkey"}, 3),
    "get": (ONE, {"schedule_pkey"}, 3),
    "list": ({"namespace": "default", "after": "s5", "limit": 100, "bytes": 1 << 20}, {"schedule_pkey"}, 350),
    "change": (
        {
            "uuid": SOME[0],
            **PAYLOAD,
            **dict.fromkeys(("next_fire_at", "starting_at", "pending_at", "due_at"), NOW),
            "version": 1,
            "update_request": "",
            "paused": False,
            "pause_reason": "",
            "skipped_overlap": 0,
        },
        {"schedule_uuid"},
        3,
    ),
    "delete": (ONE, {"schedule_pkey"}, 3),
    "runs_of": (
        {"namespace": "default", "kind": 4, "keys": Texts(f"k{n}" for n in range(20)), "origin": b"\0"},
        {"run_key_pkey"},
        60,
    ),
}


def faults(connection: psycopg.Connection[Any], name: str) -> list[str]:
    """What is wrong with the plan of one statement, run as in a batch and taken back."""
    params, indexes, most = LOOKED_AT[name]
    limits = {"lock_timeout": "1000", "statement_timeout": "5000", "idle_timeout": "5000"}
    with connection.transaction(force_rollback=True):
        connection.execute(query("batch", "prelude"), limits)
        if name == "list":
            connection.execute(query("run", "in_order"))
        text = b"explain (analyze, format json, timing off, costs off) " + query("schedule", name)
        row = connection.execute(text, params).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    nodes = list(walk(plan[0]["Plan"]))
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    found = [f"uses {index}" for index in used - indexes]
    found += [f"scans {node['Relation Name']}" for node in nodes if node["Node Type"] == "Seq Scan"]
    touched = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes
        if "Relation Name" in node
    )
    if not used:
        found.append("uses no index")
    if touched > most:
        found.append(f"touches {touched:.0f} rows")
    return found


@pytest.mark.parametrize("analyzed", ["full", "empty"])
def test_every_statement_on_schedules_uses_its_index_and_touches_few_rows(
    new_database: Callable[..., str], analyzed: str
) -> None:
    """I12: firing costs the same among few schedules and among many. In a database of its own: what other tests have
    left in a table's files counts for the planner.
    """
    with psycopg.connect(new_database(migrated=True), autocommit=True) as connection:
        arrays.register(connection)  # type: ignore[arg-type]  # adapters are the same for both kinds
        if analyzed == "empty":
            connection.execute("analyze schedule, run, run_key")
        connection.execute(BUILD)
        if analyzed == "full":
            connection.execute("analyze schedule, run, run_key")
        assert {name: found for name in LOOKED_AT if (found := faults(connection, name))} == {}


def test_every_statement_on_schedules_is_looked_at() -> None:
    assert statements("schedule").keys() - LOOKED_AT.keys() == {"insert"}
