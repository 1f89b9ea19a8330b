"""Questions to code runs: who is asked, that the answer comes back, and what is said where there is none."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost_server.api import queries
from tests.engine.code import AS_NEW, CODE, MANIFEST, held, local, payload
from tests.engine.rows import count, fetch
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

OTHER = pb.WorkflowHandler(workflow_id="code", compatibility_id="2")


@dataclass(slots=True)
class Asking:
    """A server with the code workflow, and no worker."""

    server: InProcessServer
    api: Api
    dsn: str
    connect_worker: Callable[..., Awaitable[RawWorker]]
    start_server: Callable[[], Awaitable[InProcessServer]]

    async def worker(self, server: InProcessServer | None = None, workflow: pb.WorkflowHandler = CODE) -> RawWorker:
        """A worker that has the code."""
        address = (server or self.server).grpc_address
        return await self.connect_worker(
            address, handlers=(), capacity=0, workflows=[workflow], workflow_capacity=5, worker_name=str(uuid.uuid4())
        )

    def ask(
        self, run_id: str, name: str = "progress", *, timeout: float | None = None, **fields: Any
    ) -> asyncio.Task[Payload]:
        """Begin to ask."""
        request = run_service_pb2.QueryRunRequest(run_id=run_id, name=name, **fields)
        if timeout is not None:
            request.timeout.FromMicroseconds(round(timeout * 1e6))

        async def call() -> Payload:
            return (await self.api.runs.QueryRun(request, timeout=DEADLINE)).output

        return asyncio.create_task(call())


@pytest.fixture
async def asking(
    in_process_server: StartInProcessServer,
    dsn: str,
    connect_api: Callable[[str], Api],
    connect_worker: Callable[..., Awaitable[RawWorker]],
) -> Asking:
    async def start() -> InProcessServer:
        return await in_process_server(dsn, poll_interval=0.05, disconnect_grace=0.2)

    server = await start()
    api = connect_api(server.grpc_address)
    await api.register(MANIFEST)
    return Asking(server, api, dsn, connect_worker, start)


async def test_a_question_is_put_to_a_worker_with_all_that_it_needs_to_answer(asking: Asking) -> None:
    worker = await asking.worker()
    run_id = (await asking.api.start("code", "7")).run_id
    run = held(worker, await worker.task())
    await run.advance(local(1, "a"))
    answer = asking.ask(run_id, "progress", input=Payload(json='{"of": 3}'))
    query = await worker.next(pb.Query)
    assert (query.run_id, query.workflow_id, query.compatibility_id) == (run_id, "code", "1")
    assert (query.name, query.input.json, query.last_seq, query.seen_seq) == ("progress", '{"of": 3}', 2, 1)
    await worker.answer(query, '{"done": 1}')
    assert (await answer).json == '{"done": 1}'
    assert kinds_of(await asking.api.history(run_id)) == ["run_started", "local_step_ended"]


def kinds_of(events: list[run_pb2.Event]) -> list[str]:
    return [str(event.WhichOneof("kind")) for event in events]


async def test_the_worker_that_decided_last_is_asked_before_others(asking: Asking) -> None:
    """It may have the run in memory."""
    workers = [await asking.worker() for _ in range(4)]
    run_id = (await asking.api.start("code")).run_id
    taking = {asyncio.create_task(worker.task()): worker for worker in workers}
    [done], rest = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    decider = taking[done]
    await held(decider, done.result()).advance()
    for _ in range(4):
        answer = asking.ask(run_id)
        await decider.answer(await decider.next(pb.Query), "1")
        assert (await answer).json == "1"


async def test_a_run_that_has_ended_can_be_asked(asking: Asking) -> None:
    worker = await asking.worker()
    run_id = (await asking.api.start("code")).run_id
    await held(worker, await worker.task()).complete("done")
    assert (await asking.api.wait(run_id)).state == run_pb2.RUN_STATE_COMPLETED
    answer = asking.ask(run_id)
    query = await worker.next(pb.Query)
    assert query.last_seq == 2
    await worker.answer(query, '"over"')
    assert (await answer).json == '"over"'


async def test_a_run_that_has_continued_as_new_is_asked_as_that(asking: Asking) -> None:
    worker = await asking.worker()
    first = (await asking.api.start("code")).run_id
    await held(worker, await worker.task()).advance(outcome=AS_NEW, output=payload(2))
    following = held(worker, await worker.task())
    answer = asking.ask(first)
    query = await worker.next(pb.Query)
    assert query.run_id == following.task.task.run_id != first
    await worker.answer(query)
    await answer
    told = await asking.api.get(first)
    assert (told.state, told.next_run_id) == (run_pb2.RUN_STATE_CONTINUED, query.run_id)
    assert (await asking.api.get(query.run_id)).previous_run_id == first


async def test_a_query_that_the_code_refuses_says_why(asking: Asking) -> None:
    worker = await asking.worker()
    run_id = (await asking.api.start("code")).run_id
    answer = asking.ask(run_id)
    failure = run_pb2.Failure(code="UNKNOWN_QUERY", message="the workflow has no query 'progress'")
    await worker.answer(await worker.next(pb.Query), failure=failure)
    with refused("QUERY_FAILED", grpc.StatusCode.FAILED_PRECONDITION) as caught:
        await answer
    assert "no query 'progress'" in caught.error.message


async def test_a_worker_that_does_not_answer_is_not_waited_for_for_ever(asking: Asking) -> None:
    """I12."""
    worker = await asking.worker()
    run_id = (await asking.api.start("code")).run_id
    with refused("QUERY_FAILED", grpc.StatusCode.FAILED_PRECONDITION) as caught:
        await asking.ask(run_id, timeout=1.5)
    assert "no worker has answered in 1.5 s" in caught.error.message
    await worker.answer(await worker.next(pb.Query))  # too late, and no fault of its


async def test_without_a_worker_that_has_the_code_there_is_no_answer(asking: Asking) -> None:
    await asking.worker(workflow=OTHER)
    run_id = (await asking.api.start("code")).run_id
    with refused("NO_WORKER", grpc.StatusCode.UNAVAILABLE):
        await asking.ask(run_id)


async def test_another_worker_is_asked_when_the_one_that_was_asked_goes(asking: Asking) -> None:
    workers = [await asking.worker() for _ in range(2)]
    run_id = (await asking.api.start("code")).run_id
    answer = asking.ask(run_id)
    asked = [asyncio.create_task(worker.next(pb.Query)) for worker in workers]
    [first], [rest] = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    index = asked.index(first)
    await workers[index].drop()
    await workers[1 - index].answer(await rest, '"mine"')
    assert (await answer).json == '"mine"'


async def test_a_worker_of_another_server_answers_through_the_database(asking: Asking) -> None:
    """Whichever server is asked; nothing stays behind."""
    second = await asking.start_server()
    worker = await asking.worker(second)
    run_id = (await asking.api.start("code")).run_id
    answers = [asking.ask(run_id, input=Payload(json=f"{n}")) for n in range(5)]
    for _ in answers:
        query = await worker.next(pb.Query)
        await worker.answer(query, f"[{query.input.json}]")
    assert [(await answer).json for answer in answers] == [f"[{n}]" for n in range(5)]
    assert await count(asking.dsn, "query") == 0


async def test_what_a_worker_of_another_server_refuses_is_told(asking: Asking) -> None:
    second = await asking.start_server()
    worker = await asking.worker(second)
    run_id = (await asking.api.start("code")).run_id
    answer = asking.ask(run_id)
    failure = run_pb2.Failure(code="BROKEN", message="division by zero\0")
    await worker.answer(await worker.next(pb.Query), failure=failure)
    with refused("QUERY_FAILED", grpc.StatusCode.FAILED_PRECONDITION) as caught:
        await answer
    assert "BROKEN: division by zero" in caught.error.message


async def test_a_question_that_nobody_waits_for_any_more_is_taken_away(asking: Asking) -> None:
    second = await asking.start_server()
    worker = await asking.worker(second)
    run_id = (await asking.api.start("code")).run_id
    with refused("QUERY_FAILED", grpc.StatusCode.FAILED_PRECONDITION):
        # Long enough that the other server comes to it, however busy the machine is: it may be asked, not answered.
        await asking.ask(run_id, timeout=3.0)
    await worker.next(pb.Query)

    async def gone() -> bool:
        return await count(asking.dsn, "query") == 0

    await eventually(gone)


@pytest.mark.parametrize("goes", ["worker", "server"])
async def test_a_worker_or_server_that_goes_gives_a_question_of_another_server_back(
    asking: Asking, goes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker was asked and has not answered; whoever comes next does, at the server that was asked."""
    monkeypatch.setattr(queries, "_GIVING_BACK", 20.0)
    second = await asking.start_server()
    leaving = await asking.worker(second)
    run_id = (await asking.api.start("code")).run_id
    answer = asking.ask(run_id, timeout=25.0)
    await leaving.next(pb.Query)
    await (leaving.drop() if goes == "worker" else second.stop())
    worker = await asking.worker()
    await worker.answer(await worker.next(pb.Query), "2")
    assert (await answer).json == "2"


async def test_a_workflow_of_a_graph_has_no_queries(asking: Asking) -> None:
    await asking.api.register(manifest(1))
    run_id = (await asking.api.start("wf")).run_id
    with refused("ILLEGAL_TRANSITION", grpc.StatusCode.FAILED_PRECONDITION) as caught:
        await asking.ask(run_id)
    assert caught.error.metadata == {"state": "PENDING", "event": "QUERY"}


async def test_all_that_is_wrong_with_a_question_is_told_at_once(asking: Asking) -> None:
    request = run_service_pb2.QueryRunRequest(run_id="x", name="n" * 201, timeout=Duration(seconds=61))
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as caught:
        await asking.api.runs.QueryRun(request, timeout=DEADLINE)
    assert sorted(caught.error.paths) == ["name", "run_id", "timeout"]
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        await asking.ask(str(uuid.uuid4()))
    with refused("INVALID_JSON", grpc.StatusCode.INVALID_ARGUMENT):
        await asking.ask(str(uuid.uuid4()), input=Payload(json="{"))


async def test_a_session_tells_which_code_its_worker_has(asking: Asking) -> None:
    await asking.worker(workflow=pb.WorkflowHandler(workflow_id="code", compatibility_id="1", queue="slow"))
    rows = await fetch(asking.dsn, "select workflows, workflow_queues from session where ended_at is null")
    assert rows == [(["code@1"], ["slow"])]


async def test_a_run_that_waits_for_a_worker_with_its_code_says_so(asking: Asking) -> None:
    """Semantics, section 2: it does not fail."""
    run_id = (await asking.api.start("code")).run_id
    waiting = await asking.api.get(run_id)
    assert waiting.waiting_reason == "NO_WORKER"
    [decide] = waiting.open_steps
    assert (decide.task_id, decide.decide, decide.handler) == (1, True, "code@1")
    await asking.worker(workflow=pb.WorkflowHandler(workflow_id="code", compatibility_id="1", queue="another"))
    assert (await asking.api.get(run_id)).waiting_reason == "NO_WORKER"
    worker = await asking.worker()
    run = held(worker, await worker.task())
    told = await asking.api.get(run_id)
    assert (told.waiting_reason, told.open_steps[0].state) == ("", run_pb2.STEP_STATE_LEASED)
    await run.advance()
    idle = await asking.api.get(run_id)
    assert (idle.waiting_reason, list(idle.open_steps)) == ("", [])
    assert idle.state == run_pb2.RUN_STATE_WAITING
