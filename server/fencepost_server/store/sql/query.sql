-- Questions to code runs on their way between servers, and which workers have the code of a run. A question is a row from when it is
-- asked at a server that has no worker for it until its answer is fetched, or until it is forgotten (cluster.sql).

-- name: worker_connected
-- Has a worker that is connected to a server that lives the code? With %(queue)s, does it also look there? The worker has said so at
-- its Hello. index: session_deciding
select exists (
    select from session s join server v on v.server_id = s.server_id
    where s.namespace = %(namespace)s and s.ended_at is null and s.workflows <> '{}' and s.workflows @> array[%(handler)s::text]
      and v.seen_at > clock_timestamp() - %(server_timeout)s
      and (%(queue)s::text = '' or exists (
          select from unnest(s.workflows, s.workflow_queues) w(handler, queue)
          where w.handler = %(handler)s and w.queue = %(queue)s))
);

-- name: post
insert into query (query_id, namespace, handler, run_id, name, input, input_binary, input_metadata, asked_by, expires_at)
values (%(query_id)s, %(namespace)s, %(handler)s, %(run_id)s, %(name)s, %(json)s, %(binary)s, %(metadata)s, %(server)s,
        clock_timestamp() + %(timeout)s);

-- name: take
-- Questions that workers of this server can answer, also its own: a worker may have come meanwhile.
-- locks: their rows, skipping those that another server takes. index: query_open
update query set taken_by = %(server)s
where query_id = any(array(
    select q.query_id
    from query q join unnest(%(namespaces)s, %(handlers)s) w(namespace, handler)
      on q.namespace = w.namespace and q.handler = w.handler
    where q.taken_by is null and q.expires_at > clock_timestamp()
    limit 100 for update of q skip locked))
returning query_id, namespace, run_id, name, input, input_binary, input_metadata,
          extract(epoch from expires_at - clock_timestamp())::float8;

-- name: answer
-- locks: its row. index: query_pkey
update query set answered = true, output = %(json)s, output_binary = %(binary)s, output_metadata = %(metadata)s,
                 failure = %(failure)s
where query_id = %(query_id)s and taken_by = %(server)s;

-- name: give_back
-- The worker that was asked has gone: any other may answer. locks: its row. index: query_pkey
update query set taken_by = null where query_id = %(query_id)s and taken_by = %(server)s and not answered;

-- name: fetch
-- Answers for callers of this server. locks: their rows. index: query_answered
delete from query where asked_by = %(server)s and answered
returning query_id, output, output_binary, output_metadata, failure;

-- name: withdraw
-- Nobody waits any more. locks: its row. index: query_pkey
delete from query where query_id = %(query_id)s;
