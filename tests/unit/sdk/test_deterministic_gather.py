"""gather does what asyncio's does, and takes as many turns in every Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencepost import WorkflowContext, workflow
from fencepost.deterministic import gather
from tests.unit.sdk.replaying import decided, output_of

_asyncios = asyncio.gather
GATHERS = [pytest.param(_asyncios, id="asyncio"), pytest.param(gather, id="ours")]


async def value(x: int, turns: int = 1) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return x


async def error(turns: int = 1) -> int:
    await value(0, turns)
    raise ValueError("no")


@pytest.mark.parametrize("gathers", GATHERS)
async def test_results_come_in_the_order_that_was_asked_for(gathers: Callable[..., Any]) -> None:
    twice = asyncio.ensure_future(value(3))
    assert await gathers(value(1, 5), value(2), twice, twice) == [1, 2, 3, 3]
    assert await gathers() == []
    assert await gathers(twice) == [3]


@pytest.mark.parametrize("gathers", GATHERS)
async def test_the_first_error_is_raised_and_the_others_go_on(gathers: Callable[..., Any]) -> None:
    slow = asyncio.ensure_future(value(1, 9))
    with pytest.raises(ValueError, match="no"):
        await gathers(slow, error(), error(3))
    assert not slow.done()
    assert await slow == 1


@pytest.mark.parametrize("gathers", GATHERS)
async def test_errors_can_be_results(gathers: Callable[..., Any]) -> None:
    cancelled = asyncio.ensure_future(value(1))
    cancelled.cancel()
    got = await gathers(value(1), error(), cancelled, return_exceptions=True)
    assert [type(result) for result in got] == [int, ValueError, asyncio.CancelledError]


@pytest.mark.parametrize("gathers", GATHERS)
@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_cancelling_it_cancels_all(gathers: Callable[..., Any], return_exceptions: bool) -> None:
    parts = [asyncio.ensure_future(value(x, 99)) for x in range(3)]

    async def waiting() -> None:
        await gathers(*parts, return_exceptions=return_exceptions)

    task = asyncio.ensure_future(waiting())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(part.cancelled() for part in parts)


@pytest.mark.parametrize("gathers", GATHERS)
async def test_a_part_that_is_cancelled_is_an_error(gathers: Callable[..., Any]) -> None:
    parts = [asyncio.ensure_future(value(x, 5)) for x in range(2)]
    together = gathers(*parts)
    parts[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await together
    assert not together.cancel()
    assert await parts[1] == 1


async def turns_of(gathers: Callable[..., Any]) -> int:
    """How many turns of the loop it takes to gather what has ended."""
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(1)
    task = asyncio.ensure_future(gathers(ended))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_it_takes_a_turn_in_every_python() -> None:
    assert await turns_of(gather) == 1


def test_workflows_have_it_under_asyncios_name() -> None:
    @workflow("w", compatibility_id="1")
    async def function(ctx: WorkflowContext) -> list[int]:
        return [await turns_of(asyncio.gather), await turns_of(asyncio.tasks.gather)]

    assert output_of(decided(function)) == [1, 1]
