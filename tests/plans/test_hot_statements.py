"""The plans of every hot statement on 50,000 rows: the index that its comment names, and few rows touched.

Most runs have ended; tasks wait in hundreds of places, a tenth of them is leased. The statements run with the
settings of a batch, in a transaction that is rolled back.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from fencepost_server.domain.model import PARKED_UNTIL
from fencepost_server.store import arrays, extras
from fencepost_server.store.arrays import Blobs, Ints, Texts, Times, Uuids, columns
from fencepost_server.store.queries import query, statements

RUNS = 50_000
BUILD = """
insert into definition (namespace, workflow_id, hash, compatibility_id, manifest)
select 'default', 'wf' || n, sha256(n::text::bytea), '1', '{}' from generate_series(1, 500) n;
insert into deployment select namespace, workflow_id, hash from definition;
insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, priority, state, node_index,
                 next_seq, last_event_at, created_at, ended_at)
select md5('r' || n)::uuid, 'default', 'wf' || (1 + n % 500), sha256((1 + n % 500)::text::bytea), '', 'k' || n,
       3, 3, 0, 5, now() - n * interval '1 s', now() - n * interval '1 s', now()
from generate_series(1, %(runs)s) n;
update run set user_id = 'u' || (1 + get_byte(uuid_send(run_id), 0)) where get_byte(uuid_send(run_id), 1) < 128;
update run set parent_run_id = md5('r' || 50)::uuid where get_byte(uuid_send(run_id), 2) < 4;
insert into run_attribute (namespace, key, value, created_at, run_id)
select namespace, 'few', 'v' || get_byte(uuid_send(run_id), 3), created_at, run_id from run union all
select namespace, 'all', 'v', created_at, run_id from run;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
select 'default', 1, workflow_id, '', request_key, run_id, definition_hash, '\\x00', true from run;
insert into event (run_id, seq, type, at, node_index, task_id, token, attempt, digest, payload)
select run_id, seq, seq, now(), 0, 2, 1, 1, '\\x00', 'null' from run, unnest('{1, 4}'::int[]) seq;
insert into task (run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, visible_at, attempt,
                  operational_failures, corrective_failures, redeliveries, token, lease_ms, lease_session,
                  lease_expires_at)
select md5('r' || n)::uuid, 2, 'default', 'q' || n %% 20, 'h' || n %% 7, 1 + n %% 5, 0, 1,
       now() + (n - %(runs)s / 2) * interval '1 s', 1, 0, 0, 0, 1, 60000,
       case when n %% 10 = 0 then md5('s' || n / 10 %% 1000)::uuid end,
       case when n %% 10 = 0 then now() + n * interval '1 ms' end
from generate_series(1, %(runs)s) n;
insert into session (session_id, namespace, server_id, process_nonce, worker_name, sdk)
select md5('s' || n)::uuid, 'default', gen_random_uuid(), 'n', 'w', '' from generate_series(1, 1000) n;
insert into checkpoint (run_id, task_id, number, payload) select run_id, 2, 1, '1' from run;
insert into stopped_task (run_id, task_id, row) select run_id, 2, '{}' from run;
insert into timer (run_id, seq, kind, namespace, fire_at, place)
select run_id, 1, 1, 'default', created_at + interval '4 h', '{}' from run;
insert into wait (run_id, seq, name, place) select run_id, seq, 'go', '{}' from run, unnest('{1, 4}'::int[]) seq;
insert into signal (run_id, seq, name, size) select run_id, seq, 'go', 1 from run, unnest('{1, 4}'::int[]) seq;
insert into scope (run_id, scope_id, node_index, total, done, next_item, item_bytes, output_bytes, parent_scope,
                   parent_item)
select run_id, 2, 0, 2, 1, 2, 1, 1, 0, 0 from run;
insert into output (run_id, scope_id, item, node_index, seq)
select run_id, 2, item, node, 4 from run, unnest('{0, 1}'::int[]) item, unnest('{-1, 3}'::int[]) node;
insert into child (run_id, seq, child_run_id, place) select run_id, 2, md5(run_id::text)::uuid, '{}' from run;
insert into undo (run_id, of_seq, unfinished, node_index, task_id, input_seq, input_bytes, output_seq, token, scope_id,
                  item)
select run_id, of_seq, false, 0, 2, 1, 1, 4, 1, 0, 0 from run, unnest('{1, 4}'::int[]) of_seq;
insert into request (run_id, request_id, fingerprint, answer) select run_id, 'r', '\\x00', '{}' from run;
insert into message (target_run, kind, source_run, source_seq, namespace, body)
select md5(run_id::text)::uuid, 1, run_id, 2, 'default', '{}' from run;
insert into schedule (namespace, schedule_id, uuid, spec, paused, due_at)
select 'default', 's' || n, gen_random_uuid(), '{}', false, now() + n * interval '1 s' from generate_series(1, 10000) n;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
select 'default', 3, workflow_id, '', request_key, run_id, definition_hash, '\\x00', true from run;
"""


@pytest.fixture(scope="module")
def connection(cluster: Any, template: str) -> Iterator[psycopg.Connection[Any]]:
    """A database of 50,000 runs and tasks, analyzed."""
    with _built(cluster, template, "plans") as connection:
        connection.execute("vacuum analyze")
        yield connection


@pytest.fixture(scope="module")
def grown(cluster: Any, template: str) -> Iterator[psycopg.Connection[Any]]:
    """The same, but it was analyzed while it was empty, and not again."""
    with _built(cluster, template, "grown", autovacuum=False) as connection:
        yield connection


@contextmanager
def _built(cluster: Any, template: str, suffix: str, *, autovacuum: bool = True) -> Iterator[psycopg.Connection[Any]]:
    name = cluster.prefix + suffix
    dsn = cluster.create(name, template)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            if not autovacuum:
                for table in ("run", "run_attribute", "run_key", "event", "definition"):
                    connection.execute(f"alter table {table} set (autovacuum_enabled = off)")
                connection.execute("analyze")
            for part in BUILD.replace("%%", "%").split(";\n"):
                if part.strip():
                    connection.execute(part.replace("%(runs)s", str(RUNS)))
            arrays.register(connection)  # type: ignore[arg-type]  # adapters are the same for both kinds
            yield connection
    finally:
        cluster.drop(name)


def run_ids(n: int) -> list[str]:
    return [str(uuid.UUID(hashlib.md5(f"r{i}".encode()).hexdigest())) for i in range(10, 10 + 10 * n, 10)]


def session_id(n: int) -> str:
    return str(uuid.UUID(hashlib.md5(f"s{n}".encode()).hexdigest()))


NOW = datetime.now(UTC)
SOME = run_ids(20)
KEYS = {
    "namespaces": Texts(["default"] * 20),
    "kinds": Ints([1] * 20),
    "workflow_ids": Texts(f"wf{1 + n % 500}" for n in range(20)),
    "user_ids": Texts([""] * 20),
    "keys": Texts(f"k{n}" for n in range(20)),
}
REFS = {"run_ids": Uuids(SOME), "task_ids": Ints([2] * 20), "tokens": Ints([1] * 20), "namespace": "default"}
LIMITS = {
    "gap": timedelta(seconds=5),
    "hold": timedelta(seconds=30),
    "server_timeout": timedelta(seconds=10),
    "max_places": 2000,
}
OF_A_RUN = {
    f"{table}_pkey"
    for table in (
        *("run", "event", "run_attribute", "request", "task", "stopped_task", "checkpoint", "scope", "output"),
        *("wait", "signal", "timer", "child", "undo"),
    )
}
LIST: dict[str, Any] = {
    "lead": 0,
    "namespace": "default",
    "workflow_id": "",
    "user_id": "",
    "parent_run_id": None,
    "key": "",
    "value": "",
    "created_after": NOW - timedelta(days=1000),
    "before_at": NOW,
    "before_run": SOME[0],
    "states": Ints(),
    "failures": Texts(),
    "keys": Texts(),
    "values": Texts(),
    "scan": 100,
    "limit": 100,
}

OF_REMOVED = {
    "namespace": "default",
    "workflow_id": "wf7",
    "hash": hashlib.sha256(b"7").digest(),
    "after_at": NOW - timedelta(days=10),
    "after_run": session_id(0),
    "until_at": NOW + timedelta(days=10),
    "until_run": session_id(0),
    "scan": 50,
}

HOT: dict[str, tuple[str, str, dict[str, Any], set[str], int]] = {
    # name: file, statement, parameters, indexes that may be used, rows that may be touched
    "lock deployments": (
        "batch",
        "lock_deployments",
        {"namespaces": Texts(["default"] * 20), "workflow_ids": Texts(f"wf{n}" for n in range(1, 21))},
        {"deployment_pkey"},
        100,
    ),
    "lock runs": ("batch", "lock_runs", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "lock runs, skipping": ("batch", "lock_runs_skipping", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "lock tasks": ("batch", "lock_tasks", {"run_ids": Uuids(SOME), "task_ids": Ints([2] * 20)}, {"task_pkey"}, 100),
    "read outcomes": (
        "batch",
        "read_outcomes",
        {"run_ids": Uuids(SOME), "task_ids": Ints([2] * 20)},
        {"event_pkey"},
        150,
    ),
    "read keys": ("batch", "read_keys", KEYS, {"run_key_pkey"}, 100),
    "read runs": ("batch", "read_runs", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "live runs of a definition": (
        "definition",
        "live_runs",
        {**OF_REMOVED, "limit": 20},
        {"run_list_workflow"},
        60,
    ),
    "count live runs": ("definition", "count_live_runs", OF_REMOVED, {"run_list_workflow"}, 60),
    "active parents": (
        "definition",
        "active_parents",
        {"namespace": "default", "workflow_ids": Texts(f"wf{n}" for n in range(1, 21)), "mark": "{"},
        {"deployment_pkey", "definition_pkey"},
        60,
    ),
    "removals": (
        "definition",
        "removals",
        {"after_namespace": "default", "after_workflow": "wf7", "after_hash": b"", "limit": 1000},
        {"deployment_pkey", "definition_pkey", "definition_hash"},
        510,
    ),
    "read definitions": (
        "batch",
        "read_definitions",
        {"hashes": Blobs([hashlib.sha256(b"7").digest()])},
        {"definition_hash"},
        20,
    ),
    "delete tasks": ("batch", "delete_tasks", {"run_ids": Uuids(SOME), "task_ids": Ints([2] * 20)}, {"task_pkey"}, 150),
    "claim": (
        "task",
        "claim",
        {
            "namespace": "default",
            "queues": Texts(["q1", "q3"]),
            "handlers": Texts(["h1", "h3"]),
            "priorities": Ints([2, 4]),
            "sessions": Uuids([session_id(1)] * 20),
            "limit": 20,
            "max_bytes": 1 << 20,
        },
        {"task_ready", "task_pkey", "run_pkey", "event_pkey", "cluster_pkey", "checkpoint_pkey"},
        500,
    ),
    "renew": ("task", "renew", {**REFS, "progress": Texts([])}, {"task_pkey"}, 150),
    "renew, telling": ("task", "renew", {**REFS, "progress": Texts(['{"json": "1"}'] * 5)}, {"task_pkey"}, 150),
    "read leases": ("task", "read_leases", REFS, {"task_pkey"}, 100),
    "adopt": ("task", "adopt", {**REFS, "session": session_id(5)}, {"task_pkey"}, 150),
    "session's leases": (
        "task",
        "session_leases",
        {"sessions": Uuids([session_id(n) for n in range(1, 4)]), "limit": 100_000},
        {"task_session"},
        1600,
    ),
    "expired": (
        "task",
        "expired",
        {"after_at": NOW - timedelta(days=1), "after_run": str(uuid.UUID(int=0)), "after_task": 0, "limit": 250},
        {"task_lease"},
        2000,
    ),
    "shorten": (
        "task",
        "shorten",
        {"sessions": Uuids([session_id(10)]), "grace": timedelta(seconds=1)},
        {"task_session", "task_pkey"},
        2500,
    ),
    "count long": (
        "task",
        "count_long",
        {"sessions": Uuids([session_id(10)]), "grace": timedelta(seconds=1)},
        {"task_session"},
        600,
    ),
    **{
        f"list runs by {name}": (
            "run",
            "list_runs",
            {**LIST, **params},
            {index, "run_pkey", "run_attribute_pkey"},
            most,
        )
        for name, params, index, most in (
            ("nothing", {}, "run_list", 350),
            ("state", {"states": Ints([3]), "scan": 1000}, "run_list", 350),
            ("rare state", {"states": Ints([1]), "scan": 1000}, "run_list", 2100),
            ("failure", {"failures": Texts(["x", "y", "z"]), "scan": 1000}, "run_list", 2100),
            (
                "rare label",
                {"keys": Texts(["all", "few"]), "values": Texts(["v", "no"]), "scan": 500},
                "run_list",
                1600,
            ),
            ("workflow", {"lead": 1, "workflow_id": "wf7"}, "run_list_workflow", 350),
            ("user", {"lead": 2, "user_id": "u7"}, "run_list_user", 350),
            ("parent", {"lead": 3, "parent_run_id": run_ids(5)[4]}, "run_list_parent", 350),
            ("label", {"lead": 4, "key": "few", "value": "v7"}, "run_attribute_list", 350),
            ("frequent label", {"lead": 4, "key": "all", "value": "v"}, "run_attribute_list", 350),
        )
    },
    "count candidates": (
        "run",
        "count_candidates",
        {
            **LIST,
            "workflow_id": "wf7",
            "user_id": "u7",
            "keys": Texts(["all", "few", "no"]),
            "values": Texts(["v", "v7", ""]),
            "most": 300,
        },
        {"run_list_workflow", "run_list_user", "run_attribute_list"},
        900,
    ),
    "retention: definitions": (
        "retention",
        "definitions",
        {"namespace": "default", "workflow_id": "wf100", "hash": b"", "limit": 100},
        {"definition_pkey"},
        100,
    ),
    "retention: old": (
        "retention",
        "old",
        {
            "namespaces": Texts(["default"] * 20),
            "workflow_ids": Texts(f"wf{n}" for n in range(1, 21)),
            "keeps": [3600.0] * 20,
            "after_ats": Times([NOW - timedelta(days=1000)] * 20),
            "after_runs": Uuids([SOME[0]] * 20),
        },
        {"run_list_workflow"},
        20,
    ),
    "retention: page": (
        "retention",
        "page",
        {
            "namespace": "default",
            "workflow_id": "wf7",
            "keep": 3600,
            "after_at": NOW - timedelta(days=1000),
            "after_run": SOME[0],
            "limit": 50,
        },
        {"run_list_workflow"},
        50,
    ),
    "retention: lock": ("retention", "lock", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "retention: needed": ("retention", "needed", {"run_ids": Uuids(SOME)}, {"run_pkey", "message_once"}, 100),
    "retention: remember": (
        "retention",
        "remember",
        {"run_ids": Uuids(SOME), "memory": timedelta(days=30)},
        {"run_pkey", "run_key_pkey"},
        150,
    ),
    "retention: hide": (
        "retention",
        "hide",
        {"run_ids": Uuids(SOME[:1])},
        {"run_pkey", "run_attribute_pkey"},
        10,
    ),
    "retention: delete": ("retention", "delete", {"run_ids": Uuids(SOME)}, OF_A_RUN, 500),
    "retention: lock hidden": ("retention", "lock_hidden", {}, {"run_list", "run_list_workflow", "run_list_user"}, 5),
    "retention: delete slice": ("retention", "delete_slice", {"run_id": SOME[0], "limit": 100}, OF_A_RUN, 60),
    "retention: outlived": (
        "retention",
        "outlived",
        {
            "namespace": "default",
            "kind": 1,
            "workflow_id": "wf2",
            "user_id": "",
            "key": "",
            "limit": 100,
            "memory": timedelta(days=30),
        },
        {"run_key_pkey", "run_pkey"},
        400,
    ),
    "retention: forget keys": ("retention", "forget_keys", {"limit": 1000}, {"run_key_expiry"}, 10),
    "open steps": ("task", "open_steps", {"run_id": SOME[0]}, {"task_pkey", "session_pkey"}, 20),
    "open waits": ("wait", "open_waits", {"run_id": SOME[0]}, {"timer_pkey", "wait_pkey", "child_pkey"}, 40),
    "probe": (
        "cluster",
        "probe",
        {"server": str(uuid.uuid4()), **LIMITS},
        # the first timer and the first schedule that fall due, and any one message: one row each
        {"task_ready", "task_lease", "server_pkey", "cluster_pkey", "session_ended", "timer_due", "schedule_due"}
        | {"message_pkey", "message_once"},
        20_000,
    ),
    "get run": ("run", "get_run", {"run_id": SOME[0], "namespace": "default"}, {"run_pkey"}, 5),
    "payloads": ("run", "payloads", {"run_id": SOME[0]}, {"run_pkey", "event_pkey"}, 10),
    "progress": ("run", "progress", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "history": ("run", "history", {"run_id": SOME[0], "after": 0, "limit": 100}, {"event_pkey"}, 10),
    "run by key": (
        "run",
        "run_by_key",
        {"namespace": "default", "kind": 1, "workflow_id": "wf2", "user_id": "", "key": "k1"},
        {"run_key_pkey"},
        5,
    ),
}


IN_ORDER = {
    *(name for name in HOT if name.startswith("list runs")),
    *("live runs of a definition", "count live runs"),
    *("count candidates", "retention: definitions", "retention: old", "retention: page", "retention: outlived"),
}
"""Ranges of indexes, read in their order up to a limit."""


NULL = ("null", None, None)
EACH: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    # statement of extra.sql: what it is asked for, or given, of each run; indexes that may be used
    "payload": ((1,), {"event_pkey"}),
    "scope": ((2,), {"scope_pkey"}),
    "outputs": ((2,), {"output_pkey", "event_pkey"}),
    "recorded": ((2, 3, 1), {"output_pkey"}),
    "wait": (("go",), {"wait_pkey"}),
    "signal": (("go",), {"signal_pkey"}),
    "matches": ((), {"wait_pkey", "signal_pkey"}),
    "timer": ((1, 1), {"timer_pkey"}),
    "fired_timers": ((), {"timer_pkey"}),
    "open_tasks": ((), {"task_pkey"}),
    "open_task": ((2,), {"task_pkey"}),
    "park": ((), {"task_pkey"}),
    "unpark": ((), {"task_pkey"}),
    "unblock": ((), {"task_pkey"}),
    "next_undo": ((), {"undo_pkey", "event_pkey"}),
    "stopped": ((), {"stopped_task_pkey"}),
    "child": ((2,), {"child_pkey"}),
    "children": ((), {"child_pkey"}),
    "request": (("r",), {"request_pkey"}),
    "run_state": ((), {"run_pkey"}),
    "pending_start": ((), {"message_once"}),
    "update_scope": ((2, 2, 2, 2), {"scope_pkey"}),
    "update_undo": ((4, 2), {"undo_pkey"}),
    "cancel_task": ((2, NOW, "RUN_ENDED"), {"task_pkey"}),
    "restore_task": ((2, 1, None, None, None, 1), {"task_pkey"}),
    "save_checkpoint": ((2, 2, *NULL), {"task_pkey"}),
    "park_timer": ((1, 1), {"timer_pkey"}),
    "stop_timers": ((), {"timer_pkey"}),
    "restart_timers": ((), {"timer_pkey"}),
    "delete_timer": ((1, 1), {"timer_pkey"}),
    "delete_wait": ((1, "go"), {"wait_pkey"}),
    "delete_signal": ((1, "go"), {"signal_pkey"}),
    "delete_scope": ((2,), {"scope_pkey", "output_pkey"}),
    "delete_child": ((2,), {"child_pkey"}),
    "delete_undo": ((4,), {"undo_pkey"}),
    "delete_stopped": ((), {"stopped_task_pkey"}),
    "delete_checkpoint": ((2,), {"checkpoint_pkey"}),
    "clear_ended": ((), OF_A_RUN),
}
AS_A_WHOLE: dict[str, tuple[dict[str, Any], set[str], int]] = {
    # statement of extra.sql that is not asked for by run: parameters, indexes, rows that may be touched
    "key_holder": (
        {"a": KEYS["namespaces"], "b": KEYS["workflow_ids"], "c": KEYS["keys"]},
        {"run_key_pkey"},
        100,
    ),
    "lock_messages": ({"ids": Ints(range(1, 21))}, {"message_pkey"}, 100),
    "delete_message": ({"a": Ints(range(1, 21))}, {"message_pkey"}, 100),
    "due_timers": (
        {"after_at": NOW - timedelta(days=1000), "after_run": SOME[0], "after_seq": 0, "limit": 500},
        {"timer_due"},
        600,
    ),
    "messages": ({"after": 100, "limit": 500}, {"message_pkey"}, 600),
}


def of_each(statement: str) -> dict[str, Any]:
    """The parameters of a statement of extra.sql for some runs."""
    types = {**extras._READS, **extras._WRITES}[statement]
    rows = [(run_id, *EACH[statement][0]) for run_id in SOME]
    given = dict(zip("abcdefghijk", columns(rows, *types), strict=False))
    return given | ({"until": PARKED_UNTIL, "now": NOW} if statement in extras._READS else {})


HOT |= {
    f"extra: {name}": ("extra", name, of_each(name), indexes, 600 if name == "clear_ended" else 200)
    for name, (_, indexes) in EACH.items()
}
HOT |= {f"extra: {name}": ("extra", name, *rest) for name, rest in AS_A_WHOLE.items()}


SMALL = {"cluster", "server"}


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes."""
    yield plan
    for child in plan.get("Plans", []):
        yield from walk(child)


def faults(connection: psycopg.Connection[Any], name: str) -> list[str]:
    """What is wrong with the plan of one statement."""
    file, statement, params, indexes, most = HOT[name]
    limits = {"lock_timeout": "1000", "statement_timeout": "5000", "idle_timeout": "5000"}
    with connection.transaction(force_rollback=True):
        if name != "probe":  # it alone runs without the settings of a batch
            connection.execute(query("batch", "prelude"), limits)
        if name in IN_ORDER:
            connection.execute(query("run", "in_order"))
        explained = b"explain (analyze, format json, timing off, costs off) " + query(file, statement)
        row = connection.execute(explained, params).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    nodes = list(walk(plan[0]["Plan"]))
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"} - SMALL
    if name == "probe":
        scanned.discard("message")  # the first row that it meets will do
    touched = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes
        if "Relation Name" in node
    )
    found = [f"uses {index}" for index in used - indexes] + [f"scans {table}" for table in scanned]
    if not used:
        found.append("uses no index")
    if touched > most:
        found.append(f"touches {touched:.0f} rows")
    return found


def test_every_hot_statement_uses_its_index_and_touches_few_rows(connection: psycopg.Connection[Any]) -> None:
    """I12: the cost of none of them grows with what lies around."""
    assert {name: found for name in HOT if (found := faults(connection, name))} == {}


def test_no_list_rests_on_statistics(grown: psycopg.Connection[Any]) -> None:
    """A table that was analyzed while it was empty is taken for empty when a million runs have come."""
    looks = {*IN_ORDER, *(name for name in HOT if name.startswith("retention:"))}
    assert {name: found for name in looks if (found := faults(grown, name))} == {}


def test_every_statement_on_what_runs_have_beyond_their_steps_is_looked_at() -> None:
    """What only inserts has no plan that could go wrong; neither has ``take_key``, which inserts too."""
    looked_at = {statement for file, statement, *_ in HOT.values() if file == "extra"}
    others = statements("extra").keys() - looked_at
    assert {name for name in others if not name.startswith("insert_")} == {"take_key"}


def test_every_statement_that_looks_something_up_says_which_index_it_uses() -> None:
    """The comment stays in the text, so that it shows up in pg_stat_activity."""
    silent = []
    for file in ("batch", "task", "run", "definition", "retention", "extra", "schedule", "wait"):
        for name, text in statements(file).items():
            comment = b"\n".join(line for line in text.splitlines() if line.startswith(b"--"))
            if re.search(rb"\bwhere\b", text) and b"index:" not in comment and b"HOT" not in comment:
                silent.append(f"{file}.{name}")
    assert silent == []
