"""Questions to code runs: put to a worker that has the run's code, wherever it is connected, and answered from the
run's history. They change nothing; an answer that is lost is asked for again.

A worker of this server is asked at once, the one that decided last before others. If only another server has one, the
question waits in a mailbox of the database, where each server looks as long as it has workers with code and knows of
other servers; so does the one that was asked, because a worker may come to it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fencepost.v1 import worker_service_pb2
from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    FencepostError,
    IllegalTransition,
    NoWorker,
    Overloaded,
    QueryFailed,
    RunNotFound,
    Unavailable,
    UnknownDefinition,
)
from fencepost_server.domain.graph import Code
from fencepost_server.domain.model import Payload, RunState
from fencepost_server.domain.rows import Control
from fencepost_server.engine import reading
from fencepost_server.engine.engine import Engine
from fencepost_server.engine.loops import Loop
from fencepost_server.session.session import Session
from fencepost_server.session.stream import WorkerStreams
from fencepost_server.store import mailbox, runs
from fencepost_server.store.mailbox import Question, Reply
from fencepost_server.store.runs import RunSummary
from fencepost_server.wire.payloads import payload_out

log = logging.getLogger("fencepost.queries")

_FETCH_INTERVAL = 0.1
_MAX_WAITING = 1000
_MAX_SERVING = 500
_GIVING_BACK = 2.0

Outcome = Payload | FencepostError


@dataclass(frozen=True, slots=True)
class _Target:
    """A code run, and who may answer for it."""

    run: RunSummary
    code: Code
    seen_seq: int
    last_session: str


class RunQueries:
    """All that is asked at this server, or answered by its workers for others."""

    def __init__(self, config: Config, engine: Engine, streams: WorkerStreams) -> None:
        self._config = config
        self._engine = engine
        self._streams = streams
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.loop = Loop("queries", self.run_once)
        streams.on_decider = engine.listener.on_asked = self.loop.wake

    async def stop(self) -> None:
        """End: whoever waits for an answer of this server asks another one. What its workers, who have gone, were asked
        for other servers is given back first: nobody else would take it up.
        """
        await self.loop.stop()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_GIVING_BACK)
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def ask(self, namespace: str, run_id: str, name: str, value: Payload, timeout: float) -> Payload:
        """Ask a run; one that has continued as new is asked as that. Raises RunNotFound, IllegalTransition,
        UnknownDefinition, QueryFailed, NoWorker, Overloaded.
        """
        target = await self._target(namespace, run_id)
        question = Question(str(uuid.uuid4()), namespace, target.run.run_id, name, value, timeout)
        try:
            async with asyncio.timeout(timeout):
                outcome = await self._here(target, question)
                if isinstance(outcome, NoWorker):
                    outcome = await self._elsewhere(target, question)
        except TimeoutError:
            raise QueryFailed(f"no worker has answered in {timeout:g} s") from None
        if isinstance(outcome, FencepostError):
            raise outcome
        return outcome

    async def no_worker(self, namespace: str, code: Code) -> bool:
        """Whether no connected worker takes what a code run has to decide."""
        timeout = self._config.server_timeout
        return not await mailbox.worker_connected(self._engine.reads, namespace, code.handler, code.queue, timeout)

    async def _target(self, namespace: str, run_id: str) -> _Target:
        run = await runs.get_summary(self._engine.reads, namespace, run_id)
        if run is None or run.state == RunState.CONTINUED:
            latest = await reading.latest(self._engine, namespace, run_id)
            run = await runs.get_summary(self._engine.reads, namespace, latest)
        if run is None:
            raise RunNotFound(f"no run {run_id} in namespace {namespace!r}")
        graph = await self._engine.catalog.graph(self._engine.reads, run.definition_hash)
        if graph.broken:
            raise UnknownDefinition(graph.broken)
        if graph.code is None:
            state = RunState(run.state).name
            raise IllegalTransition(
                f"run {run_id} is of a graph, which has no queries", metadata={"state": state, "event": "QUERY"}
            )
        decider = None if run.control is None else Control.from_json(run.control).decider
        if decider is None:
            return _Target(run, graph.code, 0, "")
        return _Target(run, graph.code, decider.seen_seq, decider.session)

    # Workers of this server

    async def _here(self, target: _Target, question: Question) -> Outcome:
        """The answer of a worker of this server. NoWorker if none has the code, or all that were asked have gone."""
        tried: set[str] = set()
        while True:
            sessions = self._streams.deciders(target.run.namespace, target.code.handler)
            left = [session for session in sessions if session.session_id not in tried]
            if not left:
                return NoWorker(
                    f"no connected worker has workflow {target.run.workflow_id!r} with compatibility id "
                    f"{target.code.compatibility_id!r}"
                )
            session = min(left, key=lambda session: session.session_id != target.last_session)
            tried.add(session.session_id)
            outcome = await _asked(session, target, question)
            if not isinstance(outcome, NoWorker):
                return outcome

    # Workers of other servers

    async def _elsewhere(self, target: _Target, question: Question) -> Outcome:
        """The answer of a worker of another server. NoWorker if none has the code."""
        code, namespace, timeout = target.code, target.run.namespace, self._config.server_timeout
        if not await mailbox.worker_connected(self._engine.reads, namespace, code.handler, "", timeout):
            return NoWorker(
                f"no connected worker has workflow {target.run.workflow_id!r} with compatibility id "
                f"{code.compatibility_id!r}"
            )
        if len(self._waiting) >= _MAX_WAITING:
            return Overloaded("too many queries wait for workers of other servers")
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[question.query_id] = replied
        try:
            await mailbox.post(self._engine.reads, self._engine.server_id, code.handler, question)
            self._engine.notifier.ask()
            self.loop.wake()
            reply = await replied
        finally:
            del self._waiting[question.query_id]
            if not replied.done() or replied.cancelled():
                self._spawn(mailbox.withdraw(self._engine.reads, question.query_id))
        return reply.output if reply.output is not None else _error(reply.failure)

    async def run_once(self) -> float | None:
        """Fetch answers, and take questions that workers of this server can answer."""
        if self._waiting:
            for query_id, reply in await mailbox.fetch(self._engine.reads, self._engine.server_id):
                replied = self._waiting.get(query_id)
                if replied is not None and not replied.done():
                    replied.set_result(reply)
        deciders = self._streams.workflows()
        if deciders and (self._waiting or self._engine.notifier.others) and len(self._serving) < _MAX_SERVING:
            for question in await mailbox.take(self._engine.reads, self._engine.server_id, deciders):
                self._spawn(self._serve(question))
        if self._waiting:
            return _FETCH_INTERVAL
        return self._config.poll_interval if deciders else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="query")
        self._serving.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Unavailable):  # of that, whoever asked hears nothing in time
            log.error("a query of another server was not answered", exc_info=error)

    async def _serve(self, question: Question) -> None:
        """Answer a question of another server."""
        server_id, outcome = self._engine.server_id, await self._asked_for(question)
        if isinstance(outcome, NoWorker):
            await mailbox.give_back(self._engine.reads, server_id, question.query_id)
        elif isinstance(outcome, FencepostError):
            reply = Reply(None, (outcome.reason, outcome.message))
            await mailbox.answer(self._engine.reads, server_id, question.query_id, reply)
        else:
            await mailbox.answer(self._engine.reads, server_id, question.query_id, Reply(outcome))

    async def _asked_for(self, question: Question) -> Outcome:
        try:
            async with asyncio.timeout(question.timeout):
                return await self._here(await self._target(question.namespace, question.run_id), question)
        except TimeoutError:
            return QueryFailed("no worker has answered in time")
        except FencepostError as error:
            return error


async def _asked(session: Session, target: _Target, question: Question) -> Outcome:
    """What one worker says."""
    answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def done(outcome: Outcome) -> None:
        if not answered.done():
            answered.set_result(outcome)

    message = worker_service_pb2.Query(
        query_id=question.query_id,
        run_id=target.run.run_id,
        workflow_id=target.run.workflow_id,
        compatibility_id=target.code.compatibility_id,
        last_seq=target.run.last_seq,
        name=question.name,
        input=payload_out(question.input),
        seen_seq=target.seen_seq,
        user_id=target.run.user_id,
    )
    try:
        session.ask(message, done)
        return await answered
    except Overloaded as error:
        return error
    finally:
        session.forget_question(question.query_id)


def _error(failure: tuple[str, str] | None) -> FencepostError:
    """What another server said of its worker's answer."""
    reason, message = failure or ("QUERY_FAILED", "there was no answer")
    kinds = (QueryFailed, Overloaded, RunNotFound, IllegalTransition, UnknownDefinition)
    return next((kind for kind in kinds if kind.reason == reason), QueryFailed)(message)
