"""A database of 50,000 runs with all that runs may have, and what may be said of the plan of a statement on it.

Most runs have ended; tasks wait in hundreds of places, a tenth of them is leased. The statements run with the
settings of a batch, in a transaction that is rolled back.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from fencepost_server.store import arrays
from fencepost_server.store.arrays import Ints, Texts
from fencepost_server.store.queries import query

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
       case when n %% 10 = 0 then now() + (n - 500) * interval '1 s' end
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


@contextmanager
def built(cluster: Any, template: str, suffix: str, *, autovacuum: bool = True) -> Iterator[psycopg.Connection[Any]]:
    """The database. Without ``autovacuum`` it was analyzed while it was empty, and not again."""
    name = f"{cluster.prefix}{suffix}_{os.getpid()}"  # each worker of the tests has its own
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
OF_A_RUN = {
    f"{table}_pkey"
    for table in (
        *("run", "event", "run_attribute", "request", "task", "stopped_task", "checkpoint", "scope", "output"),
        *("wait", "signal", "timer", "child", "undo"),
    )
}
SMALL = {"cluster", "server"}


def walk(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes."""
    yield plan
    for child in plan.get("Plans", []):
        yield from walk(child)


@dataclass(frozen=True, slots=True)
class Hot:
    """A statement, its parameters, the indexes that it may use and how many rows it may touch."""

    file: str
    statement: str
    params: dict[str, Any]
    indexes: set[str]
    most: int
    lone: bool = False
    """It runs without the settings of a batch."""
    in_order: bool = False
    """With those of lists."""


def faults(connection: psycopg.Connection[Any], hot: Hot) -> list[str]:
    """What is wrong with the plan of one statement."""
    limits = {"lock_timeout": "1000", "statement_timeout": "5000", "idle_timeout": "5000"}
    with connection.transaction(force_rollback=True):
        if not hot.lone:
            connection.execute(query("batch", "prelude"), limits)
        if hot.in_order:
            connection.execute(query("run", "in_order"))
        explained = b"explain (analyze, format json, timing off, costs off) " + query(hot.file, hot.statement)
        row = connection.execute(explained, hot.params).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    nodes = list(walk(plan[0]["Plan"]))
    used = {node["Index Name"] for node in nodes if "Index Name" in node}
    scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"} - SMALL
    if hot.statement == "probe":
        scanned.discard("message")  # the first row that it meets will do
    touched = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes
        if "Relation Name" in node
    )
    found = [f"uses {index}" for index in used - hot.indexes] + [f"scans {table}" for table in scanned]
    if not used:
        found.append("uses no index")
    if touched > hot.most:
        found.append(f"touches {touched:.0f} rows")
    return found
