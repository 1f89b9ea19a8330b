"""Plays programs as a code workflow, with real steps: what a worker of these tests runs, and what is replayed.

What is written here in asyncio is not used to find out what a run should have come to: `outcomes` has its own idea.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import fencepost
from fencepost import (
    OperationalError,
    OpFailed,
    PermanentError,
    Retry,
    StepContext,
    TaskGroup,
    UndoPolicy,
    WorkflowContext,
    step,
    undo,
    workflow,
)
from tests.determinism.programs import Node, program_of

PATIENT = Retry(max_attempts=1000, initial_delay=0.01, max_delay=0.05, jitter=0.0)
"""Worker kills count as attempts of a remote step; they must not add up to a failure."""
UNDO = UndoPolicy("det.undo", retry=PATIENT)

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def fold(last: int, value: object) -> int:
    """What the next op is given: all that came before, as a number."""
    text = json.dumps([last, value], separators=(",", ":"), sort_keys=True)
    return zlib.crc32(text.encode())


# Steps. What they return is chance: only the history knows it.


def _nothing(ctx: StepContext) -> object:
    return None


act: Callable[[StepContext], object] = _nothing
"""What a step that succeeds does outside; who looks at effects puts something else in its place."""


def outcome(site: int, mode: str, last: int, attempt: int) -> dict[str, int]:
    if mode == "flaky" and attempt == 1:
        raise OperationalError("not yet", code="FLAKY")
    if mode == "fail":
        raise PermanentError(f"step {site} refuses", code=f"REFUSED_{site}")
    return {"site": site, "v": int.from_bytes(os.urandom(4)), "last": last}


def acted(ctx: StepContext, site: int, mode: str, last: int, attempt: int) -> dict[str, int]:
    result = outcome(site, mode, last, attempt)
    act(ctx)
    return result


def plain(site: int, mode: str, last: int, ctx: StepContext) -> dict[str, int]:
    return acted(ctx, site, mode, last, ctx.attempt)


async def slow(site: int, mode: str, last: int, ctx: StepContext) -> dict[str, int]:
    await asyncio.sleep(0.001)
    return acted(ctx, site, mode, last, 2)


@step("det.step")
def remote(ctx: StepContext, input: dict[str, Any]) -> dict[str, int]:
    return acted(ctx, input["site"], input["mode"], input["last"], ctx.attempt)


@undo("det.undo")
def undone(ctx: StepContext, input: Any) -> None:
    """What it undoes is in the history."""
    act(ctx)


@workflow("det_child", compatibility_id="1")
async def child(ctx: WorkflowContext, input: dict[str, Any]) -> dict[str, int]:
    done = await ctx.run(plain, input["site"], "ok", input["last"])
    if input["mode"] == "fail":
        raise PermanentError("the child refuses", code=f"CHILD_{input['site']}")
    return dict(done)


@workflow("det_program", compatibility_id="1")
async def program(ctx: WorkflowContext, input: dict[str, Any]) -> dict[str, Any]:
    played = program_of(input["seed"])
    part, carry = input["part"], input["carry"]
    tree = played.trees[part]
    value = await play(ctx, tree, carry)
    carry = fold(carry, value)
    if part + 1 < len(played.trees):
        ctx.continue_as_new({"seed": input["seed"], "part": part + 1, "carry": carry})
    return {"value": value, "sum": carry}


async def caught(ctx: WorkflowContext, node: Node, last: int) -> Any:
    """A failure becomes a value, a cancellation does not."""
    try:
        return await play(ctx, node, last)
    except OpFailed as error:
        return ["error", error.code]


async def play(ctx: WorkflowContext, node: Node, last: int) -> Any:
    """Do what a node says; the value is JSON."""
    if node.kind in _LEAVES:
        return await _leaf(ctx, node, last)
    if node.kind in _ALONE:
        return await _alone(ctx, node, last)
    return await _together(ctx, node, last)


_LEAVES = frozenset({"local", "remote", "sleep", "asleep", "signal", "signals", "child", "patch", "attributes", "now",
                     "chance", "contend"})  # fmt: skip
_ALONE = frozenset({"seq", "tries", "timeout", "wait_for", "stop", "clean_up", "choice"})


async def _leaf(ctx: WorkflowContext, node: Node, last: int) -> Any:
    kind = node.kind
    if kind == "local":
        return await _local(ctx, node, last)
    if kind in {"remote", "child"}:
        given = {"site": node.site, "mode": node.mode, "last": last}
        if kind == "child":
            return (await ctx.child(child, given))["v"]
        policy = UNDO if node.mode == "undo" else None
        return (await ctx.call(remote, given, retry=PATIENT, undo=policy))["v"]
    if kind == "sleep":
        return await ctx.sleep(node.seconds)
    if kind == "asleep":
        return await asyncio.sleep(node.seconds)
    if kind == "signal":
        return await ctx.signal(node.signal, type=int, timeout=node.seconds if node.mode == "timed" else None)
    if kind == "signals":
        got: list[int] = []
        async for payload in ctx.signals(node.signal, type=int):
            got.append(payload)
            if len(got) == node.count:
                break
        return got
    if kind == "contend":
        return list(await asyncio.gather(*(ctx.signal(node.signal, type=int) for _ in range(node.count))))
    if kind == "patch":
        return ["new", await _local(ctx, node, last)] if ctx.patched(f"p{node.site}") else "old"
    if kind == "attributes":
        return ctx.set_attributes({f"a{node.site}": str(last)})
    if kind == "now":
        return (ctx.now() - _EPOCH) // dt.timedelta(microseconds=1)
    await _local(ctx, node.parts[0], last)
    return [ctx.random.randrange(10**6), str(ctx.uuid4())]


async def _local(ctx: WorkflowContext, node: Node, last: int) -> int:
    named = f"n{node.site}"
    if node.mode == "async":
        return (await ctx.run(slow, node.site, node.mode, last, name=named))["v"]
    policy = UNDO if node.mode == "undo" else None
    return (await ctx.run(plain, node.site, node.mode, last, name=named, retry=PATIENT, undo=policy))["v"]


async def _alone(ctx: WorkflowContext, node: Node, last: int) -> Any:
    kind, parts = node.kind, node.parts
    if kind in {"seq", "tries"}:
        values = []
        for part in parts:
            values.append(await (play if kind == "seq" else caught)(ctx, part, last))
            last = fold(last, values[-1])
        return values
    if kind == "timeout":
        scope = asyncio.timeout(node.seconds)
        try:
            async with scope:
                return await play(ctx, parts[0], last)
        except TimeoutError:
            if not scope.expired():
                raise
            return "late"
    if kind == "wait_for":
        try:
            return ["in time", await fencepost.wait_for(caught(ctx, parts[0], last), node.seconds)]
        except TimeoutError:
            return "late"
    if kind == "clean_up":
        try:
            return await play(ctx, parts[0], last)
        finally:
            with ctx.shielded():
                await play(ctx, parts[1], last)
    if kind == "choice":
        chosen = await play(ctx, parts[0], last)
        return await play(ctx, parts[1 + chosen % 2], last)
    body = asyncio.create_task(caught(ctx, parts[0], last))
    try:
        await caught(ctx, parts[1], last)
    finally:
        stopped = body.cancel()
    if stopped:
        with contextlib.suppress(asyncio.CancelledError):
            await body
        return "stopped"
    return body.result()


async def _together(ctx: WorkflowContext, node: Node, last: int) -> Any:
    kind, parts = node.kind, node.parts
    if kind == "gather":
        return list(await asyncio.gather(*(play(ctx, part, last) for part in parts)))
    if kind == "results":
        results = await asyncio.gather(*(play(ctx, part, last) for part in parts), return_exceptions=True)
        return [["error", each.code] if isinstance(each, OpFailed) else _value(each) for each in results]
    if kind == "group":
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(play(ctx, part, last)) for part in parts]
        except ExceptionGroup as failed:
            return ["group", *(error.code for error in failed.exceptions if isinstance(error, OpFailed))]
        return [task.result() for task in tasks]
    if kind == "lock":
        lock = asyncio.Lock()
        return list(await asyncio.gather(*(_locked(lock, ctx, part, last) for part in parts)))
    if kind == "event":
        ready = asyncio.Event()
        rest = [_after(ready, ctx, part, last) for part in parts[1:]]
        return list(await asyncio.gather(_then(ready, ctx, parts[0], last), *rest))
    tasks = [asyncio.create_task(caught(ctx, part, last)) for part in parts]
    try:
        if kind == "race":
            done, _ = await fencepost.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return [tasks.index(done[0]), done[0].result()]
        if kind == "completed":
            return [await each for each in fencepost.as_completed(tasks)]
        return await _through_queue(tasks)
    finally:
        for task in tasks:
            task.cancel()


def _value(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


async def _locked(lock: asyncio.Lock, ctx: WorkflowContext, part: Node, last: int) -> Any:
    async with lock:
        return await caught(ctx, part, last)


async def _then(ready: asyncio.Event, ctx: WorkflowContext, part: Node, last: int) -> Any:
    try:
        return await caught(ctx, part, last)
    finally:
        ready.set()


async def _after(ready: asyncio.Event, ctx: WorkflowContext, part: Node, last: int) -> Any:
    await ready.wait()
    return await caught(ctx, part, last)


async def _through_queue(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    queue: asyncio.Queue[list[Any]] = asyncio.Queue(1)

    async def produce(number: int, task: asyncio.Task[Any]) -> None:
        await queue.put([number, await task])

    producers = [asyncio.create_task(produce(number, task)) for number, task in enumerate(tasks)]
    got = [await queue.get() for _ in tasks]
    await asyncio.gather(*producers)
    return got
