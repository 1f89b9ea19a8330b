-- Definitions, which of them is active, and which were removed.

-- name: lock_children
-- Registrations and activations that bring child nodes go one by one in a namespace: two at once could make a cycle that neither
-- of them sees. locks: an advisory lock of the namespace, before any row.
select pg_advisory_xact_lock(1718903667, hashtext(%(namespace)s));

-- name: wait_longer
-- Starts hold a deployment in turn, several at a time: whoever wants it for itself may have to wait for many of them, and nobody
-- waits behind it. The time limit of a statement is the limit then. No locks.
select set_config('lock_timeout', '0', true);

-- name: lock_deployment
-- locks: the deployment row (update): starts of the workflow wait. index: deployment_pkey
select active_hash from deployment where namespace = %(namespace)s and workflow_id = %(workflow_id)s for update;

-- name: insert_deployment
insert into deployment (namespace, workflow_id, active_hash) values (%(namespace)s, %(workflow_id)s, %(hash)s)
on conflict on constraint deployment_pkey do nothing;

-- name: activate
-- The deployment is locked. index: deployment_pkey
update deployment set active_hash = %(hash)s where namespace = %(namespace)s and workflow_id = %(workflow_id)s;

-- name: same_compatibility
-- index: definition_compatibility_id
select hash, manifest, removed_at is not null from definition
where namespace = %(namespace)s and workflow_id = %(workflow_id)s and compatibility_id = %(compatibility_id)s;

-- name: insert
insert into definition (namespace, workflow_id, hash, compatibility_id, manifest)
values (%(namespace)s, %(workflow_id)s, %(hash)s, %(compatibility_id)s, %(manifest)s)
on conflict on constraint definition_pkey do nothing;

-- name: remove
-- The deployment is locked, so every start that saw the definition has committed: its run is in the snapshot of whoever looks for
-- runs after this. The first time of a removal stays. index: definition_pkey
update definition set removed_at = clock_timestamp()
where namespace = %(namespace)s and workflow_id = %(workflow_id)s and hash = %(hash)s and removed_at is null;

-- name: refuse_starts
-- What starts read under their lock of the deployment, which is held here for update. index: deployment_pkey
update deployment set removed = array_append(removed, %(hash)s)
where namespace = %(namespace)s and workflow_id = %(workflow_id)s and not %(hash)s = any(removed);

-- name: get
-- index: definition_pkey
select d.workflow_id, d.hash, d.compatibility_id, d.hash = a.active_hash, d.manifest, d.created_at, d.removed_at
from definition d join deployment a using (namespace, workflow_id)
where d.namespace = %(namespace)s and d.workflow_id = %(workflow_id)s and d.hash = coalesce(%(hash)s, a.active_hash);

-- name: deployed
-- index: deployment_pkey
select 1 from deployment where namespace = %(namespace)s and workflow_id = %(workflow_id)s;

-- name: list
-- Keyset by (workflow_id, created_at descending, hash). index: definition_pkey or definition_compatibility_id, then deployment_pkey
select d.workflow_id, d.hash, d.compatibility_id, d.hash = a.active_hash, '', d.created_at, d.removed_at
from (
    select * from definition
    where namespace = %(namespace)s and (%(workflow_id)s = '' or workflow_id = %(workflow_id)s)
      and workflow_id >= %(after_workflow)s
      and (workflow_id > %(after_workflow)s or (created_at, hash) < (%(before_at)s, %(before_hash)s))
    order by workflow_id, created_at desc, hash desc limit %(limit)s
) d
cross join lateral (
    select active_hash from deployment a where a.namespace = d.namespace and a.workflow_id = d.workflow_id offset 0
) a
order by d.workflow_id, d.created_at desc, d.hash desc;

-- name: read_for_starts
-- The definitions that starts ask for: by hash, in the namespace. index: definition_pkey
select d.namespace, d.workflow_id, d.hash, d.manifest
from unnest(%(namespaces)s, %(workflow_ids)s, %(hashes)s) k(namespace, workflow_id, hash)
cross join lateral (
    select * from definition d
    where d.namespace = k.namespace and d.workflow_id = k.workflow_id and d.hash = k.hash offset 0
) d;

-- name: active_parents
-- The active manifests of workflows, of those alone that have the text %(mark)s: all others have no child nodes. A removed one
-- starts no runs, and so no children. index: deployment_pkey, definition_pkey
select k.workflow_id, a.manifest
from unnest(%(workflow_ids)s) k(workflow_id)
cross join lateral (
    select d.manifest from deployment p
    join definition d on d.namespace = p.namespace and d.workflow_id = p.workflow_id and d.hash = p.active_hash
    where p.namespace = %(namespace)s and p.workflow_id = k.workflow_id and d.removed_at is null
      and position(%(mark)s in d.manifest) > 0
    offset 0
) a;

-- name: removals
-- Removed definitions, a page in the order of the key. Reads every deployment past the page's beginning, which is a small row.
-- index: deployment_pkey; definition_pkey or definition_hash
select d.namespace, d.workflow_id, d.hash, d.created_at, d.removed_at
from deployment a
cross join lateral unnest(a.removed) r(hash)
cross join lateral (
    select * from definition d
    where d.namespace = a.namespace and d.workflow_id = a.workflow_id and d.hash = r.hash offset 0
) d
where a.removed <> '{}' and (a.namespace, a.workflow_id) >= (%(after_namespace)s, %(after_workflow)s)
  and (a.namespace, a.workflow_id, r.hash) > (%(after_namespace)s, %(after_workflow)s, %(after_hash)s)
order by a.namespace, a.workflow_id, r.hash limit %(limit)s;

-- name: live_runs
-- Runs of a definition that have not ended, the oldest first; reads at most %(scan)s rows of its workflow. The last row read is
-- returned even if it does not fit, marked, so that the next page goes on from it. No lock: whoever acts on a run looks again.
-- index: run_list_workflow
with page as (
    select run_id, created_at, ended_at is null and definition_hash = %(hash)s as live from run
    where namespace = %(namespace)s and workflow_id = %(workflow_id)s
      and (created_at, run_id) > (%(after_at)s, %(after_run)s) and (created_at, run_id) <= (%(until_at)s, %(until_run)s)
    order by created_at, run_id limit %(scan)s
), numbered as (
    select *, row_number() over (order by created_at, run_id) as n, count(*) over () as total from page
)
select run_id, created_at, live, total from numbered where live or n = total order by n limit %(limit)s;

-- name: count_live_runs
-- How many of the next %(scan)s runs of a workflow are of a definition and have not ended; how many were read, and the last one.
-- index: run_list_workflow
with page as (
    select run_id, created_at, ended_at is null and definition_hash = %(hash)s as live from run
    where namespace = %(namespace)s and workflow_id = %(workflow_id)s
      and (created_at, run_id) > (%(after_at)s, %(after_run)s) and (created_at, run_id) <= (%(until_at)s, %(until_run)s)
    order by created_at, run_id limit %(scan)s
)
select n.live, n.total, l.created_at, l.run_id
from (select (count(*) filter (where live))::int as live, count(*)::int as total from page) n
cross join lateral (select created_at, run_id from page order by created_at desc, run_id desc limit 1) l;
