-- Leases: claimed, renewed, adopted after a reconnect, cut short after a disconnect. These lock tasks only, with skip locked, and
-- write no events.

-- name: claim
-- locks: up to %(limit)s ready tasks, skip locked; those whose inputs are together past %(max_bytes)s are not taken. The lateral is pulled row by row under the outer limit, so no more are locked
-- than are taken. index: task_ready, one range a (queue, handler, priority); then task_pkey, run_pkey, event_pkey
with want as (
    select * from unnest(%(queues)s, %(handlers)s, %(priorities)s) with ordinality w(queue, handler, priority, ord)
), picked as (
    select p.run_id, p.task_id, p.input_bytes
    from (select * from want order by ord) w
    cross join lateral (
        select t.run_id, t.task_id, t.input_bytes from task t
        where t.lease_session is null and t.namespace = %(namespace)s and t.queue = w.queue and t.handler = w.handler
          and t.priority = w.priority and t.visible_at <= (select clock_timestamp())
        order by t.visible_at limit %(limit)s
        for update skip locked
    ) p
    limit %(limit)s
), numbered as (
    select run_id, task_id, row_number() over () as n,
           sum(input_bytes) over (rows unbounded preceding) - input_bytes as bytes_before
    from picked
), claimed as (
    update task t
    set lease_session = (%(sessions)s)[k.n],
        token = greatest(t.token + 1, (c.epoch::bigint << 40) + 1),
        attempt = t.attempt + 1,
        lease_expires_at = c.now + least(t.lease_ms, coalesce(t.timeout_ms, t.lease_ms)) * interval '1 ms',
        attempt_deadline_at = c.now + coalesce(t.timeout_ms, t.long_timeout_ms) * interval '1 ms'
    from numbered k, (select epoch, (select clock_timestamp()) as now from cluster) c
    where t.run_id = any(array(select run_id from picked)) and t.run_id = k.run_id and t.task_id = k.task_id
      and k.bytes_before < %(max_bytes)s
    returning t.*
)
select c.run_id, c.task_id, c.token, c.lease_session, c.queue, c.handler, c.priority, c.node_index, c.attempt, c.lease_ms,
       coalesce(c.timeout_ms, c.long_timeout_ms), c.feedback, r.workflow_id, r.definition_hash, r.user_id,
       e.payload, e.payload_binary, e.payload_metadata,
       c.extra, c.checkpoint_number, s.payload, s.payload_binary, s.payload_metadata, o.payload, o.payload_binary, o.payload_metadata,
       case when c.extra is not null then r.control end, r.next_seq - 1
from claimed c
cross join lateral (select * from run r where r.run_id = c.run_id offset 0) r
cross join lateral (
    select * from event e where e.run_id = coalesce((c.extra->>'origin')::uuid, c.run_id) and e.seq = c.input_seq offset 0
) e
left join lateral (
    select * from checkpoint s where c.checkpoint_number > 0 and s.run_id = c.run_id and s.task_id = c.task_id offset 0
) s on true
left join lateral (
    select * from event o
    where c.extra is not null and o.run_id = coalesce((c.extra->>'origin')::uuid, c.run_id) and o.seq = (c.extra->>'output_seq')::bigint offset 0
) o on true;

-- name: renew
-- locks: the leases named, in key order, skip locked (a skipped one is tried again by the caller). The token decides (I2); an
-- attempt's deadline is never passed, and with it no grace. What is told of a step's progress replaces what was told before;
-- the column of it ends with the last lease that has any. index: task_pkey
with locked as (
    select k.run_id, k.task_id, k.progress
    from unnest(%(run_ids)s, %(task_ids)s, %(tokens)s, %(progress)s) k(run_id, task_id, token, progress)
    cross join lateral (
        select from task t
        where t.run_id = k.run_id and t.task_id = k.task_id and t.token = k.token and t.namespace = %(namespace)s
          and t.lease_session is not null
        for update skip locked
    ) t
), clock as (
    select (select clock_timestamp()) as now
)
update task t
set lease_expires_at = least(clock.now + t.lease_ms * interval '1 ms',
                             coalesce(t.attempt_deadline_at, clock.now + t.lease_ms * interval '1 ms')),
    progress = coalesce(l.progress::json, t.progress)
from locked l, clock
where t.run_id = any(%(run_ids)s) and t.run_id = l.run_id and t.task_id = l.task_id
returning t.run_id, t.task_id, t.token, extract(epoch from t.lease_expires_at - clock.now)::float8,
          t.cancel_reason is not null;

-- name: read_leases
-- Which of these leases are current. No locks. index: task_pkey
select k.run_id, k.task_id, k.token
from unnest(%(run_ids)s, %(task_ids)s, %(tokens)s) k(run_id, task_id, token)
cross join lateral (
    select from task t
    where t.run_id = k.run_id and t.task_id = k.task_id and t.token = k.token and t.namespace = %(namespace)s
      and t.lease_session is not null offset 0
) t;

-- name: adopt
-- Moves the held leases of a process's former sessions to its new one. locks: those tasks, in key order, skip locked.
-- index: task_pkey
with locked as (
    select k.run_id, k.task_id
    from unnest(%(run_ids)s, %(task_ids)s, %(tokens)s) k(run_id, task_id, token)
    cross join lateral (
        select from task t
        where t.run_id = k.run_id and t.task_id = k.task_id and t.token = k.token and t.namespace = %(namespace)s
          and t.lease_session is not null
        for update skip locked
    ) t
), clock as (
    select (select clock_timestamp()) as now
)
update task t
set lease_session = %(session)s,
    lease_expires_at = least(clock.now + t.lease_ms * interval '1 ms',
                             coalesce(t.attempt_deadline_at, clock.now + t.lease_ms * interval '1 ms'))
from locked l, clock
where t.run_id = any(%(run_ids)s) and t.run_id = l.run_id and t.task_id = l.task_id
returning t.run_id, t.task_id, t.token, extract(epoch from t.lease_expires_at - clock.now)::float8,
          t.cancel_reason is not null;

-- name: session_leases
-- The leases of sessions, bounded. No locks. index: task_session
select run_id, task_id, token, lease_session from task where lease_session = any(%(sessions)s) limit %(limit)s;

-- name: shorten
-- Streams of sessions have ended: their leases last the grace from now at most. locks: tasks of the sessions, skip locked;
-- those skipped are being reported or claimed away, the caller repeats until none is left. index: task_session
with locked as (
    select run_id, task_id from task
    where lease_session = any(%(sessions)s) and lease_expires_at > clock_timestamp() + %(grace)s
    order by run_id, task_id limit 5000
    for update skip locked
)
update task t set lease_expires_at = clock_timestamp() + %(grace)s
from locked l
where t.lease_session = any(%(sessions)s) and t.run_id = l.run_id and t.task_id = l.task_id;

-- name: long_sessions
-- Ended sessions with leases that shorten has not reached. index: task_session
select distinct lease_session::text from task
where lease_session = any(%(sessions)s) and lease_expires_at > clock_timestamp() + %(grace)s + interval '100 ms';

-- name: expired
-- Candidates for the sweeper, without locks: each is checked again under the locks of the batch. Pages by key, so that rows
-- which can't be changed now do not hide those behind them. index: task_lease
select run_id, task_id, token, namespace, lease_expires_at from task
where lease_session is not null and lease_expires_at <= (select clock_timestamp())
  and (lease_expires_at, run_id, task_id) > (%(after_at)s, %(after_run)s, %(after_task)s)
order by lease_expires_at, run_id, task_id limit %(limit)s;

-- name: open_steps
-- index: task_pkey, session_pkey
select t.task_id, t.node_index, t.handler, t.queue, t.attempt, t.operational_failures, t.corrective_failures, t.visible_at,
       t.lease_expires_at, t.last_failure, s.worker_name, t.visible_at > clock_timestamp() as later,
       t.lease_session is not null as leased, t.extra, t.checkpoint_number, t.progress
from task t
left join lateral (select worker_name from session s where s.session_id = t.lease_session offset 0) s on true
where t.run_id = %(run_id)s order by t.task_id limit 1000;

-- name: blocked_deciders
-- What a worker with the code may be able to go on with. Every few seconds, a page by run id; candidates without locks.
-- index: task_ready, run_pkey
select t.run_id, t.queue, t.handler, r.control
from (
    select x.run_id, x.queue, x.handler
    from unnest(%(queues)s, %(handlers)s) w(queue, handler)
    cross join generate_series(1, 5) p
    cross join lateral (
        select t.run_id, t.queue, t.handler from task t
        where t.lease_session is null and t.namespace = %(namespace)s and t.queue = w.queue and t.handler = w.handler
          and t.priority = p and t.visible_at = %(until)s and t.run_id > %(after)s
        order by t.run_id limit %(limit)s
    ) x
    order by x.run_id limit %(limit)s
) t
cross join lateral (select control from run r where r.run_id = t.run_id offset 0) r
order by t.run_id;
