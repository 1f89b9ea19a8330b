"""The workflows of the golden histories. They must go on fitting what was recorded of them: a change that does not is
one that breaks runs of users at the next release, and so is one that needs a change here.

What a function has come to know goes into the input of a last step, whose digest the history has: a replay that
computes something else is noticed. New histories come of new workflows, at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import fencepost
from fencepost import (
    OperationalError,
    OpFailed,
    PermanentError,
    Retry,
    Step,
    StepContext,
    TaskGroup,
    UndoPolicy,
    Workflow,
    WorkflowContext,
    step,
    undo,
    workflow,
)

HOUR = 3600.0
DAY = 24 * HOUR
SOON = Retry(max_attempts=5, initial_delay=0.01, jitter=0.0)


def double(number: int) -> int:
    return 2 * number


async def triple(number: int) -> int:
    await asyncio.sleep(0)
    return 3 * number


def refuse(reason: str) -> None:
    raise PermanentError(reason, code="REFUSED")


@step("golden.add")
def add(ctx: StepContext, input: list[int]) -> int:
    if ctx.attempt == 1 and len(input) > 2:
        raise OperationalError("too much at once", code="LATER")
    return sum(input)


@step("golden.never")
def never(input: Any) -> None:
    raise PermanentError("not this", code="NEVER")


@step("golden.report")
def report(input: Any) -> Any:
    return input


@undo("golden.take_back")
def take_back(ctx: StepContext, input: Any) -> None:
    if ctx.attempt == 1:
        raise OperationalError("not now", code="LATER")


@undo("golden.stuck")
def stuck(input: Any) -> None:
    raise PermanentError("it can't be undone", code="STUCK")


TAKE_BACK = UndoPolicy("golden.take_back", retry=SOON)


@workflow("golden.child", compatibility_id="1")
async def child(ctx: WorkflowContext, number: int) -> int:
    if number < 0:
        raise PermanentError("negative", code="NEGATIVE")
    return await ctx.run(double, number)


@workflow("golden.everything", compatibility_id="1")
async def everything(ctx: WorkflowContext, number: int) -> list[Any]:
    """Every op, and every way in which one ends."""
    log: list[Any] = [number, ctx.now().isoformat(), ctx.random.randrange(1000), str(ctx.uuid4()), ctx.user_id]
    log.append(await ctx.run(double, number))
    log.append(await ctx.run(triple, number, name="thrice"))
    ctx.set_attributes({"stage": "steps", "number": str(number)})
    log.append(await ctx.call(add, [number, 1]))
    log.append(await ctx.call(add, [number, 1, 2], retry=SOON))
    for fails in (
        lambda: ctx.run(refuse, "by itself"),
        lambda: ctx.call(never, number),
        lambda: ctx.call("golden.nowhere", number, queue_timeout=HOUR),
        lambda: ctx.call("golden.nowhere", number, total_timeout=HOUR),
        lambda: ctx.child(child, -1),
        lambda: ctx.signal("missing", timeout=DAY),
    ):
        try:
            await fails()
        except OpFailed as error:
            log.append([type(error).__name__, error.code])
    log.append(await ctx.child(child, number))
    if ctx.patched("newer"):
        await ctx.sleep(365 * DAY)
    ctx.set_attributes({"stage": "signals", "number": None})
    log.append(await ctx.signal("first", type=str))
    async for word in ctx.signals("words", type=str):
        log.append(word)
        if word == "last":
            break
    log.append(await _asyncio(ctx))
    log.append(ctx.now().isoformat())
    return await ctx.call(report, log)


async def _asyncio(ctx: WorkflowContext) -> list[Any]:
    """What is cancelled, and what is waited for together."""
    seen: list[Any] = list(
        await asyncio.gather(ctx.run(double, 1), ctx.call(add, [2, 3]), asyncio.sleep(HOUR, "slept"))
    )
    try:
        async with asyncio.timeout(HOUR):
            await ctx.signal("never")
    except TimeoutError:
        seen.append("late")
    tasks = [asyncio.ensure_future(ctx.sleep(length)) for length in (3 * HOUR, HOUR, 2 * HOUR)]
    done, rest = await fencepost.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    seen.append([tasks.index(task) for task in done])
    for task in rest:
        task.cancel()
    with contextlib.suppress(ExceptionGroup):
        async with TaskGroup() as group:
            group.create_task(_fails(ctx))
            group.create_task(_waits(ctx, seen))
    queue: asyncio.Queue[int] = asyncio.Queue()
    lock = asyncio.Lock()

    async def produce(number: int) -> None:
        async with lock:
            await queue.put(await ctx.run(triple, number))

    async with TaskGroup() as group:
        for number in range(3):
            group.create_task(produce(number))
    return [*seen, *[queue.get_nowait() for _ in range(3)]]


async def _fails(ctx: WorkflowContext) -> None:
    await ctx.run(refuse, "in a group")


async def _waits(ctx: WorkflowContext, seen: list[Any]) -> None:
    try:
        await ctx.child(child, 1_000)
        await ctx.sleep(HOUR)
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


@workflow("golden.cancelled", compatibility_id="1")
async def cancelled(ctx: WorkflowContext, number: int) -> None:
    """Cancelled amid a step that nobody takes: it cleans up, and what it did is undone, but for one thing."""
    await ctx.run(double, number, undo="golden.stuck")
    await ctx.call(add, [number, 1], undo=TAKE_BACK)
    try:
        await asyncio.gather(ctx.call("golden.nowhere", number), ctx.sleep(DAY), ctx.signal("never"))
    finally:
        with ctx.shielded():
            await ctx.sleep(HOUR)
            await ctx.call(report, [ctx.cancelled, ctx.now().isoformat()])


@workflow("golden.failed", compatibility_id="1")
async def failed(ctx: WorkflowContext, number: int) -> None:
    """Fails amid open ops."""
    await ctx.run(double, number, undo=TAKE_BACK)
    waiting = ctx.sleep(DAY)
    await ctx.call(never, number)
    await waiting


@workflow("golden.timed_out", compatibility_id="1")
async def timed_out(ctx: WorkflowContext, number: int) -> None:
    """Waits for longer than it may."""
    await ctx.run(double, number)
    await ctx.sleep(10 * DAY)


@workflow("golden.continued", compatibility_id="1")
async def continued(ctx: WorkflowContext, turns: int) -> int:
    """Goes on as a new run, with a signal that nobody has taken and a step that can be undone."""
    await ctx.run(double, turns, undo=TAKE_BACK)
    forgotten = ctx.sleep(DAY)
    if turns:
        ctx.continue_as_new(turns - 1)
    forgotten.cancel()
    return await ctx.signal("kept", type=int)


@workflow("golden.endless", compatibility_id="1")
async def endless(ctx: WorkflowContext, number: int) -> None:
    """Waits until it is terminated."""
    await ctx.run(double, number)
    await ctx.signal("never")


@workflow("golden.stubborn", compatibility_id="1")
async def stubborn(ctx: WorkflowContext, number: int) -> None:
    """Is cancelled, and does not end in the time that it has for that."""
    await ctx.run(double, number)
    with ctx.shielded():
        await ctx.signal("never")


@workflow("golden.changed", compatibility_id="1")
async def changed(ctx: WorkflowContext, number: int) -> int:
    """Met code that did not fit it, and then this again."""
    doubled = await ctx.run(double, number)
    await ctx.signal("go_on")
    return await ctx.run(triple, doubled)


def other_code() -> Workflow[..., Any]:
    """What `changed` does not fit."""

    @workflow("golden.changed", compatibility_id="1")
    async def differently(ctx: WorkflowContext, number: int) -> int:
        return await ctx.run(triple, number)

    return differently


ALL: dict[str, Workflow[..., Any]] = {
    each.workflow_id: each
    for each in (child, everything, cancelled, failed, timed_out, continued, endless, stubborn, changed)
}
STEPS: list[Step[..., Any]] = [add, never, report, take_back, stuck]
