"""What can't be right is refused before anything is sent, with the argument's name and what it has to be."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from fencepost import AsyncClient, Client, RunState, StartRun, WorkflowContext, step, workflow
from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as runs
from tests.unit.sdk.answering import BATCH, LIST, START, WAIT, Server


@step("mail.send")
def send(text: str) -> None: ...


@workflow("tick", compatibility_id="1")
async def tick(ctx: WorkflowContext) -> None: ...


@workflow("greet", compatibility_id="1")
async def greet(ctx: WorkflowContext, name: str = "") -> None: ...


WRONG = pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        (
            TypeError,
            {"start_delay": "5s"},
            "start_delay: '5s' is no length of time: give seconds as a number, or a timed",
        ),
        (ValueError, {"start_delay": -1}, "start_delay: -1 is no length of time from 0 to 3650 days"),
        (
            TypeError,
            {"run_timeout": "1h"},
            "run_timeout: '1h' is no length of time: give seconds as a number, or a time",
        ),
        (TypeError, {"attributes": {"n": 1}}, "attributes: names and values are text, not 'n': 1"),
        (TypeError, {"attributes": ["n"]}, r"attributes: a dict of text to text, not \['n'\]"),
        (TypeError, {"request_key": 5}, "request_key: it is text, not 5"),
        (TypeError, {"user_id": 5, "dedupe_key": b"d"}, "user_id: it is text, not 5; dedupe_key: it is text, not b'd'"),
        (TypeError, {"priority": "high"}, "priority: a whole number from 1 to 5, not 'high'"),
        (TypeError, {"workflow_id": send}, "the step mail.send is no workflow: start one that runs it"),
        (
            TypeError,
            {"workflow_id": tick, "input": "x"},
            "input: workflow tick takes none, so 'x' would be lost",
        ),
        (TypeError, {"workflow_id": len}, "a workflow is its id or a function with @workflow, not <built-in"),
    ],
)


@pytest.fixture
def alone() -> Iterator[Client]:
    """One that reaches no server: nothing is sent."""
    with Client("127.0.0.1:1", timeout=0.01) as client:
        yield client


@pytest_asyncio.fixture
async def async_client() -> AsyncIterator[AsyncClient]:
    """The same."""
    async with AsyncClient("127.0.0.1:1", timeout=0.01) as client:
        yield client


@WRONG
async def test_a_start_that_can_not_be_right(
    alone: Client, async_client: AsyncClient, kind: type[Exception], arguments: dict[str, Any], said: str
) -> None:
    given = {"workflow_id": "order", **arguments}
    with pytest.raises(kind, match=said):
        alone.start_run(**given)
    with pytest.raises(kind, match=said):
        await async_client.start_run(**given)
    with pytest.raises(kind, match=said):
        alone.start_runs([StartRun("order"), StartRun(**given)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"states": 5}, "states: a RunState, its name, or a list of them, not 5"),
        ({"states": ["FAILED", None]}, "states: a RunState, its name, or a list of them, not None"),
        ({"attributes": {"n": 1}}, "attributes: names and values are text, not 'n': 1"),
        ({"workflow_id": send}, "workflow_id: it is text, not <Step mail.send"),
        ({"user_id": 5}, "user_id: it is text, not 5"),
    ],
)
async def test_a_list_that_can_not_be_right(
    alone: Client, async_client: AsyncClient, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        list(alone.list_runs(**arguments))
    with pytest.raises(TypeError, match=said):
        await anext(async_client.list_runs(**arguments))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tick, "not <Workflow tick compatibility_id=1 queue=default>: its manifest is its .manifest"),
        (None, "a manifest is a text, the path of a file, or a dict, not None$"),
        (b"id: order", "not b'id: order'$"),
    ],
)
async def test_what_is_no_manifest(alone: Client, async_client: AsyncClient, given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        alone.register_definition(given)
    with pytest.raises(TypeError, match=said):
        await async_client.validate_definition(given)


def test_a_time_limit_is_told_as_people_write_it(alone: Client, server: Server, client: Client) -> None:
    with pytest.raises(TimeoutError, match=r"within 0\.0123457 s: "):
        alone.wait_run("r1", timeout=0.0123456789)
    asked = server.ask(client.wait_run, "r1", 0.0000123456789)  # it is over when the answer comes
    server.answer(WAIT, runs.WaitRunResponse(run=run_pb2.Run(run_id="r1", state=run_pb2.RUN_STATE_WAITING)))
    with pytest.raises(TimeoutError, match=r"has not ended within 1\.23457e-05 s; it is WAITING"):
        asked.result(30)


@pytest.mark.parametrize(
    ("given", "sent"), [((tick,), ""), (("tick", None), ""), (("tick", "x"), '"x"'), ((greet, "Ada"), '"Ada"')]
)
def test_an_input_is_sent_to_what_takes_one_or_may_take_one(
    server: Server, client: Client, given: tuple[Any, ...], sent: str
) -> None:
    asked = server.ask(client.start_run, *given)
    request = server.answer(START, runs.StartRunResponse(run_id="r1"))
    assert request.input.json == sent
    asked.result(30)


def test_lengths_of_time_are_seconds_or_timedeltas(server: Server, client: Client) -> None:
    asked = server.ask(client.start_run, "order", start_delay=dt.timedelta(minutes=1, milliseconds=5), run_timeout=90)
    request = server.answer(START, runs.StartRunResponse(run_id="r1"))
    assert request.start_delay.ToTimedelta() == dt.timedelta(minutes=1, milliseconds=5)
    assert request.run_timeout.ToTimedelta() == dt.timedelta(seconds=90)
    asked.result(30)
    many = server.ask(client.start_runs, [StartRun("order", run_timeout=dt.timedelta(hours=1))])
    batch = server.answer(BATCH, runs.BatchStartRunsResponse(results=[runs.BatchStartRunsResult()]))
    assert batch.runs[0].run_timeout.ToTimedelta() == dt.timedelta(hours=1)
    many.result(30)


def test_runs_are_listed_by_one_state_or_by_several_on_each_page(server: Server, client: Client) -> None:
    given: list[Any] = ["FAILED", RunState.FAILED, ["FAILED"], (RunState.FAILED,), iter(["FAILED"])]
    for states in given:
        found = client.list_runs(states=states)
        asked = server.ask(list[Any], found)
        for token in ("more", ""):
            request = server.answer(LIST, runs.ListRunsResponse(next_page_token=token))
            assert list(request.states) == [run_pb2.RUN_STATE_FAILED]
        assert asked.result(30) == []
