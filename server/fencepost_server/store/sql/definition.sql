-- Definitions and which of them is active.

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
select hash, manifest from definition
where namespace = %(namespace)s and workflow_id = %(workflow_id)s and compatibility_id = %(compatibility_id)s;

-- name: insert
insert into definition (namespace, workflow_id, hash, compatibility_id, manifest)
values (%(namespace)s, %(workflow_id)s, %(hash)s, %(compatibility_id)s, %(manifest)s)
on conflict on constraint definition_pkey do nothing;

-- name: get
-- index: definition_pkey
select d.workflow_id, d.hash, d.compatibility_id, d.hash = a.active_hash, d.manifest, d.created_at
from definition d join deployment a using (namespace, workflow_id)
where d.namespace = %(namespace)s and d.workflow_id = %(workflow_id)s and d.hash = coalesce(%(hash)s, a.active_hash);

-- name: deployed
-- index: deployment_pkey
select 1 from deployment where namespace = %(namespace)s and workflow_id = %(workflow_id)s;

-- name: list
-- Keyset by (workflow_id, created_at descending, hash). index: definition_pkey
select d.workflow_id, d.hash, d.compatibility_id, d.hash = a.active_hash, d.created_at
from definition d join deployment a using (namespace, workflow_id)
where d.namespace = %(namespace)s and (%(workflow_id)s = '' or d.workflow_id = %(workflow_id)s)
  and (d.workflow_id > %(after_workflow)s
       or (d.workflow_id = %(after_workflow)s and (d.created_at, d.hash) < (%(before_at)s, %(before_hash)s)))
order by d.workflow_id, d.created_at desc, d.hash desc limit %(limit)s;

-- name: read_for_starts
-- The definitions that starts ask for: by hash, in the namespace. index: definition_pkey
select d.namespace, d.workflow_id, d.hash, d.manifest
from unnest(%(namespaces)s, %(workflow_ids)s, %(hashes)s) k(namespace, workflow_id, hash)
join definition d using (namespace, workflow_id, hash);
