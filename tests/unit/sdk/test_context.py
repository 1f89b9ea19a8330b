"""What a handler may say and ask while it runs, in threads, on loops, and without a worker."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from fencepost import (
    CancelReason,
    FailureKind,
    LeaseLost,
    NotDecodable,
    NotEncodable,
    StepCancelled,
    StepContext,
    TaskKind,
    Value,
    step,
)
from fencepost.checkpoints import Saving
from fencepost.failure import failed
from fencepost.lease import Lease
from tests.unit.sdk.building import lease_of


class Desk:
    """Takes what a step hands over, as an executor does, and answers when the test says so."""

    def __init__(self) -> None:
        self.taken: list[Saving] = []
        self.came = threading.Event()

    def report(self, lease: Lease, saving: Saving) -> None:
        self.taken.append(saving)
        self.came.set()


def at_desk() -> tuple[StepContext, Lease, Desk]:
    lease, desk = lease_of(), Desk()
    lease.reporter = desk
    return StepContext(lease), lease, desk


def in_thread(function: Any, *arguments: Any, **keywords: Any) -> Future[Any]:
    """Call it in a daemon thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **keywords))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_in_a_thread_a_checkpoint_blocks_until_it_is_saved() -> None:
    context, _, desk = at_desk()
    saving = in_thread(context.checkpoint, {"done": 1})
    assert desk.came.wait(30)
    assert not saving.done()
    assert (desk.taken[0].number, desk.taken[0].state.json) == (1, '{"done":1}')
    desk.taken[0].succeed()
    assert saving.result(30) is None


def test_in_a_thread_a_checkpoint_that_can_not_be_saved_raises_why() -> None:
    context, _, desk = at_desk()
    saving = in_thread(context.checkpoint, 1)
    assert desk.came.wait(30)
    desk.taken[0].fail(LeaseLost("gone"))
    with pytest.raises(LeaseLost, match="gone"):
        saving.result(30)


def test_who_does_not_want_to_wait_does_not() -> None:
    context, _, desk = at_desk()
    assert context.checkpoint(1, wait=False) is None
    assert [saving.waiters for saving in desk.taken] == [[]]


async def test_on_a_loop_a_checkpoint_is_handed_over_at_once_and_may_be_awaited() -> None:
    context, _, desk = at_desk()
    saved = context.checkpoint(1)
    assert [saving.number for saving in desk.taken] == [1]
    waiting = asyncio.ensure_future(saved)
    await asyncio.sleep(0)
    assert not waiting.done()
    desk.taken[0].succeed()
    assert await asyncio.wait_for(waiting, 30) is None


async def test_a_wait_that_is_cancelled_harms_nobody_else() -> None:
    context, _, desk = at_desk()
    waiting = asyncio.ensure_future(context.checkpoint(1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    desk.taken[0].succeed()


async def test_a_failed_checkpoint_that_nobody_awaits_says_nothing() -> None:
    context, _, desk = at_desk()
    context.checkpoint(1)
    desk.taken[0].fail(LeaseLost("gone"))


def test_numbers_grow_from_the_last_one_also_over_threads_and_arrive_in_order() -> None:
    lease, desk = lease_of(), Desk()
    lease.reporter = desk
    lease.checkpoint = (7, Value(json="1"))
    context = StepContext(lease)
    threads = [in_thread(lambda: [context.checkpoint(0, wait=False) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.result(30)
    assert [saving.number for saving in desk.taken] == list(range(8, 208))


def test_the_last_checkpoint_is_that_of_an_earlier_attempt_until_there_is_a_newer() -> None:
    context, lease, _ = at_desk()
    seen = [context.last_checkpoint, context.load_checkpoint(int)]
    lease.checkpoint = (3, Value(json='{"done":3}'))
    seen.append(context.last_checkpoint)
    context.checkpoint({"done": 4}, wait=False)
    seen.append(context.last_checkpoint)
    assert seen == [None, None, {"done": 3}, {"done": 4}]


def test_the_last_checkpoint_may_have_a_type() -> None:
    @dataclass
    class Cursor:
        done: int

    context, lease, _ = at_desk()
    lease.checkpoint = (3, Value(json='{"done":3}'))
    assert context.load_checkpoint(Cursor) == Cursor(3)
    with pytest.raises(NotDecodable):
        context.load_checkpoint(list[int])


def test_a_checkpoint_that_can_not_be_recorded_is_refused_at_once() -> None:
    lease = lease_of(max_payload_bytes=100)
    context = StepContext(lease)
    with pytest.raises(NotEncodable, match="the checkpoint has 101 bytes, over the limit of 100"):
        context.checkpoint("x" * 99)
    with pytest.raises(NotEncodable):
        context.checkpoint({1})
    assert lease.checkpoint == (0, None)


@pytest.mark.parametrize(
    "reason", [CancelReason.LEASE_LOST, CancelReason.ATTEMPT_TIMEOUT, CancelReason.WORKER_SHUTDOWN]
)
def test_an_attempt_of_which_nothing_counts_saves_nothing(reason: CancelReason) -> None:
    context, lease, desk = at_desk()
    lease.cancel_reason = reason
    with pytest.raises(LeaseLost, match=reason):
        context.checkpoint(1)
    assert desk.taken == []


def test_a_step_that_should_stop_may_save_what_it_has() -> None:
    context, lease, desk = at_desk()
    lease.cancel_reason = CancelReason.RUN_CANCELLED
    context.checkpoint(1, wait=False)
    assert len(desk.taken) == 1


def test_progress_has_a_limit_and_says_so() -> None:
    context = StepContext.for_test()
    context.progress("x" * 4094)
    with pytest.raises(NotEncodable, match="the progress has 4097 bytes, over the limit of 4096"):
        context.progress("x" * 4095)
    with pytest.raises(NotEncodable, match="4097 bytes"):
        context.progress(Value(json="1" * 96, metadata={"k": "v" * 4000}))


def test_a_sync_step_stops_where_it_can() -> None:
    context, lease, _ = at_desk()
    context.raise_if_cancelled()
    lease.cancel_reason = CancelReason.RUN_CANCELLED
    with pytest.raises(StepCancelled, match="RUN_CANCELLED") as caught:
        context.raise_if_cancelled()
    failure = failed(caught.value, 1000)
    assert (failure.kind, failure.code) == (FailureKind.OPERATIONAL, "StepCancelled")


def test_a_context_for_a_test_remembers_what_was_saved() -> None:
    @step("s")
    def count(n: int, ctx: StepContext) -> int:
        done = ctx.last_checkpoint or 0
        for number in range(done, n):
            ctx.checkpoint(number + 1)
        return n - done

    first = StepContext.for_test()
    assert count(3, first) == 3
    assert first.last_checkpoint == 3
    assert count(5, StepContext.for_test(last_checkpoint=3)) == 2


def test_a_context_tells_what_kind_of_task_it_is() -> None:
    assert (StepContext.for_test().kind, StepContext.for_test().unfinished) == (TaskKind.STEP, False)
    context = StepContext.for_test(kind=TaskKind.UNDO, unfinished=True)
    assert (context.kind, context.unfinished) == (TaskKind.UNDO, True)
