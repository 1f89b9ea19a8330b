"""StartRun and BatchStartRuns: what they accept, what they refuse, and with which words."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import count, fetch
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer

LIMIT = 2048


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


BROKEN_JSON = {
    "nothing": "",
    "not JSON": "{",
    "a second value": "1 2",
    "NaN": "NaN",
    "infinity": "-Infinity",
    "a byte order mark": "\ufeff1",
    "a raw NUL": '"\0"',
    "a raw control character": '"\x1f"',
    "a lone high surrogate": r'"\ud800"',
    "a lone low surrogate": r'["\udc00\ud800"]',
    "duplicate keys": '{"a": 1, "b": {"c": 1, "c": 1}}',
    "duplicate keys by escape": r'{"a": 1, "\u0061": 1}',
    "nested past the limit": deep(129),
    "nested far past the limit": deep(100_000),
    "a number of too many digits": "[" + "9" * 1001 + "]",
    "a fraction of too many digits": "0." + "1" * 1000,
    "an exponent past the limit": "1e1000001",
    "a hopeless exponent": "-1E-" + "9" * 30,
    "a leading zero": "01",
}

ODD_JSON = {
    "white space": " \t\r\n1 ",
    "an escaped NUL": r'{"\u0000": "\u0000"}',
    "a pair of surrogates": r'"\ud83d\ude00"',
    "raw characters past the basic plane": '"😀\U0010ffff\u2028"',
    "nested to the limit": deep(128),
    "as many digits as there may be": "9" * 1000,
    "a number that no double holds": "1e400",
    "the largest exponent": "1e1000000",
    "minus zero": "-0",
    "a string of digits": json.dumps("9" * 1500),
    "brackets in a string": json.dumps("[" * 500),
    "an empty key": '{"": null}',
}


async def test_what_is_not_json_is_refused_and_makes_no_run(api: Api, dsn: str) -> None:
    await api.register(manifest())
    for name, text in BROKEN_JSON.items():
        with refused("INVALID_JSON", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await api.start(input=text)
        assert refusal.error.paths == ["input.json"], name
    assert await count(dsn, "run") == 0


async def test_odd_but_valid_json_is_kept_byte_for_byte(api: Api) -> None:
    await api.register(manifest())
    for name, text in ODD_JSON.items():
        run_id = (await api.start(input=text, request_key=name)).run_id
        assert (await api.get(run_id)).input.json == text, name
        assert (await api.history(run_id))[0].run_started.input.json == text, name
        assert not (await api.start(input=text, request_key=name)).created, name


@pytest.fixture
async def small(in_process_server: StartInProcessServer, dsn: str) -> InProcessServer:
    """A server with a payload limit of LIMIT bytes."""
    return await in_process_server(dsn, max_payload_bytes=LIMIT, max_frame_bytes=64 << 10)


def payload_of(size: int, kind: str) -> Payload:
    """A payload of exactly so many bytes."""
    if kind == "binary":
        return Payload(binary=b"\0" * size)
    character = {"ascii": "a", "two bytes": "ä", "four bytes": "😀"}[kind]
    width = len(character.encode())
    text = '"' + character * ((size - 2) // width) + "a" * ((size - 2) % width) + '"'
    assert len(text.encode()) == size
    return Payload(json=text)


@pytest.mark.parametrize("kind", ["ascii", "two bytes", "four bytes", "binary"])
async def test_a_payload_may_have_as_many_bytes_as_the_limit_says_and_no_more(
    small: InProcessServer, api_of_small: Api, kind: str
) -> None:
    """Row 28 of the field's failures, on the way in."""
    await api_of_small.register(manifest())
    for size in (LIMIT - 1, LIMIT):
        request = pb.StartRunRequest(workflow_id="wf", input=payload_of(size, kind))
        started = await api_of_small.runs.StartRun(request, timeout=DEADLINE)
        assert (await api_of_small.get(started.run_id)).input == request.input
    with refused("PAYLOAD_TOO_LARGE", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        request = pb.StartRunRequest(workflow_id="wf", input=payload_of(LIMIT + 1, kind))
        await api_of_small.runs.StartRun(request, timeout=DEADLINE)
    assert refusal.error.paths == ["input.binary" if kind == "binary" else "input.json"]
    assert str(LIMIT) in refusal.error.message


@pytest.fixture
def api_of_small(small: InProcessServer, connect_api: Any) -> Api:
    api: Api = connect_api(small.grpc_address)
    return api


async def test_metadata_has_limits_of_its_own(api: Api) -> None:
    await api.register(manifest())
    fits = Payload(json="1", metadata={f"k{n}": "v" for n in range(32)})
    run = await api.runs.StartRun(pb.StartRunRequest(workflow_id="wf", input=fits), timeout=DEADLINE)
    assert (await api.get(run.run_id)).input == fits
    for metadata in ({f"k{n}": "v" for n in range(33)}, {"k": "v" * 5000}):
        with refused("PAYLOAD_TOO_LARGE") as refusal:
            request = pb.StartRunRequest(workflow_id="wf", input=Payload(json="1", metadata=metadata))
            await api.runs.StartRun(request, timeout=DEADLINE)
        assert refusal.error.paths == ["input.metadata"]


async def test_a_request_is_told_all_of_its_faults_at_once(api: Api) -> None:
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.start(
            "",
            namespace="no good",
            definition_hash="abc",
            user_id="u\0",
            request_key="k" * 201,
            request_id="\0",
            priority=6,
        )
    assert refusal.error.paths == [
        "namespace",
        "workflow_id",
        "definition_hash",
        "user_id",
        "request_key",
        "request_id",
        "priority",
    ]
    with refused("INVALID_REQUEST") as refusal:
        await api.start("-wf", priority=-1)
    assert refusal.error.paths == ["workflow_id", "priority"]


async def test_text_that_is_no_utf_8_is_the_callers_fault(api: Api) -> None:
    """The fault is the request's, so the code must not say that the server is broken, or UNKNOWN."""
    for method in ("RunService/StartRun", "RunService/WatchRun", "DefinitionService/GetDefinition"):
        streams = method.endswith("WatchRun")
        call: Any = (api.channel.unary_stream if streams else api.channel.unary_unary)(f"/fencepost.v1.{method}")
        for data in (b"\x12\x02\xff\xfe", b"no message at all"):
            with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
                answer = call(data, timeout=DEADLINE)
                await (answer.read() if streams else answer)


async def test_an_unknown_workflow_and_an_unknown_definition_are_told_apart(api: Api) -> None:
    hash_ = (await api.register(manifest())).definition.definition_hash
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await api.start("other")
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await api.start("other", definition_hash=hash_)
    with refused("UNKNOWN_DEFINITION", grpc.StatusCode.NOT_FOUND) as refusal:
        await api.start(definition_hash="0" * 64)
    assert "0" * 64 in refusal.error.message
    other = (await api.register(manifest(workflow_id="other"))).definition.definition_hash
    with refused("UNKNOWN_DEFINITION"):
        await api.start(definition_hash=other)
    assert (await api.start(definition_hash=hash_.upper())).definition_hash == hash_


SCHEMA = {
    "type": "object",
    "required": ["a", "b"],
    "properties": {"a": {"type": "integer"}, "c/d": {"items": {"type": "string"}}},
    "additionalProperties": {"maxLength": 3},
}


async def test_an_input_that_breaks_the_schema_is_told_every_violation_with_its_place(api: Api, dsn: str) -> None:
    await api.register(manifest(workflow={"input_schema": SCHEMA}, schema_check="runtime"))
    with refused("INPUT_SCHEMA_MISMATCH", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.start(input='{"a": "x", "c/d": ["", 1, 2], "z": "long one"}')
    assert sorted(refusal.error.paths) == ["", "/a", "/c~1d/1", "/c~1d/2", "/z"]
    assert await count(dsn, "run") == 0
    await api.start(input='{"a": 1.0, "b": null, "c/d": []}')


async def test_the_schema_of_the_first_node_holds_for_the_input_too(api: Api) -> None:
    node = {"input_schema": {"type": "integer"}, "schema_check": "runtime"}
    await api.register(manifest(2, nodes={"n1": node}))
    with refused("INPUT_SCHEMA_MISMATCH"):
        await api.start(input='"x"')
    await api.start(input="184467440737095516160")


async def test_violations_that_would_fill_the_header_are_cut_and_the_reason_arrives(api: Api) -> None:
    """gRPC sends details in a header with a limit of 8 KiB: past it a client sees no reason at all."""
    await api.register(manifest(workflow={"input_schema": {"additionalProperties": {"type": "integer"}}}))
    for value in (
        {"k" * 50 + str(n): "ä" * 400 for n in range(100)},
        {"k" * 500_000: "x"},
        {"ä" * 300 + str(n): ["ä"] for n in range(20)},
    ):
        with refused("INPUT_SCHEMA_MISMATCH") as refusal:
            await api.start(input=json.dumps(value))
        assert refusal.error.violations


async def test_a_binary_input_is_kept_and_no_schema_is_checked_on_it(api: Api) -> None:
    await api.register(manifest(workflow={"input_schema": {"type": "integer"}}))
    value = Payload(binary=b"\xff\0\x80", metadata={"content-type": "x"})
    run = await api.runs.StartRun(pb.StartRunRequest(workflow_id="wf", input=value), timeout=DEADLINE)
    assert (await api.get(run.run_id)).input == value


async def test_no_input_stands_for_null(api: Api) -> None:
    await api.register(manifest(workflow={"input_schema": {"type": "null"}}))
    run = await api.runs.StartRun(pb.StartRunRequest(workflow_id="wf", request_key="k"), timeout=DEADLINE)
    assert (await api.get(run.run_id)).input == Payload(json="null")
    assert not (await api.start(input=" null ", request_key="k")).created


async def test_every_item_of_a_batch_is_answered_by_itself(api: Api, dsn: str) -> None:
    await api.register(manifest(workflow={"input_schema": {"type": "integer"}}))
    taken = await api.start(input="1", request_key="taken", request_id="taken")
    bad = {
        "INVALID_REQUEST": api.start_request(priority=9),
        "INVALID_JSON": api.start_request(input="{"),
        "INPUT_SCHEMA_MISMATCH": api.start_request(input='"x"'),
        "PAYLOAD_TOO_LARGE": api.start_request(input='"' + "x" * (1 << 20) + '"'),
        "UNKNOWN_WORKFLOW": api.start_request("other", "1"),
        "UNKNOWN_DEFINITION": api.start_request(input="1", definition_hash="0" * 64),
        "REQUEST_KEY_CONFLICT": api.start_request(input="2", request_key="taken"),
        "REQUEST_ID_CONFLICT": api.start_request(input="2", request_id="taken"),
    }
    requests = [api.start_request(input="1")]
    for request in bad.values():
        requests += [request, api.start_request(input="1")]
    results = await api.start_many([*requests, api.start_request(input="1.0", request_key="taken")])
    reasons = [error_pb2.ErrorReason.Name(r.error.reason).removeprefix("ERROR_REASON_") for r in results[1:-1:2]]
    assert reasons == list(bad)
    good = results[:-1:2]
    assert all(result.started.created for result in good)
    assert len({result.started.run_id for result in good}) == len(good)
    assert (results[-1].started.run_id, results[-1].started.created) == (taken.run_id, False)
    conflict = results[1 + 2 * list(bad).index("REQUEST_KEY_CONFLICT")].error
    assert conflict.metadata["existing_run_id"] == taken.run_id
    mismatch = results[1 + 2 * list(bad).index("INPUT_SCHEMA_MISMATCH")].error
    assert [violation.path for violation in mismatch.violations] == [""]
    assert await count(dsn, "run") == len(good) + 1


async def test_a_batch_has_a_size_and_one_namespace(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Any
) -> None:
    server = await in_process_server(dsn, max_batch_starts=3)
    api: Api = connect_api(server.grpc_address)
    await api.register(manifest(), namespace="one")
    for n in (0, 4):
        with refused("INVALID_REQUEST") as refusal:
            await api.start_many([api.start_request()] * n, namespace="one")
        assert refusal.error.paths == ["runs"]
    same, other, without = await api.start_many(
        [api.start_request(namespace="one"), api.start_request(namespace="two"), api.start_request()], namespace="one"
    )
    assert same.started.created
    assert without.started.created
    assert other.error.reason == error_pb2.ERROR_REASON_INVALID_REQUEST
    assert [violation.path for violation in other.error.violations] == ["namespace"]
    assert await fetch(dsn, "select distinct namespace from run") == [("one",)]
