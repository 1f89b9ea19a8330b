"""Leases and the server's frames, built for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from fencepost.codec import NULL, Value
from fencepost.failure import Completed
from fencepost.identity import Identity
from fencepost.lease import Lease, Owner, TaskKind, clock
from fencepost.ledger import Counters
from fencepost.session import Session
from fencepost.steps import Step, step, undo
from fencepost.v1 import error_pb2
from fencepost.v1 import worker_service_pb2 as pb

RUN = "00000000-0000-7000-8000-00000000000"
OK = pb.ITEM_OUTCOME_OK
LEASE_LOST = pb.ITEM_OUTCOME_LEASE_LOST
ALREADY_DONE = pb.ITEM_OUTCOME_ALREADY_DONE
REFUSED = pb.ITEM_OUTCOME_REFUSED


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@step("s")
def plain(x: Any) -> Any:
    return x


@undo("u")
def undoing(x: Any, y: Any) -> None: ...


def lease_of(
    handler: Step[..., Any] = plain,
    *,
    owner: Owner | None = None,
    run: int = 1,
    token: int = 1,
    input: Value = NULL,
    max_payload_bytes: int = 1 << 20,
    kind: TaskKind = TaskKind.STEP,
    undo_output: Value | None = None,
    unfinished: bool = False,
) -> Lease:
    handler.prepare()
    return Lease(
        owner=owner,
        step=handler,
        run_id=f"{RUN}{run}",
        task_id=2,
        token=token,
        workflow_id="w",
        definition_hash="h",
        node_id="n",
        attempt=1,
        expires_at=clock() + 60,
        lease_seconds=60.0,
        deadline=0.0,
        input=input,
        failure_before=None,
        idempotency_key=f"k{run}",
        user_id="",
        max_payload_bytes=max_payload_bytes,
        kind=kind,
        undo_output=undo_output,
        unfinished=unfinished,
    )


def session_of(*, capacity: int = 10, cancel_after_lease: float | None = None) -> Session:
    identity = Identity(
        namespace="default",
        worker_name="test",
        process_nonce="0123456789abcdef",
        sdk_version="0",
        steps={plain.name: plain, undoing.name: undoing},
        labels={"zone": "a"},
        max_frame_bytes=3 << 20,
    )
    return Session(identity, Counters(), capacity=capacity, cancel_after_lease=cancel_after_lease)


def ref(run: int = 1, token: int = 1) -> pb.TaskRef:
    return pb.TaskRef(run_id=f"{RUN}{run}", task_id=2, fencing_token=token)


def welcome(
    held: Iterable[pb.HeldResult] = (), *, max_items: int = 100, max_bytes: int = 3 << 20, session: str = "a"
) -> pb.SessionResponse:
    frame = pb.SessionResponse()
    frame.welcome.session_id = session
    frame.welcome.heartbeat_interval.seconds = 20
    frame.welcome.ping_interval.seconds = 5
    frame.welcome.disconnect_grace.seconds = 10
    frame.welcome.max_payload_bytes = 1 << 20
    frame.welcome.max_frame_bytes = max_bytes
    frame.welcome.max_frame_items = max_items
    frame.welcome.held.extend(held)
    return frame


def kept(run: int, seconds: int = 60) -> pb.HeldResult:
    result = pb.HeldResult(task=ref(run), kept=True)
    result.lease_duration.seconds = seconds
    return result


def lost(run: int) -> pb.HeldResult:
    return pb.HeldResult(task=ref(run), kept=False)


def task(
    run: int = 1, token: int = 1, *, lease: float = 60, timeout: float | None = None, handler: str = "s", **fields: Any
) -> pb.Task:
    made = pb.Task(
        **{
            "task": ref(run, token),
            "kind": pb.TASK_KIND_STEP,
            "handler": handler,
            "node_id": "n",
            "attempt": 1,
            **fields,
        }
    )
    made.input.json = '{"x":1}'
    made.lease_duration.FromNanoseconds(int(lease * 1e9))
    if timeout is not None:
        made.attempt_timeout.FromNanoseconds(int(timeout * 1e9))
    return made


def tasks(*made: pb.Task, number: int = 1, last_frame_id: int = 1) -> pb.SessionResponse:
    frame = pb.SessionResponse()
    frame.tasks.tasks_number = number
    frame.tasks.last_frame_id = last_frame_id
    frame.tasks.tasks.extend(made)
    return frame


def ack(
    frame_id: int,
    outcomes: dict[int, pb.ItemOutcome.ValueType] | None = None,
    *,
    reason: str = "",
    message: str = "",
    lease: float = 0,
) -> pb.SessionResponse:
    """An Ack of some items of a frame, by their index."""
    frame = pb.SessionResponse()
    frame.ack.frame_id = frame_id
    for index, outcome in (outcomes or {}).items():
        result = frame.ack.results.add(index=index, outcome=outcome, message=message)
        if reason:
            result.reason = error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
        if lease:
            result.lease_duration.FromNanoseconds(int(lease * 1e9))
    return frame


def refusal(frame_id: int, reason: str, message: str = "no") -> pb.SessionResponse:
    """An Ack that refuses a whole frame."""
    frame = pb.SessionResponse()
    frame.ack.frame_id = frame_id
    frame.ack.error.reason = error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    frame.ack.error.message = message
    return frame


DONE = Completed(Value(json="1"), 1)


def opened(
    session: Session | None = None, *, now: float = 0.0, max_items: int = 100, max_bytes: int = 3 << 20
) -> Session:
    """A session whose first stream has been welcomed; its Hello was sent at ``now``."""
    session = session or session_of()
    session.begin(now)
    assert frames(session, now)[0].WhichOneof("frame") == "hello"
    assert not session.receive(welcome(max_items=max_items, max_bytes=max_bytes), now).rebuild
    return session


def frames(session: Session, now: float = 0.0) -> list[pb.SessionRequest]:
    """All that it wants to write."""
    said = []
    while (frame := session.next_frame(now)) is not None:
        said.append(frame)
    return said


def only(session: Session, now: float = 0.0) -> pb.SessionRequest:
    said = frames(session, now)
    assert len(said) == 1, said
    return said[0]


def given(session: Session, *made: pb.Task, now: float = 0.0, **frame: int) -> list[Lease]:
    return session.receive(tasks(*made, **frame), now).start
