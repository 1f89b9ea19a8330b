"""A database of 50,000 runs with all that runs may have, the settings of a batch, and names for rows in it.

Most runs have ended; tasks wait in hundreds of places, a tenth of them is leased. Other sizes with PLAN_ROWS=1000000.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg

from fencepost_server.domain.model import IDLE_UNTIL, PARKED_UNTIL
from fencepost_server.store import arrays
from fencepost_server.store.arrays import Ints, Texts

RUNS = int(os.environ.get("PLAN_ROWS", "50000"))
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
insert into session (session_id, namespace, server_id, process_nonce, worker_name, sdk, workflows, workflow_queues,
                     handlers, handler_queues)
select md5('s' || n)::uuid, 'default', gen_random_uuid(), 'n', 'w', '',
       case when n %% 10 = 0 then '{code@1}'::text[] else '{}' end,
       case when n %% 10 = 0 then '{default}'::text[] else '{}' end,
       array['h' || n %% 7, 'h8'], '{q1, q2}'
from generate_series(1, 1000) n;
insert into session (session_id, namespace, server_id, process_nonce, worker_name, sdk, ended_at)
select gen_random_uuid(), 'default', gen_random_uuid(), 'n', 'w', '', now() - n * interval '1 s'
from generate_series(1, 20000) n;
insert into task (run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, visible_at, attempt,
                  operational_failures, corrective_failures, redeliveries, token, lease_ms, lease_session,
                  lease_expires_at)
select md5('r' || n)::uuid, 1, 'default', 'default', 'code@1', 3, 0, 1,
       case when n < 5000 then %(parked)s::timestamptz else %(idle)s end,
       1, 0, 0, 0, 1, 60000,
       case when n %% 20 = 0 then md5('s900')::uuid end, case when n %% 20 = 0 then now() + interval '1 h' end
from generate_series(10, %(runs)s, 10) n;
insert into query (query_id, namespace, handler, run_id, name, asked_by, taken_by, answered, expires_at)
select run_id, 'default', 'h' || get_byte(uuid_send(run_id), 0), run_id, 'q',
       md5('v' || get_byte(uuid_send(run_id), 1))::uuid,
       case when get_byte(uuid_send(run_id), 2) < 200 then run_id end, get_byte(uuid_send(run_id), 2) < 10,
       created_at + interval '1000 days'
from run;
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
insert into schedule (namespace, schedule_id, uuid, spec, paused, next_fire_at, due_at, last_run_id, pending_at)
select 'default', 's' || n, md5('s' || n)::uuid, '{}', false, now() + (n - 300) * interval '1 s',
       case when n %% 3 > 0 then now() + (n - 300) * interval '1 s' end, md5('r' || n)::uuid, now()
from generate_series(1, %(runs)s) n;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
select 'default', 4, '', '', 'k' || n, md5('r' || n)::uuid, '\\x00', '\\x00', true from generate_series(1, %(runs)s) n;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created,
                     expires_at)
select 'default', 2, '', '', 'k' || n, md5('r' || n)::uuid, '\\x00', '\\x00', true, now() + (n - 100) * interval '1 s'
from generate_series(1, %(runs)s) n;
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created)
select 'default', 3, workflow_id, '', request_key, run_id, definition_hash, '\\x00', true from run;
"""


def build(dsn: str) -> None:
    """Fill a database whose tables are analyzed while they are empty, and not again."""
    values = {"%(runs)s": str(RUNS), "%(parked)s": f"'{PARKED_UNTIL}'", "%(idle)s": f"'{IDLE_UNTIL}'", "%%": "%"}
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "select oid::regclass::text from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace"
        )
        for (table,) in tables.fetchall():
            connection.execute(f"alter table {table} set (autovacuum_enabled = off)")
        connection.execute("analyze")
        for part in BUILD.split(";\n"):
            for name, value in values.items():
                part = part.replace(name, value)  # noqa: PLW2901  # it is filled in
            connection.execute(part)


@contextmanager
def opened(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that knows the columns of batches."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        arrays.register(connection)  # type: ignore[arg-type]  # adapters are the same for both kinds
        yield connection


def run_ids(n: int) -> list[str]:
    return [str(uuid.UUID(hashlib.md5(f"r{i}".encode()).hexdigest())) for i in range(10, 10 + 10 * n, 10)]


def session_id(n: int) -> str:
    return str(uuid.UUID(hashlib.md5(f"s{n}".encode()).hexdigest()))


NOW = datetime.now(UTC)
N = 400
"""Operations in one transaction, as servers have it by default."""
SOME = run_ids(N)
KEYS = {
    "namespaces": Texts(["default"] * N),
    "kinds": Ints([1] * N),
    "workflow_ids": Texts(f"wf{1 + n % 500}" for n in range(N)),
    "user_ids": Texts([""] * N),
    "keys": Texts(f"k{n}" for n in range(N)),
}
OF_A_RUN = {
    f"{table}_pkey"
    for table in (
        *("run", "event", "run_attribute", "request", "task", "stopped_task", "checkpoint", "scope", "output"),
        *("wait", "signal", "timer", "child", "undo"),
    )
}
