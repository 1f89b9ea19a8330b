"""TaskGroup, wait, wait_for and as_completed: what they do, which is what asyncio's do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from fencepost.deterministic import NonDeterministic, TaskGroup, as_completed, wait, wait_for
from tests.unit.sdk.test_deterministic_loop import Clock, run


async def after(seconds: float, result: str, seen: list[str] | None = None) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if seen is not None:
            seen.append(f"cancel {result}")
        raise
    return result


async def failing(seconds: float, message: str) -> str:
    await asyncio.sleep(seconds)
    raise ValueError(message)


def anywhere(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What `program` returns on a deterministic loop and on asyncio's: the same."""
    result = run(program())
    assert asyncio.run(program()) == result
    return result


# Seconds on asyncio's own loop are real.
TICK = 0.01


def test_wait_gives_lists_in_the_order_of_its_arguments() -> None:
    async def program() -> list[str]:
        tasks = [asyncio.create_task(after(TICK * n, str(n))) for n in (3, 1, 2)]
        done, pending = await wait([*tasks, tasks[0]])
        assert pending == []
        slow = asyncio.create_task(after(90_000, "slow"))
        assert await wait([*tasks, slow, tasks[0]], timeout=TICK) == (done, [slow])
        slow.cancel()
        return [task.result() for task in done]

    assert anywhere(program) == ["3", "1", "2"]


def test_wait_returns_at_the_first_result_or_the_first_error_as_asked() -> None:
    async def program() -> tuple[bool, bool]:
        slow, quick = asyncio.create_task(after(9_000, "slow")), asyncio.create_task(after(TICK, "quick"))
        done, pending = await wait([slow, quick], return_when=asyncio.FIRST_COMPLETED)
        first = (done, pending) == ([quick], [slow])
        bad = asyncio.create_task(failing(TICK, "bad"))
        done, pending = await wait([slow, quick, bad], return_when=asyncio.FIRST_EXCEPTION)
        slow.cancel()
        return first, (done, pending) == ([quick, bad], [slow]) and bool(bad.exception())

    assert anywhere(program) == (True, True)


def test_wait_leaves_neither_callbacks_nor_timers_when_it_is_cancelled() -> None:
    clock = Clock()

    async def program() -> None:
        future = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(wait([future], timeout=50))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(1)
        assert waiting.cancelled()
        assert clock.timers == {}
        assert not future._callbacks
        future.cancel()

    run(program(), clock)


@pytest.mark.parametrize(("fs", "error"), [([], ValueError), ("future", TypeError), ("coroutine", TypeError)])
def test_wait_refuses_what_asyncio_refuses(fs: Any, error: type[Exception]) -> None:
    async def program() -> None:
        coroutine = asyncio.sleep(0)
        given = {"future": asyncio.get_running_loop().create_future(), "coroutine": [coroutine]}
        with pytest.raises(error):
            await wait(given[fs] if isinstance(fs, str) else fs)
        with pytest.raises(ValueError, match="conditions"):
            await wait([], return_when="EVERYTHING")
        coroutine.close()

    run(program())


def test_a_set_is_refused_in_a_workflow_only() -> None:
    async def program() -> None:
        task = asyncio.create_task(after(0, "result"))
        done, _ = await wait({task})
        assert done == [task]

    asyncio.run(program())
    with pytest.raises(NonDeterministic, match="order of a set"):
        run(program())


def test_as_completed_gives_results_as_they_come() -> None:
    async def program() -> list[str]:
        done = asyncio.create_task(after(0, "done"))
        await done
        last, first, middle = (asyncio.get_running_loop().create_future() for _ in range(3))
        settling = asyncio.create_task(settle(first=first, middle=middle, last=last))
        results = [await each for each in as_completed([_awaited(last), first, done, _awaited(middle)])]
        await settling
        return results

    assert anywhere(program) == ["done", "first", "middle", "last"]


def test_as_completed_gives_the_futures_themselves_in_an_async_for() -> None:
    async def program() -> list[int]:
        last, first, middle = futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
        settling = asyncio.create_task(settle(first=first, middle=middle, last=last))
        order = [futures.index(each) async for each in as_completed(futures)]
        await settling
        return order

    assert anywhere(program) == [1, 2, 0]


def test_as_completed_times_out_once_and_for_all() -> None:
    async def program() -> list[str]:
        seen = []
        done = asyncio.create_task(after(0, "done"))
        await done
        slow = [asyncio.create_task(after(9_000, name)) for name in "ab"]
        for each in as_completed([*slow, done], timeout=TICK):
            try:
                seen.append(await each)
            except TimeoutError:
                seen.append("timeout")
        for task in slow:
            task.cancel()
        return seen

    assert anywhere(program) == ["done", "timeout", "timeout"]


def test_a_cancelled_waiter_of_as_completed_takes_no_result_with_it() -> None:
    async def program() -> str:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future(), loop.create_future()]
        first, second = (asyncio.ensure_future(_awaited(each)) for each in as_completed(futures))
        await asyncio.sleep(0)
        futures[1].set_result("only")
        await asyncio.sleep(0)
        first.cancel()
        result = await second
        futures[0].cancel()
        return str(result)

    assert anywhere(program) == "only"


async def settle(**futures: asyncio.Future[str]) -> None:
    """Give futures their names as results, one after the other."""
    for name, future in futures.items():
        for _ in range(5):
            await asyncio.sleep(0)
        future.set_result(name)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def test_wait_for_gives_the_result_or_cancels_and_raises() -> None:
    async def program() -> list[str]:
        seen: list[str] = [await wait_for(after(TICK, "in time"), 900), await wait_for(after(TICK, "no limit"), None)]
        with pytest.raises(TimeoutError):
            await wait_for(after(9_000, "late", seen), TICK)
        return seen

    assert anywhere(program) == ["in time", "no limit", "cancel late"]


def test_wait_for_without_time_gives_only_what_is_there() -> None:
    async def program() -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result("there")
        for timeout in (0, -1):
            with pytest.raises(TimeoutError):
                await wait_for(after(TICK, "late"), timeout)
        return await wait_for(done, 0)

    assert anywhere(program) == "there"


def test_wait_for_passes_a_cancellation_on() -> None:
    async def program() -> list[str]:
        seen: list[str] = []
        outer = asyncio.create_task(wait_for(after(9_000, "inner", seen), 9_000))
        await asyncio.sleep(TICK)
        outer.cancel()
        await wait([outer])
        assert outer.cancelled()
        return seen

    assert anywhere(program) == ["cancel inner"]


# asyncio's own group has to pass what ours passes, or the test is wrong.
@pytest.fixture(params=[TaskGroup, asyncio.TaskGroup], ids=["ours", "theirs"])
def group_type(request: pytest.FixtureRequest) -> Any:
    return request.param


def on_loops_of(group_type: Any, program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return anywhere(program) if group_type is TaskGroup else asyncio.run(program())


def test_a_group_waits_for_its_tasks(group_type: Any) -> None:
    async def program() -> list[str]:
        async with group_type() as group:
            tasks = [group.create_task(after(TICK * n, str(n)), name=f"n{n}") for n in (2, 1)]
        return [task.result() for task in tasks] + [task.get_name() for task in tasks]

    assert on_loops_of(group_type, program) == ["2", "1", "n2", "n1"]


def test_a_failed_task_cancels_the_others_and_the_body(group_type: Any) -> None:
    async def program() -> list[str]:
        seen: list[str] = []

        async def grouped() -> None:
            async with group_type() as group:
                group.create_task(after(9_000, "first", seen))
                group.create_task(failing(TICK, "bad"))
                await after(9_000, "body", seen)

        with pytest.raises(ExceptionGroup) as failed:
            await grouped()
        seen += [str(error) for error in failed.value.exceptions]
        task = asyncio.current_task()
        assert task is not None
        return [*seen, f"cancelling {task.cancelling()}"]

    # Of asyncio's own group the test must not depend on more than it promises.
    assert sorted(on_loops_of(group_type, program)) == ["bad", "cancel body", "cancel first", "cancelling 0"]


def test_a_failed_body_cancels_the_tasks(group_type: Any) -> None:
    async def program() -> list[str]:
        seen: list[str] = []

        async def grouped() -> None:
            async with group_type() as group:
                group.create_task(after(9_000, "task", seen))
                await failing(TICK, "body")

        with pytest.raises(ExceptionGroup) as failed:
            await grouped()
        return seen + [str(error) for error in failed.value.exceptions]

    assert on_loops_of(group_type, program) == ["cancel task", "body"]


def test_a_cancelled_group_cancels_its_tasks_and_is_cancelled(group_type: Any) -> None:
    async def program() -> list[str]:
        seen: list[str] = []

        async def grouped(body: float) -> None:
            async with group_type() as group:
                group.create_task(after(9_000, f"task {body}", seen))
                await asyncio.sleep(body)

        for body in (0, 9_000):  # cancelled at the end of the group, and in its body
            outer = asyncio.create_task(grouped(body))
            await asyncio.sleep(TICK)
            outer.cancel()
            await asyncio.wait_for(asyncio.gather(outer, return_exceptions=True), 90)
            assert outer.cancelled()
        return seen

    assert on_loops_of(group_type, program) == ["cancel task 0", "cancel task 9000"]


def test_a_cancelled_task_does_not_fail_its_group(group_type: Any) -> None:
    async def program() -> str:
        async with group_type() as group:
            group.create_task(after(9_000, "cancelled")).cancel()
            kept = group.create_task(after(TICK, "kept"))
        return str(kept.result())

    assert on_loops_of(group_type, program) == "kept"


def test_a_group_takes_tasks_only_while_it_is_open(group_type: Any) -> None:
    async def program() -> None:
        group = group_type()
        await _refused(group)
        async with group:
            group.create_task(after(0, "in time"))
        await _refused(group)
        with pytest.raises(RuntimeError):
            await group.__aenter__()

    async def _refused(group: Any) -> None:
        coroutine = after(0, "too late")
        with pytest.raises(RuntimeError):
            group.create_task(coroutine)
        coroutine.close()

    on_loops_of(group_type, program)


def test_a_groups_tasks_may_create_more_while_it_ends(group_type: Any) -> None:
    async def program() -> list[str]:
        seen = []

        async def spreads(group: Any, left: int) -> None:
            await asyncio.sleep(TICK)
            seen.append(str(left))
            if left:
                group.create_task(spreads(group, left - 1))

        async with group_type() as group:
            group.create_task(spreads(group, 3))
        return seen

    assert on_loops_of(group_type, program) == ["3", "2", "1", "0"]


def test_groups_nest(group_type: Any) -> None:
    async def program() -> list[str]:
        seen: list[str] = []

        async def grouped() -> None:
            async with group_type() as outer:
                outer.create_task(after(9_000, "outer", seen))
                async with group_type() as inner:
                    inner.create_task(after(9_000, "inner", seen))
                    inner.create_task(failing(TICK, "bad"))

        with pytest.raises(ExceptionGroup) as failed:
            await grouped()
        found = failed.value.exceptions[0]
        assert isinstance(found, ExceptionGroup)
        return [*seen, *(str(error) for error in found.exceptions)]

    assert on_loops_of(group_type, program) == ["cancel inner", "cancel outer", "bad"]


def test_a_cancellation_that_meets_a_failure_is_not_lost() -> None:
    async def program() -> list[str]:
        seen = []

        async def grouped() -> None:
            try:
                async with TaskGroup() as group:
                    _ = group.create_task(failing(TICK, "bad"))
                    try:
                        await asyncio.sleep(9_000)
                    finally:
                        await asyncio.sleep(TICK)
            except* ValueError:
                seen.append("failed")
            seen.append("goes on")
            await asyncio.sleep(TICK)
            seen.append("was not cancelled")

        outer = asyncio.create_task(grouped())
        await asyncio.sleep(TICK * 1.5)
        outer.cancel()
        await wait([outer])
        assert outer.cancelled()
        return seen

    assert run(program()) == ["failed", "goes on"]


def test_an_exit_of_the_process_leaves_a_group_as_it_is() -> None:
    async def program() -> None:
        async with TaskGroup() as group:
            _ = group.create_task(after(9_000, "cancelled"))
            raise SystemExit(3)

    with pytest.raises(SystemExit, match=re.escape("3")):
        asyncio.run(program())


def test_a_group_says_how_it_stands() -> None:
    async def program() -> tuple[str, str]:
        async with TaskGroup() as group:
            _ = group.create_task(after(TICK, ""))
            before = repr(group)
        return before, repr(group)

    assert run(program()) == ("<TaskGroup tasks=1 errors=0>", "<TaskGroup tasks=0 errors=0>")
