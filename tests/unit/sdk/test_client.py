"""The sync client over a channel that a test answers: what it asks, how it repeats, what it raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import fencepost
from fencepost import Client, FencepostError, NotEncodable, RunFailed, RunState, StartRun, calls
from fencepost.v1 import definition_service_pb2 as definitions
from fencepost.v1 import error_pb2, run_pb2
from fencepost.v1 import run_service_pb2 as runs
from tests.fixtures.waiting import wait_until
from tests.unit.sdk.answering import (
    BATCH,
    GET,
    HISTORY,
    LIST,
    OK,
    START,
    WAIT,
    WATCH,
    Server,
    event_of,
    method,
    run_of,
    trailing,
)


def test_a_run_is_started_with_all_that_was_given(server: Server, client: Client) -> None:
    asked = server.ask(
        client.start_run,
        "order",
        {"n": 2**70},
        request_key="k",
        user_id="u",
        priority=1,
        definition_hash="h",
    )
    request = server.answer(START, runs.StartRunResponse(run_id="r1", created=True, definition_hash="h"))
    assert (request.namespace, request.workflow_id, request.input.json) == ("shop", "order", f'{{"n":{2**70}}}')
    assert (request.request_key, request.user_id, request.priority) == ("k", "u", 1)
    assert request.definition_hash == "h"
    assert len(request.request_id) == 36
    run = asked.result(30)
    assert (run.run_id, run.created, run.definition_hash) == ("r1", True, "h")


def test_a_dedupe_key_is_sent_with_what_to_do_about_a_duplicate(server: Server, client: Client) -> None:
    asked = server.ask(client.start_run, "order", dedupe_key="d", on_active_duplicate="bind")
    bound = runs.StartRunResponse(run_id="r1", created=False, input_differs=True)
    request = server.answer(START, bound)
    assert (request.dedupe_key, request.on_active_duplicate) == ("d", runs.DUPLICATE_POLICY_BIND)
    run = asked.result(30)
    assert (run.created, run.input_differs) == (False, True)
    many = server.ask(client.start_runs, [StartRun("order", dedupe_key="d", on_active_duplicate="bind")])
    batch = server.answer(BATCH, runs.BatchStartRunsResponse(results=[runs.BatchStartRunsResult(started=bound)]))
    assert (batch.runs[0].dedupe_key, batch.runs[0].on_active_duplicate) == ("d", runs.DUPLICATE_POLICY_BIND)
    (handle,) = many.result(30)
    assert isinstance(handle, fencepost.RunHandle)
    assert handle.input_differs


def test_without_a_dedupe_key_no_policy_is_sent_because_the_server_refuses_one(server: Server, client: Client) -> None:
    asked = server.ask(client.start_run, "order", on_active_duplicate="conflict")
    request = server.answer(START, runs.StartRunResponse(run_id="r1", created=True))
    assert (request.dedupe_key, request.on_active_duplicate) == ("", runs.DUPLICATE_POLICY_UNSPECIFIED)
    assert not asked.result(30).input_differs


def test_a_policy_that_there_is_not_is_refused_before_anything_is_sent(client: Client) -> None:
    policy: Any = "replace"
    with pytest.raises(ValueError, match="'replace', neither 'conflict' nor 'bind'"):
        client.start_run("order", dedupe_key="d", on_active_duplicate=policy)
    with pytest.raises(ValueError, match="replace"):
        client.start_runs([StartRun("order"), StartRun("order", dedupe_key="d", on_active_duplicate=policy)])


def test_a_run_tells_its_dedupe_key(server: Server, client: Client) -> None:
    asked = server.ask(client.get_run, "r1")
    server.answer(GET, runs.GetRunResponse(run=run_of(dedupe_key="d")))
    assert asked.result(30).dedupe_key == "d"


def test_a_start_is_repeated_with_the_same_request_id_until_it_is_answered(server: Server, client: Client) -> None:
    asked = server.ask(client.start_run, "order")
    first = server.refuse(START, grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
    second = server.refuse(START, grpc.StatusCode.UNAVAILABLE)
    third = server.answer(START, runs.StartRunResponse(run_id="r1", created=True))
    assert first.request_id == second.request_id == third.request_id
    assert asked.result(30).run_id == "r1"


def test_each_start_has_a_request_id_of_its_own(server: Server, client: Client) -> None:
    ids = set()
    for _ in range(2):
        asked = server.ask(client.start_run, "order")
        ids.add(server.answer(START, runs.StartRunResponse(run_id="r1")).request_id)
        asked.result(30)
    assert len(ids) == 2


def test_the_delay_that_the_server_asks_for_is_kept(server: Server, client: Client) -> None:
    asked = server.ask(client.get_run, "r1")
    began = time.monotonic()  # before the refusal: the client's pause may be over before this thread is on again
    server.refuse(GET, grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry=0.3)
    server.answer(GET, runs.GetRunResponse(run=run_of()))
    assert time.monotonic() - began >= 0.25
    assert asked.result(30).ended


def test_what_does_not_pass_within_the_time_is_raised(server: Server) -> None:
    client = Client(channel=server.channel, timeout=0.02)
    asked = server.ask(client.get_run, "r1")
    server.refuse(GET, grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE", retry=0.5)
    with pytest.raises(fencepost.DatabaseUnavailable):
        asked.result(30)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKFLOW", fencepost.UnknownWorkflow),
        (grpc.StatusCode.INVALID_ARGUMENT, "INPUT_SCHEMA_MISMATCH", fencepost.InputSchemaMismatch),
        (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_KEY_CONFLICT", fencepost.RequestKeyConflict),
        (grpc.StatusCode.ALREADY_EXISTS, "DEDUPE_KEY_CONFLICT", fencepost.DedupeKeyConflict),
        (grpc.StatusCode.INTERNAL, "INTERNAL", fencepost.ServerFault),
        (grpc.StatusCode.UNKNOWN, "", fencepost.ServerFault),
    ],
)
def test_what_can_not_pass_is_raised_at_once_and_never_as_an_error_of_grpc(
    server: Server, client: Client, code: grpc.StatusCode, reason: str, kind: type[FencepostError]
) -> None:
    asked = server.ask(client.start_run, "order")
    server.refuse(START, code, reason)
    with pytest.raises(kind) as caught:
        asked.result(30)
    assert not isinstance(caught.value, grpc.RpcError)
    assert caught.value.__suppress_context__


def test_an_input_that_has_no_json_is_refused_before_anything_is_sent(client: Client) -> None:
    for value in (float("nan"), b"x", {"a": {1}}, "\ud800"):
        with pytest.raises(NotEncodable):
            client.start_run("order", value)


def test_many_runs_are_started_in_bounded_batches_and_keep_their_order(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_BATCH_ITEMS", 2)
    starts = [StartRun("order", number) for number in range(3)]
    starts.insert(1, StartRun("order", float("nan")))
    asked = server.ask(client.start_runs, starts)
    refused = runs.ItemError(reason=error_pb2.ERROR_REASON_UNKNOWN_WORKFLOW, message="no")
    first = server.answer(
        BATCH,
        runs.BatchStartRunsResponse(
            results=[
                runs.BatchStartRunsResult(started=runs.StartRunResponse(run_id="r0", created=True)),
                runs.BatchStartRunsResult(error=refused),
            ]
        ),
    )
    second = server.answer(
        BATCH,
        runs.BatchStartRunsResponse(results=[runs.BatchStartRunsResult(started=runs.StartRunResponse(run_id="r2"))]),
    )
    assert [run.input.json for run in (*first.runs, *second.runs)] == ["0", "1", "2"]
    one, two, three, four = asked.result(30)
    assert isinstance(one, fencepost.RunHandle)
    assert (one.run_id, one.created) == ("r0", True)
    assert isinstance(two, NotEncodable)
    assert isinstance(three, fencepost.UnknownWorkflow)
    assert isinstance(four, fencepost.RunHandle)


def test_batches_keep_to_a_size(server: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_BATCH_BYTES", 1000)
    asked = server.ask(client.start_runs, [StartRun("order", "x" * 600) for _ in range(2)])
    for _ in range(2):
        started = runs.BatchStartRunsResult(started=runs.StartRunResponse(run_id="r"))
        assert len(server.answer(BATCH, runs.BatchStartRunsResponse(results=[started])).runs) == 1
    assert len(asked.result(30)) == 2


def test_only_what_may_pass_of_a_batch_is_started_again(server: Server, client: Client) -> None:
    asked = server.ask(client.start_runs, [StartRun("order", number) for number in range(2)])
    busy = runs.ItemError(reason=error_pb2.ERROR_REASON_OVERLOADED, message="busy")
    started = runs.StartRunResponse(run_id="r0")
    first = server.answer(
        BATCH,
        runs.BatchStartRunsResponse(
            results=[runs.BatchStartRunsResult(started=started), runs.BatchStartRunsResult(error=busy)]
        ),
    )
    again = server.answer(
        BATCH,
        runs.BatchStartRunsResponse(results=[runs.BatchStartRunsResult(started=runs.StartRunResponse(run_id="r1"))]),
    )
    assert [run.request_id for run in again.runs] == [first.runs[1].request_id]
    handles = asked.result(30)
    assert [handle.run_id for handle in handles if isinstance(handle, fencepost.RunHandle)] == ["r0", "r1"]


def test_a_result_is_waited_for_and_decoded(server: Server, client: Client) -> None:
    asked = server.ask(client.handle("r1").result, timeout=60, type=list[int])
    assert server.answer(WAIT, runs.WaitRunResponse(run=run_of("RUNNING"), ended=False)).run_id == "r1"
    server.refuse(WAIT, grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING")
    run = run_of(output={"json": "[1,2]"})
    server.answer(WAIT, runs.WaitRunResponse(run=run, ended=True))
    assert asked.result(30) == [1, 2]


def test_a_failed_run_raises_its_failure(server: Server, client: Client) -> None:
    asked = server.ask(client.handle("r1").result)
    failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code="C", message="m", node_id="n", attempt=2)
    server.answer(WAIT, runs.WaitRunResponse(run=run_of("FAILED", failure=failure), ended=True))
    with pytest.raises(RunFailed, match="r1 failed at node n, attempt 2: PERMANENT C: m") as caught:
        asked.result(30)
    assert caught.value.failure.code == "C"
    assert caught.value.run.state is RunState.FAILED


def test_a_run_that_does_not_end_in_time_is_a_timeout(server: Server, client: Client) -> None:
    asked = server.ask(client.wait_run, "r1", timeout=0)
    server.answer(WAIT, runs.WaitRunResponse(run=run_of("RUNNING"), ended=False))
    with pytest.raises(TimeoutError, match="RUNNING"):
        asked.result(30)


def test_an_outage_longer_than_the_wait_is_a_timeout_too(server: Server, client: Client) -> None:
    asked = server.ask(client.wait_run, "r1", timeout=0.01)
    server.refuse(WAIT, grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE", retry=0.5)
    with pytest.raises(TimeoutError, match="DATABASE_UNAVAILABLE"):
        asked.result(30)


def test_lists_read_pages_as_they_are_needed(server: Server, client: Client) -> None:
    asked = server.ask(lambda: list(client.list_runs("order", ["FAILED", RunState.RUNNING], limit=3)))
    first = server.answer(
        LIST,
        runs.ListRunsResponse(runs=[run_of(run_id="a"), run_of(run_id="b")], next_page_token="t"),
    )
    assert (first.page_size, first.page_token, list(first.states)) == (3, "", [4, 2])
    second = server.answer(
        LIST, runs.ListRunsResponse(runs=[run_of(run_id="c"), run_of(run_id="d")], next_page_token="u")
    )
    assert second.page_token == "t"
    assert [run.run_id for run in asked.result(30)] == ["a", "b", "c"]


def test_a_state_that_there_is_not_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="SLEEPING"):
        next(client.list_runs(states=["SLEEPING"]))


def test_a_run_is_found_by_its_key(server: Server, client: Client) -> None:
    asked = server.ask(client.find_run, "order", "k", "u")
    request = server.answer(GET, runs.GetRunResponse(run=run_of()))
    key = request.request_key
    assert (key.workflow_id, key.request_key, key.user_id) == ("order", "k", "u")
    assert asked.result(30).run_id == "r1"


def watch(
    server: Server,
    *events: run_pb2.Event,
    code: grpc.StatusCode = OK,
    when: Callable[[], bool] = lambda: True,
) -> Any:
    """Answer the next WatchRun with events, then end it; an error drops what was not read, so only ``when``
    it was.
    """
    _, request, call = server.channel.take_unary_stream(WATCH)
    call.send_initial_metadata(())
    for event in events:
        call.send_response(runs.WatchRunResponse(event=event))
    wait_until(when)
    call.terminate((), code, "")
    return request


def test_watching_goes_on_after_a_break_and_shows_each_event_once(server: Server, client: Client) -> None:
    seen: list[int] = []

    def follow() -> None:
        seen.extend(event.seq for event in client.handle("r1").events())

    asked = server.ask(follow)
    unavailable = grpc.StatusCode.UNAVAILABLE
    assert watch(server, event_of(1), event_of(2), code=unavailable, when=lambda: 2 in seen).after_seq == 0
    assert watch(server, event_of(2), event_of(3), code=unavailable, when=lambda: 3 in seen).after_seq == 2
    assert watch(server, event_of(4, "run_completed")).after_seq == 3
    asked.result(30)
    assert seen == [1, 2, 3, 4]


def test_watching_a_run_past_its_end_ends(server: Server, client: Client) -> None:
    asked = server.ask(lambda: list(client.watch_run("r1", after_seq=9)))
    assert watch(server).after_seq == 9
    assert asked.result(30) == []


def test_watching_what_is_not_there_raises(server: Server, client: Client) -> None:
    asked = server.ask(lambda: list(client.watch_run("r1")))
    _, _, call = server.channel.take_unary_stream(WATCH)
    call.send_initial_metadata(())
    call.terminate(trailing("RUN_NOT_FOUND"), grpc.StatusCode.NOT_FOUND, "no")
    with pytest.raises(fencepost.RunNotFound):
        asked.result(30)


def test_history_shows_each_kind_of_event_with_its_fields(server: Server, client: Client) -> None:
    started = event_of(1, "run_started")
    started.run_started.input.json = "5"
    retrying = event_of(3, "step_retrying")
    retrying.step_retrying.failure.code = "C"
    retrying.step_retrying.ready_time.FromSeconds(0)
    completed = event_of(4, "step_completed")
    completed.step_completed.attempt = 2
    unknown = run_pb2.Event(seq=5)
    asked = server.ask(lambda: list(client.history("r1")))
    server.answer(HISTORY, runs.GetHistoryResponse(events=[started, event_of(2), retrying, completed, unknown]))
    one, two, three, four, five = asked.result(30)
    assert one.payload is not None
    assert one.payload.decode() == 5
    assert two.kind == "step_scheduled"
    assert three.failure is not None
    assert three.failure.code == "C"
    assert three.ready_time is not None
    assert four.payload is not None
    assert (four.payload.decode(), four.attempt) == (None, 2)
    assert five.kind is fencepost.EventKind.UNKNOWN


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_manifest_may_be_text_a_file_or_a_dict(server: Server, client: Client, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"order{suffix}"
    path.write_text('{"id": "order"}')
    yaml = suffix == ".yaml"
    text = "id: order\n" if yaml else '{"id":"order"}'
    for manifest in (path, str(path), text, {"id": "order"}):
        asked = server.ask(client.register_definition, manifest)
        response = definitions.RegisterDefinitionResponse(created=True)
        response.definition.workflow_id = "order"
        request = server.answer(method("RegisterDefinition"), response)
        expected = "yaml" if yaml and not isinstance(manifest, dict) else "json"
        assert request.WhichOneof("manifest") == expected
        assert asked.result(30).created


def test_definitions_are_validated_read_and_listed(server: Server, client: Client) -> None:
    validating = server.ask(client.validate_definition, "id: order\n")
    fault = runs.Violation(path="/sequence", message="missing")
    server.answer(method("ValidateDefinition"), definitions.ValidateDefinitionResponse(violations=[fault]))
    assert validating.result(30) == [fencepost.Violation("/sequence", "missing")]
    reading = server.ask(client.get_definition, "order")
    server.answer(
        method("GetDefinition"),
        definitions.GetDefinitionResponse(
            definition=definitions.Definition(workflow_id="order", state=definitions.DEFINITION_STATE_PREVIOUS)
        ),
    )
    assert reading.result(30).state is fencepost.DefinitionState.PREVIOUS
    listing = server.ask(lambda: list(client.list_definitions()))
    server.answer(method("ListDefinitions"), definitions.ListDefinitionsResponse())
    assert listing.result(30) == []
