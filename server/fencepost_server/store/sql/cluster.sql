-- What a server knows of the others, and the one statement that serves all loops while nothing happens.

-- name: probe
-- Beats for this server, moves the outage guard on, and tells what there is to do: which (namespace, queue, handler, priority)
-- have a ready task and when the first is due, when the first lease can expire, how many other servers live, which of this server's
-- sessions have ended of late: of one that it believes to be open, the process has come back elsewhere; when the first timer is due;
-- whether there are messages; and when the first schedule is due. A gap between probes of all servers longer than an outage holds
-- every expiry until workers had time to come back.
-- locks: own server row; the cluster row at most once a second (more often only if an outage is said to be shorter than some
-- seconds). index: task_ready (one lookup a combination), task_lease, session_ended, timer_due, message_pkey, schedule_due
with recursive beat as (
    insert into server (server_id) values (%(server)s)
    on conflict (server_id) do update set seen_at = clock_timestamp()
), pass as (
    update cluster
    set last_pass_at = clock_timestamp(),
        hold_until = case when clock_timestamp() - last_pass_at > %(gap)s then clock_timestamp() + %(hold)s else hold_until end
    where last_pass_at < clock_timestamp() - least(interval '1 s', %(gap)s / 4)
), ready as (
    (select namespace, queue, handler, priority, visible_at from task
     where lease_session is null
     order by namespace, queue, handler, priority, visible_at limit 1)
    union all
    select t.namespace, t.queue, t.handler, t.priority, t.visible_at
    from ready r cross join lateral (
        select namespace, queue, handler, priority, visible_at from task
        where lease_session is null
          and (namespace, queue, handler, priority) > (r.namespace, r.queue, r.handler, r.priority)
        order by namespace, queue, handler, priority, visible_at limit 1
    ) t
)
select 1 as what, namespace, queue, handler, priority::int, extract(epoch from visible_at - clock_timestamp())::float8
from (select * from ready limit %(max_places)s) r
union all
select 2, null, null, null, null,
       (select extract(epoch from greatest(t.lease_expires_at, c.hold_until) - clock_timestamp())::float8
        from (select lease_expires_at from task where lease_session is not null order by lease_expires_at limit 1) t,
             (select hold_until from cluster) c)
union all
select 3, null, null, null,
       (select count(*)::int from server where seen_at > clock_timestamp() - %(server_timeout)s and server_id <> %(server)s),
       0
union all
select 4, session_id::text, null, null, null, 0 from session
where ended_at > (select clock_timestamp()) - %(server_timeout)s and server_id = %(server)s
union all
select 5, null, null, null, null,
       (select extract(epoch from fire_at - clock_timestamp())::float8 from timer where not parked order by fire_at limit 1)
union all
select 6, null, null, null, (select 1 from message limit 1), 0
union all
select 7, null, null, null, null,
       (select extract(epoch from due_at - clock_timestamp())::float8 from schedule
        where due_at is not null order by due_at limit 1);

-- name: count_ready
-- How many tasks wait in each of these places, counted up to %(most)s, and since when the first of them; places without any are left
-- out. index: task_ready, one range a place
select w.namespace, w.queue, c.n::int, extract(epoch from c.now - c.first_at)::float8
from unnest(%(namespaces)s, %(queues)s, %(handlers)s, %(priorities)s) w(namespace, queue, handler, priority)
cross join lateral (
    select count(*) as n, min(x.visible_at) as first_at, max(x.now) as now
    from (
        select t.visible_at, c.now from (select (select clock_timestamp()) as now) c, task t
        where t.lease_session is null and t.namespace = w.namespace and t.queue = w.queue and t.handler = w.handler
          and t.priority = w.priority and t.visible_at <= c.now
        order by t.visible_at limit %(most)s
    ) x
) c
where c.n > 0;

-- name: forget
-- Bounded housekeeping: gone servers, ended sessions, request ids past their time. Open sessions are read, all of them:
-- there are as many as worker streams. Times are compared with a subquery's, which an index takes as a bound: the function itself
-- would be called for each row of the index. index: run_key_expiry, session_ended, query_expiry
with keys as (
    delete from run_key where ctid = any(array(
        select ctid from run_key where expires_at < (select clock_timestamp())
        order by expires_at limit 1000 for update skip locked))
), orphans as (
    -- Their server was killed and could not say that they ended. It is gone for an hour when its row is (below).
    update session set ended_at = clock_timestamp() where ctid = any(array(
        select s.ctid from session s
        where s.ended_at is null and s.started_at < clock_timestamp() - interval '1 hour'
          and not exists (select 1 from server v where v.server_id = s.server_id)
        limit 1000 for update of s skip locked))
), sessions as (
    delete from session where ctid = any(array(
        select ctid from session where ended_at < (select clock_timestamp() - interval '1 hour')
        order by ended_at limit 1000 for update skip locked))
), queries as (
    delete from query where ctid = any(array(
        select ctid from query where expires_at < (select clock_timestamp())
        order by expires_at limit 1000 for update skip locked))
)
delete from server where seen_at < clock_timestamp() - interval '1 hour';

-- name: notify
select pg_notify('fencepost', p) from unnest(%(payloads)s) p;

-- name: time
select clock_timestamp();

-- name: open_session
insert into session (session_id, namespace, server_id, process_nonce, worker_name, sdk, workflows, workflow_queues, handlers, handler_queues)
values (%(session)s, %(namespace)s, %(server)s, %(nonce)s, %(worker_name)s, %(sdk)s, %(workflows)s, %(workflow_queues)s, %(handlers)s, %(handler_queues)s)
on conflict (session_id) do nothing
returning session_id;

-- name: unserved
-- Which of these places nobody takes tasks from who is connected to a server that lives. A worker has said at its Hello what it
-- takes; while one is connected to a server of an older release, which did not write that down, none is told.
-- index: session_serving, server_pkey
select w.queue, w.handler from unnest(%(queues)s, %(handlers)s) w(queue, handler)
where not exists (
    select from session s join server v on v.server_id = s.server_id
    where s.namespace = %(namespace)s and s.ended_at is null and s.handlers is distinct from '{}'
      and v.seen_at > clock_timestamp() - %(server_timeout)s
      and (s.handlers is null or s.handlers @> array[w.handler] and exists (
          select from unnest(s.handlers, s.handler_queues) h(handler, queue)
          where h.handler = w.handler and h.queue = w.queue))
);

-- name: own_sessions
-- Which of these former sessions belong to the same process. index: session_pkey
select session_id from session
where session_id = any(%(sessions)s) and namespace = %(namespace)s and process_nonce = %(nonce)s;

-- name: leave_sessions
-- A process has come back: its former sessions have ended, whatever their servers believe. locks: their rows. index: session_pkey
update session set ended_at = clock_timestamp()
where session_id = any(%(sessions)s) and namespace = %(namespace)s and process_nonce = %(nonce)s and ended_at is null;

-- name: close_session
-- locks: their rows. index: session_pkey
update session set ended_at = clock_timestamp() where session_id = any(%(sessions)s) and ended_at is null;

-- name: raise_epoch
-- Every token given from now on is larger than any given before, also than those a restored backup has forgotten (I3).
update cluster set epoch = epoch + 1 returning epoch;

-- name: backend
-- Which process of Postgres serves this connection.
select pg_backend_pid();

-- name: prepared
-- Whether this process knows a statement by a name of ours (store/pipeline.py).
select exists (select from pg_prepared_statements where starts_with(name, 'fencepost_'));
