-- Reads for people and clients. No locks.

-- name: get_run
-- index: run_pkey
select r.run_id, r.namespace, r.workflow_id, r.definition_hash, r.state, r.user_id, r.request_key, r.priority, r.failure,
       r.created_at, r.ended_at, r.next_seq - 1, r.dedupe_key, r.attributes, r.parent_run_id, r.control
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

-- name: in_order
-- For a transaction that reads a range of an index in its order up to a limit: with statistics that are older than the rows, it can
-- look cheaper to gather the whole range in a bitmap and to sort it.
select set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true);

-- name: list_runs
-- Keyset by (created_at, run_id), newest first. Which branch of candidates runs is %(lead)s: 0 all of the namespace, 1 a workflow's,
-- 2 a user's, 3 a run's children, 4 those with one attribute; each is one range of its index. Of them at most %(scan)s are looked at,
-- however few fit, and no more than it takes to find %(limit)s: page is read as far as hits asks for. The last candidate comes marked,
-- with how many there were, if there were too few hits, so that the next page goes on from it.
-- index: run_list, run_list_workflow, run_list_user, run_list_parent, run_attribute_list; then run_pkey, run_attribute_pkey
with candidates as (
    (select run_id, created_at from run
     where %(lead)s::int = 0 and namespace = %(namespace)s
       and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
     order by created_at desc, run_id desc limit %(scan)s)
    union all
    (select run_id, created_at from run
     where %(lead)s::int = 1 and namespace = %(namespace)s and workflow_id = %(workflow_id)s
       and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
     order by created_at desc, run_id desc limit %(scan)s)
    union all
    (select run_id, created_at from run
     where %(lead)s::int = 2 and namespace = %(namespace)s and user_id = %(user_id)s and user_id <> ''
       and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
     order by created_at desc, run_id desc limit %(scan)s)
    union all
    (select run_id, created_at from run
     where %(lead)s::int = 3 and parent_run_id = %(parent_run_id)s and namespace = %(namespace)s
       and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
     order by created_at desc, run_id desc limit %(scan)s)
    union all
    (select run_id, created_at from run_attribute
     where %(lead)s::int = 4 and namespace = %(namespace)s and key = %(key)s and value = %(value)s
       and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
     order by created_at desc, run_id desc limit %(scan)s)
), page as materialized (
    select c.run_id, c.created_at, r.fits
    from candidates c cross join lateral (
        select (cardinality(%(states)s) = 0 or r.state = any(%(states)s))
               and (%(workflow_id)s = '' or r.workflow_id = %(workflow_id)s)
               and (%(user_id)s = '' or r.user_id = %(user_id)s)
               and (%(parent_run_id)s::uuid is null or r.parent_run_id = %(parent_run_id)s)
               -- A failure is compared as the text that it is stored as: no JSON function takes a code or message with \u0000.
               and (cardinality(%(failures)s) = 0
                    or exists (select from unnest(%(failures)s) f(start) where starts_with(r.failure::text, f.start)))
               and (cardinality(%(keys)s) = 0
                    or (select count(*) from unnest(%(keys)s, %(values)s) a(key, value)
                        cross join lateral (
                            select from run_attribute x
                            where x.run_id = r.run_id and x.key = a.key and x.value = a.value offset 0
                        ) x) = cardinality(%(keys)s)) as fits
        from run r where r.run_id = c.run_id offset 0
    ) r
    order by c.created_at desc, c.run_id desc
), hits as materialized (
    select run_id from page where fits limit %(limit)s
), told as (
    select run_id, true as fits, 0 as scanned from hits
    union all
    select run_id, false, (select count(*) from page)
    from (select run_id from page order by created_at, run_id limit 1) last
    where (select count(*) from hits) < %(limit)s
)
select r.run_id, r.namespace, r.workflow_id, r.definition_hash, r.state, r.user_id, r.request_key, r.priority, r.failure,
       r.created_at, r.ended_at, r.next_seq - 1, r.dedupe_key, r.attributes, r.parent_run_id, r.control, t.fits, t.scanned
from told t cross join lateral (select * from run r where r.run_id = t.run_id offset 0) r
order by t.fits desc, r.created_at desc, r.run_id desc;

-- name: count_candidates
-- How many runs each of several filters would leave, counted up to %(most)s: a list goes through the fewest. The first column is the
-- lead as in list_runs, the second which of the attributes. index: run_list_workflow, run_list_user, run_attribute_list
select 1 as lead, 0 as ord, (
    select count(*) from (
        select from run
        where namespace = %(namespace)s and workflow_id = %(workflow_id)s
          and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
        order by created_at desc, run_id desc limit %(most)s) x)
where %(workflow_id)s <> ''
union all
select 2, 0, (
    select count(*) from (
        select from run
        where namespace = %(namespace)s and user_id = %(user_id)s and user_id <> ''
          and created_at >= %(created_after)s and (created_at, run_id) < (%(before_at)s, %(before_run)s)
        order by created_at desc, run_id desc limit %(most)s) x)
where %(user_id)s <> ''
union all
select 4, a.ord::int, x.n
from unnest(%(keys)s, %(values)s) with ordinality a(key, value, ord)
cross join lateral (
    select count(*) as n from (
        select from run_attribute x
        where x.namespace = %(namespace)s and x.key = a.key and x.value = a.value
          and x.created_at >= %(created_after)s and (x.created_at, x.run_id) < (%(before_at)s, %(before_run)s)
        order by x.created_at desc, x.run_id desc limit %(most)s) y
) x;

-- name: latest
-- Who goes on with the work of a run that has continued as new. index: run_pkey, run_chain
select l.run_id
from (select coalesce((select chain_id from run where run_id = %(run_id)s), %(run_id)s::uuid) as chain_id) c
cross join lateral (
    select run_id, namespace from run l where l.chain_id = c.chain_id order by l.created_at desc, l.run_id desc limit 1
) l
where l.namespace = %(namespace)s;

-- name: progress
-- How far runs are that somebody waits for or watches, in one statement for all of them. index: run_pkey
select run_id, next_seq - 1, ended_at is not null from run where run_id = any(%(run_ids)s);

-- name: workflows
-- index: run_pkey
select run_id, workflow_id from run where run_id = any(%(run_ids)s);

-- name: history
-- index: event_pkey
select seq, type, at, node_index, task_id, token, attempt, input_seq, payload, payload_binary, payload_metadata, detail
from event where run_id = %(run_id)s and seq > %(after)s order by seq limit %(limit)s;
