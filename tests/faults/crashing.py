"""A scene of the step engine in which one commit goes wrong: its connection breaks before it or before its answer, or
the server dies before it or right after it, and everybody comes back to another server and says again what was not
answered.

What dies here stops where it is, in the test's own process, with its connections cut and its loops ended. So it can
wake up in the end, long after everything was done by another, and must change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, LiteralString, TypeVar

import grpc
import psycopg
from google.protobuf.json_format import MessageToDict

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.engine.operations import (
    Command,
    CommandKind,
    Deliver,
    Fire,
    MessageKind,
    Operation,
    Report,
    ReportKind,
    Start,
)
from tests.engine.flows import HANDLERS, PERMANENT
from tests.engine.flows import Scene as Flow
from tests.engine.rows import fetch
from tests.faults.scene import STAYING, WRITING, Scene, until_count
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker, StreamEnded
from tests.fixtures.servers import InProcessServer, Setting
from tests.fixtures.waiting import TIMEOUT, eventually

T = TypeVar("T")
S = TypeVar("S", bound="Stage")
Wanted = Callable[[Operation], bool]

SETTINGS: dict[str, Setting] = {
    **STAYING, "lanes": 1, "prepared": "off", "poll_interval": 0.05, "operation_timeout": 60.0
}  # fmt: skip
WORKER: dict[str, Any] = {"handlers": HANDLERS, "capacity": 100}
COMMIT = b"commit\0"
_HASH = re.compile("[0-9a-f]{64}")
_VOLATILE = {
    "event_time", "fencing_token", "ready_time", "fire_time", "timeout_time", "deadline_time", "definition_hash",
}  # fmt: skip
_TABLES: tuple[LiteralString, ...] = (
    "task", "timer", "wait", "signal", "scope", "output", "child", "undo", "stopped_task", "checkpoint", "request",
)  # fmt: skip


class Crash(Enum):
    """What goes wrong with the commit."""

    COMMIT_LOST = "the connection breaks before it"
    ANSWER_LOST = "the connection breaks after it"
    DEAD_BEFORE = "the server dies before it"
    DEAD_AFTER = "the server dies after it, before it tells anybody"

    @property
    def deadly(self) -> bool:
        """Another server has to go on."""
        return self in (Crash.DEAD_BEFORE, Crash.DEAD_AFTER)


def starts(operation: Operation) -> bool:
    """A call starts a run."""
    return isinstance(operation, Start)


def reports(kind: ReportKind) -> Wanted:
    """A worker or a loop reports on a task."""
    return lambda operation: isinstance(operation, Report) and operation.kind is kind


def commands(kind: CommandKind) -> Wanted:
    """A run is asked for something."""
    return lambda operation: isinstance(operation, Command) and operation.kind is kind


def fires(operation: Operation) -> bool:
    """A timer is due."""
    return isinstance(operation, Fire)


def delivers(kind: MessageKind) -> Wanted:
    """A run tells another something."""
    return lambda operation: isinstance(operation, Deliver) and operation.kind is kind


@dataclass(slots=True)
class Stage(Flow):
    """``crash`` is what happens in `cut`; None: nothing, to see how things go without. One cut a crash."""

    scene: Scene
    database: Proxy
    clients: Proxy
    crash: Crash | None = None
    run_ids: list[str] = field(default_factory=list)
    same_process: bool = True
    """Whether it is the same worker that comes back after the server's death, or another process."""
    hello: Mapping[str, Any] = field(default_factory=dict)
    """What its worker says of itself, beside its handlers."""
    address: str = ""
    """Where everybody is."""
    _wanted: Wanted | None = None
    _cuts: int = 0
    _held: dict[tuple[str, int], pb.TaskRef] = field(default_factory=dict)
    _dead: asyncio.Event = field(default_factory=asyncio.Event)
    _awake: asyncio.Event = field(default_factory=asyncio.Event)
    _moved: bool = False
    _other: tuple[InProcessServer, Proxy, Proxy] | None = None

    # The crash

    @contextlib.asynccontextmanager
    async def cut(self, wanted: Wanted) -> AsyncIterator[None]:
        """Let the next commit of such an operation, which the block brings about, go wrong. After the block it has."""
        before, self._wanted = self._cuts, wanted
        yield
        await eventually(lambda: self._cuts > before, what="there is such an operation")
        await self._come_back()

    async def _come_back(self) -> None:
        if self.crash is not None and self.crash.deadly:
            await asyncio.wait_for(self._dead.wait(), TIMEOUT)
            await self._move()

    def watch(self) -> None:
        """Stand between the server's lane and its work."""
        (lane,) = self.server.app.engine.lanes
        work = lane._work

        async def watched(
            connection: psycopg.AsyncConnection[Any], operations: list[Operation], skip_locked: bool
        ) -> list[Operation]:
            if self._wanted is None or not any(map(self._wanted, operations)):
                passed: list[Operation] = await work(connection, operations, skip_locked)
                return passed
            self._wanted = None
            try:
                return await self._crashing(work, connection, operations, skip_locked)
            finally:
                self._cuts += 1

        lane._work = watched

    async def _crashing(
        self, work: Any, connection: psycopg.AsyncConnection[Any], operations: list[Operation], skip_locked: bool
    ) -> list[Operation]:
        if self.crash is Crash.DEAD_AFTER:
            self.server.app.engine.committer.after_commit = self._die
        elif self.crash is not None:
            forward = self.crash is Crash.ANSWER_LOST
            ours = next(s for s in _statements(operations))
            self.database.break_on(COMMIT, "up", "reset", after=ours, forward=forward)
        try:
            done: list[Operation] = await work(connection, operations, skip_locked)
        except psycopg.OperationalError:
            assert self.database.breaks, "it broke by itself"
            if self.crash is Crash.DEAD_BEFORE:
                await self._die()
            raise
        assert self.crash in (None, Crash.DEAD_AFTER), "nothing broke"
        return done

    async def _die(self) -> None:
        """Everything of the server stands still, with nobody connected to it, until it wakes up."""
        engine = self.server.app.engine
        engine.committer.after_commit = None
        self._dead.set()
        self._cuts += 1
        self.clients.refuse()
        self.clients.reset()
        for loop in engine.loops:
            await loop.stop()
        await self._awake.wait()

    async def _move(self) -> None:
        """Everybody goes on with another server. What the worker has not read it has never received."""
        if self._moved:
            return
        self._moved = True
        self._other = await _serve(self.scene)
        self.address = self._other[2].address
        self.api = self.scene.api(self.address)
        sessions, nonce = self.worker.sessions, self.worker.hello().process_nonce
        await self.worker.drop()
        await until_count(self.dsn, WRITING, 0)  # whoever is dead holds no lock: a lease that is locked is not kept
        hello: dict[str, Any] = {}
        if self.same_process:
            hello = {
                "process_nonce": nonce,
                "previous_session_ids": sessions,
                "held": list(self._held.values()),
            }
        self.worker = await self.scene.raw(self.address, **WORKER, **self.hello, **hello)

    async def wake(self) -> None:
        """The dead server goes on from where it died, and is done with it."""
        if self._moved:
            self._awake.set()
            await asyncio.wait_for(self.server.app.engine.lanes[0].drain(), TIMEOUT)

    def onwards(self) -> None:
        """When the dead server has woken: the one that went on is to have the next accident."""
        if self._other is not None:
            self.server, self.database, self.clients = self._other
            self._other, self._moved = None, False
            self._dead, self._awake = asyncio.Event(), asyncio.Event()
            self.watch()

    # Whoever is not answered says it again to another server

    async def asked(self, request: Callable[[Api], Awaitable[T]]) -> T:
        """A call."""
        try:
            return await request(self.api)
        except grpc.aio.AioRpcError:
            if not self._dead.is_set():
                raise
        await self._move()
        return await request(self.api)

    async def told(self, task: pb.Task, tell: Callable[[RawWorker], Awaitable[pb.ItemResult]]) -> pb.ItemResult:
        """A report on a task."""
        try:
            result = await tell(self.worker)
        except StreamEnded:
            assert self._dead.is_set()
            await self._move()
            result = await tell(self.worker)
        self._held.pop((task.task.run_id, task.task.task_id), None)
        return result

    async def start(self, data: Any = None, workflow_id: str = "wf", **fields: Any) -> str:
        request = self.api.start_request(workflow_id, json.dumps(data), **fields)
        started = await self.asked(lambda api: api.runs.StartRun(request, timeout=DEADLINE))
        self.run_ids.append(started.run_id)
        return started.run_id

    async def call(self, name: str, run_id: str, **fields: Any) -> Any:
        fields.setdefault("request_id", str(uuid.uuid4()))
        request = getattr(run_service_pb2, f"{name}RunRequest")(run_id=run_id, **fields)
        return await self.asked(lambda api: getattr(api.runs, f"{name}Run")(request, timeout=DEADLINE))

    async def task(self, handler: str) -> pb.Task:
        (task,) = await self.tasks(handler)
        return task

    async def tasks(self, *handlers: str) -> list[pb.Task]:
        found = await Flow.tasks(self, *handlers)
        self._held |= {(task.task.run_id, task.task.task_id): task.task for task in found}
        return found

    async def complete(self, task: pb.Task, output: Any = None) -> None:
        result = await self.told(task, lambda worker: worker.complete(task, json.dumps(output)))
        assert result.outcome in (OK, ALREADY_DONE), result

    async def fail(self, task: pb.Task, kind: run_pb2.FailureKind.ValueType = PERMANENT, **more: Any) -> None:
        result = await self.told(task, lambda worker: worker.fail(task, kind, **more))
        assert result.outcome in (OK, ALREADY_DONE), result

    async def lost(self, task: pb.Task) -> None:
        """Nothing that is said of a task counts any more."""
        result = await self.told(task, lambda worker: worker.complete(task, '"late"'))
        assert result.outcome == LEASE_LOST, result

    async def expire(self, task: pb.Task) -> None:
        """Let a lease run out now, and its worker be gone for ever."""
        self.same_process = False
        self._held.pop((task.task.run_id, task.task.task_id))
        await Flow.expire(self, task)

    async def until_told(self, run_id: str, kind: str) -> None:
        """Wait until a kind of event is in a history."""

        async def there() -> bool:
            return kind in await self.kinds(run_id)

        await eventually(there)

    # What came of it

    async def outcome(self) -> list[Any]:
        """All that is known of the runs when they have ended, but for times, tokens and ids: no two runs share them."""
        family = list(self.run_ids)
        told = []
        for run_id in family:  # it grows
            run = await self.api.wait(run_id)
            events = await self.api.history(run_id)
            family += [event.child_scheduled.child_run_id for event in events if event.HasField("child_scheduled")]
            family += [event.run_continued.next_run_id for event in events if event.HasField("run_continued")]
            told.append((run_pb2.RunState.Name(run.state), run.output.json, MessageToDict(run.failure), _plain(events)))

        async def no_message() -> bool:
            return await self._rows("message", "target_run", family) == 0

        await eventually(no_message)
        left = {table: await self._rows(table, "run_id", family) for table in _TABLES}
        text = json.dumps([told, left])
        for number, run_id in enumerate(family):
            text = text.replace(run_id, f"run {number}")
        text = _HASH.sub("hash", text)
        found: list[Any] = json.loads(text)
        return found

    async def _rows(self, table: LiteralString, column: LiteralString, run_ids: Sequence[str]) -> int:
        [(n,)] = await fetch(self.dsn, f"select count(*) from {table} where {column} = any(%s)", [list(run_ids)])
        return int(n)


def _statements(operations: Iterable[Operation]) -> Iterable[bytes]:
    """What only the lane sends: it tells its connection from the others."""
    for operation in operations:
        new = starts(operation) or delivers(MessageKind.START_CHILD)(operation)
        yield b"insert into run (run_id" if new else b"for no key update"


def _plain(events: Sequence[run_pb2.Event]) -> list[Any]:
    return [_stripped(MessageToDict(event, preserving_proto_field_name=True)) for event in events]


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(inner) for key, inner in value.items() if key not in _VOLATILE}
    return value


async def _serve(scene: Scene) -> tuple[InProcessServer, Proxy, Proxy]:
    """A server, what is between it and its database, and between it and all others."""
    database = scene.proxy(database_address(scene.dsn))
    server = await scene.serve(**SETTINGS | {"dsn": redirected(scene.dsn, database.address)})
    return server, database, scene.proxy(server.grpc_address)


async def open_stage(scene: Scene, kind: type[S], **hello: Any) -> S:
    """A stage on a server that is to have an accident. ``hello``: see `Stage`."""
    server, database, clients = await _serve(scene)
    worker = await scene.raw(clients.address, **WORKER, **hello)
    api = scene.api(clients.address)
    stage = kind(server, api, worker, scene.dsn, scene, database, clients, hello=hello, address=clients.address)
    stage.watch()
    return stage
