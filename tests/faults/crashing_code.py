"""The scene of tests.faults.crashing for code runs: its worker decides them too, by hand, and does what the protocol
asks of one whose Advance was not answered: it says it again, and where that was recorded before, it goes on with
nothing that it remembers, gives the run back, and takes it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.domain.errors import DatabaseUnavailable
from fencepost_server.engine.operations import Operation, Report, ReportKind
from tests.engine.code import AS_NEW, BLOCK, COMPLETE, FAIL, MANIFEST, WAIT, Held, held, payload, send
from tests.engine.flows import PERMANENT
from tests.engine.rows import execute, fetch
from tests.faults.crashing import COMMIT, WORKER, Crash, Stage, open_stage
from tests.faults.scene import Scene
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, RawWorker, StreamEnded
from tests.fixtures.waiting import TIMEOUT, eventually

ROOM = 100
_CLAIM = b"numbered as ("
_GRACE = 8
_ENDS = (COMPLETE, FAIL, AS_NEW, BLOCK)


def advances(operation: Operation) -> bool:
    """A worker tells what a function has decided."""
    return isinstance(operation, Report) and operation.kind is ReportKind.ADVANCE


def removable(crash: Crash | None) -> str:
    """The compatibility id of a definition that only one story with one crash has."""
    return str(crash)


@dataclass(slots=True)
class CodeStage(Stage):
    """A stage whose worker has the code workflow, too."""

    _spare: dict[bool, list[pb.Task]] = field(default_factory=lambda: {False: [], True: []})
    """Tasks that came while one of the other kind was awaited: of steps, and of deciding."""
    _dying: asyncio.Task[None] | None = None

    # Tasks

    async def _next(self, *, deciding: bool) -> pb.Task:
        spare = self._spare[deciding]
        while not spare:
            task = await self.worker.task()
            self._spare[task.kind == pb.TASK_KIND_DECIDE].append(task)
        return spare.pop(0)

    async def tasks(self, *handlers: str) -> list[pb.Task]:
        found = [await self._next(deciding=False) for _ in handlers]
        assert sorted(task.handler for task in found) == sorted(handlers), found
        self._held |= {(task.task.run_id, task.task.task_id): task.task for task in found}
        return sorted(found, key=lambda task: handlers.index(task.handler))

    async def take(self, run: Held | None = None, *, attempt: int = 1) -> Held:
        """The next DECIDE task, of ``run`` if one is named: what it was before it was given back."""
        task = await self._next(deciding=True)
        assert task.attempt == attempt, "a crash of a server costs no attempt"
        if run is not None:
            assert task.task.run_id == run.task.task.run_id
            assert task.task.fencing_token > run.task.task.fencing_token
        self._held[task.task.run_id, task.task.task_id] = task.task
        return held(self.worker, task)

    async def no_task(self) -> None:
        assert self._spare == {False: [], True: []}
        await Stage.no_task(self)

    async def room(self, runs: int) -> None:
        """How many code runs its worker takes."""
        self.worker.workflow_capacity_now = runs
        with contextlib.suppress(StreamEnded):  # it says so in its next Hello
            await self.worker.sync()

    async def _move(self) -> None:
        if not self._moved:
            self._spare = {False: [], True: []}
        await Stage._move(self)

    async def newcomer(self) -> None:
        """The worker's process ends for good, and another one comes."""
        await self.worker.close()
        self._held.clear()
        self._spare = {False: [], True: []}
        self.worker = await self.scene.raw(self.address, hello=False, **WORKER, **self.hello)
        with contextlib.suppress(StreamEnded):  # its server may be dead before it is welcome
            await self.worker.drop()
            await self.worker.connect()

    async def wake(self) -> None:
        await Stage.wake(self)
        if self._dying is not None:
            await asyncio.wait_for(self._dying, TIMEOUT)

    # Advances

    async def begin(self, *commands: pb.Command, outcome: Any = WAIT, value: Any = None, **fields: Any) -> Held:
        """Start a run, and advance it once if there are commands."""
        await self.start(value, "code", **fields)
        run = await self.take()
        if commands:
            await self.advance(run, *commands, outcome=outcome)
        return run

    async def advance(self, run: Held, *commands: pb.Command, outcome: Any = WAIT, **fields: Any) -> bool:
        """Send the next Advance until it is answered. Returns whether the run stays: then ``run`` goes on."""
        item = run.item(*commands, outcome=outcome, **fields)
        result = await self.told(run.task, _teller(item))
        key = run.task.task.run_id, run.task.task.task_id
        if result.outcome == LEASE_LOST:
            assert outcome == BLOCK, result  # which leaves nothing by which a repeat is known
            return False
        if result.outcome == ALREADY_DONE:
            self._held[key] = run.task.task
            return await self._taken_anew(run)
        assert result.outcome == OK, result
        if outcome == BLOCK:
            return False
        run.advance_no += 1
        run.seen += result.advance.events
        run.seq = max([run.seq, *result.advance.seqs, *(event.seq for event in result.advance.events)])
        if result.advance.kept:
            self._held[key] = run.task.task
        return result.advance.kept

    async def _taken_anew(self, run: Held) -> bool:
        """What was recorded is as good as an answer, but the answer is lost, and with it what the worker knows."""
        run.advance_no += 1
        return await self.give_back(run)

    async def give_back(self, run: Held) -> bool:
        """Release a run, and take it anew if it was there still."""
        result = await self.told(run.task, _releaser(run.task))
        if result.outcome == LEASE_LOST:
            return False
        assert result.outcome in (OK, ALREADY_DONE), result
        new = await self.take(run)
        assert new.advance_no == run.advance_no
        run.worker, run.task, run.seq, run.advance_no = new.worker, new.task, new.seq, new.advance_no
        run.seen += new.seen
        return True

    async def end(self, run: Held, output: Any = None, *commands: pb.Command, **fields: Any) -> None:
        """The function returns."""
        assert not await self.advance(run, *commands, outcome=COMPLETE, output=payload(output), **fields)

    async def raises(self, run: Held, *commands: pb.Command, **fields: Any) -> None:
        """The function raises."""
        failure = run_pb2.Failure(kind=PERMANENT, code="BROKEN", message="told to")
        assert not await self.advance(run, *commands, outcome=FAIL, failure=failure, **fields)

    async def powerless(self, run: Held) -> None:
        """Nothing that is said of a run by who had it counts any more."""
        for outcome in (WAIT, COMPLETE):
            result = await self.told(run.task, _teller(run.item(outcome=outcome, output=payload("late"))))
            assert result.outcome == LEASE_LOST, result

    async def seq(self, run: Held, kind: str) -> int:
        """The number of the last event of a kind."""
        events = await self.api.history(run.task.task.run_id)
        return max(event.seq for event in events if event.WhichOneof("kind") == kind)

    async def hurry(self, run_id: str, kind: str) -> None:
        if kind != "GRACE":
            await Stage.hurry(self, run_id, kind)
            return
        statement = "update timer set fire_at = clock_timestamp() where run_id = %s and kind = %s"
        assert await execute(self.dsn, statement, [run_id, _GRACE]), "no grace"

    async def hurry_retry(self, run_id: str) -> None:
        """Let the next attempt of a run's task be due now, once the last one has failed."""
        due = "update task set visible_at = clock_timestamp() where run_id = %s and lease_session is null"
        begun = "select from task where run_id = %s and lease_session is not null and attempt > 1"

        async def hurried() -> bool:
            return bool(await execute(self.dsn, due, [run_id]) or await fetch(self.dsn, begun, [run_id]))

        await eventually(hurried)

    # The crash at a claim, which is not a lane's

    @contextlib.asynccontextmanager
    async def cut_claim(self) -> AsyncIterator[None]:
        """Let the next commit of a claim go wrong."""
        before = self._cuts
        dispatcher = self.server.app.engine.dispatcher
        claim, deliver = dispatcher._claim, dispatcher._deliver

        async def crashing(demand: Any) -> None:
            dispatcher._claim = claim
            if self.crash is Crash.DEAD_AFTER:
                dispatcher._deliver = dying
            elif self.crash is not None:
                forward = self.crash is Crash.ANSWER_LOST
                self.database.break_on(COMMIT, "up", "reset", after=_CLAIM, forward=forward)
            try:
                await claim(demand)
            except DatabaseUnavailable:
                assert self.database.breaks, "it broke by itself"
                if self.crash is Crash.DEAD_BEFORE:
                    await self._dead_for(lambda: claim(demand))
                raise
            finally:
                self._cuts += 1

        async def dying(*args: Any) -> None:
            dispatcher._deliver = deliver
            await self._dead_for(lambda: deliver(*args))

        dispatcher._claim = crashing
        yield
        await eventually(lambda: self._cuts > before, what="there is such a claim")
        await self._come_back()

    async def _dead_for(self, then: Callable[[], Awaitable[None]]) -> None:
        """The server dies in its loop, which therefore ends, and does ``then`` when it wakes up."""

        async def die() -> None:
            await self._die()
            with contextlib.suppress(DatabaseUnavailable):
                await then()

        self._dying = asyncio.create_task(die())
        await asyncio.Event().wait()


def _teller(item: pb.AdvanceItem) -> Callable[[RawWorker], Awaitable[pb.ItemResult]]:
    async def tell(worker: RawWorker) -> pb.ItemResult:
        [result] = await send(worker, item)
        return result

    return tell


def _releaser(task: pb.Task) -> Callable[[RawWorker], Awaitable[pb.ItemResult]]:
    async def tell(worker: RawWorker) -> pb.ItemResult:
        [result] = await worker.release(task)
        return result

    return tell


async def open_code_stage(scene: Scene) -> CodeStage:
    """A stage with the code workflow, on a server that is to have an accident."""
    own = [pb.WorkflowHandler(workflow_id="code", compatibility_id=removable(crash)) for crash in (None, *Crash)]
    code = pb.WorkflowHandler(workflow_id="code", compatibility_id="1")
    stage = await open_stage(scene, CodeStage, workflows=[code, *own], workflow_capacity=ROOM)
    await stage.api.register(MANIFEST)
    return stage


def manifest_of(compatibility_id: str) -> str:
    """The code workflow, as a definition of its own."""
    return json.dumps({**json.loads(MANIFEST), "compatibility_id": compatibility_id})
