"""Local steps in the worker: each attempt ends once, however it behaves, and short ones cost little."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
import pytest_asyncio

from fencepost import CancelReason, CorrectiveError, FailureKind, PermanentError, Retry, StepContext, local_steps
from fencepost.failure import Completed, Failed
from fencepost.local_functions import local_function
from fencepost.local_steps import LocalSteps, Underway
from fencepost.ops import Call, LocalCall
from fencepost.run_cache import RunEntry
from tests.fixtures.waiting import eventually
from tests.unit.sdk.building import this_task
from tests.unit.sdk.threads import no_thread_starts

ONCE = Retry(max_attempts=1)
QUICK = Retry(max_attempts=3, initial_delay=0.001, jitter=0)
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Bench:
    """Local steps that run beside a test."""

    def __init__(self, threads: int = 4) -> None:
        self.ended: list[tuple[Underway, Completed | Failed]] = []
        self.settled = 0
        self.steps = LocalSteps(asyncio.get_running_loop(), threads, self._end, self._settle)
        self._op = 0

    def _end(self, step: Underway, result: Completed | Failed) -> None:
        self.ended.append((step, result))

    def _settle(self) -> None:
        self.settled += 1

    def make(
        self, function: Callable[..., Any], *args: Any, retry: Retry = ONCE, timeout: float | None = None
    ) -> Underway:
        self._op += 1
        local = local_function(function, {})
        call = Call(function, local, args, retry, timeout, "", "w")
        # Only its presence is looked at.
        entry = cast("RunEntry", object())
        return Underway(entry, LocalCall(self._op, local.name, call, "r", 1), 1 << 20)

    def begin(self, function: Callable[..., Any], *args: Any, **options: Any) -> Underway:
        step = self.make(function, *args, **options)
        self.steps.begin([step])
        return step

    async def all_ended(self, count: int) -> list[Completed | Failed]:
        await eventually(lambda: len(self.ended) >= count)
        return [result for _step, result in self.ended]


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.steps.close()


def output(result: Completed | Failed) -> str | None:
    assert isinstance(result, Completed), result
    return result.output.json


def failure(result: Completed | Failed) -> tuple[FailureKind, str]:
    assert isinstance(result, Failed), result
    return result.kind, result.code


async def test_steps_that_wait_for_nothing_are_run_by_one_task_and_settled_together(bench: Bench) -> None:
    tasks = set()

    async def quick(number: int) -> int:
        tasks.add(this_task().get_name())
        return number

    bench.steps.begin([bench.make(quick, number) for number in range(100)])
    results = await bench.all_ended(100)
    assert [output(result) for result in results] == [str(number) for number in range(100)]
    await eventually(lambda: bench.settled == 1)
    assert len(tasks) == 1


async def test_a_step_that_waits_holds_up_no_other(bench: Bench) -> None:
    go = asyncio.Event()

    async def waits() -> str:
        await go.wait()
        return "waited"

    async def quick() -> str:
        return "quick"

    bench.steps.begin([bench.make(function) for function in (quick, waits, quick, waits, quick)])
    assert [output(result) for result in await bench.all_ended(3)] == ['"quick"'] * 3
    go.set()
    assert [output(result) for result in await bench.all_ended(5)][3:] == ['"waited"'] * 2


async def test_a_step_sees_a_task_of_its_own_and_asyncios_timeouts_work_in_it(bench: Bench) -> None:
    async def impatient() -> str:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            return "timed out"
        return "slept"

    async def groups() -> list[int]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0.001, number)) for number in range(3)]
        return [task.result() for task in tasks]

    bench.steps.begin([bench.make(impatient), bench.make(groups)])
    assert sorted(output(result) or "" for result in await bench.all_ended(2)) == ['"timed out"', "[0,1,2]"]


async def test_what_a_step_does_to_its_task_and_context_does_not_reach_the_next(bench: Bench) -> None:
    async def careless() -> str:
        variable.set("set")
        this_task().cancel()
        return variable.get()

    async def careful() -> str:
        before = variable.get()
        await asyncio.sleep(0)
        return before

    bench.steps.begin([bench.make(function) for function in (careless, careful, careless, careful)])
    found = sorted(output(result) or "" for result in await bench.all_ended(4))
    assert found == ['"set"', '"set"', '"unset"', '"unset"']


async def test_what_a_step_leaves_on_its_task_does_not_reach_the_next(bench: Bench) -> None:
    async def careless() -> None:
        asyncio.get_running_loop().call_later(0.01, this_task().cancel)

    async def innocent() -> str:
        await asyncio.sleep(0.1)
        return "innocent"

    bench.steps.begin([bench.make(careless), bench.make(innocent)])
    assert [output(result) for result in await bench.all_ended(2)] == [None, '"innocent"']


async def test_a_context_is_kept_over_what_a_step_waits_for(bench: Bench) -> None:
    async def keeps() -> str:
        variable.set("mine")
        await asyncio.sleep(0.001)
        return variable.get()

    bench.begin(keeps)
    assert [output(result) for result in await bench.all_ended(1)] == ['"mine"']


@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_step_raises_is_its_failure(bench: Bench, is_async: bool) -> None:
    for error in (SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), TimeoutError("t")):

        def raises(error: BaseException = error) -> None:
            raise error

        async def raises_async(error: BaseException = error) -> None:
            await asyncio.sleep(0)
            raise error

        bench.begin(raises_async if is_async else raises)
    codes = sorted(failure(result)[1] for result in await bench.all_ended(5))
    assert codes == ["CancelledError", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "TimeoutError"]


@pytest.mark.parametrize("bad", [float("nan"), b"bytes", {1, 2}, "\ud800", "x" * (1 << 21)])
async def test_an_output_that_cannot_be_recorded_is_a_failure(bench: Bench, bad: object) -> None:
    async def returns() -> object:
        return bad

    bench.begin(returns, retry=QUICK)
    (result,) = await bench.all_ended(1)
    assert failure(result) == (FailureKind.PERMANENT, "OUTPUT_NOT_RECORDABLE")


async def test_operational_failures_are_tried_again_and_permanent_ones_are_not(bench: Bench) -> None:
    attempts: list[int] = []

    async def shaky(ctx: StepContext) -> int:
        attempts.append(ctx.attempt)
        if len(attempts) < 3:
            raise OSError("busy")
        return len(attempts)

    def never() -> None:
        raise PermanentError("no", code="NO")

    step = bench.begin(shaky, retry=QUICK)
    assert [output(result) for result in await bench.all_ended(1)] == ["3"]
    assert attempts == [1, 2, 3]
    assert step.attempt == 3
    bench.begin(never, retry=QUICK)
    assert failure((await bench.all_ended(2))[1]) == (FailureKind.PERMANENT, "NO")


async def test_a_corrective_failure_is_tried_again_at_once_with_its_feedback(bench: Bench) -> None:
    def learns(ctx: StepContext) -> object:
        if ctx.feedback is None:
            raise CorrectiveError("worse", feedback={"do": "better"})
        return ctx.feedback

    bench.begin(learns, retry=Retry(initial_delay=60, jitter=0))
    assert [output(result) for result in await bench.all_ended(1)] == ['{"do":"better"}']


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_attempt_that_takes_too_long_is_failed_and_told_to_stop(bench: Bench, is_async: bool) -> None:
    reasons: list[object] = []
    begun = threading.Event()

    async def hangs(ctx: StepContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            reasons.append(ctx.cancel_reason)

    def blocks(ctx: StepContext) -> None:
        begun.set()
        end = time.monotonic() + 30
        while not ctx.cancelled and time.monotonic() < end:
            time.sleep(0.001)
        reasons.append(ctx.cancel_reason)

    bench.begin(hangs if is_async else blocks, timeout=0.02)
    if not is_async:
        assert begun.wait(30)  # this holds the loop up, whose timer would not wait for a thread that is slow to begin
    assert failure((await bench.all_ended(1))[0]) == (FailureKind.OPERATIONAL, "ATTEMPT_TIMEOUT")
    await eventually(lambda: reasons == [CancelReason.ATTEMPT_TIMEOUT])
    assert len(bench.ended) == 1, "what it still does is nobody's"


async def test_an_attempt_whose_thread_is_slow_to_begin_is_told_to_stop_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    late = threading.Event()
    bind = LocalCall.bind

    def late_bind(self: LocalCall, attempt: int = 1) -> Any:
        assert late.wait(30)
        return bind(self, attempt)

    def blocks(ctx: StepContext) -> None:
        told.append(ctx.wait_cancelled(10))

    monkeypatch.setattr(LocalCall, "bind", late_bind)
    asyncio.get_running_loop().call_later(0.1, late.set)
    bench.begin(blocks, timeout=0.01)
    await bench.all_ended(1)
    await eventually(lambda: told == [True])


async def test_a_step_that_was_dropped_is_stopped_and_has_no_end(bench: Bench) -> None:
    stopped = threading.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    async def shaky() -> None:
        raise OSError("busy")

    hanging = bench.begin(hangs)
    pausing = bench.begin(shaky, retry=Retry(initial_delay=0.05, jitter=0))
    await eventually(lambda: hanging.task is not None and pausing.timer is not None)
    bench.steps.drop(hanging)
    bench.steps.drop(pausing)
    await eventually(stopped.is_set)
    bench.begin(asyncio.sleep, 0.1)
    await bench.all_ended(1)
    assert len(bench.ended) == 1


async def test_a_step_that_nobody_awaits_any_more_has_no_further_attempt(bench: Bench) -> None:
    async def shaky() -> None:
        raise OSError("busy")

    step = bench.begin(shaky, retry=Retry(initial_delay=60, jitter=0))
    await eventually(lambda: step.timer is not None)
    bench.steps.stop(step, CancelReason.RUN_ENDED)
    assert failure((await bench.all_ended(1))[0]) == (FailureKind.OPERATIONAL, "StepCancelled")


async def test_steps_that_block_their_threads_run_beside_each_other(bench: Bench) -> None:
    together = threading.Barrier(4, timeout=30)

    def meets() -> int:
        return together.wait()

    bench.steps.begin([bench.make(meets) for _ in range(8)])
    results = await bench.all_ended(8)
    assert sorted(output(result) or "" for result in results) == sorted("00112233")


async def test_short_steps_need_one_thread(bench: Bench) -> None:
    names = set()

    def quick() -> None:
        names.add(threading.current_thread().name)

    bench.begin(quick)
    await bench.all_ended(1)
    for count in range(2, 50):
        bench.begin(quick)
        await bench.all_ended(count)
    assert len(names) < 5, "one more where a step was done before its thread had said so"


async def test_what_a_users_class_raises_as_it_is_written_is_the_steps_own_failure(bench: Bench) -> None:
    """Also what is no Exception: the run would wait for the step for ever."""

    class Odd(list[int]):
        def __iter__(self) -> Any:
            raise SystemExit(3)

    def in_a_thread() -> Any:
        return Odd([1])

    async def at_once() -> Any:
        return Odd([1])

    async def later() -> Any:
        await asyncio.sleep(0)
        return Odd([1])

    bench.steps.begin([bench.make(function) for function in (in_a_thread, at_once, later)])
    assert [failure(result) for result in await bench.all_ended(3)] == [(FailureKind.OPERATIONAL, "SystemExit")] * 3


async def test_local_steps_for_which_no_thread_can_be_started_run_when_one_can(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_steps, "HELP_AGAIN_AFTER", 0.01)
    with no_thread_starts():
        bench.begin(lambda: 1)
    assert [output(result) for result in await bench.all_ended(1)] == ["1"]
