-- Schedules. Whoever changes one holds its row; whoever wants several locks them in the order of their uuids, or skips
-- what is locked. Nothing else is locked with them.

-- name: lock_due
-- Those that somebody should look at. locks: their rows, skipping. index: schedule_due
select * from (
    select uuid, namespace, schedule_id, spec, input, input_binary, input_metadata, version, update_request, paused,
           pause_reason, next_fire_at, starting_at, pending_at, due_at, last_fire_at, last_run_id, started_runs,
           skipped_overlap, skipped_missed, last_error, created_at
    from schedule
    where due_at <= (select clock_timestamp())
    order by due_at limit %(limit)s for no key update skip locked
) s;

-- name: running
-- The time, which of these runs have not ended, and what each is by now: one that has continued as new is the last of its chain. A
-- run that is gone has ended. index: run_pkey, run_chain
with live as materialized (
    select k.run_id, coalesce(l.run_id, r.run_id) as live_id
    from unnest(%(run_ids)s) k(run_id)
    cross join lateral (select * from run r where r.run_id = k.run_id offset 0) r
    left join lateral (
        select run_id, ended_at from run l where r.state = 12 and l.chain_id = coalesce(r.chain_id, r.run_id)
        order by l.created_at desc, l.run_id desc limit 1
    ) l on true
    where coalesce(l.ended_at, case when l.run_id is null then r.ended_at end) is null
)
select clock_timestamp(), array(select run_id from live order by run_id), array(select live_id from live order by run_id);

-- name: advance
-- The rows are locked. index: schedule_uuid
update schedule s
set next_fire_at = x.next_fire_at, starting_at = x.starting_at, pending_at = x.pending_at, last_fire_at = x.last_fire_at,
    skipped_overlap = x.skipped_overlap, skipped_missed = x.skipped_missed, due_at = x.due_at
from unnest(%(uuids)s, %(next_fire_ats)s, %(starting_ats)s, %(pending_ats)s, %(last_fire_ats)s, %(skipped_overlaps)s,
            %(skipped_misseds)s, %(due_ats)s)
     x(uuid, next_fire_at, starting_at, pending_at, last_fire_at, skipped_overlap, skipped_missed, due_at)
where s.uuid = any(%(uuids)s) and s.uuid = x.uuid;

-- name: park
-- The row is locked. index: schedule_uuid
update schedule set due_at = %(due_at)s, last_error = %(error)s where uuid = %(uuid)s;

-- name: first_due
-- In how many seconds. index: schedule_due
select extract(epoch from due_at - clock_timestamp())::float8 from schedule
where due_at is not null order by due_at limit 1;

-- name: settle
-- A fire time has its run, or has none for a reason; unless another server has written that down. The loop looks again at
-- once for what comes next. locks: the rows, by uuid. index: schedule_uuid
with settled as (
    select x.*
    from (
        select * from unnest(%(uuids)s, %(fire_ats)s, %(run_ids)s, %(errors)s) x(uuid, fire_at, run_id, error) order by uuid
    ) x
    cross join lateral (select from schedule s where s.uuid = x.uuid for no key update) s
)
update schedule s
set starting_at = null, due_at = clock_timestamp(), last_run_id = coalesce(x.run_id, s.last_run_id),
    started_runs = s.started_runs + (x.run_id is not null)::int, failed_starts = s.failed_starts + (x.run_id is null)::int,
    last_error = x.error
from settled x
where s.uuid = any(%(uuids)s) and s.uuid = x.uuid and s.starting_at = x.fire_at
returning s.uuid;

-- name: hurry
-- The run that they wait for has ended. locks: their rows, skipping: who holds one looks by itself. index: schedule_uuid
update schedule set due_at = clock_timestamp()
where uuid = any(array(
    select uuid from schedule where uuid = any(%(uuids)s) and pending_at is not null for no key update skip locked));

-- name: started
-- Runs were started at a call. locks: the row. index: schedule_uuid
update schedule set last_run_id = %(run_id)s, started_runs = started_runs + %(runs)s, last_error = ''
where uuid = %(uuid)s;

-- name: insert
insert into schedule (namespace, schedule_id, uuid, spec, input, input_binary, input_metadata, paused, next_fire_at, due_at,
                      created_at)
values (%(namespace)s, %(schedule_id)s, %(uuid)s, %(spec)s, %(input)s, %(input_binary)s, %(input_metadata)s, %(paused)s,
        %(next_fire_at)s, %(due_at)s, %(created_at)s)
on conflict on constraint schedule_pkey do nothing
returning uuid;

-- name: lock
-- locks: the row. index: schedule_pkey
select 1 from schedule where namespace = %(namespace)s and schedule_id = %(schedule_id)s for update;

-- name: get
-- index: schedule_pkey
select uuid, namespace, schedule_id, spec, input, input_binary, input_metadata, version, update_request, paused,
       pause_reason, next_fire_at, starting_at, pending_at, due_at, last_fire_at, last_run_id, started_runs,
       skipped_overlap, skipped_missed, last_error, created_at
from schedule where namespace = %(namespace)s and schedule_id = %(schedule_id)s;

-- name: list
-- Keyset by id; ends early after inputs of %(bytes)s bytes as they are stored. index: schedule_pkey
select uuid, namespace, schedule_id, spec, input, input_binary, input_metadata, version, update_request, paused,
       pause_reason, next_fire_at, starting_at, pending_at, due_at, last_fire_at, last_run_id, started_runs,
       skipped_overlap, skipped_missed, last_error, created_at
from (
    select *, sum(coalesce(pg_column_size(input), 0) + coalesce(pg_column_size(input_binary), 0))
              over (order by schedule_id rows between unbounded preceding and 1 preceding) as bytes_before
    from (
        select * from schedule where namespace = %(namespace)s and schedule_id > %(after)s
        order by schedule_id limit %(limit)s
    ) page
) s
where coalesce(bytes_before, 0) < %(bytes)s order by schedule_id;

-- name: change
-- What a call changes. The row is locked. index: schedule_uuid
update schedule
set spec = %(spec)s, input = %(input)s, input_binary = %(input_binary)s, input_metadata = %(input_metadata)s,
    version = %(version)s, update_request = %(update_request)s, paused = %(paused)s, pause_reason = %(pause_reason)s,
    next_fire_at = %(next_fire_at)s, starting_at = %(starting_at)s, pending_at = %(pending_at)s, due_at = %(due_at)s,
    skipped_overlap = %(skipped_overlap)s
where uuid = %(uuid)s;

-- name: delete
-- locks: the row. index: schedule_pkey
delete from schedule where namespace = %(namespace)s and schedule_id = %(schedule_id)s returning uuid;

-- name: runs_of
-- The runs of some fire times that were started in one way. Each key by itself: older planners read all keys of a kind where
-- statistics say that there are few. index: run_key_pkey
select k.key, r.run_id
from unnest(%(keys)s) k(key)
cross join lateral (
    select y.run_id from run_key y
    where y.namespace = %(namespace)s and y.kind = %(kind)s and y.workflow_id = '' and y.user_id = '' and y.key = k.key
      and y.fingerprint = %(origin)s offset 0
) r;
