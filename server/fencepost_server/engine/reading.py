"""Reading runs and histories, and waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fencepost_server.domain.errors import RunNotFound
from fencepost_server.domain.graph import Graph
from fencepost_server.domain.model import RunState
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.keys import REQUEST_KEY
from fencepost_server.store import runs
from fencepost_server.store.runs import EventRecord, RunDetail, RunSummary

_WATCH_BATCH = 200


@dataclass(frozen=True, slots=True)
class RunView:
    """A run and the definition that it is pinned to."""

    run: RunDetail
    graph: Graph


async def get(engine: Engine, namespace: str, run_id: str) -> RunView:
    """A run by id. Raises RunNotFound."""
    run = await runs.get_run(engine.reads, namespace, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id} in namespace {namespace!r}")
    return RunView(run, await engine.catalog.graph(engine.reads, run.summary.definition_hash))


async def find(engine: Engine, namespace: str, workflow_id: str, user_id: str, key: str) -> RunView:
    """A run by its request key. Raises RunNotFound."""
    run_id = await runs.run_by_key(engine.reads, namespace, REQUEST_KEY, workflow_id, user_id, key)
    if run_id is None:
        raise RunNotFound(f"no run of workflow {workflow_id!r} has the request key {key!r}")
    return await get(engine, namespace, run_id)


async def latest(engine: Engine, namespace: str, run_id: str) -> str:
    """The run that goes on with the work of another one, at the end of their chain; itself if there is none."""
    return await runs.latest(engine.reads, namespace, run_id) or run_id


async def wait(engine: Engine, namespace: str, run_id: str, timeout: float) -> tuple[RunView, bool]:
    """The run once it has ended, or after ``timeout`` seconds, and whether it has ended. Of one that continues as
    new the next one is waited for, and told.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        view, ended = await _wait(engine, namespace, run_id, deadline)
        if not ended or view.run.summary.state != RunState.CONTINUED:
            return view, ended
        following = await latest(engine, namespace, run_id)
        if following == run_id:
            return view, ended
        run_id = following


async def _wait(engine: Engine, namespace: str, run_id: str, deadline: float) -> tuple[RunView, bool]:
    """As ``wait``, for one run of a chain.

    The interest is registered before the first look, so that an end in between is not missed. After the timeout there
    is a last look: what has happened without ending the run has woken nobody.
    """
    async with engine.watches.watching(run_id, end_only=True) as watch:
        late = False
        while True:
            watch.woken.clear()
            view = await get(engine, namespace, run_id)
            ended = view.run.summary.ended_at is not None
            if ended or late:
                return view, ended
            _end_if_cancelled()
            try:
                async with asyncio.timeout_at(deadline):
                    await watch.woken.wait()
            except TimeoutError:
                late = True


def _end_if_cancelled() -> None:
    """Whoever has gone shall not be waited for: his cancel can have got lost in a read (see engine.loops)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Events in order, with what is needed to name their parts."""

    run: RunSummary
    graph: Graph
    events: list[EventRecord]
    more: bool


async def history(engine: Engine, namespace: str, run_id: str, after: int, limit: int, max_bytes: int) -> HistoryPage:
    """A page of events; it ends early at ``max_bytes`` of payloads. Raises RunNotFound."""
    run = await runs.get_summary(engine.reads, namespace, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id} in namespace {namespace!r}")
    graph = await engine.catalog.graph(engine.reads, run.definition_hash)
    events = await runs.history(engine.reads, run_id, after, limit + 1)
    if after < run.last_seq and (not events or events[0].seq != after + 1):
        raise RunNotFound(f"run {run_id} was deleted just now")  # a history has no gaps (I4)
    size = 0
    for index, event in enumerate(events):
        size += event.payload.size * 3 + len(event.detail or "")
        if index == limit or (index and size > max_bytes):
            return HistoryPage(run, graph, events[:index], True)
    return HistoryPage(run, graph, events, False)


async def watch(
    engine: Engine, namespace: str, run_id: str, after: int, max_bytes: int
) -> AsyncIterator[tuple[HistoryPage, EventRecord]]:
    """Events after a number, as they come, until the last one of a run that has ended."""
    async with engine.watches.watching(run_id) as interest:
        while True:
            interest.woken.clear()
            page = await history(engine, namespace, run_id, after, _WATCH_BATCH, max_bytes)
            for event in page.events:
                yield page, event
                after = event.seq
            # Not ``after``: the events may have been read past the run, and then its end is still to be seen.
            interest.last_seq = page.run.last_seq
            if page.run.ended_at is not None and after >= page.run.last_seq:
                return
            if not page.more and after >= page.run.last_seq:
                _end_if_cancelled()
                await interest.woken.wait()
