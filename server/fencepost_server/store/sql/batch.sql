-- The statements of the group commit, in the order in which a batch runs them.

-- name: begin
-- Said aloud, whatever the database's default is: the design rests on each statement having its own snapshot.
begin isolation level read committed;

-- name: commit
commit;

-- name: rollback
rollback;

-- name: prelude
-- Limits and plan settings of this transaction only, so that a pooler in transaction mode can sit in between.
--
-- No plan may rest on statistics: a queue that was analyzed while it was empty is taken for empty when a million tasks have
-- come. So every hot statement names its rows by arrays, either as a lateral subquery that the planner can't turn around
-- (offset 0, or a row lock), or as "= any" on the index's first column; and scans are off.
select set_config('lock_timeout', %(lock_timeout)s, true),
       set_config('statement_timeout', %(statement_timeout)s, true),
       set_config('idle_in_transaction_session_timeout', %(idle_timeout)s, true),
       set_config('enable_seqscan', 'off', true),
       set_config('enable_mergejoin', 'off', true),
       set_config('jit', 'off', true);

-- name: lock_deployments
-- locks: deployment rows (share), in the order of the arrays, which are sorted. index: deployment_pkey
select k.namespace, k.workflow_id, d.active_hash, d.removed
from unnest(%(namespaces)s, %(workflow_ids)s) k(namespace, workflow_id)
cross join lateral (
    select active_hash, removed from deployment d where d.namespace = k.namespace and d.workflow_id = k.workflow_id for share
) d;

-- name: lock_runs
-- locks: run rows, by id. Reads nothing that a decision rests on but the locked row itself. index: run_pkey
select run_id, namespace, workflow_id, definition_hash, user_id, priority, state, node_index, next_seq, last_event_at,
       dedupe_key, control, failure
from run where run_id = any(%(run_ids)s) order by run_id for no key update;

-- name: lock_runs_skipping
-- locks: run rows, by id; those that another transaction holds are left out and tried again later (a stopped server must not
-- stop this one). index: run_pkey
select run_id, namespace, workflow_id, definition_hash, user_id, priority, state, node_index, next_seq, last_event_at,
       dedupe_key, control, failure
from run where run_id = any(%(run_ids)s) order by run_id for no key update skip locked;

-- name: lock_tasks
-- locks: task rows, in the order of the arrays, which are sorted by (run_id, task_id); their runs are locked already, so only claims
-- and heartbeats compete. index: task_pkey
select k.run_id, k.task_id, t.queue, t.handler, t.priority, t.node_index, t.input_seq, t.input_bytes, t.visible_at, t.attempt,
       t.operational_failures, t.corrective_failures, t.redeliveries, t.token, t.lease_ms,
       coalesce(t.timeout_ms, t.long_timeout_ms), t.lease_session,
       t.lease_expires_at, t.attempt_deadline_at, t.last_failure, t.feedback, t.outcomes, t.extra, t.checkpoint_number
from unnest(%(run_ids)s, %(task_ids)s) k(run_id, task_id)
cross join lateral (select * from task t where t.run_id = k.run_id and t.task_id = k.task_id for update) t;

-- name: read_deciders
-- What an Advance that keeps its lease is compared with (I2). No row is locked: the runs are, and the token of a DECIDE task that is
-- leased changes under the lock of its run only; claims take those that are not. index: task_pkey
select k.run_id, t.token, t.handler, t.attempt = 1 and t.operational_failures = 0 and t.redeliveries = 0
from unnest(%(run_ids)s) k(run_id)
cross join lateral (
    select * from task t where t.run_id = k.run_id and t.task_id = 1 and t.lease_session is not null offset 0
) t;

-- name: read_clock
-- The one time of the batch, read after its locks are held. Also the epoch of tokens, and the outage guard.
select clock_timestamp(), epoch, hold_until, last_pass_at from cluster;

-- name: read_definitions
-- index: definition_hash
select distinct on (hash) hash, manifest from definition where hash = any(%(hashes)s);

-- name: read_outcomes
-- What became of tasks that are gone: the event that ended each, which keeps token and digest (I6); of a step that was retried
-- by an operator the last one. Runs only for resends and stale tokens. index: event_pkey, from the task's scheduling on
select k.run_id, k.task_id, e.type, e.token, e.digest, e.detail
from unnest(%(run_ids)s, %(task_ids)s) k(run_id, task_id)
cross join lateral (
    select type, token, digest, detail from event
    where run_id = k.run_id and seq > k.task_id and task_id = k.task_id and type in (4, 5, 23, 26, 27)
    order by seq desc limit 1
) e;

-- name: insert_keys
-- locks: waits for other transactions that insert the same key; rows come sorted, so waits have no cycles. index: run_key_pkey
insert into run_key (namespace, kind, workflow_id, user_id, key, run_id, definition_hash, fingerprint, created, expires_at)
select * from unnest(%(namespaces)s, %(kinds)s, %(workflow_ids)s, %(user_ids)s, %(keys)s, %(run_ids)s, %(hashes)s,
                     %(fingerprints)s, %(created)s, %(expires_at)s)
on conflict on constraint run_key_pkey do nothing;

-- name: read_keys
-- A statement of its own after insert_keys: its snapshot sees the rows that insert_keys waited for. index: run_key_pkey
select k.ord::int, r.run_id, r.definition_hash, r.fingerprint, r.created, r.input_differs
from unnest(%(namespaces)s, %(kinds)s, %(workflow_ids)s, %(user_ids)s, %(keys)s)
     with ordinality k(namespace, kind, workflow_id, user_id, key, ord)
cross join lateral (
    select * from run_key r
    where r.namespace = k.namespace and r.kind = k.kind and r.workflow_id = k.workflow_id and r.user_id = k.user_id
      and r.key = k.key offset 0
) r;

-- name: update_keys
-- locks: run_key rows that this transaction inserted. A request id whose request was bound to an older run remembers that; a key
-- whose first request was refused goes to the next one, with the fingerprint of that. By tuple id: a join by five columns is taken for
-- one of a row, and planned as a loop in a loop. index: run_key_pkey
update run_key r set run_id = u.run_id, definition_hash = u.hash, fingerprint = u.fingerprint, created = u.created,
                     input_differs = u.input_differs
from (
    select u.*, p.place
    from unnest(%(namespaces)s, %(kinds)s, %(workflow_ids)s, %(user_ids)s, %(keys)s, %(run_ids)s, %(hashes)s,
                %(fingerprints)s, %(created)s, %(input_differs)s)
         u(namespace, kind, workflow_id, user_id, key, run_id, hash, fingerprint, created, input_differs)
    cross join lateral (
        select ctid as place from run_key p
        where p.namespace = u.namespace and p.kind = u.kind and p.workflow_id = u.workflow_id and p.user_id = u.user_id
          and p.key = u.key offset 0
    ) p
) u
where r.ctid = u.place;

-- name: delete_keys
-- locks: run_key rows that this transaction inserted (a refused request leaves no key behind), or that a run which ends now
-- holds. Whoever inserts such a key meanwhile waits for this transaction, and holds all other locks that it needs.
-- index: run_key_pkey
delete from run_key where ctid = any(array(
    select r.ctid
    from unnest(%(namespaces)s, %(kinds)s, %(workflow_ids)s, %(user_ids)s, %(keys)s, %(run_ids)s)
         u(namespace, kind, workflow_id, user_id, key, run_id)
    cross join lateral (
        select ctid from run_key r
        where r.namespace = u.namespace and r.kind = u.kind and r.workflow_id = u.workflow_id and r.user_id = u.user_id
          and r.key = u.key and r.run_id = u.run_id offset 0
    ) r));

-- name: insert_runs
insert into run (run_id, namespace, workflow_id, definition_hash, user_id, request_key, dedupe_key, priority, state, node_index,
                 next_seq, last_event_at, created_at, output_seq, failure, ended_at, control, attributes, parent_run_id, chain_id)
select run_id, namespace, workflow_id, hash, user_id, request_key, dedupe_key, priority, state, node_index, next_seq, created_at,
       created_at, output_seq, failure::json, ended_at, control::json, attributes::json, parent_run_id, chain_id
from unnest(%(run_ids)s, %(namespaces)s, %(workflow_ids)s, %(hashes)s, %(user_ids)s, %(request_keys)s, %(dedupe_keys)s, %(priorities)s,
            %(states)s, %(node_indexes)s, %(next_seqs)s, %(created_ats)s, %(output_seqs)s, %(failures)s, %(ended_ats)s, %(controls)s,
            %(attributes)s, %(parents)s, %(chains)s)
     u(run_id, namespace, workflow_id, hash, user_id, request_key, dedupe_key, priority, state, node_index, next_seq, created_at,
       output_seq, failure, ended_at, control, attributes, parent_run_id, chain_id);

-- name: update_runs
-- HOT: no index names a column that is set here.
update run r
set state = u.state, node_index = u.node_index, next_seq = u.next_seq, last_event_at = u.last_event_at,
    output_seq = u.output_seq, failure = u.failure::json, ended_at = u.ended_at, control = u.control::json
from unnest(%(run_ids)s, %(states)s, %(node_indexes)s, %(next_seqs)s, %(last_event_ats)s, %(output_seqs)s, %(failures)s,
            %(ended_ats)s, %(controls)s)
     u(run_id, state, node_index, next_seq, last_event_at, output_seq, failure, ended_at, control)
where r.run_id = any(%(run_ids)s) and r.run_id = u.run_id;

-- name: delete_tasks
-- By tuple id: the rows are locked, so they stay where they are. index: task_pkey
delete from task where ctid = any(array(
    select t.ctid from unnest(%(run_ids)s, %(task_ids)s) k(run_id, task_id)
    cross join lateral (select ctid from task t where t.run_id = k.run_id and t.task_id = k.task_id offset 0) t));

-- name: insert_tasks
insert into task (run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, input_bytes, visible_at, attempt,
                  operational_failures, corrective_failures, redeliveries, token, lease_ms, timeout_ms, lease_session,
                  lease_expires_at, attempt_deadline_at, extra, resume_at, long_timeout_ms)
select run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, input_bytes, visible_at, attempt, 0, 0, 0, token,
       lease_ms, case when timeout_ms < 2147483648 then timeout_ms end, lease_session, lease_expires_at, attempt_deadline_at, extra::json,
       resume_at, case when timeout_ms >= 2147483648 then timeout_ms end
from unnest(%(run_ids)s, %(task_ids)s, %(namespaces)s, %(queues)s, %(handlers)s, %(priorities)s, %(node_indexes)s,
            %(input_seqs)s, %(input_bytes)s, %(visible_ats)s, %(attempts)s, %(tokens)s, %(lease_mss)s, %(timeout_mss)s, %(lease_sessions)s,
            %(lease_expires_ats)s, %(attempt_deadline_ats)s, %(extras)s, %(resume_ats)s)
     u(run_id, task_id, namespace, queue, handler, priority, node_index, input_seq, input_bytes, visible_at, attempt, token, lease_ms,
       timeout_ms, lease_session, lease_expires_at, attempt_deadline_at, extra, resume_at);

-- name: update_tasks
-- Back to READY, with another token: retries, releases, expiries, undelivered tasks. index: task_pkey
update task t
set visible_at = u.visible_at, attempt = u.attempt, operational_failures = u.operational_failures,
    corrective_failures = u.corrective_failures, redeliveries = u.redeliveries, token = u.token,
    last_failure = u.last_failure::json, feedback = u.feedback::json, outcomes = u.outcomes::json,
    resume_at = u.resume_at, lease_session = null, lease_expires_at = null, attempt_deadline_at = null
from unnest(%(run_ids)s, %(task_ids)s, %(visible_ats)s, %(attempts)s, %(operational_failures)s, %(corrective_failures)s,
            %(redeliveries)s, %(tokens)s, %(last_failures)s, %(feedbacks)s, %(outcomes)s, %(resume_ats)s)
     u(run_id, task_id, visible_at, attempt, operational_failures, corrective_failures, redeliveries, token, last_failure,
       feedback, outcomes, resume_at)
where t.run_id = any(%(run_ids)s) and t.run_id = u.run_id and t.task_id = u.task_id;

-- name: insert_events
insert into event (run_id, seq, type, at, node_index, task_id, token, attempt, input_seq, digest, payload, payload_binary,
                   payload_metadata, detail)
select run_id, seq, type, at, node_index, task_id, token, attempt, input_seq, digest, payload::json, payload_binary,
       payload_metadata::json, detail::json
from unnest(%(run_ids)s, %(seqs)s, %(types)s, %(ats)s, %(node_indexes)s, %(task_ids)s, %(tokens)s, %(attempts)s,
            %(input_seqs)s, %(digests)s, %(payloads)s, %(binaries)s, %(metadata)s, %(details)s)
     u(run_id, seq, type, at, node_index, task_id, token, attempt, input_seq, digest, payload, payload_binary,
       payload_metadata, detail);

-- name: read_runs
-- Which of these runs exist. index: run_pkey
select run_id, definition_hash from run where run_id = any(%(run_ids)s);
