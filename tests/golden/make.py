"""Makes golden histories, by real runs: ``python -m tests.golden.make [STORY …]``.

Each story becomes a file of what ``fencepost runs history RUN --json`` prints; a run of a chain, one each. A file that
is there is never written again: what an earlier version has recorded is what it is for. Without names, the stories
that have none are told.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from fencepost import AsyncRunHandle, RunState
from fencepost.testing import AsyncEnvironment, TestServer
from fencepost_server.cli.documents import event_document
from tests.fixtures.waiting import eventually
from tests.golden import workflows

FOLDER = Path(__file__).parent
HOUR = dt.timedelta(hours=1)


async def everything(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run(
            "golden.everything", 7, user_id="golden", start_delay=60.0, run_timeout=3_000 * 86_400.0
        )
        await run.signal("words", "early")
        await env.skip(dt.timedelta(days=2))
        await run.pause("for a while")
        await env.skip(dt.timedelta(hours=1))
        await run.resume("enough")
        await env.skip(dt.timedelta(days=366))
        for name, word in (("first", "hello"), ("words", "late"), ("words", "last")):
            await run.signal(name, word)
        await env.result(run)
    return run


async def cancelled(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.cancelled", 7)
        await env.skip(HOUR)
        await run.cancel("by hand", grace=86_400.0)
        await env.skip(2 * HOUR)
        assert (await run.get()).state is RunState.BLOCKED
        await run.retry("once more")
        await env.skip(HOUR)
        await run.retry("leave it", skip_undo=True)
        await env.settle()
        assert (await run.get()).state is RunState.CANCELLED
    return run


async def failed(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.failed", 7)
        await env.skip(HOUR)
        assert (await run.get()).state is RunState.FAILED
    return run


async def timed_out(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.timed_out", 7, run_timeout=86_400.0)
        await env.skip(dt.timedelta(days=2))
        assert (await run.get()).state is RunState.FAILED
    return run


async def continued(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.continued", 2, start_delay=60.0)
        await run.signal("kept", 11)
        assert await env.result(run, type=int) == 11
    return run


async def terminated(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.endless", 7)
        await env.settle()
        await run.terminate("by hand")
    return run


async def stubborn(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows.STEPS, workflows=list(workflows.ALL.values())):
        run = await env.client.start_run("golden.stubborn", 7)
        await env.settle()
        await run.cancel("by hand", grace=60.0)
        await env.skip(HOUR)
        assert (await run.get()).state is RunState.CANCELLED
    return run


async def changed(env: AsyncEnvironment) -> AsyncRunHandle:
    async with env.worker(workflows=[workflows.changed]):
        run = await env.client.start_run("golden.changed", 7)
        await env.settle()
    async with env.worker(workflows=[workflows.other_code()]):
        await run.signal("go_on")

        async def is_blocked() -> bool:
            return (await run.get()).state is RunState.BLOCKED

        await eventually(is_blocked)
    async with env.worker(workflows=[workflows.changed]):
        assert await env.result(run, type=int) == 42
    return run


Story = Callable[[AsyncEnvironment], Awaitable[AsyncRunHandle]]
STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (everything, cancelled, failed, timed_out, continued, terminated, stubborn, changed)
}


async def _chain(env: AsyncEnvironment, run_id: str) -> AsyncIterator[str]:
    while run_id:
        yield run_id
        run_id = (await env.client.get_run(run_id)).next_run_id


async def make(name: str) -> list[Path]:
    """Tell a story and write down what was recorded. Raises FileExistsError for one that is there."""
    paths = []
    async with TestServer.start() as env:
        run = await STORIES[name](env)
        number = 0
        async for run_id in _chain(env, run.run_id):
            number += 1
            path = FOLDER / f"{name}-{number}.json"
            with path.open("xb") as file:
                async for event in env.client.history(run_id):
                    named = {"run_id": run_id} if event.seq == 1 else {}
                    file.write(msgspec.json.encode(named | event_document(event)) + b"\n")
            paths.append(path)
    return paths


def main(names: list[str]) -> None:
    for name in names or [name for name in STORIES if not (FOLDER / f"{name}-1.json").exists()]:
        for path in asyncio.run(make(name)):
            sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
