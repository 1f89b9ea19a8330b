"""A worker that decides code workflows, as a program: ``python -m tests.faults.code_program TARGET SINK_DSN OPTIONS``.

OPTIONS is a JSON object of what `Worker` takes, and of

- ``name``: what its steps return, to tell workers apart;
- ``variant``: of code that changes between deploys, "" or "changed";
- ``always_replay``: forget each run whenever that can be;
- ``collect``: collect garbage every 10 ms.

It prints what happens to it, a line of JSON each; when it ends, also what its steps did in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import random
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fencepost
from fencepost import (
    Client,
    Retry,
    Step,
    StepContext,
    UndoPolicy,
    Worker,
    Workflow,
    WorkflowContext,
    step,
    undo,
    workflow,
)
from fencepost.testing.always_replaying import AlwaysReplaying
from tests.faults.code_errors import broken
from tests.faults.sink import Sink

SOON = Retry(max_attempts=3, initial_delay=0.01, jitter=0)
CHAIN_AFTER = 100
LOCAL_ROUNDS = 15


class World:
    """What the steps of this program share."""

    def __init__(self, target: str, sink_dsn: str, options: dict[str, Any]) -> None:
        self.sink = Sink(sink_dsn)
        self.client = Client(target.partition(",")[0])
        self.name: str = options.pop("name", "")
        self.changed = options.pop("variant", "") == "changed"
        self.senders = ThreadPoolExecutor(16, thread_name_prefix="sends")
        self.chance = random.Random(7)
        self.printing = threading.Lock()
        self.acts: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()


world: World


def say(event: str, **details: Any) -> None:
    with world.printing:
        sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
        sys.stdout.flush()


# Steps that wait for a gate, and act outside.


def hold(ctx: StepContext, gate: str) -> str:
    """Act when the gate is open; when cancelled too, as code does that looks too late."""
    say("begun", run_id=ctx.run_id, gate=gate, attempt=ctx.attempt)
    while not world.sink.is_open(gate):
        if ctx.wait_cancelled(0.02):
            say("cancelled", run_id=ctx.run_id, gate=gate, reason=ctx.cancel_reason)
            break
    accepted = world.sink.act(ctx.idempotency_key, ctx.fencing_token)
    say("acted", run_id=ctx.run_id, gate=gate, accepted=accepted)
    return world.name


@step("hold.remote")
def hold_remote(ctx: StepContext, gate: str) -> str:
    return hold(ctx, gate)


@workflow("held", compatibility_id="1")
async def held(ctx: WorkflowContext, gates: list[str]) -> list[str]:
    """A local step behind each gate, with a wait for a signal before each but the first."""
    say("called", run_id=ctx.run_id)
    names = []
    for number, gate in enumerate(gates):
        if number:
            await ctx.signal("go")
        names.append(await ctx.run(hold, gate, retry=SOON))
    return names


@workflow("deployed", compatibility_id="1")
async def deployed(ctx: WorkflowContext, rounds: int) -> int:
    """Steps behind gates, the first ones local, the others remote, with a step between that brings the run on."""
    for number in range(rounds):
        if number >= LOCAL_ROUNDS:
            await ctx.call(hold_remote, f"round-{number}", retry=SOON)
        else:
            await ctx.run(hold, f"round-{number}", retry=SOON)
        await ctx.run(nothing)
    return rounds


async def nothing() -> None:
    """A step that ends at once."""


# Steps of 50 ms that can be undone (row 41).


async def tick(key: str) -> str:
    await asyncio.sleep(0.05)
    world.acts[key] += 1
    return key


def tick_in_thread(key: str) -> str:
    time.sleep(0.05)
    world.acts[key] += 1
    return key


@step("tick.remote")
def tick_remote(key: str) -> str:
    return tick_in_thread(key)


@undo("untick")
async def untick(key: str, output: str) -> None:
    assert output == key
    world.undone[key] += 1


BY = UndoPolicy(untick)


@workflow("ticking", compatibility_id="1")
async def ticking(ctx: WorkflowContext, way: str) -> str:
    """Goes on for ever, unless it is cancelled; and tries what it can against that."""
    number = 0
    while not ctx.cancelled:
        number += 1
        key = f"{ctx.run_id}/{number}"
        if way == "pair":
            await asyncio.gather(
                ctx.run(tick, f"{key}/a", undo=BY),
                ctx.run(tick_in_thread, f"{key}/b", undo=BY),
            )
        elif way == "remote":
            await ctx.call(tick_remote, key, undo=BY)
        elif way == "swallow":
            try:
                await ctx.run(tick_in_thread, key, undo=BY)
            except asyncio.CancelledError:
                number += 1000
        elif way == "shielded":
            try:
                await ctx.run(tick, key, undo=BY)
            finally:
                with ctx.shielded():
                    await ctx.run(tick, f"{key}/cleaned", undo=BY)
        else:
            await ctx.run(tick, key, undo=BY)
    for _ in range(3):
        try:
            await ctx.run(tick, f"{ctx.run_id}/never", undo=BY)
        except asyncio.CancelledError:
            continue
    return "as if nothing had been"


# Functions that never wait (row 44).


@workflow("stuck", compatibility_id="1")
async def stuck(ctx: WorkflowContext) -> str:
    while not world.changed:
        pass
    return "free"


@workflow("stubborn", compatibility_id="1")
async def stubborn(ctx: WorkflowContext) -> None:
    """Takes no cancellation for an answer."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.signal("never")


@workflow("plain", compatibility_id="1")
async def plain(ctx: WorkflowContext, start: int) -> int:
    for _ in range(3):
        start = await ctx.run(plus_one, start)
    return start


async def plus_one(value: int) -> int:
    return value + 1


# Code that changes between deploys (row 39).


def charge(amount: int) -> str:
    return f"charged {amount}"


def refund(amount: int) -> str:
    return f"refunded {amount}"


@workflow("changing", compatibility_id="1")
async def changing(ctx: WorkflowContext, gates: int) -> list[str]:
    """Its second step is another one when it is changed."""
    said = [await ctx.run(charge, 1)]
    said.append(await ctx.run(refund if world.changed else charge, 2))
    for _ in range(gates):
        await ctx.signal("go")
        said.append(await ctx.run(charge, 3))
    return said


# Runs that are dropped from memory amid what they wait for (row 43).


async def act(ctx: StepContext) -> None:
    world.sink.act(ctx.idempotency_key, ctx.fencing_token)
    world.acts[ctx.run_id] += 1


class Cleaning:
    """Cleans up, in the ways that a function can."""

    def __init__(self, ctx: WorkflowContext) -> None:
        self.ctx = ctx

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        await self.ctx.run(act)

    def __del__(self) -> None:
        # Nobody may begin anything from here: not the run, and no other that happens to be at work.
        try:
            _ = self.ctx.run(act)
        except BaseException as error:  # noqa: BLE001 - that it is refused is the point
            world.acts[f"refused {type(error).__name__}"] += 1


async def signals(ctx: WorkflowContext) -> AsyncGenerator[int, None]:
    try:
        while True:
            yield await ctx.signal("go", type=int)
    finally:
        await ctx.run(act)


async def wait_and_clean(ctx: WorkflowContext) -> None:
    try:
        await ctx.signal("go")
    except BaseException:
        await ctx.run(act)
        raise
    else:
        await ctx.run(act)


@workflow("dropped", compatibility_id="1")
async def dropped(ctx: WorkflowContext, way: int) -> int:
    """Waits for a signal, and acts once it is over with it, however that comes."""
    if way == 0:
        try:
            await ctx.signal("go")
        finally:
            await ctx.run(act)
    elif way == 1:
        async with Cleaning(ctx):
            await ctx.signal("go")
    elif way == 2:
        async with contextlib.aclosing(signals(ctx)) as each:
            async for _ in each:
                break
    elif way == 3:
        await asyncio.create_task(wait_and_clean(ctx))
    else:
        async with asyncio.timeout(3600), fencepost.TaskGroup() as group:
            group.create_task(wait_and_clean(ctx))
    return way


# Signals in a chain of runs (row 42), and signals that meet local steps (row 54).


@workflow("chain", compatibility_id="1")
async def chain(ctx: WorkflowContext, given: dict[str, Any]) -> list[int]:
    """Handles so many signals, and continues as new after every hundred."""
    handled: list[int] = list(given["handled"])
    while len(handled) < given["total"]:
        handled.append(await ctx.run(same, await ctx.signal("number", type=int)))
        if len(handled) % CHAIN_AFTER == 0 and len(handled) < given["total"]:
            ctx.continue_as_new({**given, "handled": handled})
    return handled


async def same(number: int) -> int:
    return number


async def short(run_id: str, number: int) -> int:
    """Ends at the time at which the signal that it sends arrives, now before and now after it. Some of either are
    certain, for which one is quicker depends on the machine.
    """
    way = world.chance.choice((0.0, 0.001, 0.002, 0.005, 0.01, "before", "after"))
    if way == "before":
        asyncio.get_running_loop().call_later(0.1, world.senders.submit, send, run_id, number)
        return number
    sent = world.senders.submit(send, run_id, number)
    await (asyncio.wrap_future(sent) if way == "after" else asyncio.sleep(float(way)))
    return number


def send(run_id: str, number: int) -> None:
    try:
        world.client.signal_run(run_id, "met", number, request_id=f"{run_id}/{number}")
    except Exception:
        say("not-sent", error=traceback.format_exc())
        raise


async def signal_was_first(number: int) -> int:
    return number


async def step_was_first(number: int) -> int:
    return number


@workflow("meeting", compatibility_id="1")
async def meeting(ctx: WorkflowContext, rounds: int) -> list[str]:
    """What it does depends on what came first."""
    order: list[str] = []

    async def note(what: str, awaited: Awaitable[int]) -> None:
        order.append(f"{what} {await awaited}")

    for number in range(rounds):
        await asyncio.gather(
            note("signal", ctx.signal("met", type=int)), note("step", ctx.run(short, ctx.run_id, number))
        )
        await ctx.run(signal_was_first if order[-2].startswith("signal") else step_was_first, number)
    return order


# Tasks that nothing but their loop refers to (row 15).

weakly_known: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()


async def be_woken(known: weakref.WeakSet[asyncio.Future[None]]) -> None:
    """Wait for what only this task refers to, and only weakly whoever is going to wake it."""
    woken = asyncio.get_running_loop().create_future()
    known.add(woken)
    await woken


def wake(known: weakref.WeakSet[asyncio.Future[None]]) -> None:
    for woken in list(known):
        if not woken.done():
            woken.set_result(None)


async def wait_weakly(value: int) -> int:
    asyncio.get_running_loop().call_later(0.1, wake, weakly_known)
    await be_woken(weakly_known)
    return value + 1


@workflow("busy", compatibility_id="1")
async def busy(ctx: WorkflowContext, n: int) -> list[int]:
    results: asyncio.Queue[int] = asyncio.Queue()
    known: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    async def work(number: int) -> None:
        value = await ctx.run(wait_weakly, number)
        await be_woken(known)
        async with asyncio.timeout(60):
            results.put_nowait(await ctx.call(plus_remote, value))

    for number in range(n):
        _ = asyncio.create_task(work(number))  # noqa: RUF006 - nothing but the loop knows of it
    while results.qsize() < n:
        await ctx.sleep(0.05)
        wake(known)
    return sorted([results.get_nowait() for _ in range(n)])


@step("plus.remote")
async def plus_remote(value: int) -> int:
    return await wait_weakly(value) + 99


WORKFLOWS: list[Workflow[..., Any]] = [
    held, deployed, ticking, stuck, stubborn, plain, changing, dropped, chain, meeting, busy, broken,
]  # fmt: skip
STEPS: list[Step[..., Any]] = [hold_remote, tick_remote, untick, plus_remote]


def collect_often() -> None:
    gc.freeze()
    while True:
        gc.collect()
        time.sleep(0.01)


def tell_connected(worker: Worker) -> None:
    if worker.wait_connected(60):
        say("connected")


def main(target: str, sink_dsn: str, options_json: str = "{}") -> None:
    global world  # noqa: PLW0603 - functions of workflows are given nothing else
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    options = json.loads(options_json)
    world = World(target, sink_dsn, options)
    always_replay = options.pop("always_replay", False)
    if options.pop("collect", False):
        threading.Thread(target=collect_often, daemon=True).start()
    worker = Worker(target, STEPS, workflows=WORKFLOWS, **options)
    if always_replay:
        worker._decider = AlwaysReplaying
    threading.Thread(target=tell_connected, args=(worker,), daemon=True).start()
    worker.run()
    say("did", acts=world.acts, undone=world.undone)
    say("ended", **dataclasses.asdict(worker.stats()))
    world.sink.close()
    world.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
