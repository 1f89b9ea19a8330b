"""DefinitionService: what is registered, what is refused, and which definition new runs take."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from fencepost.v1 import definition_service_pb2 as pb
from tests.api.deploying import activate, registered, remove
from tests.engine.rows import count, holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import OK, RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.servers import PATIENT, InProcessServer, StartInProcessServer
from tests.fixtures.waiting import until_blocked

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]

FAULTS: dict[str, tuple[str, list[str]]] = {
    "not JSON": ("{", [""]),
    "no object": ("[]", [""]),
    "empty": ("{}", ["", "", ""]),
    "an empty sequence": ('{"id": "a", "compatibility_id": "1", "sequence": []}', ["/sequence"]),
    "unknown keys": (manifest(workflow={"colour": 1}, nodes={"n1": {"tpyo": 1}}), ["/colour", "/sequence/0/tpyo"]),
    "duplicate node ids": (manifest(3, nodes={"n3": {"id": "n1"}}), ["/sequence/2/id"]),
    "bad names": (manifest(workflow_id="a b", nodes={"n1": {"queue": ""}}), ["/id", "/sequence/0/queue"]),
    "bad durations": (
        manifest(2, nodes={"n1": {"timeout": 30}, "n2": {"lease": "1h-1m", "timeout": "0s"}}),
        ["/sequence/0/timeout", "/sequence/1/lease", "/sequence/1/timeout"],
    ),
    "a bad retry policy": (
        manifest(retry={"max_attempts": 0, "jitter": 2, "initial_delay": "2m"}),
        ["/sequence/0/retry/initial_delay", "/sequence/0/retry/jitter", "/sequence/0/retry/max_attempts"],
    ),
    "an invalid schema": (manifest(output_schema={"type": "text"}), ["/sequence/0/output_schema/type"]),
    "a remote $ref": (
        manifest(workflow={"input_schema": {"items": {"$ref": "https://example.com/x"}}}),
        ["/input_schema/items/$ref"],
    ),
    "an output that the next node does not take": (
        manifest(2, nodes={"n1": {"output_schema": {"type": "string"}}, "n2": {"input_schema": {"type": "integer"}}}),
        ["/sequence/1/input_schema"],
    ),
    "an output that is not the workflow's": (
        manifest(workflow={"output_schema": {"type": "null"}}, output_schema={"type": "integer"}),
        ["/output_schema"],
    ),
}


async def test_every_fault_of_a_manifest_is_told_with_its_path(api: Api, dsn: str) -> None:
    for name, (text, paths) in FAULTS.items():
        with refused("INVALID_MANIFEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await api.register(text)
        assert sorted(refusal.error.paths) == sorted(paths), name
        request = pb.ValidateDefinitionRequest(json=text)
        answer = await api.definitions.ValidateDefinition(request, timeout=DEADLINE)
        assert [(v.path, v.message) for v in answer.violations] == list(refusal.error.violations), name
        assert (answer.definition_hash, answer.manifest_json) == ("", "")
    everything = json.loads(manifest(3, workflow={"a": 1, "b": 2}, lease="x", nodes={"n2": {"id": "n1"}}))
    with refused("INVALID_MANIFEST") as refusal:
        await api.register(json.dumps(everything))
    assert len(refusal.error.violations) == 6
    assert await count(dsn, "definition") == 0
    assert await count(dsn, "deployment") == 0


async def test_a_manifest_of_many_faults_is_refused_with_a_reason_and_told_in_full_when_validated(api: Api) -> None:
    """The details of an error travel in a header with a limit; those of ValidateDefinition in a message."""
    text = manifest(100, nodes={f"n{n}": {"ä" * 100: 1} for n in range(1, 101)})
    with refused("INVALID_MANIFEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.register(text)
    assert refusal.error.paths[0].startswith("/sequence/0/")
    answer = await api.definitions.ValidateDefinition(pb.ValidateDefinitionRequest(json=text), timeout=DEADLINE)
    assert len(answer.violations) == 100


YAML = """
# The same as manifest(2, …), as a person would write it.
id: wf
compatibility_id: "1"
sequence:
  - step: s1
    id: n1
    retry: {max_attempts: 5, jitter: 0.5}
  - {id: n2, step: s2, lease: 60s, queue: default}
"""


async def test_the_same_manifest_in_yaml_and_json_is_one_definition(api: Api, dsn: str) -> None:
    request = pb.RegisterDefinitionRequest(yaml=YAML)
    first = await api.definitions.RegisterDefinition(request, timeout=DEADLINE)
    assert first.created
    retry = {"jitter": 0.5, "initial_delay": "1000ms"}
    second = await api.register(manifest(2, nodes={"n1": {"retry": retry, "lease": "1m"}}))
    assert not second.created
    assert second.definition == first.definition
    assert json.loads(first.definition.manifest_json)["sequence"][1] == {"id": "n2", "step": "s2"}
    validated = await api.definitions.ValidateDefinition(pb.ValidateDefinitionRequest(yaml=YAML), timeout=DEADLINE)
    assert validated.definition_hash == first.definition.definition_hash
    assert validated.manifest_json == first.definition.manifest_json
    assert await count(dsn, "definition") == 1
    with refused("INVALID_MANIFEST") as refusal:
        bad = pb.RegisterDefinitionRequest(yaml="id: &a wf\ncompatibility_id: *a\nsequence: []\nid: x")
        await api.definitions.RegisterDefinition(bad, timeout=DEADLINE)
    assert len(refusal.error.violations) >= 3


async def test_another_manifest_under_the_same_compatibility_id_is_drift_and_told_what_differs(api: Api) -> None:
    first = (await api.register(manifest(2))).definition
    with refused("DEFINITION_DRIFT", grpc.StatusCode.FAILED_PRECONDITION) as refusal:
        await api.register(manifest(2, nodes={"n2": {"lease": "2m", "queue": "slow"}}))
    told = [text for _, text in refusal.error.violations]
    assert len(told) == 2
    assert any("/sequence/1/lease" in text and "2m" in text for text in told)
    assert any("/sequence/1/queue" in text and "slow" in text for text in told)
    assert refusal.error.metadata["registered_hash"] == first.definition_hash
    found = await api.definitions.GetDefinition(pb.GetDefinitionRequest(workflow_id="wf"), timeout=DEADLINE)
    assert found.definition == first


async def definitions(api: Api, page_size: int = 0, **fields: Any) -> list[pb.Definition]:
    """All definitions over all pages."""
    found: list[pb.Definition] = []
    token = ""
    while True:
        request = pb.ListDefinitionsRequest(page_size=page_size, page_token=token, **fields)
        page = await api.definitions.ListDefinitions(request, timeout=DEADLINE)
        found += page.definitions
        token = page.next_page_token
        if not token:
            return found


async def test_a_new_compatibility_id_becomes_active_and_the_one_before_previous(api: Api) -> None:
    hashes = [(await api.register(manifest(compatibility_id=str(n)))).definition.definition_hash for n in range(3)]
    listed = await definitions(api, workflow_id="wf")
    assert [d.definition_hash for d in listed] == hashes[::-1]
    assert [d.state for d in listed] == [pb.DEFINITION_STATE_ACTIVE] + [pb.DEFINITION_STATE_PREVIOUS] * 2
    again = await api.register(manifest(compatibility_id="0"))
    assert (again.created, again.definition.state) == (False, pb.DEFINITION_STATE_PREVIOUS)
    assert (await api.start()).definition_hash == hashes[2]
    assert (await api.start(definition_hash=hashes[0])).definition_hash == hashes[0]


async def test_a_run_stays_on_its_definition_when_another_becomes_active(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I9."""
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=["s1", "s2", "new"])
    first = await worker.task()
    await api.register(manifest(compatibility_id="2", nodes={"n1": {"step": "new"}}))
    assert (await worker.complete(first)).outcome == OK
    second = await worker.task()
    assert (second.handler, second.definition_hash) == ("s2", first.definition_hash)
    newer = await api.start()
    assert (await worker.task()).handler == "new"
    assert (await worker.complete(second)).outcome == OK
    assert (await api.wait(run_id)).definition_hash == first.definition_hash != newer.definition_hash


async def test_definitions_are_listed_by_workflow_the_newest_first_in_pages_of_any_size(api: Api) -> None:
    for workflow_id, n in itertools.product(("a", "b", "C"), range(3)):
        await api.register(manifest(workflow_id=workflow_id, compatibility_id=str(n)))
    expected = [(w, str(n)) for w in ("C", "a", "b") for n in (2, 1, 0)]
    for size in (1, 2, 4, 9, 0):
        found = await definitions(api, size)
        assert [(d.workflow_id, d.compatibility_id) for d in found] == expected
        assert all(d.manifest_json == "" for d in found)
    assert [d.compatibility_id for d in await definitions(api, 2, workflow_id="a")] == ["2", "1", "0"]
    assert await definitions(api, workflow_id="d") == []


async def test_definitions_are_of_their_namespace(api: Api) -> None:
    """I14."""
    hash_ = (await api.register(manifest(), namespace="one")).definition.definition_hash
    with refused("UNKNOWN_WORKFLOW"):
        await api.start(namespace="two", definition_hash=hash_)
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await api.definitions.GetDefinition(pb.GetDefinitionRequest(workflow_id="wf"), timeout=DEADLINE)
    assert await definitions(api) == []
    assert (await api.register(manifest(2), namespace="two")).created
    with refused("UNKNOWN_DEFINITION"):
        await api.start(namespace="two", definition_hash=hash_)
    with refused("UNKNOWN_DEFINITION", grpc.StatusCode.NOT_FOUND):
        request = pb.GetDefinitionRequest(namespace="two", workflow_id="wf", definition_hash=hash_)
        await api.definitions.GetDefinition(request, timeout=DEADLINE)


async def test_what_is_wrong_with_a_request_is_told_before_the_manifest_is_read(api: Api) -> None:
    requests = {
        "manifest": pb.RegisterDefinitionRequest(),
        "namespace": pb.RegisterDefinitionRequest(namespace="-", json="{"),
        "request_id": pb.RegisterDefinitionRequest(request_id="\0", json="{"),
    }
    for path, request in requests.items():
        with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await api.definitions.RegisterDefinition(request, timeout=DEADLINE)
        assert refusal.error.paths == [path]
    with refused("INVALID_REQUEST") as refusal:
        which = pb.GetDefinitionRequest(workflow_id="", definition_hash="x")
        await api.definitions.GetDefinition(which, timeout=DEADLINE)
    assert refusal.error.paths == ["workflow_id", "definition_hash"]
    with refused("INVALID_REQUEST"):
        await definitions(api, page_size=1001)


async def test_a_manifest_may_have_as_many_bytes_as_the_limit_says(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    api = connect_api((await in_process_server(dsn, max_manifest_bytes=2048)).grpc_address)
    for size in (2047, 2048):
        text = manifest(workflow_id=f"wf{size}")
        await api.register(text[:-1] + " " * (size - len(text)) + text[-1])
    for text in (manifest() + " " * 2048, json.dumps({"é": "ä" * 1100}, ensure_ascii=False)):
        with refused("INVALID_MANIFEST") as refusal:
            await api.register(text)
        assert "2048" in refusal.error.violations[0][1]


async def test_a_large_manifest_does_not_keep_the_server_from_its_other_work(
    server: InProcessServer, api: Api, connect_api: Connect
) -> None:
    """The reader of YAML takes seconds for what is within the limits; heartbeats can't wait for that (I12)."""
    node = "step: s, input_schema: {enum: [a, b, c, d, e, f, g, h]}, schema_check: runtime"
    body = "".join(f"- {{id: n{n}, {node}}}\n" for n in range(900))
    request = pb.ValidateDefinitionRequest(yaml=f"id: wf\ncompatibility_id: '1'\nsequence:\n{body}")
    small, answered = connect_api(server.grpc_address), 0
    for _ in range(3):  # once is enough, unless the machine is busy
        large = asyncio.ensure_future(api.definitions.ValidateDefinition(request, timeout=60))
        answered = 0
        while not large.done():
            await small.list_all()
            answered += 1
        assert (await large).definition_hash
        if answered > 5:
            break
    assert answered > 5


@pytest.mark.parametrize("same", [True, False])
async def test_definitions_registered_at_once_from_two_servers_become_one_active_each_once(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, same: bool
) -> None:
    servers = [await in_process_server(dsn, **PATIENT) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    texts = [manifest(compatibility_id="1" if same else str(n)) for n in range(10)]
    answers = await asyncio.gather(*(apis[n % 2].register(texts[n % 10]) for n in range(40)))
    assert sum(answer.created for answer in answers) == (1 if same else 10)
    listed = await definitions(apis[0])
    assert len(listed) == (1 if same else 10)
    assert sum(d.state == pb.DEFINITION_STATE_ACTIVE for d in listed) == 1
    assert listed[0].state == pb.DEFINITION_STATE_ACTIVE


@pytest.mark.parametrize("known", [True, False])
async def test_drift_from_two_servers_at_once_lets_one_manifest_win(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, known: bool
) -> None:
    """Whether the workflow was known before or not."""
    servers = [await in_process_server(dsn, **PATIENT) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    if known:
        await apis[0].register(manifest(compatibility_id="0"))
    answers = await asyncio.gather(*(apis[n % 2].register(manifest(n + 1)) for n in range(10)), return_exceptions=True)
    won = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert [answer.created for answer in won] == [True]
    for answer in answers:
        if isinstance(answer, BaseException):
            with refused("DEFINITION_DRIFT"):
                raise answer
    assert await count(dsn, "definition") == 1 + known


async def test_a_start_waits_for_a_registration_under_way_and_takes_what_became_active(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """The lock of the deployment: a start takes either definition, and never one that has gone meanwhile."""
    api = connect_api((await in_process_server(dsn)).grpc_address)
    first = (await api.register(manifest())).definition
    second = (await api.register(manifest(2, compatibility_id="2"))).definition
    assert first.definition_hash != second.definition_hash
    async with holding(dsn, "select from deployment for update") as connection:
        starting = asyncio.create_task(api.start())
        await until_blocked(dsn)
        activate = "update deployment set active_hash = %s"
        await connection.execute(activate, [bytes.fromhex(first.definition_hash)])
        await connection.commit()
    assert (await starting).definition_hash == first.definition_hash


async def get(api: Api, hash_: str = "", **fields: Any) -> pb.Definition:
    """A definition; the active one without a hash."""
    request = pb.GetDefinitionRequest(workflow_id="wf", definition_hash=hash_, **fields)
    return (await api.definitions.GetDefinition(request, timeout=DEADLINE)).definition


async def test_activating_a_previous_definition_rolls_back_to_it_and_tells_the_one_before(api: Api) -> None:
    first, second = [await registered(api, manifest(n + 1, compatibility_id=str(n))) for n in range(2)]
    for before in (second, first):  # a repeat changes nothing
        answer = await activate(api, first)
        assert (answer.definition.definition_hash, answer.definition.state) == (first, pb.DEFINITION_STATE_ACTIVE)
        assert json.loads(answer.definition.manifest_json)["compatibility_id"] == "0"
        assert answer.previous_hash == before
    assert (await api.start()).definition_hash == first
    assert (await get(api, second)).state == pb.DEFINITION_STATE_PREVIOUS
    answer = await activate(api, second.upper())
    assert (answer.definition.definition_hash, answer.previous_hash) == (second, first)
    assert (await api.start()).definition_hash == second


@pytest.mark.parametrize("change", [activate, remove])
async def test_what_can_not_be_activated_or_removed_is_told(api: Api, change: Callable[..., Awaitable[object]]) -> None:
    """I14: another namespace's definition is as unknown as none."""
    hash_ = await registered(api, manifest())
    await api.register(manifest(2), namespace="two")
    with refused("UNKNOWN_WORKFLOW", grpc.StatusCode.NOT_FOUND):
        await change(api, hash_, "nobody")
    with refused("UNKNOWN_DEFINITION", grpc.StatusCode.NOT_FOUND):
        await change(api, "0" * 64)
    with refused("UNKNOWN_DEFINITION"):
        await change(api, hash_, namespace="two")
    with refused("UNKNOWN_WORKFLOW"):
        await change(api, hash_, namespace="three")
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await change(api, "", "", namespace="-", request_id="\0")
    assert refusal.error.paths == ["namespace", "workflow_id", "definition_hash", "request_id"]
    with refused("INVALID_REQUEST") as refusal:
        await change(api, "x")
    assert refusal.error.paths == ["definition_hash"]
    assert (await get(api)).state == pb.DEFINITION_STATE_ACTIVE


async def test_a_removed_definition_is_shown_as_removed_and_can_not_become_active(api: Api, dsn: str) -> None:
    first, second = [await registered(api, manifest(compatibility_id=str(n))) for n in range(2)]
    for _ in range(2):  # a repeat changes nothing
        answer = await remove(api, first)
        assert (answer.definition.definition_hash, answer.definition.state) == (first, pb.DEFINITION_STATE_REMOVED)
        assert answer.remaining_runs == 0
    assert await count(dsn, "deployment", "cardinality(removed) = 1") == 1
    assert [d.state for d in await definitions(api)] == [pb.DEFINITION_STATE_ACTIVE, pb.DEFINITION_STATE_REMOVED]
    assert (await get(api, first)).state == pb.DEFINITION_STATE_REMOVED
    with refused("DEFINITION_REMOVED", grpc.StatusCode.FAILED_PRECONDITION):
        await activate(api, first)
    assert (await get(api)).definition_hash == second


async def test_the_manifest_of_a_removed_definition_comes_back_under_another_compatibility_id_only(api: Api) -> None:
    """A worker that registers what it knows at its start must not undo an operator's removal."""
    hash_ = await registered(api, manifest())
    await remove(api, hash_)
    with refused("DEFINITION_REMOVED", grpc.StatusCode.FAILED_PRECONDITION) as refusal:
        await api.register(manifest())
    assert hash_ in refusal.error.message
    with refused("DEFINITION_DRIFT"):
        await api.register(manifest(2))
    assert (await get(api)).state == pb.DEFINITION_STATE_REMOVED, "the active one stays named until another is"
    again = await api.register(manifest(compatibility_id="2"))
    assert (again.created, again.definition.state) == (True, pb.DEFINITION_STATE_ACTIVE)
    assert (await api.start()).definition_hash == again.definition.definition_hash


async def test_when_the_active_definition_was_removed_another_can_be_activated(api: Api) -> None:
    first, second = [await registered(api, manifest(compatibility_id=str(n))) for n in range(2)]
    assert (await remove(api, second)).definition.state == pb.DEFINITION_STATE_REMOVED
    assert (await activate(api, first)).previous_hash == second
    assert (await api.start()).definition_hash == first


async def test_a_removal_waits_longer_for_starts_under_way_than_starts_wait_for_each_other(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Under load somebody always starts: a removal that gave up as soon as a batch does would never get its turn."""
    api = connect_api((await in_process_server(dsn, **{**PATIENT, "lock_timeout": 0.05})).grpc_address)
    hash_ = await registered(api, manifest())
    async with holding(dsn, "select from deployment for share") as start:
        removing = asyncio.create_task(remove(api, hash_))
        await until_blocked(dsn)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(removing), 0.5)
        await start.rollback()
    assert (await removing).definition.state == pb.DEFINITION_STATE_REMOVED


def nested(fallback: str, **step: object) -> str:
    """A manifest with nodes of every kind inside each other."""
    branch = [{"id": "rest", "sleep": "1h"}, {"id": "ask", "wait_signal": "yes"}]
    inner = {"id": "each", "map": {"over": "", "do": [{"id": "one", "step": "s", **step}], "max_parallel": 3}}
    cases = [
        {"when": {"at": "/a", "eq": 1}, "do": [{"id": "both", "parallel": [branch, [inner]]}]},
        {"otherwise": [{"id": "child", "workflow": fallback}]},
    ]
    return json.dumps({"id": "wf", "compatibility_id": "1", "sequence": [{"id": "route", "choose": cases}]})


async def test_drift_is_told_down_to_the_node_inside_of_nodes(api: Api) -> None:
    await api.register(nested("plan-b", undo={"step": "u"}))
    with refused("DEFINITION_DRIFT") as refusal:
        await api.register(nested("plan-c", undo={"step": "v"}, total_timeout="1h"))
    one = "/sequence/0/choose/0/do/0/parallel/1/0/map/do/0"
    assert [text for _, text in refusal.error.violations] == [
        f'{one}/total_timeout: not set → "1h"',
        f'{one}/undo/step: "u" → "v"',
        '/sequence/0/choose/1/otherwise/0/workflow: "plan-b" → "plan-c"',
    ]
