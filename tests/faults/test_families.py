"""Parents and children stay together whatever dies: each child is created once and heard of once, and none runs for a
parent that is ending (rows 45 and 53 of the field's failures).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import PERMANENT, Scene, state_of, step, workflow
from tests.faults.crashing import SETTINGS
from tests.faults.scene import QUICK, STAYING, asleep, count, until_count
from tests.faults.scene import Scene as Stage
from tests.fixtures.api import Api, kinds
from tests.fixtures.databases import database_address, redirected
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker
from tests.fixtures.servers import StartServerProcess
from tests.fixtures.waiting import eventually

FAMILIES = 60
NONCE = "the same process"
KID = workflow(step("g"), workflow_id="kid")
"""A child with one step."""


def kid(node_id: str = "kid", **more: Any) -> dict[str, Any]:
    """A node that starts a child."""
    return {"id": node_id, "workflow": "kid", **more}


async def family(api: Api, parent_id: str) -> list[run_pb2.Run]:
    """The children of a run, the newest first."""
    return await api.list_all(parent_run_id=parent_id)


async def open_scene(stage: Stage, **settings: Any) -> Scene:
    """A server in the test's loop, and a worker of steps and children."""
    server = await stage.serve(**{**SETTINGS, **settings})
    worker = await stage.raw(server.grpc_address, handlers=["a", "b", "c", "d", "g", "undo-a"], capacity=100)
    scene = Scene(server, stage.api(server.grpc_address), worker, stage.dsn)
    await scene.api.register(KID)
    return scene


async def work_off(worker: RawWorker) -> None:
    """Complete whatever comes, in any order, until cancelled."""
    while True:
        task = await worker.task(60)
        await worker.complete(task, json.dumps(task.handler))


# Servers that die


@pytest.mark.parametrize(
    ("pattern", "when"),
    [
        (b"insert into message", "the child is scheduled"),
        (b"insert into run (run_id", "the child is started"),
        (b"delete from task", "the child has ended"),
        (b"delete from child", "the parent is told"),
    ],
    ids=["scheduled", "started", "ended", "told"],
)
async def test_a_server_that_is_killed_as_it_commits_leaves_no_family_apart(
    scene: Stage, server_process: StartServerProcess, pattern: bytes, when: str
) -> None:
    """kill -9 right after the commit, before anybody hears of it; another server goes on with what is in the tables."""
    database = scene.proxy(database_address(scene.dsn))
    doomed = server_process(redirected(scene.dsn, database.address), lanes=1, prepared="off", **STAYING)
    api = scene.api(doomed.grpc_address)
    await api.register(KID)
    await api.register(workflow(step("a"), kid(), step("b")))
    worker = await scene.raw(doomed.grpc_address, handlers=["a", "b", "g"], process_nonce=NONCE)
    parent = (await api.start()).run_id
    a = await worker.task()
    if when == "the child has ended":
        await worker.complete(a, "1")
        task = await worker.task()
    else:
        task = a
    database.break_on(b"commit\0", "up", "blackhole", after=pattern, forward=True)
    telling = asyncio.create_task(_go_on(worker, task))
    await eventually(lambda: database.breaks, 30, what=when)
    await asyncio.to_thread(doomed.kill)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    held = list(worker.held.values())
    await worker.drop()

    other = await scene.serve(**SETTINGS)
    api = scene.api(other.grpc_address)
    again = await scene.raw(
        other.grpc_address, handlers=["a", "b", "g"], process_nonce=NONCE, previous_session_ids=worker.sessions,
        held=held,
    )  # fmt: skip
    await again.complete_all([(ref, "1") for ref in held])
    working = asyncio.create_task(work_off(again))
    assert state_of(await api.wait(parent, 30)) == "COMPLETED"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    [child] = await family(api, parent)
    assert kinds(await api.history(child.run_id)) == [
        "run_started",
        "step_scheduled",
        "step_completed",
        "run_completed",
    ]
    told = Counter(kinds(await api.history(parent)))
    assert (told["child_scheduled"], told["child_ended"]) == (1, 1)
    assert await count(scene.dsn, "message") == await count(scene.dsn, "child") == 0


async def _go_on(worker: RawWorker, task: pb.Task) -> None:
    await worker.complete(task, "1")
    await work_off(worker)


async def test_families_outlive_servers_that_are_killed_again_and_again(
    scene: Stage, server_process: StartServerProcess
) -> None:
    """Whatever the servers were doing: every parent learns of its child, and no child is there twice."""
    steady = await scene.serve(**SETTINGS)
    doomed = server_process(scene.dsn, **QUICK)
    api = scene.api(steady.grpc_address)
    await api.register(KID)
    await api.register(workflow(step("a"), kid("one"), kid("two"), step("b")))
    worker = await scene.raw(steady.grpc_address, handlers=["a", "b", "g"], capacity=FAMILIES)
    results = await api.start_many([api.start_request() for _ in range(FAMILIES)])
    working = asyncio.create_task(work_off(worker))
    for share in (1, 2, 3):
        await until_count(scene.dsn, "run where parent_run_id is not null", FAMILIES * share // 2, 30, more=True)
        await asyncio.to_thread(doomed.kill)
        doomed.start()
        await asyncio.to_thread(doomed.wait_serving)
    for result in results:
        assert state_of(await api.wait(result.started.run_id, 30)) == "COMPLETED"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    for result in results:
        told = Counter(kinds(await api.history(result.started.run_id)))
        assert (told["child_scheduled"], told["child_ended"]) == (2, 2)
    assert await count(scene.dsn, "run where parent_run_id is not null") == 2 * FAMILIES
    assert await count(scene.dsn, "message") == 0


async def test_two_servers_that_deliver_the_same_messages_at_once_apply_each_once(scene: Stage) -> None:
    here, there = await open_scene(scene), await scene.serve(**SETTINGS)
    outboxes = [server.app.engine.outbox for server in (here.server, there)]
    await here.api.register(workflow(kid("one"), kid("two")))

    async def deliver_together(n: int, message: int) -> None:
        for outbox in outboxes:
            outbox.wake()
        await until_count(scene.dsn, "message", 0)

    async with asleep(outboxes[0].loop), asleep(outboxes[1].loop):
        results = await here.api.start_many([here.api.start_request() for _ in range(FAMILIES)])
        await until_count(scene.dsn, "message", FAMILIES)
    await deliver_together(FAMILIES, 1)
    for _ in range(2):
        tasks = await here.worker.tasks(FAMILIES, 30)
        async with asleep(outboxes[0].loop), asleep(outboxes[1].loop):
            await here.worker.complete_all([(task, "1") for task in tasks])
            await until_count(scene.dsn, "message", FAMILIES)
        await deliver_together(FAMILIES, 4)
    for result in results:
        assert state_of(await here.api.wait(result.started.run_id)) == "COMPLETED"
        told = Counter(kinds(await here.api.history(result.started.run_id)))
        assert (told["child_scheduled"], told["child_ended"]) == (2, 2)
    assert await count(scene.dsn, "run where parent_run_id is not null") == 2 * FAMILIES


@pytest.mark.parametrize("how", ["Cancel", "Terminate"])
@pytest.mark.parametrize("policy", ["cancel", "terminate", "abandon"])
async def test_a_child_whose_parent_ended_before_it_was_started_never_runs(scene: Stage, how: str, policy: str) -> None:
    """The start is on its way when the parent ends, whatever was to become of a child that runs."""
    s = await open_scene(scene)
    async with asleep(s.server.app.engine.outbox.loop):
        run_id = await s.run(step("a", undo=True), kid(on_parent_end=policy), step("b"))
        await s.do("a")
        await until_count(scene.dsn, "message", 1)
        await s.call(how, run_id)
    if how == "Cancel":
        await s.do("undo-a")
    ended = "CANCELLED" if how == "Cancel" else "TERMINATED"
    assert state_of(await s.api.wait(run_id)) == ended
    await until_count(scene.dsn, "message", 0)
    assert await family(s.api, run_id) == []
    await s.no_task()


# Retries of the parent

PARENT = (
    {
        "id": "both",
        "parallel": [
            [step("a"), kid("one"), step("b"), kid("left", on_parent_end="abandon"), step("c"), kid("two")],
            [step("x") | {"step": "d"}],
        ],
    },
    kid("three"),
    step("y") | {"step": "a"},
)
"""Beside children of all sorts there is the step x, which can fail wherever the others are; behind it come a child that
can fail itself, and a step.
"""
VICTIMS = ("x", "three", "y")
"""The nodes of which at any time there is one that can fail."""
BESIDE_X = 3
"""So many children there are beside x."""
KIDS = ["left", "one", "three", "two"]
NEVER = 1 << 30


class Parent:
    """A run of PARENT and its children, with the tasks that have come of them. Once the event ``point`` is in its
    history, and ``ready``: what follows from it has come to the worker, a victim fails for good; when everything has
    ended with that, the parent is retried.
    """

    def __init__(self, scene: Scene, run_id: str, point: int, *, ready: bool) -> None:
        self.run_id, self.point = run_id, point
        self.arrived: asyncio.Queue[pb.Task] = asyncio.Queue()
        self.failed_after = 0
        """How many events there were when the victim failed."""
        self._scene, self._ready = scene, ready
        self._victim: pb.Task | None = None

    async def play(self) -> list[run_pb2.Event]:
        """Let it go on, one report after the other, until it has completed. Returns its history."""
        while "run_completed" not in kinds(events := await self._scene.api.history(self.run_id)):
            if self._victim is not None:
                await self._decide(self._victim, events)
            with contextlib.suppress(TimeoutError):
                await self._take(await asyncio.wait_for(self.arrived.get(), 0.02))
        return events

    async def _decide(self, victim: pb.Task, events: list[run_pb2.Event]) -> None:
        """Let the victim fail now, complete because nothing else can go on without it, or neither."""
        stuck = victim.node_id != "x" or kinds(events).count("child_ended") == BESIDE_X
        if len(events) >= self.point and (stuck or not self._ready or not self.arrived.empty()):
            self.failed_after, self._victim = len(events), None
            await self._scene.fail(victim, PERMANENT)
            assert state_of(await self._scene.api.wait(self.run_id)) == "FAILED"
            while self.point % 2 and not self.arrived.empty():  # whoever was left alone ends before the retry
                await self._take(self.arrived.get_nowait())
            answers = [await self._scene.call("Retry", self.run_id, request_id="again") for _ in range(2)]
            assert answers[0] == answers[1]
        elif len(events) < self.point and stuck:
            self._victim = None
            await self._scene.complete(victim)

    async def _take(self, task: pb.Task) -> None:
        node = task.node_id
        if task.task.run_id != self.run_id:
            node = (await self._nodes())[task.task.run_id]
        if node in VICTIMS and not self.failed_after:
            self._victim = task
        else:  # it can have been stopped before it was read
            assert (await self._scene.worker.complete(task)).outcome in (OK, LEASE_LOST)

    async def _nodes(self) -> dict[str, str]:
        """By the id of a child: its node."""
        return {event.child_run_id: event.node_id for event in await self._scene.events(self.run_id, "child_scheduled")}


async def _hand_out(scene: Scene, parents: dict[str, Parent]) -> None:
    """Give every task to the parent whose family it is of, until cancelled."""
    while True:
        task = await scene.worker.task(60)
        run_id = task.task.run_id
        if run_id not in parents:
            run_id = (await scene.api.get(run_id)).parent_run_id
        parents[run_id].arrived.put_nowait(task)


async def _played(scene: Scene, parents: list[Parent]) -> list[list[run_pb2.Event]]:
    """The histories of families that go on beside each other."""
    handing = asyncio.create_task(_hand_out(scene, {parent.run_id: parent for parent in parents}))
    playing = asyncio.gather(*(parent.play() for parent in parents))
    both: list[asyncio.Future[Any]] = [handing, playing]
    try:
        async with asyncio.timeout(90):
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if handing.done():
                handing.result()  # raises its error: nobody gets a task any more
            return await playing
    finally:
        handing.cancel()
        playing.cancel()
        await asyncio.gather(*both, return_exceptions=True)


@pytest.mark.parametrize("ready", [False, True], ids=["at-once", "when-what-follows-is-there"])
async def test_a_parent_that_is_retried_at_any_event_of_its_history_creates_each_child_once(
    scene: Stage, ready: bool
) -> None:
    """The points are those of the history of one that nobody retries. A child that completed is never run again; one
    that was stopped with its parent is, by an event of its own; one that was left alone is waited for again.
    """
    s = await open_scene(scene, cancel_grace=0.0)
    [reference] = await _played(s, [Parent(s, await s.run(*PARENT), NEVER, ready=ready)])
    assert Counter(kinds(reference))["child_ended"] == len(KIDS)
    last = next(e.seq for e in reference if e.HasField("step_completed") and e.step_completed.node_id == "y")
    parents = [Parent(s, await s.start(), point, ready=ready) for point in range(1, last)]
    for parent, events in zip(parents, await _played(s, parents), strict=True):
        assert parent.failed_after >= parent.point
        assert kinds(events).count("run_retried") == 1
        scheduled = [event for event in events if event.HasField("child_scheduled")]
        ended = [event.child_ended.child_seq for event in events if event.HasField("child_ended")]
        nodes = {event.child_scheduled.child_run_id: event.child_scheduled.node_id for event in scheduled}
        there = {child.run_id for child in await family(s.api, parent.run_id)}
        # One whose start came when its parent had failed has never been there, and has no end: another one is.
        never = {event.seq for event in scheduled if event.child_scheduled.child_run_id not in there} - set(ended)
        assert sorted({*ended, *never}) == [event.seq for event in scheduled], parent.point
        assert len(ended) == len(set(ended))
        assert len(never) <= len(scheduled) - len(KIDS), parent.point
        assert len(nodes) == len(scheduled), "no two events create the same child"
        left = [event.seq for event in scheduled if event.child_scheduled.node_id == "left"]
        assert len(set(left) - never) == 1, "it went on without its parent"
        children = await family(s.api, parent.run_id)
        assert {child.run_id for child in children} <= set(nodes)
        completed = [nodes[child.run_id] for child in children if state_of(child) == "COMPLETED"]
        assert sorted(completed) == KIDS, parent.point
    assert len({parent.failed_after for parent in parents}) > len(KIDS), "they failed at different places"
