-- Ended runs and their rows, deleted in bounded batches.
--
-- A run that has more events than one transaction deletes is hidden first: it leaves its namespace for '', which no caller can name,
-- so that nobody sees half of it; there it is found again by whoever goes on, also after a crash.

-- name: definitions
-- Every definition, in pages. index: definition_pkey
select namespace, workflow_id, hash from definition
where (namespace, workflow_id, hash) > (%(namespace)s, %(workflow_id)s, %(hash)s)
order by namespace, workflow_id, hash limit %(limit)s;

-- name: old
-- Which of these workflows have a run after a place that is older than they keep runs, in one lookup each.
-- index: run_list_workflow
select w.ord::int
from unnest(%(namespaces)s, %(workflow_ids)s, %(keeps)s::float8[], %(after_ats)s, %(after_runs)s)
     with ordinality w(namespace, workflow_id, keep, after_at, after_run, ord)
cross join lateral (
    select from run r
    where r.namespace = w.namespace and r.workflow_id = w.workflow_id
      and r.created_at < (select clock_timestamp()) - w.keep * interval '1 second'
      and (r.created_at, r.run_id) > (w.after_at, w.after_run)
    order by r.created_at, r.run_id limit 1
) r;

-- name: page
-- A workflow's runs that are older than it keeps any, oldest first: a run that ended so long ago was created before. Decides
-- nothing: what is deleted is looked at again under its lock. Last, how many seconds ago it ended; null: it has not.
-- index: run_list_workflow
select run_id, created_at, definition_hash, next_seq - 1,
       extract(epoch from (select clock_timestamp()) - ended_at)::float8
from run
where namespace = %(namespace)s and workflow_id = %(workflow_id)s
  and created_at < (select clock_timestamp()) - %(keep)s::float8 * interval '1 second'
  and (created_at, run_id) > (%(after_at)s, %(after_run)s)
order by created_at, run_id limit %(limit)s;

-- name: lock
-- locks: run rows, by id; those that another transaction holds are left for another time, and hidden ones for lock_hidden.
-- index: run_pkey
select run_id, definition_hash, extract(epoch from clock_timestamp() - ended_at)::float8
from run where run_id = any(%(run_ids)s) and ended_at is not null and namespace <> ''
order by run_id for update skip locked;

-- name: needed
-- Which of these locked runs somebody still needs: a FAILED one is retried for a parent that has not ended, and a parent is told of an
-- end by a message; one that has continued has what is undone later in its chain, and the first of a chain is what calls know, with the
-- memory of them and the input that a dedupe key stands for: it stays as long as any other of them. A statement of its own after lock: what it sees of other rows is as new.
-- index: run_pkey, message_once, undo_origin, run_chain
select r.run_id
from unnest(%(run_ids)s) k(run_id)
cross join lateral (
    select * from run r where r.run_id = k.run_id and (r.parent_run_id is not null or r.state = 12) offset 0
) r
where r.state = 4 and exists (select from run p where p.run_id = r.parent_run_id and p.ended_at is null)
   or r.parent_run_id is not null
      and exists (select from message m where m.target_run = r.parent_run_id and m.kind = 4 and m.source_run = r.run_id)
   or r.state = 12 and exists (select from undo u where u.origin = r.run_id)
   or r.state = 12 and r.chain_id is null and (select true from run l where l.chain_id = r.run_id limit 1);

-- name: remember
-- Their request keys stand for them for a while longer. locks: run_key rows, skipping; what is skipped here is found by outlived.
-- index: run_pkey, run_key_pkey
update run_key set expires_at = clock_timestamp() + %(memory)s
where ctid = any(array(
    select y.ctid
    from unnest(%(run_ids)s) k(run_id)
    cross join lateral (select * from run r where r.run_id = k.run_id and r.request_key <> '' offset 0) r
    cross join lateral (
        select y.ctid from run_key y
        where y.namespace = r.namespace and y.kind = 1 and y.workflow_id = r.workflow_id and y.user_id = r.user_id
          and y.key = r.request_key and y.run_id = r.run_id and y.expires_at is null
        for update skip locked
    ) y));

-- name: hide
-- The runs are locked. With their labels, so that no list finds them. index: run_pkey, run_attribute_pkey
with labels as (
    delete from run_attribute where run_id = any(%(run_ids)s)
)
update run set namespace = '' where run_id = any(%(run_ids)s);

-- name: delete
-- All rows of runs that are locked and small. Nobody else locks rows of an ended run, but under the lock of the run.
-- index: run_pkey, and of the others the primary keys, which begin with the run
with events as (delete from event where run_id = any(%(run_ids)s)),
     labels as (delete from run_attribute where run_id = any(%(run_ids)s)),
     requests as (delete from request where run_id = any(%(run_ids)s)),
     tasks as (delete from task where run_id = any(%(run_ids)s)),
     stopped as (delete from stopped_task where run_id = any(%(run_ids)s)),
     checkpoints as (delete from checkpoint where run_id = any(%(run_ids)s)),
     scopes as (delete from scope where run_id = any(%(run_ids)s)),
     outputs as (delete from output where run_id = any(%(run_ids)s)),
     waits as (delete from wait where run_id = any(%(run_ids)s)),
     signals as (delete from signal where run_id = any(%(run_ids)s)),
     timers as (delete from timer where run_id = any(%(run_ids)s)),
     children as (delete from child where run_id = any(%(run_ids)s)),
     undos as (delete from undo where run_id = any(%(run_ids)s))
delete from run where run_id = any(%(run_ids)s);

-- name: lock_hidden
-- locks: one hidden run, whichever nobody holds, but of those that can't be deleted. index: run_list
select run_id from run where namespace = '' and run_id <> all(%(left)s) order by created_at desc, run_id desc limit 1 for update skip locked;

-- name: delete_slice
-- Up to %(limit)s rows of each table of a hidden run, which is locked; the newest events first, so that whoever was reading when it
-- was hidden sees no hole. Returns how many in the table with the most. index: the primary keys, which begin with the run
with events as (
    delete from event where ctid = any(array(
        select ctid from event where run_id = %(run_id)s order by seq desc limit %(limit)s)) returning 1
), requests as (
    delete from request where ctid = any(array(
        select ctid from request where run_id = %(run_id)s limit %(limit)s)) returning 1
), tasks as (
    delete from task where ctid = any(array(
        select ctid from task where run_id = %(run_id)s limit %(limit)s)) returning 1
), stopped as (
    delete from stopped_task where ctid = any(array(
        select ctid from stopped_task where run_id = %(run_id)s limit %(limit)s)) returning 1
), checkpoints as (
    delete from checkpoint where ctid = any(array(
        select ctid from checkpoint where run_id = %(run_id)s limit %(limit)s)) returning 1
), scopes as (
    delete from scope where ctid = any(array(
        select ctid from scope where run_id = %(run_id)s limit %(limit)s)) returning 1
), outputs as (
    delete from output where ctid = any(array(
        select ctid from output where run_id = %(run_id)s limit %(limit)s)) returning 1
), waits as (
    delete from wait where ctid = any(array(
        select ctid from wait where run_id = %(run_id)s limit %(limit)s)) returning 1
), signals as (
    delete from signal where ctid = any(array(
        select ctid from signal where run_id = %(run_id)s limit %(limit)s)) returning 1
), timers as (
    delete from timer where ctid = any(array(
        select ctid from timer where run_id = %(run_id)s limit %(limit)s)) returning 1
), children as (
    delete from child where ctid = any(array(
        select ctid from child where run_id = %(run_id)s limit %(limit)s)) returning 1
), undos as (
    delete from undo where ctid = any(array(
        select ctid from undo where run_id = %(run_id)s limit %(limit)s)) returning 1
)
select greatest(
    (select count(*) from events), (select count(*) from requests), (select count(*) from tasks),
    (select count(*) from stopped), (select count(*) from checkpoints), (select count(*) from scopes),
    (select count(*) from outputs), (select count(*) from waits), (select count(*) from signals),
    (select count(*) from timers), (select count(*) from children), (select count(*) from undos))::int;

-- name: outlived
-- The next keys in order: those that were to live as long as their run, and have outlived it, get their time. Such are keys bound to a
-- run that was started with another one, and keys of schedules. Returns the last key looked at. locks: run_key rows, skipping.
-- index: run_key_pkey, run_pkey
with page as materialized (
    select namespace, kind, workflow_id, user_id, key, run_id, expires_at, ctid as place from run_key
    where (namespace, kind, workflow_id, user_id, key)
          > (%(namespace)s, %(kind)s, %(workflow_id)s, %(user_id)s, %(key)s)
    order by namespace, kind, workflow_id, user_id, key limit %(limit)s
), timed as (
    update run_key set expires_at = clock_timestamp() + %(memory)s
    where ctid = any(array(
        select y.ctid
        from page p
        cross join lateral (
            select ctid from run_key y
            where y.ctid = p.place and y.run_id = p.run_id and y.expires_at is null for update skip locked
        ) y
        where p.expires_at is null
          -- Asked for each key: a join may be planned as a look at all runs.
          and (select r.run_id from run r where r.run_id = p.run_id and r.namespace <> '') is null))
)
select namespace, kind, workflow_id, user_id, key, count(*) over ()::int from page
order by namespace desc, kind desc, workflow_id desc, user_id desc, key desc limit 1;

-- name: forget_keys
-- Keys past their time. locks: run_key rows, skipping. index: run_key_expiry
delete from run_key where ctid = any(array(
    select ctid from run_key where expires_at < (select clock_timestamp())
    order by expires_at limit %(limit)s for update skip locked))
returning 1;
