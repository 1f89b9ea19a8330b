"""Every state of a run × every event, on a real server, from the one table of domain.transitions.

A run has everything at once: steps that are leased, a sleep, a wait for a signal, a child that is at work, a timeout.
It is brought into a state, the event happens, and what became of it is compared with the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as definition_pb
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.model import RunState
from fencepost_server.domain.transitions import RunEvent, Verdict, verdict
from tests.engine.flows import ONCE, TIMERS, OpenScene, Scene, state_of, step, workflow
from tests.engine.rows import count, execute
from tests.fixtures.api import DEADLINE, kinds
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, seconds
from tests.fixtures.refusals import decode
from tests.fixtures.waiting import eventually

S, E, V = RunState, RunEvent, Verdict
NOW = {"nanos": 0}
NODES = [
    {
        "id": "all",
        "parallel": [
            [step("a", undo={"retry": ONCE})],
            [step("b"), step("e")],
            [step("d", retry=ONCE)],
            [{"id": "nap", "sleep": "1h"}],
            [{"id": "sub", "workflow": "child"}, step("f")],
            [{"id": "ask", "wait_signal": "go"}, step("g")],
        ],
    }
]
CALLS = {
    E.SIGNAL: "Signal",
    E.CANCEL: "Cancel",
    E.TERMINATE: "Terminate",
    E.PAUSE: "Pause",
    E.RESUME: "Resume",
    E.RETRY: "Retry",
}
BEGUN = {E.STEP_COMPLETED: "e", E.CHILD_ENDED: "f", E.SIGNAL: "g"}
"""What follows of an event that acts."""
ACTED = {
    E.SIGNAL: ("signal_taken",),
    E.CANCEL: ("run_ending", "run_cancelled"),
    E.TERMINATE: ("run_terminated",),
    E.PAUSE: ("run_paused",),
    E.RESUME: ("run_resumed",),
    E.RETRY: ("run_retried",),
    E.REMOVE: ("run_ending", "step_cancelled"),
    E.STEP_COMPLETED: ("step_completed",),
    E.STEP_FAILED: ("step_failed",),
    E.TIMER: ("timer_fired",),
    E.RUN_TIMEOUT: ("timer_fired",),
    E.CHILD_ENDED: ("child_ended",),
    E.UNDO_COMPLETED: ("undo_completed",),
    E.UNDO_FAILED: ("undo_failed",),
}
"""One of these is written by an event that acts."""
RECORDED = {
    E.SIGNAL: "signal_received",
    E.STEP_COMPLETED: "step_completed",
    E.TIMER: "timer_fired",
    E.RUN_TIMEOUT: "timer_fired",
    E.CHILD_ENDED: "child_ended",
}
"""What is written by one that acts later."""


@dataclass
class Case:
    """A run in some state, with the tasks that were leased on the way there, by handler."""

    scene: Scene
    run_id: str = ""
    tasks: dict[str, pb.Task] = field(default_factory=dict)

    async def begin(self, workflow_id: str) -> None:
        """Start the run; the steps that are ready are leased."""
        await self.scene.api.register(workflow(*NODES, workflow_id=workflow_id))
        self.run_id = await self.scene.start(None, workflow_id, run_timeout=seconds(3600))
        for task in await self.scene.tasks("a", "b", "d", "h"):
            self.tasks[task.handler] = task

    async def complete(self, *handlers: str) -> None:
        """Complete steps; those that follow are taken first."""
        for handler in handlers:
            if handler not in self.tasks:
                self.tasks[handler] = await self.scene.task(handler)
            await self.scene.complete(self.tasks[handler])

    async def call(self, name: str, **fields: Any) -> None:
        """CancelRun and its like."""
        await self.scene.call(name, self.run_id, **fields)

    async def undoing(self) -> None:
        """Cancelled after a has completed; nothing is under way any more."""
        await self.complete("a")
        await self.call("Cancel", grace=NOW)
        await self.scene.until(self.tasks["h"].task.run_id, "ENDING")
        await self.complete("h")
        self.tasks["undo-a"] = await self.scene.task("undo-a")

    async def bring(self, state: RunState, *, undo: bool) -> None:
        """Into a state; with ``undo``, by way of an undo where there is one."""
        await self._bring(state, undo)
        if state is S.CONTINUED:  # this release has no other way there
            await self.scene.output(self.run_id)
            await execute(self.scene.dsn, "update run set state = 12 where run_id = %s", [self.run_id])
        await self.scene.until(self.run_id, state.name)
        await self.settled()

    async def _bring(self, state: RunState, undo: bool) -> None:
        if state is S.PENDING:
            return
        if state in (S.COMPLETED, S.CONTINUED):
            await self.complete("a", "b", "d", "e", "h", "f")
            await self.scene.signal(self.run_id)
            await self.complete("g")
            await self.scene.hurry(self.run_id, "SLEEP")
        elif state is S.FAILED:
            await (self.complete("a") if undo else self.scene.fail(self.tasks["a"]))
            await self.scene.fail(self.tasks["b"])
            await self.complete("d", "h")
            if undo:
                await self.complete("undo-a")
        elif state is S.UNDOING or (undo and state.final):
            await self.undoing()
            if state is S.CANCELLED:
                await self.complete("undo-a")
            elif state is S.TERMINATED:
                await self.call("Terminate")
        elif state is S.CANCELLED:
            await self.call("Cancel", grace=NOW)
            await self.complete("h")
        else:
            await self._bring_begun(state)

    async def _bring_begun(self, state: RunState) -> None:
        await self.complete("a")
        if state is S.WAITING:
            await self.complete("b", "d", "e")
        elif state is S.PAUSED:
            await self.call("Pause")
        elif state is S.BLOCKED:
            await self.scene.worker.release(self.tasks["d"])
        elif state is S.ENDING:
            await self.call("Cancel")
        elif state is S.TERMINATED:
            await self.call("Terminate")

    async def block_by_undo(self) -> None:
        """BLOCKED because an undo failed for good."""
        await self.undoing()
        await self.scene.fail(self.tasks["undo-a"])
        await self.scene.until(self.run_id, "BLOCKED")
        await self.settled()

    async def settled(self) -> None:
        """Nothing is on its way to the run."""

        async def nothing() -> bool:
            due = await count(self.scene.dsn, "timer", "not parked and fire_at <= clock_timestamp()")
            return due + await count(self.scene.dsn, "message") == 0

        await eventually(nothing)

    async def events(self) -> list[str]:
        """What has happened."""
        return kinds(await self.scene.api.history(self.run_id, page_size=1000))

    async def leave(self) -> None:
        """Make room for the next case."""
        for run in await self.scene.api.list_all():
            if not RunState(run.state).final:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may end by itself meanwhile
                    await self.scene.call("Terminate", run.run_id)
        await self.scene.worker.reconnect(held=[])


# Events


async def call(case: Case, event: RunEvent) -> str:
    """What the caller is told: OK, or why not."""
    fields: dict[str, Any] = {"signal_name": "go"} if event is E.SIGNAL else {}
    try:
        await case.call(CALLS[event], **fields)
    except grpc.aio.AioRpcError as error:
        refusal = decode(error)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION  # noqa: PT017  # nothing else may be refused here
        state = await case.scene.state(case.run_id)
        assert refusal.metadata == {"state": state, "event": event.name}
        return refusal.reason
    return "OK"


async def remove(case: Case, _event: RunEvent) -> str:
    run = await case.scene.api.get(case.run_id)
    request = definition_pb.RemoveDefinitionRequest(workflow_id=run.workflow_id, definition_hash=run.definition_hash)
    await case.scene.api.definitions.RemoveDefinition(request, timeout=DEADLINE)
    return "OK"


async def report(case: Case, event: RunEvent) -> str:
    """Of a step that is leased, or was, or never was."""
    undo = event in (E.UNDO_COMPLETED, E.UNDO_FAILED)
    known = case.tasks.get("undo-a" if undo else "b")
    ref = known.task if known else pb.TaskRef(run_id=case.run_id, task_id=2, fencing_token=1)
    worker = case.scene.worker
    done = event in (E.STEP_COMPLETED, E.UNDO_COMPLETED)
    result = await (worker.complete(ref, "7") if done else worker.fail(ref, run_pb2.FAILURE_KIND_PERMANENT))
    if result.outcome == OK:
        return "OK"
    assert result.outcome in (LEASE_LOST, ALREADY_DONE)
    return "late"


async def fire(case: Case, event: RunEvent) -> str:
    """A timer is due; where the run's are gone, one that should not be there."""
    kind, seq = ("SLEEP", 5) if event is E.TIMER else ("RUN_TIMEOUT", 1)
    place = {"node": 0, "scope": 0, "item": 0, "seq": 1, "size": 0, "ms": 1}
    await execute(
        case.scene.dsn,
        "insert into timer (run_id, seq, kind, namespace, fire_at, place)"
        " select %(run)s, coalesce((select max(seq) from timer where (run_id, kind) = (%(run)s, %(kind)s)), %(seq)s),"
        " %(kind)s, 'default', clock_timestamp(), %(place)s"
        " on conflict (run_id, seq, kind) do update set fire_at = excluded.fire_at, parked = false",
        {"run": case.run_id, "seq": seq, "kind": TIMERS[kind], "place": json.dumps(place)},
    )
    return "OK"


async def end_child(case: Case, _event: RunEvent) -> str:
    """The child ends; where it is not waited for, somebody says once more that it has."""
    child = case.tasks["h"].task.run_id
    [scheduled] = [e for e in await case.scene.api.history(case.run_id) if e.WhichOneof("kind") == "child_scheduled"]
    if await count(case.scene.dsn, "child", "run_id = %s", [case.run_id]):
        await case.complete("h")
        return "OK"
    body = {"parent_seq": scheduled.seq, "state": 3, "output_seq": 1, "failure": None}
    await execute(
        case.scene.dsn,
        "insert into message (target_run, kind, source_run, source_seq, namespace, body)"
        " values (%s, 4, %s, 1000, 'default', %s)",
        [case.run_id, child, json.dumps(body)],
    )
    return "OK"


HAPPEN: dict[RunEvent, Callable[[Case, RunEvent], Awaitable[str]]] = {
    **dict.fromkeys(CALLS, call),
    E.REMOVE: remove,
    E.STEP_COMPLETED: report,
    E.STEP_FAILED: report,
    E.UNDO_COMPLETED: report,
    E.UNDO_FAILED: report,
    E.TIMER: fire,
    E.RUN_TIMEOUT: fire,
    E.CHILD_ENDED: end_child,
}


# Verdicts


async def check(case: Case, event: RunEvent, expected: Verdict) -> None:
    """Let the event happen; what becomes of it is what the table says."""
    scene = case.scene
    before, state = await case.events(), await scene.state(case.run_id)
    if expected is V.NEVER:
        await cannot_happen(case, event)
    told = await HAPPEN[event](case, event)
    await case.settled()
    new = (await case.events())[len(before) :]
    assert (told == "ILLEGAL_TRANSITION") == (expected is V.REFUSE), told
    if expected in (V.REFUSE, V.KEEP, V.NEVER):
        assert (new, await scene.state(case.run_id)) == ([], state)
        assert told != "OK" or event not in (E.STEP_COMPLETED, E.STEP_FAILED, E.UNDO_COMPLETED, E.UNDO_FAILED)
    elif expected is V.LATER:
        await check_later(case, event, new, state)
    else:
        assert told == "OK"
        assert set(ACTED[event]) & set(new), new
        await check_acted(case, event, state)


async def cannot_happen(case: Case, event: RunEvent) -> None:
    """There is no task whose end could be told."""
    steps = (await case.scene.api.get(case.run_id)).open_steps
    undo = event in (E.UNDO_COMPLETED, E.UNDO_FAILED)
    assert not [step for step in steps if step.undo == undo]


async def check_acted(case: Case, event: RunEvent, state: str) -> None:
    scene = case.scene
    if event in BEGUN and state != "ENDING":
        await scene.task(BEGUN[event])
    elif event in BEGUN:
        await scene.no_task()
    ends = {E.CANCEL: "ENDING", E.REMOVE: "ENDING", E.STEP_FAILED: "ENDING", E.RUN_TIMEOUT: "ENDING"}
    ends |= {E.TERMINATE: "TERMINATED", E.PAUSE: "PAUSED", E.UNDO_COMPLETED: "CANCELLED", E.UNDO_FAILED: "BLOCKED"}
    found = await scene.state(case.run_id)
    if event in ends:
        assert found == ends[event]
    elif event in (E.RESUME, E.RETRY):
        assert found != state
    if event is E.REMOVE:
        assert (await scene.worker.complete(case.tasks["b"], "7")).outcome == LEASE_LOST


async def check_later(case: Case, event: RunEvent, new: list[str], state: str) -> None:
    scene = case.scene
    assert new[0] == RECORDED[event], new
    assert "signal_taken" not in new
    assert await scene.state(case.run_id) == state
    await scene.no_task()
    if state != "PAUSED":
        return
    await scene.call("Resume", case.run_id)
    if event in BEGUN:
        await scene.task(BEGUN[event])
    elif event is E.RUN_TIMEOUT:
        await scene.until(case.run_id, "ENDING")
    assert (await case.events()).count("timer_fired") == (event in (E.TIMER, E.RUN_TIMEOUT))


@pytest.fixture
async def stage(open_scene: OpenScene) -> Scene:
    """A server where a task that comes back unbegun counts at once, and the child's workflow."""
    scene = await open_scene(free_redeliveries=0)
    await scene.api.register(workflow(step("h"), workflow_id="child"))
    return scene


@pytest.mark.parametrize("event", RunEvent, ids=lambda event: event.name)
async def test_each_event_does_in_each_state_what_the_table_says(stage: Scene, event: RunEvent) -> None:
    faults = {}
    undo = event in (E.UNDO_COMPLETED, E.UNDO_FAILED)
    for number, state in enumerate((*RunState, None)):
        case = Case(stage)
        try:
            async with asyncio.timeout(60):
                await case.begin(f"wf-{number}")
                if state is None:
                    await case.block_by_undo()
                else:
                    await case.bring(state, undo=undo)
                await check(case, event, verdict(state or S.BLOCKED, event, undo_failed=state is None))
        except (AssertionError, TimeoutError) as fault:
            faults[state.name if state else "BLOCKED by an undo"] = repr(fault)[:500]
        finally:
            await case.leave()
    assert faults == {}


def test_states_of_the_contract_are_those_of_the_table() -> None:
    assert {state.name for state in RunState} == {
        name.removeprefix("RUN_STATE_") for name, number in run_pb2.RunState.items() if number
    }
    assert state_of(run_pb2.Run(state=run_pb2.RUN_STATE_PAUSED)) == S.PAUSED.name
