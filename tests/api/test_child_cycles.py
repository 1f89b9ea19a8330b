"""Workflows that run each other as children may not come back to where they began."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc

from fencepost.v1 import definition_service_pb2 as pb
from tests.api.deploying import activate, registered, remove
from tests.engine.rows import count, holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.refusals import refused
from tests.fixtures.servers import PATIENT, StartInProcessServer
from tests.fixtures.waiting import until_blocked

Connect = Callable[[str], Api]


def parent(workflow_id: str, *children: str, compatibility_id: str = "1") -> str:
    """A manifest whose nodes run other workflows as children."""
    nodes = [{"id": f"n{n}", "workflow": child, "schema_check": "runtime"} for n, child in enumerate(children)]
    top = {"id": workflow_id, "compatibility_id": compatibility_id, "sequence": [*nodes, {"id": "s", "step": "s"}]}
    return json.dumps(top)


async def test_a_workflow_that_would_be_a_child_of_itself_is_refused_with_the_way_back(api: Api, dsn: str) -> None:
    await api.register(parent("b", "c", "nobody"))  # a child may be registered later
    await api.register(parent("c", "a"))
    text = parent("a", "nobody", "b", "c")
    with refused("INVALID_MANIFEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await api.register(text)
    assert [(path, told.partition(": ")[2]) for path, told in refusal.error.violations] == [
        ("/sequence/1/workflow", "a → b → c → a"),
        ("/sequence/2/workflow", "a → c → a"),
    ]
    answer = await api.definitions.ValidateDefinition(pb.ValidateDefinitionRequest(json=text), timeout=DEADLINE)
    assert [(v.path, v.message) for v in answer.violations] == list(refusal.error.violations)
    assert await count(dsn, "definition", "workflow_id = 'a'") == 0
    assert await count(dsn, "deployment", "workflow_id = 'a'") == 0
    assert (await api.register(text, namespace="two")).created, "nobody knows b and c there"
    with refused("INVALID_MANIFEST") as refusal:
        await api.register(parent("a", "a"))
    assert refusal.error.paths == ["/sequence/0/workflow"]


async def test_only_active_definitions_make_a_cycle_and_activating_one_is_refused_as_registering_it_is(
    api: Api,
) -> None:
    old = await registered(api, parent("a", "b"))
    await api.register(parent("a", compatibility_id="2"))
    closing = await registered(api, parent("b", "a"))
    with refused("INVALID_MANIFEST", grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await activate(api, old, "a")
    assert refusal.error.paths == ["/sequence/0/workflow"]
    assert "a → b → a" in refusal.error.violations[0][1]
    assert not (await api.register(parent("a", "b"))).created, "what is registered is not judged anew"
    await remove(api, closing, "b")  # it starts no runs any more, and so no children
    assert (await activate(api, old, "a")).definition.state == pb.DEFINITION_STATE_ACTIVE
    with refused("INVALID_MANIFEST"):
        await api.register(parent("b", "a", compatibility_id="2"))


async def test_two_registrations_at_once_can_not_make_a_cycle(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    apis = [connect_api((await in_process_server(dsn, **PATIENT)).grpc_address) for _ in range(2)]
    for n in range(20):
        texts = [parent(f"a{n}", f"b{n}"), parent(f"b{n}", f"a{n}")]
        answers = await asyncio.gather(
            *(api.register(text) for api, text in zip(apis, texts, strict=True)), return_exceptions=True
        )
        (lost,) = [answer for answer in answers if isinstance(answer, BaseException)]
        with refused("INVALID_MANIFEST"):
            raise lost
    assert await count(dsn, "definition") == 20


async def test_a_registration_with_children_waits_for_another_one_under_way(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    api = connect_api((await in_process_server(dsn, **PATIENT)).grpc_address)
    await api.register(parent("a"))
    async with holding(dsn, "select from deployment for update") as connection:
        first = asyncio.create_task(api.register(parent("a", "b", compatibility_id="2")))
        await until_blocked(dsn)
        second = asyncio.create_task(api.register(parent("b", "a")))
        await until_blocked(dsn, 2)
        await connection.rollback()
    assert (await first).created
    with refused("INVALID_MANIFEST"):
        await second


async def test_children_that_lead_to_more_workflows_than_are_followed_are_refused(api: Api, dsn: str) -> None:
    """I12."""
    many = [f"w{n}" for n in range(200)]
    for n in range(6):
        await api.register(parent(f"p{n}", *(f"p{n}.{name}" for name in many)))
    with refused("INVALID_MANIFEST") as refusal:
        await api.register(parent("a", *(f"p{n}" for n in range(6))))
    assert refusal.error.paths == [""]
    assert (await api.register(parent("a", *(f"p{n}" for n in range(4))))).created
