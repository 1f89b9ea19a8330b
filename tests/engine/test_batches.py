"""Many operations of one run in one batch: each sees what those before it have decided; and what a batch costs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.store import pipeline
from tests.engine.code import CONTINUE, cancel, local, open_code
from tests.engine.code import call as remote
from tests.engine.flows import AT_ONCE, PERMANENT, OpenScene, Scene, step, workflow
from tests.engine.histories import check_end
from tests.engine.rows import count, holding
from tests.engine.tasks import end
from tests.fixtures.api import kinds
from tests.fixtures.raw_worker import OK, StreamEnded
from tests.fixtures.waiting import eventually, until_blocked

SETTINGS = {"lanes": 1, "lock_timeout": 20, "statement_timeout": 30, "batch_timeout": 40, "cancel_grace": 2.0}


@asynccontextmanager
async def gathering(scene: Scene) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """What is asked in the block waits, and is then done in one batch. Gives a wait until so many operations do."""
    async with holding(scene.dsn, "select from deployment for update"):
        first = asyncio.create_task(scene.api.start("other"))
        await until_blocked(scene.dsn)

        async def waiting(n: int) -> None:
            await eventually(lambda: scene.server.app.engine.lanes[0].depth >= n)

        yield waiting
    await first


async def other(scene: Scene) -> None:
    """A workflow for what holds the lane up."""
    await scene.api.register(workflow({"id": "nap", "sleep": "1d"}, workflow_id="other"))


def complete(task: pb.Task, json: str = "1") -> pb.Complete:
    """A frame that completes one task."""
    return pb.Complete(items=[pb.CompleteItem(task=task.task, output=Payload(json=json))])


async def test_a_cancel_between_two_results_lets_both_count_and_nothing_follow(open_scene: OpenScene) -> None:
    scene = await open_scene(**SETTINGS)
    await other(scene)
    run_id = await scene.run({"id": "both", "parallel": [[step("a", undo=True)], [step("b")], [step("c")]]}, step("d"))
    a, b, c = await scene.tasks("a", "b", "c")
    async with gathering(scene) as waiting:
        frames = [await scene.worker.send(complete(a))]
        await waiting(1)
        cancelling = asyncio.create_task(scene.call("Cancel", run_id))
        await waiting(2)
        frames += [await scene.worker.send(complete(task)) for task in (b, c, a)]
        await waiting(5)
    await cancelling
    outcomes = [(await scene.worker.results(frame, 1))[0].outcome for frame in frames]
    assert outcomes[:3] == [OK, OK, OK]
    assert outcomes[3] == pb.ITEM_OUTCOME_ALREADY_DONE
    await scene.do("undo-a")
    events = await check_end(scene.api, run_id)
    assert kinds(events) == [
        *("run_started", "scope_opened", "step_scheduled", "step_scheduled", "step_scheduled"),
        *("step_completed", "run_ending", "step_completed", "step_completed"),
        *("undo_scheduled", "undo_completed", "run_cancelled"),
    ]


@pytest.mark.parametrize("seed", [11])
async def test_all_branches_and_what_ends_them_in_one_batch(open_scene: OpenScene, seed: int) -> None:
    """Row 50 of the field's failures: branches that complete together, with a cancel and others in between."""
    scene = await open_scene(**SETTINGS)
    await other(scene)
    fork = {
        "id": "all",
        "parallel": [
            [step("a", undo=True, retry=AT_ONCE), step("e")],
            [step("b", undo=True, retry=AT_ONCE)],
            [step("c", retry=AT_ONCE), {"id": "ask", "wait_signal": "go"}],
        ],
    }
    runs = [await scene.run(fork, step("d", undo=True))]
    runs += [await scene.start() for _ in range(39)]
    await scene.worker.capacity(120)
    tasks: dict[str, list[pb.Task]] = {}
    for task in await scene.worker.tasks(120):
        tasks.setdefault(task.task.run_id, []).append(task)
    chance = random.Random(seed)
    calls: list[asyncio.Task[Any]] = []
    async with gathering(scene) as waiting:
        sent = 0
        for run_id in runs:
            for act in chance.sample(["task", "task", "task", "cancel", "terminate", "pause", "signal", "retry"], 5):
                if act == "task":
                    await scene.worker.send(frame(chance, tasks[run_id].pop()))
                else:
                    calls.append(asyncio.create_task(call(scene, chance, act, run_id)))
                    await asyncio.sleep(0)
                sent += 1
        await waiting(sent)
    await asyncio.gather(*calls)
    finishing = asyncio.create_task(finish(scene))
    try:
        for run_id in runs:
            if await scene.state(run_id) == "PAUSED":
                await scene.call("Resume", run_id)
            if "TED" not in await scene.state(run_id):
                await call(scene, chance, "signal", run_id)
            await check_end(scene.api, run_id)
    finally:
        assert not finishing.done(), finishing.exception()
        await end([finishing])
    assert await count(scene.dsn, "task") == 0
    assert await count(scene.dsn, "timer") == 1, "that of the workflow that held the lane up"
    ends = Counter([await scene.state(run_id) for run_id in runs])
    assert len(ends) >= 3, ends


def frame(chance: random.Random, task: pb.Task) -> Any:
    """What a worker may say of a task."""
    what = chance.choices(["complete", "fail", "release", "checkpoint"], [6, 1, 1, 1])[0]
    if what == "complete":
        return complete(task)
    if what == "release":
        return pb.Release(items=[pb.ReleaseItem(task=task.task)])
    if what == "checkpoint":
        return pb.Checkpoint(items=[pb.CheckpointItem(task=task.task, number=1, state=Payload(json="1"))])
    item = pb.FailItem(task=task.task)
    item.failure.kind = PERMANENT
    return pb.Fail(items=[item])


async def call(scene: Scene, chance: random.Random, act: str, run_id: str) -> None:
    """What a caller may ask; it may be refused, for the state of the run."""
    fields: dict[str, Any] = {}
    if act == "signal":
        fields = {"signal_name": "go"}
    elif act == "cancel" and chance.random() < 0.5:
        fields = {"grace": {"nanos": 0}}
    try:
        await scene.call(act.capitalize(), run_id, **fields)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION  # noqa: PT017  # nothing else is a right answer


async def finish(scene: Scene) -> None:
    """Complete all that comes, and all that is held."""
    while True:
        try:
            await scene.worker.task(timeout=0.2)
        except (AssertionError, TimeoutError):
            await scene.worker.heartbeat()
        except StreamEnded:
            await scene.worker.reconnect()
        for ref in list(scene.worker.held.values()):
            await scene.worker.complete(ref, "1")


# What a batch costs


async def sent_for(scene: Scene, patch: pytest.MonkeyPatch, work: Awaitable[Any]) -> tuple[list[str], int]:
    """The statements that the lanes sent while ``work`` was awaited, by their first word or name, and how many
    round trips they took before that of the end.
    """
    statements: list[str] = []
    trips = 0
    send, sync = pipeline.Session.send, pipeline.Session.sync

    def ours(session: Any) -> bool:
        return any(lane._connection is session._connection for lane in scene.server.app.engine.lanes)

    def sending(self: Any, statement: bytes, params: Any = None) -> Any:
        if ours(self):
            words = [line for line in statement.decode().splitlines() if line and not line.startswith("--")]
            statements.append(" ".join(words)[:60])
        return send(self, statement, params)

    async def syncing(self: Any) -> Any:
        nonlocal trips
        trips += ours(self)
        return await sync(self)

    with patch.context() as inner:
        inner.setattr(pipeline.Session, "send", sending)
        inner.setattr(pipeline.Session, "sync", syncing)
        await work
    return statements, trips


async def test_a_step_of_a_plain_sequence_costs_what_it_did_without_control_flow(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten statements, and no table but run, task and event."""
    scene = await open_scene(lanes=1)
    run_id = await scene.run(step("a"), step("b"), step("c"))
    await scene.do("a")
    b = await scene.task("b")
    statements, trips = await sent_for(scene, monkeypatch, scene.complete(b))
    assert len(statements) == 10, statements
    assert trips == 1
    for table in ("scope", "output", "undo", "timer", "wait", "signal", "child", "message", "checkpoint", "stopped"):
        assert not [text for text in statements if f" {table} " in text], statements
    assert await count(scene.dsn, "run", "run_id = %s and control is null", [run_id]) == 1


async def test_what_a_step_with_an_undo_adds_is_one_statement(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await open_scene(lanes=1)
    await scene.run(step("a"), step("b", undo=True), step("c"))
    await scene.do("a")
    statements, trips = await sent_for(scene, monkeypatch, scene.complete(await scene.task("b")))
    assert len(statements) == 11, statements
    assert trips == 1


async def test_an_advance_costs_no_more_statements_for_many_commands_than_for_few(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving a group of thousands of steps is one Advance."""
    code = await open_code(open_scene, lanes=1)
    costs = []
    for many in (2, 200):
        await code.start()
        run = await code.take()
        asked = await run.advance(*(remote(op, "nobody") for op in range(1, many + 1)), outcome=CONTINUE)
        stops = [cancel(op, seq) for op, seq in enumerate(asked.advance.seqs, 1)]
        costs.append(await sent_for(code.scene, monkeypatch, run.advance(*stops, outcome=CONTINUE)))
    await code.decider.close()
    (few, few_trips), (lots, lots_trips) = costs
    assert (len(lots), lots_trips) == (len(few), few_trips), (few, lots)


async def test_results_of_local_steps_cost_few_statements_and_lock_no_task(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = await open_code(open_scene, lanes=1)
    await code.start()
    run = await code.take()
    await run.advance(local(1), outcome=CONTINUE)
    statements, trips = await sent_for(code.scene, monkeypatch, run.advance(local(2), outcome=CONTINUE))
    await code.decider.close()
    assert (len(statements), trips) == (8, 1), statements
    assert not [text for text in statements if " task " in text and "for update" in text], statements
