"""Two servers over one database, asked the same as the oracle.

Each example has a namespace of its own on the same servers, and in it two workers, one at each server, that lease what
they are told to and report what they are told to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString, cast

import grpc
import psycopg

from fencepost.v1 import error_pb2, run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.raw_worker import RawWorker, seconds
from tests.fixtures.refusals import decode
from tests.properties.comparing import TIMERS, Rows, run_state
from tests.properties.oracle_model import Answer, Complete, Fail, Outcome
from tests.properties.workflows import Manifest, all_handlers

OUTCOMES = {
    pb.ITEM_OUTCOME_OK: "OK",
    pb.ITEM_OUTCOME_LEASE_LOST: "LEASE_LOST",
    pb.ITEM_OUTCOME_ALREADY_DONE: "ALREADY_DONE",
}
_ROWS: LiteralString = """
select r.run_id::text, r.next_seq,
       (select array[count(*), max(seq)] from event where run_id = r.run_id),
       (select json_agg(json_build_array(task_id, token, lease_session is not null)) from task where run_id = r.run_id),
       (select json_agg(json_build_array(of_seq, unfinished)) from undo where run_id = r.run_id),
       (select json_agg(json_build_array(seq, kind)) from timer where run_id = r.run_id and not parked),
       (select json_agg(json_build_array(seq, name)) from wait where run_id = r.run_id),
       (select json_agg(json_build_array(seq, name)) from signal where run_id = r.run_id)
from run r where r.run_id = any(%s::uuid[])
"""
_EXPIRE: LiteralString = "update task set lease_expires_at = clock_timestamp() where (run_id, task_id) = (%s::uuid, %s)"
_HASTEN: LiteralString = """
update timer set fire_at = clock_timestamp() where (run_id, seq, kind) = (%s::uuid, %s, %s)
"""
_FORGET: tuple[LiteralString, ...] = ("delete from task where namespace = %s", "delete from timer where namespace = %s")


def payload(data: Any) -> Payload:
    """A JSON value."""
    return Payload(json=json.dumps(data))


def ref(run_id: str, task_id: int, token: int) -> pb.TaskRef:
    """One lease."""
    return pb.TaskRef(run_id=run_id, task_id=task_id, fencing_token=token)


def frame_of(lease: pb.TaskRef, outcome: Outcome) -> Any:
    """The frame that reports one outcome."""
    if isinstance(outcome, Complete):
        return pb.Complete(items=[pb.CompleteItem(task=lease, output=payload(outcome.output))])
    if not isinstance(outcome, Fail):
        return pb.Release(items=[pb.ReleaseItem(task=lease)])
    kind = run_pb2.FailureKind.Value(f"FAILURE_KIND_{outcome.kind}")
    item = pb.FailItem(task=lease, failure=run_pb2.Failure(kind=kind, code=outcome.code, message="told to"))
    if outcome.feedback is not None:
        item.failure.feedback.CopyFrom(payload(outcome.feedback))
    if outcome.retry_after is not None:
        item.retry_after.CopyFrom(seconds(outcome.retry_after))
    if outcome.checkpoint is not None:
        number, state = outcome.checkpoint
        item.checkpoint.CopyFrom(pb.CheckpointItem(task=lease, number=number, state=payload(state)))
    return pb.Fail(items=[item])


class Real:
    """The servers, seen by callers and workers of one namespace."""

    def __init__(self, dsn: str, apis: Sequence[Api], addresses: Sequence[str], namespace: str) -> None:
        self.dsn = dsn
        self.apis = apis
        self.namespace = namespace
        self.addresses = addresses
        self.workers: list[RawWorker] = []
        self._histories: dict[str, list[run_pb2.Event]] = {}
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def open(self) -> None:
        """Connect the workers, and a look behind the servers' backs."""
        self._connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True, connect_timeout=30)
        for address in self.addresses:
            worker = RawWorker(address, handlers=all_handlers(), capacity=0, namespace=self.namespace)
            self.workers.append(worker)
            await worker.connect()

    async def close(self) -> None:
        """Disconnect, and leave nothing to do to the servers: they go on."""
        for worker in self.workers:
            await worker.close()
        if self._connection is not None:
            for statement in _FORGET:
                await self._connection.execute(statement, [self.namespace])
            await self._connection.close()

    # Callers

    async def register(self, server: int, manifest: Manifest) -> tuple[str, bool]:
        """OK and whether it is new, or the reason of the refusal."""
        try:
            response = await self.apis[server].register(json.dumps(manifest), namespace=self.namespace)
        except grpc.aio.AioRpcError as error:
            return _reason(error), False
        return "OK", response.created

    async def start(self, server: int, workflow_id: str, data: Any, fields: Mapping[str, Any]) -> Any:
        """The response of StartRun, or the refusal."""
        try:
            return await self.apis[server].start(workflow_id, json.dumps(data), namespace=self.namespace, **fields)
        except grpc.aio.AioRpcError as error:
            return decode(error)

    async def call(self, server: int, name: str, run_id: str, **fields: Any) -> Answer:
        """A call on one run, such as CancelRun: what it is answered with."""
        request = getattr(run_service_pb2, f"{name}Request")(namespace=self.namespace, run_id=run_id, **fields)
        try:
            response = await getattr(self.apis[server].runs, name)(request, timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            refusal = decode(error)
            return Answer(refusal.reason or str(refusal), refusal.metadata.get("state", ""))
        return Answer("OK", run_state(response.state), getattr(response, "seq", 0))

    # Workers

    async def report(self, worker: int, lease: pb.TaskRef, outcome: Outcome) -> Answer:
        """Report an outcome."""
        return (await self._items(worker, frame_of(lease, outcome), 1))[0]

    async def checkpoint(self, worker: int, lease: pb.TaskRef, number: int, state: Any) -> Answer:
        """Save a state of a step."""
        item = pb.CheckpointItem(task=lease, number=number, state=payload(state))
        return (await self._items(worker, pb.Checkpoint(items=[item]), 1))[0]

    async def _items(self, worker: int, content: Any, count: int) -> list[Answer]:
        frame_id = await self.workers[worker].send(content)
        return [_answer(result) for result in await self.workers[worker].results(frame_id, count)]

    async def heartbeat(self, worker: int, leases: Sequence[pb.TaskRef]) -> list[tuple[Answer, bool]]:
        """Renew leases: what became of each, and whether it should stop."""
        sender = self.workers[worker]
        frame_id = await sender.send(pb.Heartbeat(tasks=leases, last_tasks_number=sender.last_tasks_number))
        return [(_answer(result), result.cancel_wanted) for result in await sender.results(frame_id, len(leases))]

    async def capacity(self, worker: int, capacity: int) -> None:
        """How many tasks the worker takes from now on."""
        await self.workers[worker].capacity(capacity)

    async def arrived(self, worker: int) -> list[pb.Task]:
        """The tasks that have come to a worker."""
        receiver = self.workers[worker]
        tasks: list[pb.Task] = []
        while receiver.unread(pb.Tasks):
            tasks += (await receiver.next(pb.Tasks)).tasks
        return tasks

    async def revoked(self, worker: int) -> list[pb.TaskRef]:
        """The leases that a worker was told to be gone."""
        receiver = self.workers[worker]
        leases: list[pb.TaskRef] = []
        while receiver.unread(pb.Revoke):
            leases += (await receiver.next(pb.Revoke)).tasks
        while receiver.unread(cast(Any, pb.Cancel)):
            await receiver.next(cast(Any, pb.Cancel))
        return leases

    # Time

    async def expire(self, lease: pb.TaskRef) -> None:
        """Let a lease run out now."""
        await self._execute(_EXPIRE, [lease.run_id, lease.task_id])

    async def hasten(self, run_id: str, seq: int, kind: str) -> None:
        """Let a timer be due now."""
        await self._execute(_HASTEN, [run_id, seq, TIMERS[kind]])

    # Looks

    async def get(self, server: int, run_id: str) -> run_pb2.Run:
        """GetRun."""
        return await self.apis[server].get(run_id, namespace=self.namespace)

    async def history(self, server: int, run_id: str, last_seq: int) -> list[run_pb2.Event]:
        """The events of a run; read anew only if there are more."""
        known = self._histories.get(run_id, [])
        if len(known) < last_seq:
            fresh = await self.apis[server].history(run_id, namespace=self.namespace, page_size=1000)
            assert fresh[: len(known)] == known, f"history was rewritten: {known} to {fresh}"
            self._histories[run_id] = known = fresh
        return known

    async def rows(self, run_ids: Sequence[str]) -> dict[str, Rows]:
        """The rows of runs."""
        assert self._connection is not None
        cursor = await self._connection.execute(_ROWS, [list(run_ids)])
        return {row[0]: _rows(*row[1:]) for row in await cursor.fetchall()}

    async def _execute(self, statement: LiteralString, params: Sequence[Any]) -> None:
        assert self._connection is not None
        await self._connection.execute(statement, params)


def _rows(next_seq: int, seqs: Any, tasks: Any, undo: Any, timers: Any, waits: Any, signals: Any) -> Rows:
    return Rows(
        next_seq,
        (seqs[0], seqs[1]),
        {task_id: (token, leased) for task_id, token, leased in tasks or []},
        [(of_seq, unfinished) for of_seq, unfinished in undo or []],
        {(seq, kind) for seq, kind in timers or []},
        {(seq, name) for seq, name in waits or []},
        {(seq, name) for seq, name in signals or []},
    )


def _reason(error: grpc.aio.AioRpcError) -> str:
    refusal = decode(error)
    return refusal.reason or str(refusal)


def _answer(result: pb.ItemResult) -> Answer:
    if result.outcome in OUTCOMES:
        return Answer(OUTCOMES[result.outcome])
    return Answer(error_pb2.ErrorReason.Name(result.reason).removeprefix("ERROR_REASON_"))
