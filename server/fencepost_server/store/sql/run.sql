-- Reads for people and clients. No locks.

-- name: get_run
-- index: run_pkey
select r.run_id, r.namespace, r.workflow_id, r.definition_hash, r.state, r.user_id, r.request_key, r.priority, r.failure,
       r.created_at, r.ended_at, r.next_seq - 1, r.dedupe_key
from run r where r.run_id = %(run_id)s and r.namespace = %(namespace)s;

-- name: run_by_key
-- index: run_key_pkey
select run_id from run_key
where namespace = %(namespace)s and kind = %(kind)s and workflow_id = %(workflow_id)s and user_id = %(user_id)s and key = %(key)s;

-- name: payloads
-- A run's input and output. index: event_pkey
select e.seq, e.payload, e.payload_binary, e.payload_metadata, e.seq = r.output_seq
from run r join event e on e.run_id = r.run_id and (e.seq = 1 or e.seq = r.output_seq)
where r.run_id = %(run_id)s;

-- name: list_runs
-- Keyset by (created_at, run_id), newest first; reads at most %(scan)s rows however few of them have the state. The last row read is
-- returned even if it does not fit, marked, so that the next page goes on from it. index: run_list
with page as (
    select * from run
    where namespace = %(namespace)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
    order by created_at desc, run_id desc limit %(scan)s
), numbered as (
    select *, row_number() over (order by created_at desc, run_id desc) as n, count(*) over () as total,
           state = any(%(states)s) as fits
    from page
)
select run_id, namespace, workflow_id, definition_hash, state, user_id, request_key, priority, failure, created_at, ended_at,
       next_seq - 1, dedupe_key, fits, total
from numbered where fits or n = total order by n limit %(limit)s;

-- name: list_runs_of_workflow
-- As list_runs, for one workflow. index: run_list_workflow
with page as (
    select * from run
    where namespace = %(namespace)s and workflow_id = %(workflow_id)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
    order by created_at desc, run_id desc limit %(scan)s
), numbered as (
    select *, row_number() over (order by created_at desc, run_id desc) as n, count(*) over () as total,
           state = any(%(states)s) as fits
    from page
)
select run_id, namespace, workflow_id, definition_hash, state, user_id, request_key, priority, failure, created_at, ended_at,
       next_seq - 1, dedupe_key, fits, total
from numbered where fits or n = total order by n limit %(limit)s;

-- name: progress
-- How far runs are that somebody waits for or watches, in one statement for all of them. index: run_pkey
select run_id, next_seq - 1, ended_at is not null from run where run_id = any(%(run_ids)s);

-- name: history
-- index: event_pkey
select seq, type, at, node_index, task_id, token, attempt, input_seq, payload, payload_binary, payload_metadata, detail
from event where run_id = %(run_id)s and seq > %(after)s order by seq limit %(limit)s;
