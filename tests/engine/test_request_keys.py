"""Starting the same run again: request keys and request ids, in every order and from everywhere (I6, I7)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest

from fencepost.v1 import error_pb2
from fencepost.v1 import run_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import count, execute, fetch, holding
from tests.fixtures.api import DEADLINE, Api
from tests.fixtures.manifests import manifest
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import until_blocked

Connect = Callable[[str], Api]
Answer = tuple[str, str, bool]
"""Reason or "", name of the run, created."""


@dataclass(slots=True)
class Model:
    """What a start is answered, said in the words of the contract: the request id is asked before the key."""

    runs: int = 0
    keys: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    ids: dict[str, tuple[tuple[str, ...], Answer]] = field(default_factory=dict)

    def start(self, user: str, key: str, request_id: str, input: str) -> Answer:
        whole = (user, key, input)
        if request_id in self.ids:
            request, answer = self.ids[request_id]
            return answer if request == whole else ("REQUEST_ID_CONFLICT", answer[1], False)
        answer = self._by_key(user, key, input)
        if request_id and not answer[0]:
            self.ids[request_id] = (whole, answer)
        return answer

    def _by_key(self, user: str, key: str, input: str) -> Answer:
        if (user, key) in self.keys:
            run, other = self.keys[user, key]
            return ("", run, False) if other == input else ("REQUEST_KEY_CONFLICT", run, False)
        self.runs += 1
        run = f"run {self.runs}"
        if key:
            self.keys[user, key] = (run, input)
        return ("", run, True)


def reason_of(result: pb.BatchStartRunsResult) -> str:
    if result.WhichOneof("outcome") == "started":
        return ""
    return error_pb2.ErrorReason.Name(result.error.reason).removeprefix("ERROR_REASON_")


def named(results: Sequence[pb.BatchStartRunsResult]) -> list[Answer]:
    """The answers with runs numbered in the order in which they were made."""
    names: dict[str, str] = {}
    answers: list[Answer] = []
    for result in results:
        run_id = result.started.run_id or result.error.metadata["existing_run_id"]
        if result.started.created:
            names.setdefault(run_id, f"run {len(names) + 1}")
        answers.append((reason_of(result), names[run_id], result.started.created))
    return answers


def some_starts(api: Api, seed: int, n: int) -> tuple[list[pb.StartRunRequest], list[Answer]]:
    """Starts over few keys, ids and inputs, so that all of them meet, and what a model says of them."""
    chance = random.Random(seed)
    model = Model()
    requests, expected = [], []
    for _ in range(n):
        user, key, value = chance.choice(["", "u"]), chance.choice(["", "k1", "k2"]), chance.choice(["1", "2"])
        request_id = f"{chance.randrange(n // 5)}" if chance.random() < 0.7 else ""
        requests.append(api.start_request(input=value, user_id=user, request_key=key, request_id=request_id))
        expected.append(model.start(user, key, request_id, value))
    return requests, expected


@pytest.mark.parametrize("size", [1, 7, 60])
async def test_starts_with_keys_are_answered_as_if_they_came_one_after_the_other(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, size: int
) -> None:
    """Whether they come one by one or together in one transaction, and from whichever server (I6, I7)."""
    servers = [await in_process_server(dsn, lanes=1) for _ in range(2)]
    apis = itertools.cycle([connect_api(server.grpc_address) for server in servers])
    await next(apis).register(manifest())
    for seed in range(6 if size > 1 else 1):
        await execute(dsn, "truncate run, run_key, task, event")
        requests, expected = some_starts(next(apis), seed, 60)
        results: list[pb.BatchStartRunsResult] = []
        for first in range(0, len(requests), size):
            results += await next(apis).start_many(requests[first : first + size])
        for n, (got, want) in enumerate(zip(named(results), expected, strict=True)):
            request = requests[n]
            story = [
                (i, r.user_id, r.request_key, r.request_id, r.input.json, expected[i])
                for i, r in enumerate(requests[: n + 1])
                if r.request_id == request.request_id
                or (r.user_id, r.request_key) == (request.user_id, request.request_key)
            ]
            assert got == want, (seed, story)
        made = {result.started.run_id for result in results if result.started.created}
        assert {run_id for (run_id,) in await fetch(dsn, "select run_id::text from run")} == made
        again = [reason_of(r) for r in await next(apis).start_many(requests)]
        assert again == [reason_of(r) for r in await next(apis).start_many(requests)], "a repeat has its first answer"


async def test_a_key_that_a_refused_start_brought_first_is_the_next_ones_with_its_input(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Both in one transaction. The key must remember the input of the run that it stands for (I7)."""
    api = connect_api((await in_process_server(dsn, lanes=1)).grpc_address)
    await api.register(manifest())
    await api.start(input="0", request_id="used")
    refused_, made = await api.start_many(
        [
            api.start_request(input="1", request_key="k", request_id="used"),
            api.start_request(input="2", request_key="k", request_id="r"),
        ]
    )
    assert reason_of(refused_) == "REQUEST_ID_CONFLICT"
    assert made.started.created
    found = await api.start(input="2", request_key="k")
    assert (found.run_id, found.created) == (made.started.run_id, False)
    with refused("REQUEST_KEY_CONFLICT"):
        await api.start(input="1", request_key="k")
    assert (await api.start(input="2", request_key="k", request_id="r")).run_id == made.started.run_id


async def test_an_id_that_a_refused_start_brought_first_is_the_next_ones_request(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """Both in one transaction (I6)."""
    api = connect_api((await in_process_server(dsn, lanes=1)).grpc_address)
    await api.register(manifest())
    await api.start(input="0", request_key="taken")
    refused_, made = await api.start_many(
        [
            api.start_request(input="1", request_key="taken", request_id="r"),
            api.start_request(input="2", request_id="r"),
        ]
    )
    assert reason_of(refused_) == "REQUEST_KEY_CONFLICT"
    again = await api.start(input="2", request_id="r")
    assert (again.run_id, again.created) == (made.started.run_id, True)
    with refused("REQUEST_ID_CONFLICT"):
        await api.start(input="1", request_key="taken", request_id="r")


@pytest.mark.parametrize("by", ["request_key", "request_id"])
async def test_a_thousand_equal_starts_at_once_over_two_servers_make_one_run(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, by: str
) -> None:
    """I6, I7."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers for _ in range(4)]
    await apis[0].register(manifest())
    requests = [
        apis[0].start_request(input="1.0" if n % 2 else "1", **{"request_id": "", by: "k"}) for n in range(1000)
    ]
    # The last one is answered when nearly all are: on a slow machine that is later than one call may take.
    started = await asyncio.gather(
        *(apis[n % 8].runs.StartRun(request, timeout=4 * DEADLINE) for n, request in enumerate(requests))
    )
    assert len({answer.run_id for answer in started}) == 1
    assert sum(answer.created for answer in started) == (1 if by == "request_key" else 1000)
    assert await count(dsn, "run") == 1
    assert await count(dsn, "event") == 2


async def test_different_starts_at_once_with_one_key_make_one_run_and_conflicts(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I7: same key, other input is a conflict, and never silently either run."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest())
    results = [
        result
        for some in await asyncio.gather(
            *(
                apis[n % 2].start_many(
                    [apis[0].start_request(input=str((n + i) % 3), request_key=f"k{i % 10}") for i in range(30)]
                )
                for n in range(20)
            )
        )
        for result in some
    ]
    runs = dict(await fetch(dsn, "select run_id::text, request_key from run"))
    assert len(runs) == len(set(runs.values())) == 10
    for result in results:
        run_id = result.started.run_id or result.error.metadata["existing_run_id"]
        assert run_id in runs
        assert reason_of(result) in ("", "REQUEST_KEY_CONFLICT")
    assert sum(result.started.created for result in results) == 10


async def test_a_conflict_names_the_run_and_both_fingerprints(api: Api) -> None:
    """I7."""
    await api.register(manifest())
    first = await api.start(input='{"a": 1}', request_key="k", request_id="r")
    with refused("REQUEST_KEY_CONFLICT", grpc.StatusCode.ALREADY_EXISTS) as by_key:
        await api.start(input='{"a": 2}', request_key="k")
    with refused("REQUEST_ID_CONFLICT", grpc.StatusCode.ALREADY_EXISTS) as by_id:
        await api.start(input='{"a": 2}', request_key="k", request_id="r")
    with refused("REQUEST_ID_CONFLICT"):
        await api.start(input='{"a": 1}', request_key="k", request_id="r", priority=1)
    for refusal in (by_key, by_id):
        metadata = refusal.error.metadata
        assert metadata["existing_run_id"] == first.run_id
        assert first.run_id in refusal.error.message
        ours, theirs = metadata["request_fingerprint"], metadata["existing_fingerprint"]
        assert len(bytes.fromhex(ours)) == len(bytes.fromhex(theirs)) == 32
        assert ours != theirs


async def test_only_the_value_of_an_input_counts_not_how_it_is_written(api: Api) -> None:
    await api.register(manifest())
    same = ['{"b": [1, -0], "a": "\\u00e4"}', '{"a":"ä","b":[1.0,0]}', ' {"b": [10e-1, 0.0], "a": "ä"}']
    runs = [await api.start(input=text, request_key="k") for text in same]
    assert len({run.run_id for run in runs}) == 1
    assert (await api.get(runs[0].run_id)).input.json == same[0]
    for other in ('{"b": [1, 0], "a": "Ä"}', '{"b": [0, 1], "a": "ä"}', '{"b": [true, 0], "a": "ä"}', "null"):
        with refused("REQUEST_KEY_CONFLICT"):
            await api.start(input=other, request_key="k")
    await api.start(input=str(2**64), request_key="big")
    with refused("REQUEST_KEY_CONFLICT"):
        await api.start(input=str(2**64 + 1), request_key="big")


async def test_a_key_is_of_its_namespace_user_and_workflow(api: Api, dsn: str) -> None:
    """I14: a namespace's keys are its own."""
    for namespace in ("", "other"):
        for workflow_id in ("wf", "wf2"):
            await api.register(manifest(workflow_id=workflow_id), namespace=namespace)
    places = list(itertools.product(("", "other"), ("wf", "wf2"), ("", "u1", "u2")))
    runs = {
        place: (await api.start(place[1], str(n), namespace=place[0], user_id=place[2], request_key="k")).run_id
        for n, place in enumerate(places)
    }
    assert len(set(runs.values())) == len(places)
    for (namespace, workflow_id, user), run_id in runs.items():
        key = pb.RequestKey(workflow_id=workflow_id, user_id=user, request_key="k")
        found = await api.runs.GetRun(pb.GetRunRequest(namespace=namespace, request_key=key), timeout=DEADLINE)
        assert (found.run.run_id, found.run.user_id, found.run.request_key) == (run_id, user, "k")
    with refused("RUN_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
        key = pb.RequestKey(workflow_id="wf", user_id="u3", request_key="k")
        await api.runs.GetRun(pb.GetRunRequest(request_key=key), timeout=DEADLINE)
    assert await count(dsn, "run_key", "kind = 1") == len(places)


async def test_a_refused_start_leaves_no_key_behind(api: Api, dsn: str) -> None:
    await api.register(manifest(workflow={"input_schema": {"type": "integer"}}))
    for reason, fields in {
        "INPUT_SCHEMA_MISMATCH": {"input": '"x"'},
        "UNKNOWN_DEFINITION": {"input": "1", "definition_hash": "0" * 64},
        "UNKNOWN_WORKFLOW": {"input": "1", "workflow_id": "unknown"},
        "INVALID_JSON": {"input": "{"},
    }.items():
        with refused(reason):
            await api.start(**fields, request_key="k", request_id="r")
    taken = await api.start(input="1", request_key="taken")
    with refused("REQUEST_KEY_CONFLICT"):
        await api.start(input="2", request_key="taken", request_id="r")
    assert await count(dsn, "run_key", "key in ('k', 'r')") == 0
    started = await api.start(input="2", request_key="k", request_id="r")
    assert started.created
    assert started.run_id != taken.run_id


async def test_a_key_finds_its_run_whatever_became_of_it(
    server: InProcessServer, api: Api, connect_worker: Callable[..., object]
) -> None:
    await api.register(manifest())
    first = await api.start(input="1", request_key="k", request_id="r")
    worker = await connect_worker(server.grpc_address)  # type: ignore[misc]  # its type is the fixture's
    await worker.complete(await worker.task())
    await api.wait(first.run_id)
    assert await api.start(input="1", request_key="k", request_id="r") == first
    again = await api.start(input="1", request_key="k")
    assert (again.run_id, again.created) == (first.run_id, False)


async def test_the_first_answer_is_given_again_after_the_active_definition_has_changed(api: Api) -> None:
    """I6: memory is asked before state. I9: the run stays on the definition that it was started with."""
    await api.register(manifest())
    first = await api.start(request_key="k", request_id="r")
    second = (await api.register(manifest(2, compatibility_id="2"))).definition.definition_hash
    assert await api.start(request_key="k", request_id="r") == first
    by_key = await api.start(request_key="k")
    assert (by_key.run_id, by_key.definition_hash) == (first.run_id, first.definition_hash)
    assert (await api.start()).definition_hash == second


async def test_binary_inputs_are_the_same_by_their_bytes_or_by_their_codecs_fingerprint(api: Api) -> None:
    """Two encryptions of one text differ; the codec's fingerprint says that they are one."""
    await api.register(manifest())

    async def start(key: str, data: bytes, **metadata: str) -> pb.StartRunResponse:
        value = Payload(binary=data, metadata=metadata)
        request = pb.StartRunRequest(workflow_id="wf", input=value, request_key=key)
        return await api.runs.StartRun(request, timeout=DEADLINE)

    first = await start("k", b"\0one")
    assert (await start("k", b"\0one", note="metadata does not count")).run_id == first.run_id
    for other in (b"\0two", b""):
        with refused("REQUEST_KEY_CONFLICT"):
            await start("k", other)
    with refused("REQUEST_KEY_CONFLICT"):
        await api.start(input=json.dumps("\0one"), request_key="k")
    encrypted = await start("e", b"x1", fingerprint="f")
    assert (await start("e", b"x2", fingerprint="f")).run_id == encrypted.run_id
    with refused("REQUEST_KEY_CONFLICT"):
        await start("e", b"x1", fingerprint="g")


async def test_a_start_waits_for_another_transaction_with_its_key_and_then_finds_its_run(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """The other transaction rolls back here: the start that waited makes the run."""
    api = connect_api((await in_process_server(dsn)).grpc_address)
    await api.register(manifest())
    row = "insert into run_key values ('default', 1, 'wf', '', 'k', gen_random_uuid(), '\\x00', '\\x00', true, null)"
    async with holding(dsn, row):
        starting = asyncio.create_task(api.start(request_key="k"))
        await until_blocked(dsn)
        assert not starting.done()
    assert (await starting).created


async def test_a_stranger_that_holds_a_key_delays_no_start_with_another_key(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect
) -> None:
    """I13: nothing waits on a peer that has stopped in the middle of its transaction."""
    api = connect_api((await in_process_server(dsn, lanes=1, lock_timeout=0.05)).grpc_address)
    await api.register(manifest())
    row = "insert into run_key values ('default', 1, 'wf', '', 'k', gen_random_uuid(), '\\x00', '\\x00', true, null)"
    async with holding(dsn, row):
        starting = asyncio.create_task(api.start(request_key="k"))
        await until_blocked(dsn)
        others = await api.start_many([api.start_request(request_key=f"k{n}") for n in range(5)])
        assert all(result.started.created for result in others)
        assert not starting.done()
    assert (await starting).created
