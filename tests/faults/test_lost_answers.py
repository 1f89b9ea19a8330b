"""A report or its answer is lost on the way: the worker sends it again, to the same server or to another one, and gets
the first answer; it has its effect once.

Rows 5 and 49 of the field failures. I6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest

from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.faults.scene import STAYING, Scene, fetch, task_states, until_count
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.proxy import Proxy
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED, Content, RawWorker
from tests.fixtures.waiting import eventually

LATER = {"max_attempts": 3, "initial_delay": "1h", "max_delay": "1h", "max_corrective_attempts": 3}
PRICE = {"type": "object", "required": ["price"], "properties": {"price": {"type": "integer"}}}


def complete(task: pb.TaskRef) -> Content:
    return pb.Complete(items=[pb.CompleteItem(task=task, output=Payload(json='{"price": 1}'))])


def complete_badly(task: pb.TaskRef) -> Content:
    return pb.Complete(items=[pb.CompleteItem(task=task, output=Payload(json='{"price": "much"}'))])


def fail(task: pb.TaskRef) -> Content:
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_OPERATIONAL, code="BUSY", message="the provider is busy")
    return pb.Fail(items=[pb.FailItem(task=task, failure=failure)])


def fail_for_good(task: pb.TaskRef) -> Content:
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="NO", message="never")
    return pb.Fail(items=[pb.FailItem(task=task, failure=failure)])


def release(task: pb.TaskRef) -> Content:
    return pb.Release(items=[pb.ReleaseItem(task=task)])


Report = Callable[[pb.TaskRef], Content]
ANSWERS: dict[Report, tuple[pb.ItemOutcome.ValueType, pb.ItemOutcome.ValueType]] = {
    complete: (OK, ALREADY_DONE),
    complete_badly: (REFUSED, REFUSED),
    fail: (OK, ALREADY_DONE),
    fail_for_good: (OK, ALREADY_DONE),
    release: (OK, ALREADY_DONE),
}
"""What a report is answered the first time, and when it was recorded before."""

each_report = pytest.mark.parametrize("report", ANSWERS)
either_server = pytest.mark.parametrize("elsewhere", [False, True], ids=["same-server", "another-server"])


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker behind a proxy that has a task, and where it comes back to."""

    scene: Scene
    api: Api
    proxy: Proxy
    worker: RawWorker
    task: pb.Task
    back_at: str

    async def state(self) -> tuple[list[run_pb2.Event], object]:
        """All that a report can change."""
        return await self.api.history(self.task.task.run_id), await task_states(self.scene.dsn)

    async def lose(self, frame: Content, hole: str) -> None:
        """Send a frame that does not arrive ("up"), or whose answer does not ("down"); then the connection breaks."""
        before = await self.state()

        async def recorded() -> bool:
            return await self.state() != before

        self.proxy.blackhole("up" if hole == "up" else "down")
        await self.worker.send(frame)
        if hole == "down":
            await eventually(recorded)
        self.proxy.reset()
        self.proxy.heal()
        await self.worker.ended()

    async def come_back(self) -> tuple[RawWorker, bool]:
        """The same process on a new stream, holding what it has no answer for, and whether the lease was kept.

        It takes nothing new. What the task became, and was leased to the broken stream as, has come back.
        """
        nonce = self.worker.hello().process_nonce
        worker = await self.scene.raw(self.back_at, capacity=0, process_nonce=nonce, hello=False)
        await worker.send(worker.hello(previous_session_ids=self.worker.sessions, held=[self.task.task]))
        kept = (await worker.next(pb.Welcome)).held[0].kept
        await until_count(self.scene.dsn, "task where lease_session is not null", int(kept))
        return worker, kept


async def broken(scene: Scene, *, elsewhere: bool) -> Broken:
    first = await scene.serve(**STAYING)
    second = await scene.serve(**STAYING) if elsewhere else first
    proxy, api = scene.proxy(first.grpc_address), scene.api(second.grpc_address)
    await api.register(manifest(retry=LATER, output_schema=PRICE))
    worker = await scene.raw(proxy.address, capacity=1)
    await api.start()
    return Broken(scene, api, proxy, worker, await worker.task(), second.grpc_address)


async def answer(worker: RawWorker, frame: Content) -> pb.ItemResult:
    return (await worker.results(await worker.send(frame), 1))[0]


@each_report
async def test_a_report_that_did_not_arrive_counts_when_it_comes_again(scene: Scene, report: Report) -> None:
    """Row 5: the connection breaks before the report is sent. The lease is kept over the reconnect."""
    at = await broken(scene, elsewhere=False)
    before = await at.state()
    await at.lose(report(at.task.task), "up")
    worker, kept = await at.come_back()
    assert kept
    assert (await at.state())[0] == before[0]
    assert (await answer(worker, report(at.task.task))).outcome == ANSWERS[report][0]
    assert await at.state() != before


@each_report
@either_server
async def test_a_report_whose_answer_was_lost_has_the_same_answer_and_no_effect_when_it_comes_again(
    scene: Scene, report: Report, elsewhere: bool
) -> None:
    """Rows 5 and 49: the connection breaks after the commit, before the Ack."""
    at = await broken(scene, elsewhere=elsewhere)
    await at.lose(report(at.task.task), "down")
    worker, kept = await at.come_back()
    assert not kept
    after = await at.state()
    first = await answer(worker, report(at.task.task))
    assert first.outcome == ANSWERS[report][1]
    assert await answer(worker, report(at.task.task)) == first
    assert await at.state() == after
    other = fail_for_good if report is complete else complete
    assert (await answer(worker, other(at.task.task))).outcome == LEASE_LOST
    assert await at.state() == after


@either_server
async def test_what_was_refused_is_refused_again_for_the_same_faults(scene: Scene, elsewhere: bool) -> None:
    """Row 49: an output that breaks its schema is one corrective failure, however often it is sent."""
    at = await broken(scene, elsewhere=elsewhere)
    await at.lose(complete_badly(at.task.task), "down")
    worker, _ = await at.come_back()
    refusal = await answer(worker, complete_badly(at.task.task))
    assert refusal.reason == error_pb2.ERROR_REASON_OUTPUT_SCHEMA_MISMATCH
    assert [violation.path for violation in refusal.violations] == ["/price"]
    (row,) = await fetch(scene.dsn, "select corrective_failures, operational_failures, attempt from task")
    assert row == {"corrective_failures": 1, "operational_failures": 0, "attempt": 1}


@pytest.mark.parametrize("hole", ["up", "down"])
@either_server
async def test_a_heartbeat_that_or_whose_answer_was_lost_renews_when_it_comes_again(
    scene: Scene, hole: str, elsewhere: bool
) -> None:
    """Row 5. The lease is the same afterwards but for its time."""
    at = await broken(scene, elsewhere=elsewhere)
    lease = "select token, attempt from task"
    before = await fetch(scene.dsn, lease)
    at.proxy.blackhole("up" if hole == "up" else "down")
    since = await expiry(scene.dsn)
    heartbeat = pb.Heartbeat(tasks=[at.task.task], last_tasks_number=at.worker.last_tasks_number)
    await at.worker.send(heartbeat)
    if hole == "down":
        await eventually(lambda: _is_later(scene.dsn, since))
    at.proxy.reset()
    at.proxy.heal()
    await at.worker.ended()
    worker, kept = await at.come_back()
    assert kept
    renewed = await answer(worker, pb.Heartbeat(tasks=[at.task.task]))
    assert renewed.outcome == OK
    assert renewed.lease_duration.ToTimedelta().total_seconds() == pytest.approx(60, abs=1)
    assert await fetch(scene.dsn, lease) == before
    assert (await answer(worker, complete(at.task.task))).outcome == OK


async def expiry(dsn: str) -> datetime:
    at: datetime = (await fetch(dsn, "select lease_expires_at from task"))[0]["lease_expires_at"]
    return at


async def _is_later(dsn: str, since: datetime) -> bool:
    return await expiry(dsn) > since
