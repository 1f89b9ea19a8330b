"""Programs made by chance from a seed, over every kind of op and most of asyncio, and what may happen to them.

A program is a tree of tuples that `play` goes through as a workflow's function, writing down what it sees. `live` lets
one meet a server and a worker at which everything happens in an order that chance decides: results, signals, timers,
cancellations, evictions, Advances whose answers are lost. Run as a module it prints digests of what the programs of
some seeds saw, for comparing processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import blake2b
from random import Random
from typing import Any

import fencepost
from fencepost import CorrectiveError, PermanentError, TaskGroup, WorkflowContext, workflow
from fencepost.code_run import CodeRun
from fencepost.ops import LocalCall
from fencepost.workflow import Workflow
from tests.unit.sdk.replaying import CONTINUE_AS_NEW, Decider, Story, replayed, result_of

Node = tuple[Any, ...]
NAMES = ("a", "b", "c")

_chance = Random(0)


def draw(name: str) -> str:
    return f"{name}{_chance.randrange(10**6)}"


async def draw_async(name: str) -> str:
    return f"{name}{_chance.randrange(10**6)}"


def refuse(name: str) -> str:
    raise PermanentError(f"{name} {_chance.randrange(10**6)}", code="REFUSED")


def correct(name: str) -> str:
    raise CorrectiveError("do better", feedback={"name": name})


class Program:
    """A tree, and what a run of it has seen last."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        self.tree = ("seq", [make(rng, 3) for _ in range(rng.randint(2, 5))], rng.random() < 0.15)
        self.seen: list[str] = []

        @workflow("random", compatibility_id="1")
        async def function(ctx: WorkflowContext) -> int:
            log: list[str] = []
            self.seen = log
            spawned: list[asyncio.Task[Any]] = []
            try:
                await play(ctx, self.tree, log, spawned)
                for task in spawned:
                    task.cancel()
            finally:
                log.append(f"over at {ctx.now()}")
            if self.tree[2]:
                ctx.continue_as_new(len(log))
            return len(log)

        self.workflow: Workflow[..., Any] = function


def make(rng: Random, depth: int) -> Node:
    """A node and what is under it."""
    simple = (
        "run",
        "run",
        "call",
        "call",
        "sleep",
        "asleep",
        "signal",
        "child",
        "refuse",
        "attributes",
        "known",
        "patch",
    )
    nested = (
        "seq",
        "gather",
        "group",
        "race",
        "timeout",
        "wait_for",
        "spawn",
        "queue",
        "clean_up",
        "swallow",
        "results",
    )
    kind = rng.choice(simple) if depth == 0 or rng.random() < 0.5 else rng.choice(nested)
    if kind == "signal":
        return (kind, rng.choice(NAMES), rng.choice((None, 5, 50)))
    if kind in {"sleep", "asleep"}:
        return (kind, rng.choice((0, 1, 2.5, 3600)))
    if kind in {"timeout", "wait_for"}:
        return (kind, rng.choice((1, 10)), make(rng, depth - 1))
    if kind in {"spawn", "swallow"}:
        return (kind, make(rng, depth - 1))
    if kind == "clean_up":
        return (kind, make(rng, depth - 1), make(rng, 0))
    if kind in nested:
        return (kind, [make(rng, depth - 1) for _ in range(rng.randint(1, 4))])
    return (kind, rng.choice(NAMES), rng.randrange(2))


async def play(ctx: WorkflowContext, node: Node, log: list[str], spawned: list[asyncio.Task[Any]]) -> Any:
    """Do what a node says, and write down what came of it."""
    kind = node[0]
    try:
        result = await (_simple(ctx, node) if kind in _SIMPLE else _nested(ctx, node, log, spawned))
    except fencepost.OpFailed as error:
        log.append(f"{kind} {type(error).__name__} {error} {error.feedback} at {ctx.now()}")
        return None
    except BaseException as error:
        log.append(f"{kind} {type(error).__name__} at {ctx.now()}")
        raise
    log.append(f"{kind} {result} at {ctx.now()} {ctx.cancelled}")
    return result


_SIMPLE = {"run", "call", "sleep", "asleep", "signal", "child", "refuse", "attributes", "known", "patch"}


async def _simple(ctx: WorkflowContext, node: Node) -> Any:
    kind, name, *rest = node[0], *node[1:]
    if kind == "run":
        return await ctx.run(draw_async if rest[0] else draw, name, undo="undraw" if name == "b" else None)
    if kind == "refuse":
        return await ctx.run(correct if rest[0] else refuse, name)
    if kind == "call":
        return await ctx.call(name, {"n": rest[0]})
    if kind == "child":
        return await ctx.child(name, rest[0])
    if kind == "sleep":
        return await ctx.sleep(name)
    if kind == "asleep":
        return await asyncio.sleep(name)
    if kind == "signal":
        return await ctx.signal(name, timeout=rest[0])
    if kind == "patch":
        return await ctx.run(draw, name) if ctx.patched(name) else "old"
    if kind == "attributes":
        return ctx.set_attributes({name: str(rest[0])})
    return (ctx.random.random(), ctx.uuid4(), ctx.run_id, ctx.should_continue_as_new)


async def _nested(ctx: WorkflowContext, node: Node, log: list[str], spawned: list[asyncio.Task[Any]]) -> Any:
    kind, inner = node[0], node[-1]
    if kind == "seq":
        return [await play(ctx, part, log, spawned) for part in node[1]]
    if kind == "spawn":
        spawned.append(asyncio.create_task(play(ctx, inner, log, spawned)))
        return None
    if kind == "swallow":
        with contextlib.suppress(asyncio.CancelledError):
            return await play(ctx, inner, log, spawned)
        return "swallowed"
    if kind == "clean_up":
        try:
            return await play(ctx, node[1], log, spawned)
        finally:
            with ctx.shielded():
                await play(ctx, inner, log, spawned)
    with contextlib.suppress(TimeoutError):
        if kind == "timeout":
            async with asyncio.timeout(node[1]):
                return await play(ctx, inner, log, spawned)
        if kind == "wait_for":
            return await fencepost.wait_for(play(ctx, inner, log, spawned), node[1])
    if kind in {"timeout", "wait_for"}:
        return "too late"
    return await _together(kind, [functools.partial(play, ctx, part, log, spawned) for part in inner])


async def _together(kind: str, parts: list[Callable[[], Coroutine[Any, Any, Any]]]) -> Any:
    if kind in {"gather", "results"}:
        return await asyncio.gather(*(part() for part in parts), return_exceptions=kind == "results")
    if kind == "group":
        async with TaskGroup() as group:
            tasks = [group.create_task(part()) for part in parts]
        return [task.result() if not task.cancelled() else None for task in tasks]
    if kind == "race":
        tasks = [asyncio.ensure_future(part()) for part in parts]
        done, left = await fencepost.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        return len(done)
    queue: asyncio.Queue[Any] = asyncio.Queue(1)
    lock = asyncio.Lock()

    async def produce(part: Callable[[], Awaitable[Any]]) -> None:
        async with lock:
            await queue.put(await part())

    tasks = [asyncio.create_task(produce(part)) for part in parts]
    got = [await queue.get() for _ in tasks]
    await asyncio.gather(*tasks)
    return got


class Fate:
    """What happens to one run."""

    def __init__(self, program: Program, seed: int, *, cancels: bool) -> None:
        self.program = program
        self.rng = Random(seed)
        self.story = Story()
        self.decider = Decider(program.workflow, self.story)
        self.calls: list[LocalCall] = []
        self.cancel_in = self.rng.randrange(3, 40) if cancels else 300

    def live(self) -> None:
        """Until the run is over."""
        for turn in range(3000):
            if self.story.outcome:
                return
            if turn == self.cancel_in:
                self.story.cancel()
            self.calls += self.decider.run.local_steps()
            self.rng.choice(
                (self.happens, self.decides, self.decides, self.ends_step, self.is_told, self.maybe_evicted)
            )()
        raise AssertionError(f"it did not end: {self.program.tree} {self.story.kinds}")

    def happens(self) -> None:
        """Something comes in."""
        story, rng = self.story, self.rng
        if not story.open or rng.random() < 0.25:
            rng.choice((lambda: story.signal(rng.choice(NAMES), rng.randrange(100)), story.skipped))()
            return
        seq = rng.choice(list(story.open))
        what = story.open[seq]
        if what == "step":
            story.fail(seq, "NO") if rng.random() < 0.3 else story.complete(seq, rng.randrange(100))
        elif what == "child":
            story.end_child(seq, rng.randrange(100))
        else:
            story.fire(seq)

    def decides(self) -> None:
        """An Advance, which may meet what its worker has not seen, and whose answer may be lost."""
        run, story = self.decider.run, self.story
        decision = run.decision()
        if decision is None:
            return
        while self.rng.random() < 0.3:
            self.happens()
        fate = self.rng.random()
        if fate < 0.05:
            self.evicted()
            return
        result = story.advance(decision)
        if fate < 0.1 and not story.outcome:
            self.evicted()
            return
        run.accepted(result)
        if not result.kept and not story.outcome and self.rng.random() < 0.5:
            self.evicted()

    def ends_step(self) -> None:
        """A local step ends."""
        if self.calls:
            call = self.calls.pop(self.rng.randrange(len(self.calls)))
            self.decider.run.local_ended(call.op, result_of(call), 1)

    def is_told(self) -> None:
        """The worker is told what has come in."""
        self.decider.catch_up()

    def maybe_evicted(self) -> None:
        if self.rng.random() < 0.3:
            self.evicted()

    def evicted(self) -> None:
        """The run is forgotten, and replayed: it comes to what it was."""
        before = list(self.program.seen)
        self.decider.run.evict()
        self.calls.clear()
        self.decider.evict()
        assert self.program.seen[: len(before)] == before


def live(seed: int) -> tuple[Program, Story, CodeRun]:
    """One program, lived through."""
    program = Program(seed)
    fate = Fate(program, seed, cancels=seed % 3 == 0)
    fate.live()
    return program, fate.story, fate.decider.run


def digest(seed: int) -> str:
    """What came of one program."""
    program, story, run = live(seed)
    seen = list(program.seen)
    run.evict()
    run = replayed(program.workflow, story)
    assert program.seen == seen
    run.evict()
    text = repr((seen, story.kinds, story.outcome == CONTINUE_AS_NEW))
    return blake2b(text.encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    sys.stdout.write("\n".join(digest(seed) for seed in range(first, last)))
