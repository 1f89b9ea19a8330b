"""Which way a run goes at a patch, by what it has recorded and by the code that is deployed turn after turn.

A run has three turns: in each it runs one local step, then waits for a signal, and meanwhile other code may be
deployed. The rows of the table are workflows of their own, which live side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from fencepost import AsyncRunHandle, RunState, Workflow, WorkflowContext, workflow
from fencepost.testing import AsyncEnvironment
from tests.fixtures.waiting import eventually

TURNS = 3


def old() -> str:
    return "old"


def new() -> str:
    return "new"


def newest() -> str:
    return "newest"


def version(workflow_id: str, name: str, *, again: bool = False) -> Workflow[..., Any]:
    """A workflow as it is deployed under a name; ``again``: it continues as new after its turns, once."""

    async def turn(ctx: WorkflowContext, number: int) -> str:
        if name == "two":
            if ctx.patched("q"):
                return await ctx.run(newest)
            return await ctx.run(new if ctx.patched("p") else old)
        if name == "patched":
            return await ctx.run(new if ctx.patched("p") else old)
        if name == "patched later" and number > 0:
            return await ctx.run(new if ctx.patched("p") else old)
        return await ctx.run(new if name == "new" else old)

    @workflow(workflow_id, compatibility_id="1")
    async def patches(ctx: WorkflowContext, first: bool) -> list[str]:
        went = []
        for number in range(TURNS):
            went.append(await turn(ctx, number))
            if number + 1 < TURNS:
                await ctx.signal("next")
        if again and first:
            ctx.continue_as_new(False)
        return went

    return patches


@dataclass(frozen=True, slots=True)
class Row:
    """What is deployed in each turn, and what comes of it: the way of each turn, or the difference that blocks."""

    deployed: tuple[str, ...]
    went: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    blocked: str = ""
    tried: int = 1
    """How many workers have tried a run that is blocked."""


TABLE = [
    # No patch, no mark.
    Row(("old", "old", "old"), ("old", "old", "old")),
    # A run that comes to the patch anew goes the new way, in each turn, and is marked once.
    Row(("patched", "patched", "patched"), ("new", "new", "new"), ("p",)),
    # One that has passed there without it goes the old way, also in the turns to come.
    Row(("old", "patched", "patched"), ("old", "old", "old")),
    Row(("old", "old", "patched"), ("old", "old", "old")),
    # One that has not come to the patch yet is not held by what it did before.
    Row(("old", "patched later", "patched later"), ("old", "new", "new"), ("p",)),
    Row(("patched later", "patched later", "patched later"), ("old", "new", "new"), ("p",)),
    # Once all runs are marked, the patch may go, and the mark holds nobody.
    Row(("patched", "new", "new"), ("new", "new", "new"), ("p",)),
    Row(("patched", "patched", "new"), ("new", "new", "new"), ("p",)),
    Row(
        ("new", "patched", "patched"),
        blocked="op 1: history has local step new, code asks for local step old",
        tried=2,
    ),
    # A second patch is another: it decides for runs that come to both anew.
    Row(("patched", "two", "two"), ("new", "new", "new"), ("p",)),
    Row(("two", "two", "two"), ("newest", "newest", "newest"), ("q",)),
    Row(("old", "two", "two"), ("old", "old", "old")),
    # A change without a patch, a patch that goes too soon, and one that is rolled back.
    Row(("old", "new"), blocked="op 1: history has local step old, code asks for local step new"),
    Row(("old", "patched", "new"), blocked="op 1: history has local step old, code asks for local step new"),
    Row(("patched", "old"), blocked="op 1: history has local step new, code asks for local step old", marks=("p",)),
    Row(("two", "patched"), blocked="op 1: history has local step newest, code asks for local step old", marks=("q",)),
]


async def marks_of(run: AsyncRunHandle) -> tuple[str, ...]:
    return tuple([event.patch_id async for event in run.history() if event.kind == "patch_marked"])


async def is_over(run: AsyncRunHandle, tried: int = 0) -> bool:
    """Whether it has ended or is BLOCKED; ``tried``: for the time that this worker has found, not one before it."""
    state = (await run.get()).state
    if tried and sum([event.kind == "run_blocked" async for event in run.history()]) < tried:
        return False
    return state.is_final or state is RunState.BLOCKED


async def compare(row: Row, run: AsyncRunHandle) -> None:
    """Raises AssertionError unless the run has gone as the table says."""
    if row.blocked:
        failure = (await run.get()).failure
        assert failure is not None, row
        assert (failure.code, failure.message) == ("NONDETERMINISM", row.blocked), row
    else:
        assert tuple(await run.result(timeout=30)) == row.went, row
    assert await marks_of(run) == row.marks, row


@pytest.mark.parametrize("always_replay", [False, True], ids=["kept in memory", "replayed at each event"])
async def test_runs_go_the_way_of_the_truth_table(env: AsyncEnvironment, always_replay: bool) -> None:
    rows = {f"patches-{number}": row for number, row in enumerate(TABLE)}
    runs: dict[str, AsyncRunHandle] = {}
    for turn in range(TURNS):
        deployed = [version(name, row.deployed[turn]) for name, row in rows.items() if turn < len(row.deployed)]
        async with env.worker(workflows=deployed, always_replay=always_replay):
            for code in deployed:
                if turn == 0:
                    runs[code.workflow_id] = await env.client.start_run(code.workflow_id, True)
                elif not await is_over(runs[code.workflow_id]):
                    await runs[code.workflow_id].signal("next")
            await env.settle()
            for name, row in rows.items():
                if turn + 1 == len(row.deployed):
                    await eventually(partial(is_over, runs[name], row.tried if row.blocked else 0))
    for name, row in rows.items():
        await compare(row, runs[name])


async def test_code_that_was_rolled_back_is_no_end_the_right_code_goes_on_with_the_run(env: AsyncEnvironment) -> None:
    async with env.worker(workflows=[version("rolled", "patched")]):
        run = await env.client.start_run("rolled", True)
        await env.settle()
    async with env.worker(workflows=[version("rolled", "old")]):
        await run.signal("next")
        await eventually(partial(is_over, run))
        assert (await run.get()).state is RunState.BLOCKED
    async with env.worker(workflows=[version("rolled", "patched")]):
        await run.signal("next")
        assert await run.result(timeout=30) == ["new", "new", "new"]
    assert await marks_of(run) == ("p",)


async def test_a_run_that_continues_as_new_comes_to_the_patch_anew(env: AsyncEnvironment) -> None:
    async with env.worker(workflows=[version("again", "old", again=True)]):
        run = await env.client.start_run("again", True)
        await env.settle()
    async with env.worker(workflows=[version("again", "patched", again=True)]):
        for _ in range(2 * (TURNS - 1)):
            await run.signal("next")
        assert await run.result(timeout=30) == ["new", "new", "new"]
    first = await run.get()
    assert await marks_of(run) == (), "the first run had passed there before the patch was"
    assert await marks_of(env.client.handle(first.next_run_id)) == ("p",)


async def test_a_run_that_is_dropped_right_behind_the_patch_goes_the_same_way_again(env: AsyncEnvironment) -> None:
    held = asyncio.Event()
    begun = asyncio.Event()
    asked: list[bool] = []

    async def hold() -> str:
        begun.set()
        await held.wait()
        return "held"

    def code(*, patched: bool) -> Workflow[..., Any]:
        @workflow("dropped", compatibility_id="1")
        async def dropped(ctx: WorkflowContext) -> str:
            if patched:
                asked.append(ctx.patched("p"))
            await ctx.run(hold)
            return await ctx.run(new if patched and ctx.patched("p") else old)

        return dropped

    run = None
    with contextlib.suppress(_Killed):
        async with env.worker(workflows=[code(patched=True)]):
            run = await env.client.start_run("dropped")
            await asyncio.wait_for(begun.wait(), 30)
            raise _Killed
    assert run is not None
    held.set()
    async with env.worker(workflows=[code(patched=True)]):
        assert await run.result(timeout=30) == "new"
    assert asked == [True, True]
    assert await marks_of(run) == ("p",)


class _Killed(Exception):
    """The worker is cut off where it stands."""
