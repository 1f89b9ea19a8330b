"""At most one active run for a dedupe key, beside request keys and request ids, in every order and from everywhere."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import grpc
import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import run_service_pb2 as pb
from tests.engine.rows import count, fetch
from tests.engine.test_request_keys import reason_of
from tests.fixtures.api import Api
from tests.fixtures.manifests import manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.refusals import refused
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
BIND = pb.DUPLICATE_POLICY_BIND


async def end(worker: RawWorker, api: Api, run_id: str, *, fail: bool = False) -> run_pb2.Run:
    """Let a worker end the only step of a run."""
    task = (await worker.tasks(1))[0]
    assert task.task.run_id == run_id
    if fail:
        await worker.fail(task, kind=run_pb2.FAILURE_KIND_PERMANENT)
    else:
        await worker.complete(task)
    return await api.wait(run_id)


async def test_an_active_run_is_found_by_its_dedupe_key_and_an_ended_one_is_not(
    server: InProcessServer, api: Api, connect_worker: Callable[..., object], dsn: str
) -> None:
    await api.register(manifest(1))
    for fail in (False, True):
        first = await api.start(input="1", dedupe_key="invoice 7")
        again = await api.start(input="1.0", dedupe_key="invoice 7")
        assert (first.created, again.created, again.input_differs) == (True, False, False)
        assert again.run_id == first.run_id
        worker = await connect_worker(server.grpc_address)  # type: ignore[misc]  # the fixture's protocol
        ended = await end(worker, api, first.run_id, fail=fail)
        assert ended.dedupe_key == "invoice 7"
        assert await count(dsn, "run_key", "kind = 3") == 0
        await worker.close()
    assert (await api.start(input="2", dedupe_key="invoice 7")).created


async def test_another_input_is_a_conflict_unless_the_caller_binds(api: Api) -> None:
    """I7: never silently either run."""
    await api.register(manifest(1))
    first = await api.start(input="1", dedupe_key="k")
    with refused("DEDUPE_KEY_CONFLICT", grpc.StatusCode.ALREADY_EXISTS) as caught:
        await api.start(input="2", dedupe_key="k")
    assert caught.error.metadata["existing_run_id"] == first.run_id
    assert caught.error.metadata["existing_fingerprint"] != caught.error.metadata["request_fingerprint"]
    bound = await api.start(input="2", dedupe_key="k", on_active_duplicate=BIND)
    assert (bound.run_id, bound.created, bound.input_differs) == (first.run_id, False, True)


async def test_a_policy_without_a_key_and_an_unknown_policy_are_refused(api: Api) -> None:
    await api.register(manifest(1))
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await api.start(on_active_duplicate=BIND)
    with refused("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT):
        await api.start(dedupe_key="k", on_active_duplicate=77)


async def test_keys_of_other_workflows_and_namespaces_are_other_keys(api: Api) -> None:
    """I14."""
    await api.register(manifest(1))
    await api.register(manifest(1, workflow_id="other"))
    await api.register(manifest(1), namespace="elsewhere")
    runs = [
        await api.start(dedupe_key="k"),
        await api.start("other", dedupe_key="k"),
        await api.start(dedupe_key="k", namespace="elsewhere"),
        await api.start(dedupe_key="K"),
    ]
    assert all(run.created for run in runs)
    # User ids are a part of request keys, not of dedupe keys.
    assert not (await api.start(dedupe_key="k", user_id="somebody")).created


async def test_a_request_with_both_keys_is_remembered_under_its_request_key_as_bound(
    server: InProcessServer, api: Api, connect_worker: Callable[..., object]
) -> None:
    await api.register(manifest(1))
    first = await api.start(input="1", dedupe_key="d")
    both = await api.start(input="2", dedupe_key="d", request_key="r", request_id="i", on_active_duplicate=BIND)
    assert (both.run_id, both.created, both.input_differs) == (first.run_id, False, True)
    worker = await connect_worker(server.grpc_address)  # type: ignore[misc]  # the fixture's protocol
    await end(worker, api, first.run_id)
    # The run has ended, the request key is for ever, and a repeated call gets its first answer.
    by_key = await api.start(input="2", dedupe_key="d", request_key="r", on_active_duplicate=BIND)
    assert (by_key.run_id, by_key.created) == (first.run_id, False)
    repeated = await api.start(input="2", dedupe_key="d", request_key="r", request_id="i", on_active_duplicate=BIND)
    assert repeated == both
    with refused("REQUEST_KEY_CONFLICT", grpc.StatusCode.ALREADY_EXISTS):
        await api.start(input="1", dedupe_key="d", request_key="r")
    assert (await api.start(input="1", dedupe_key="d")).created


async def test_a_refused_start_leaves_no_dedupe_key_behind(api: Api, dsn: str) -> None:
    await api.register(manifest(1, workflow={"input_schema": {"type": "integer"}}))
    await api.start(input="1", request_key="r")
    for fields in ({"input": "null", "dedupe_key": "d"}, {"input": "2", "dedupe_key": "d", "request_key": "r"}):
        results = await api.start_many([api.start_request(**fields)])
        assert reason_of(results[0]) in ("INPUT_SCHEMA_MISMATCH", "REQUEST_KEY_CONFLICT")
    assert await count(dsn, "run_key", "kind = 3") == 0
    assert (await api.start(input="3", dedupe_key="d")).created


@pytest.mark.parametrize("seed", range(6))
async def test_all_keys_in_all_orders_make_one_run_each(api: Api, dsn: str, seed: int) -> None:
    """Against a model in plain words: the request key is asked before the dedupe key, and remembers (I6, I7)."""
    await api.register(manifest(1))
    choice = random.Random(seed)
    combinations = list(itertools.product(("", "r1", "r2"), ("d1", "d2"), ("1", "2"), (0, BIND)))
    combinations += list(itertools.product(("", "r1", "r2"), ("",), ("1", "2"), (0,)))
    requests = [choice.choice(combinations) for _ in range(60)]
    by_request: dict[str, tuple[str, str]] = {}
    by_dedupe: dict[str, tuple[str, str]] = {}
    expected: list[tuple[str, bool, bool]] = []
    owner: list[str] = []
    for number, (request_key, dedupe_key, value, policy) in enumerate(requests):
        mine = f"run {number}"
        if request_key in by_request:
            run, other = by_request[request_key]
            expected.append(("" if other == value else "REQUEST_KEY_CONFLICT", False, False))
        elif dedupe_key in by_dedupe:
            run, other = by_dedupe[dedupe_key]
            if other != value and policy != BIND:
                expected.append(("DEDUPE_KEY_CONFLICT", False, False))
            else:
                expected.append(("", False, other != value))
                if request_key:
                    by_request[request_key] = (run, value)
        else:
            run = mine
            expected.append(("", True, False))
            if request_key:
                by_request[request_key] = (run, value)
            if dedupe_key:
                by_dedupe[dedupe_key] = (run, value)
        owner.append(run)
    sent = [
        api.start_request(
            input=value,
            request_id="",
            request_key=request_key,
            dedupe_key=dedupe_key,
            on_active_duplicate=policy,
        )
        for request_key, dedupe_key, value, policy in requests
    ]
    results = []
    if seed % 2:  # in one batch of one lane, or one after the other
        results = await api.start_many(sent)
    else:
        for request in sent:
            results += await api.start_many([request])
    if seed % 2 == 0:
        answers = [(reason_of(r), r.started.created, r.started.input_differs) for r in results]
        assert answers == expected
    made = {r.started.run_id for r in results if r.started.created}
    assert await count(dsn, "run") == len(made)
    dangling = await fetch(
        dsn, "select key from run_key k where not exists (select from run r where r.run_id = k.run_id)"
    )
    assert dangling == []
    for key in ("d1", "d2"):
        assert await count(dsn, "run", "dedupe_key = %s", [key]) <= 1


async def test_a_thousand_equal_starts_over_two_servers_make_one_run(
    dsn: str, in_process_server: StartInProcessServer, connect_api: Connect
) -> None:
    servers = [await in_process_server(dsn) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest(1))
    requests = [apis[0].start_request(input="1", dedupe_key="one") for _ in range(1000)]
    # On a slow machine a thousand calls take longer than a single one may.
    starts = [apis[n % 2].runs.StartRun(request, timeout=120) for n, request in enumerate(requests)]
    started = await asyncio.gather(*starts)
    assert len({run.run_id for run in started}) == 1
    assert sum(run.created for run in started) == 1


async def test_starts_that_race_the_end_of_the_run_find_it_or_make_the_next(
    dsn: str, in_process_server: StartInProcessServer, connect_api: Connect, connect_worker: Callable[..., object]
) -> None:
    """The key goes in the transaction of the end: there is never a moment with two active runs."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    apis = [connect_api(server.grpc_address) for server in servers]
    await apis[0].register(manifest(1))
    worker = await connect_worker(servers[0].grpc_address)  # type: ignore[misc]  # the fixture's protocol
    for _ in range(30):
        task_of = asyncio.ensure_future(worker.tasks(1))
        racing = [asyncio.ensure_future(api.start(input="1", dedupe_key="one")) for api in apis for _ in range(3)]
        task = (await task_of)[0]
        await worker.complete(task)
        racing += [asyncio.ensure_future(api.start(input="1", dedupe_key="one")) for api in apis for _ in range(3)]
        started = await asyncio.gather(*racing)
        active = await fetch(dsn, "select run_id::text from run where ended_at is null")
        assert len(active) <= 1
        assert {run.run_id for run in started} <= {row[0] for row in await fetch(dsn, "select run_id::text from run")}
        for (run_id,) in active:
            await end(worker, apis[0], run_id)

        async def quiet() -> bool:
            return await count(dsn, "run_key", "kind = 3") == 0

        await eventually(quiet)
