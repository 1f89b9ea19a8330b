"""What the program shows of runs of code workflows, and what it asks of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.cli.program import Program
from tests.engine.code import AS_NEW, CODE, CONTINUE, MANIFEST, Held, call, child, held, local, payload, signal, timer
from tests.fixtures.api import Api
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import InProcessServer


@pytest.fixture
async def decider(server: InProcessServer, api: Api, connect_worker: Callable[..., Awaitable[RawWorker]]) -> RawWorker:
    """A worker that decides runs of the workflow `code`."""
    await api.register(MANIFEST)
    return await connect_worker(server.grpc_address, handlers=(), capacity=0, workflows=[CODE], workflow_capacity=10)


async def begin(api: Api, decider: RawWorker) -> tuple[str, Held]:
    run_id = (await api.start("code", "7")).run_id
    return run_id, held(decider, await decider.task())


async def test_people_see_what_a_code_run_does_and_waits_for(fencepost: Program, api: Api, decider: RawWorker) -> None:
    waits = [{"id": "go", "wait_signal": "go"}]
    await api.register(json.dumps({"id": "elsewhere", "compatibility_id": "1", "sequence": waits}))
    run_id, run = await begin(api, decider)
    shown = (await fencepost("runs", "get", run_id)).out
    assert "(decides)" in shown
    labels = pb.Command(op=6, set_attributes=pb.SetAttributes(attributes={"stage": "two", "old": ""}))
    patch = pb.Command(mark_patch=pb.MarkPatch(patch_id="fix-7"))
    stop = pb.Command(cancel_op=pb.CancelOp(op=3, of_seq=4))
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="NO_FUNDS", message="the card is empty")
    failed = pb.Command(
        op=2, record_local_step=pb.RecordLocalStep(name="charge", failure=failure, attempts=3, input_hash=b"\xff")
    )
    await run.advance(local(1, "a", "greet"), failed, timer(3, 90), call(4, "ship", [1]), patch, outcome=CONTINUE)
    await run.advance(signal(5, "approve", 3600), child(7, "elsewhere"), labels, stop)
    lines = (await fencepost("runs", "history", run_id)).out.splitlines()[1:]
    told = [" ".join(line.split()[3:]) for line in lines]
    assert told[0].startswith("run_started code ")
    assert told[1:6] == [
        'local_step_ended greet op 1; attempt 1; "a"',
        "local_step_ended charge op 2; attempt 3; PERMANENT NO_FUNDS: the card is empty",
        told[3],
        "step_scheduled ship op 4; ship on default; [1]",
        "patch_marked fix-7",
    ]
    assert told[3].startswith("timer_started op 3; for 1 m 30 s; until ")
    assert told[6].startswith("signal_awaited op 5; signal approve; until ")
    assert told[7].startswith("child_scheduled elsewhere op 7; elsewhere; run ")
    assert told[8:10] == ["attributes_set op 6; no old; stage=two", "op_cancelled op 3; of event 4"]
    lines = (await fencepost("runs", "get", run_id)).out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("ship")] == [["ship", "ship"]]
    assert not [line for line in lines if "(decides)" in line]
    assert [line.split()[:2] for line in lines if line.startswith("elsewhere")] == [["elsewhere", "run"]]


async def test_programs_read_a_history_with_what_its_ops_are_matched_by(
    fencepost: Program, api: Api, decider: RawWorker
) -> None:
    run_id, run = await begin(api, decider)
    hashed = pb.Command(
        op=1, record_local_step=pb.RecordLocalStep(name="f", output=payload(1), attempts=1, input_hash=b"\xff\1")
    )
    await run.advance(hashed, timer(2, 0))
    [_, step, started] = [
        json.loads(line) for line in (await fencepost("runs", "history", run_id, "--json")).out.splitlines()
    ][:3]
    assert (step["op"], step["node_id"], step["input_hash"], step["payload"]) == (1, "f", "/wE=", 1)
    assert (started["op"], started["delay"]) == (2, 0.0)


async def test_a_run_that_goes_on_as_another_one_names_it(fencepost: Program, api: Api, decider: RawWorker) -> None:
    run_id, run = await begin(api, decider)
    await run.advance(outcome=AS_NEW, output=payload(8))
    following = (await decider.task()).task.run_id
    first = (await fencepost("runs", "get", run_id, "--json")).document
    assert (first["state"], first["next_run_id"]) == ("CONTINUED", following)
    second = (await fencepost("runs", "get", following, "--json")).document
    assert second["previous_run_id"] == run_id
    words = (await fencepost("runs", "get", run_id)).out.split()
    assert words[words.index("goes") + 1 :][:2] == ["on", "as"]
    assert following in words
    [last] = (await fencepost("runs", "history", run_id)).out.splitlines()[-1:]
    assert last.split()[3:] == ["run_continued", "run", following]


async def test_the_end_of_a_code_run_does_not_name_itself_as_what_has_the_output(
    fencepost: Program, api: Api, decider: RawWorker
) -> None:
    run_id, run = await begin(api, decider)
    await run.complete(8)
    [last] = (await fencepost("runs", "history", run_id)).out.splitlines()[-1:]
    assert " ".join(last.split()[3:]) == "run_completed output of the function"


async def test_a_run_that_no_worker_can_decide_says_why_nothing_happens(fencepost: Program, api: Api) -> None:
    await api.register(MANIFEST)
    run_id = (await api.start("code")).run_id
    assert "no connected worker has its code (NO_WORKER)" in (await fencepost("runs", "get", run_id)).out
    assert (await fencepost("runs", "get", run_id, "--json")).document["waiting_reason"] == "NO_WORKER"


async def answered(decider: RawWorker, json_text: str, asking: Awaitable[Any]) -> tuple[pb.Query, Any]:
    """Let the program ask, and answer."""
    task = asyncio.ensure_future(asking)
    query = await decider.next(pb.Query)
    await decider.answer(query, json_text)
    return query, await task


async def test_a_run_is_asked_and_the_answer_is_shown(fencepost: Program, api: Api, decider: RawWorker) -> None:
    run_id, _ = await begin(api, decider)
    query, plain = await answered(decider, '{"done":3}', fencepost("runs", "query", run_id, "progress"))
    assert (query.name, query.input.json) == ("progress", "null")
    assert json.loads(plain.out) == {"done": 3}
    asking = fencepost("runs", "query", run_id, "progress", '{"of": 1}', "--json")
    query, document = await answered(decider, '"half"', asking)
    assert (json.loads(query.input.json), document.document) == ({"of": 1}, {"output": "half"})


async def test_a_query_that_is_refused_fails_the_command(fencepost: Program, api: Api, decider: RawWorker) -> None:
    run_id, _ = await begin(api, decider)
    asking = asyncio.ensure_future(fencepost("runs", "query", run_id, "nothing"))
    failure = run_pb2.Failure(code="UNKNOWN_QUERY", message="the workflow has no query 'nothing'")
    await decider.answer(await decider.next(pb.Query), failure=failure)
    assert "QUERY_FAILED: UNKNOWN_QUERY: the workflow has no query 'nothing'" in (await asking).error


async def test_the_definition_of_a_code_workflow_is_shown(fencepost: Program, api: Api) -> None:
    await api.register(MANIFEST)
    listed = (await fencepost("definitions", "list")).out
    assert "code" in listed.split()
    shown = (await fencepost("definitions", "get", "code", "--json")).document
    assert shown["manifest"]["code"] == {}
