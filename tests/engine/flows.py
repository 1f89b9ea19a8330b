"""Workflows of any nodes, and a scene to drive them by hand: a server, a caller, a worker, timers to be hurried."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import execute
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually

NAMES = "abcdefgh"
HANDLERS = [*NAMES, *(f"undo-{name}" for name in NAMES)]
OPERATIONAL, CORRECTIVE, PERMANENT = (
    run_pb2.FAILURE_KIND_OPERATIONAL,
    run_pb2.FAILURE_KIND_CORRECTIVE,
    run_pb2.FAILURE_KIND_PERMANENT,
)
TIMERS = {
    name: number
    for number, name in enumerate(
        ("SLEEP", "SIGNAL_TIMEOUT", "QUEUE_TIMEOUT", "TOTAL_TIMEOUT", "RUN_TIMEOUT", "START_DELAY"), 1
    )
}
ONCE = {"max_attempts": 1}
AT_ONCE = {"initial_delay": "0s", "jitter": 0}
LATER = {"initial_delay": "1h", "max_delay": "1h", "jitter": 0}


def step(node_id: str, *, undo: bool | Mapping[str, Any] = False, **more: Any) -> dict[str, Any]:
    """A step whose handler is its id. With ``undo``, that of its undoing is ``undo-`` and its id."""
    node = {"id": node_id, "step": node_id, **more}
    if undo is not False:
        node["undo"] = {"step": f"undo-{node_id}", **({} if undo is True else undo)}
    return node


def workflow(*nodes: Mapping[str, Any], workflow_id: str = "wf", **top: Any) -> str:
    """JSON text of a manifest."""
    return json.dumps({"id": workflow_id, "compatibility_id": "1", **top, "sequence": nodes})


def state_of(run: run_pb2.Run | run_service_pb2.CancelRunResponse) -> str:
    """The name of a run's state, or of that in an answer."""
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")


def value_of(payload: Payload) -> Any:
    """What a JSON payload says."""
    return json.loads(payload.json)


def given(task: pb.Task) -> Any:
    """A task's input."""
    return value_of(task.input)


@dataclass(slots=True)
class Scene:
    """``worker`` takes every handler of HANDLERS, up to 100 tasks at a time."""

    server: InProcessServer
    api: Api
    worker: RawWorker
    dsn: str

    async def run(self, *nodes: Mapping[str, Any], data: Any = None, **fields: Any) -> str:
        """Register a workflow and start a run of it."""
        await self.api.register(workflow(*nodes))
        return await self.start(data, **fields)

    async def start(self, data: Any = None, workflow_id: str = "wf", **fields: Any) -> str:
        """Start a run."""
        return (await self.api.start(workflow_id, json.dumps(data), **fields)).run_id

    # Workers

    async def task(self, handler: str) -> pb.Task:
        """The next task, which is one for this handler."""
        task = await self.worker.task()
        assert task.handler == handler, task
        return task

    async def tasks(self, *handlers: str) -> list[pb.Task]:
        """The next tasks, in the order of ``handlers`` in whichever they come."""
        found = await self.worker.tasks(len(handlers))
        assert sorted(task.handler for task in found) == sorted(handlers), found
        left = list(found)
        ordered = []
        for handler in handlers:
            task = next(task for task in left if task.handler == handler)
            left.remove(task)
            ordered.append(task)
        return ordered

    async def complete(self, task: pb.Task, output: Any = None) -> None:
        """Complete a task."""
        assert (await self.worker.complete(task, json.dumps(output))).outcome == OK

    async def do(self, *handlers: str, output: Any = None) -> None:
        """Take tasks, one after the other, and complete them."""
        for handler in handlers:
            await self.complete(await self.task(handler), output)

    async def fail(self, task: pb.Task, kind: run_pb2.FailureKind.ValueType = PERMANENT, **more: Any) -> None:
        """Fail a task's attempt."""
        assert (await self.worker.fail(task, kind, **more)).outcome == OK

    async def no_task(self) -> None:
        """Nothing more may be taken: what has a cause would have come by now."""
        await self.worker.sync()
        await self.worker.no_task(0.15)

    # Callers

    async def call(self, name: str, run_id: str, **fields: Any) -> Any:
        """CancelRun and its like, by their first word: ``call("Cancel", run_id)``."""
        request = getattr(run_service_pb2, f"{name}RunRequest")(run_id=run_id, **fields)
        return await getattr(self.api.runs, f"{name}Run")(request, timeout=DEADLINE)

    async def signal(self, run_id: str, name: str = "go", data: Any = None, **fields: Any) -> int:
        """Give a run a signal; returns the number of its event."""
        payload = Payload(json=json.dumps(data))
        return int((await self.call("Signal", run_id, signal_name=name, payload=payload, **fields)).seq)

    async def state(self, run_id: str) -> str:
        """Where a run is."""
        return state_of(await self.api.get(run_id))

    async def until(self, run_id: str, *states: str) -> run_pb2.Run:
        """The run when it is in one of these states."""

        async def there() -> run_pb2.Run:
            run = await self.api.get(run_id)
            assert state_of(run) in states, (state_of(run), kinds(await self.api.history(run_id)))
            return run

        return await eventually(there)

    async def output(self, run_id: str) -> Any:
        """What a run has ended with: it completes."""
        run = await self.api.wait(run_id)
        assert state_of(run) == "COMPLETED", run
        return value_of(run.output)

    async def failure(self, run_id: str, state: str = "FAILED") -> run_pb2.Failure:
        """Why a run has ended so."""
        run = await self.api.wait(run_id)
        assert state_of(run) == state, run
        return run.failure

    # History and time

    async def kinds(self, run_id: str) -> list[str]:
        """What happened, in order."""
        return kinds(await self.api.history(run_id))

    async def events(self, run_id: str, kind: str) -> list[Any]:
        """The events of one kind."""
        events = await self.api.history(run_id)
        return [getattr(event, kind) for event in events if event.WhichOneof("kind") == kind]

    async def seq_of(self, run_id: str, kind: str, node_id: str) -> int:
        """The number of the last event of a kind at a node."""
        events = await self.api.history(run_id)
        return max(e.seq for e in events if e.WhichOneof("kind") == kind and getattr(e, kind).node_id == node_id)

    async def hurry(self, run_id: str, kind: str) -> None:
        """Let a run's timers of a kind be due now."""
        changed = await execute(
            self.dsn,
            "update timer set fire_at = clock_timestamp() where run_id = %s and kind = %s",
            [run_id, TIMERS[kind]],
        )
        assert changed, f"no {kind} timer"

    async def expire(self, task: pb.Task) -> None:
        """Let a lease run out now."""
        key = [task.task.run_id, task.task.task_id]
        await execute(
            self.dsn, "update task set lease_expires_at = clock_timestamp() where run_id = %s and task_id = %s", key
        )


OpenScene = Callable[..., Awaitable[Scene]]
