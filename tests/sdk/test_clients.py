"""Both clients against a real server: everything that they can ask, and what they raise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import AsyncClient, Client, RunState, StartRun, Worker, step
from tests.fixtures.manifests import manifest
from tests.fixtures.proxy import Proxy
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.either import Either
from tests.sdk.running import running

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@step("s1")
async def add_one(x: Any) -> Any:
    return x["n"] + 1


async def test_definitions_are_registered_once_read_listed_and_checked(ask: Either, tmp_path: Path) -> None:
    path = tmp_path / "wf.json"
    path.write_text(manifest(2))
    first = await ask("register_definition", path)
    assert (first.workflow_id, first.created, first.state) == ("wf", True, "ACTIVE")
    again = await ask("register_definition", json.loads(manifest(2)))
    assert (again.definition_hash, again.created) == (first.definition_hash, False)
    with pytest.raises(fencepost.DefinitionDrift):
        await ask("register_definition", manifest(3))
    newer = await ask("register_definition", "id: wf\ncompatibility_id: '2'\nsequence: [{id: n1, step: s1}]\n")
    assert (await ask("get_definition", "wf")).definition_hash == newer.definition_hash
    older = await ask("get_definition", "wf", first.definition_hash)
    assert older.state == "PREVIOUS"
    assert json.loads(older.manifest_json)["id"] == "wf"
    listed = await ask.all("list_definitions")
    assert [found.definition_hash for found in listed] == [newer.definition_hash, first.definition_hash]
    assert await ask("validate_definition", manifest(1)) == []


async def test_all_faults_of_a_manifest_are_raised(ask: Either) -> None:
    wrong = {"id": "wf", "sequence": [{"id": "n1"}, {"id": "n1", "step": "s"}]}
    faults = await ask("validate_definition", wrong)
    assert len(faults) >= 3
    with pytest.raises(fencepost.InvalidManifest) as caught:
        await ask("register_definition", wrong)
    assert list(caught.value.violations) == faults


async def test_runs_are_started_found_listed_and_followed(ask: Either, server: InProcessServer) -> None:
    await ask("register_definition", manifest(1))
    async with running(Worker(server.grpc_address, [add_one])):
        run = await ask("start_run", "wf", {"n": 2**70}, request_key="k", user_id="u", priority=2)
        assert run.created
        assert await ask("result", on=run, timeout=30, type=int) == 2**70 + 1
        again = await ask("start_run", "wf", {"n": 2**70}, request_key="k", user_id="u")
        assert (again.run_id, again.created) == (run.run_id, False)
        found = await ask("find_run", "wf", "k", "u")
        assert (found.run_id, found.priority, found.state) == (run.run_id, 2, RunState.COMPLETED)
        assert found.input.decode() == {"n": 2**70}
        events = await ask.all("events", on=run)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert events == await ask.all("history", on=run)
        assert events[1:] == await ask.all("watch_run", run.run_id, after_seq=1)
        more = await ask("start_runs", [StartRun("wf", {"n": number}) for number in range(30)])
        for handle in more:
            await ask("wait", on=handle, timeout=30)
    listed = await ask.all("list_runs", "wf", [RunState.COMPLETED])
    assert len(listed) == 31
    assert listed[-1].run_id == run.run_id
    assert len(await ask.all("list_runs", limit=7)) == 7
    assert await ask.all("list_runs", "wf", ["FAILED"]) == []


async def test_what_is_wrong_with_a_start_is_told(ask: Either) -> None:
    with pytest.raises(fencepost.UnknownWorkflow):
        await ask("start_run", "nothing")
    await ask("register_definition", manifest(1, workflow={"input_schema": SCHEMA}))
    with pytest.raises(fencepost.InputSchemaMismatch) as mismatch:
        await ask("start_run", "wf", {"n": "x"})
    assert [violation.path for violation in mismatch.value.violations] == ["/n"]
    with pytest.raises(fencepost.UnknownDefinition):
        await ask("start_run", "wf", {"n": 1}, definition_hash="0" * 64)
    with pytest.raises(fencepost.PayloadTooLarge):
        await ask("start_run", "wf", {"n": 1, "x": "x" * (1 << 20)})
    run = await ask("start_run", "wf", {"n": 1}, request_key="k")
    with pytest.raises(fencepost.RequestKeyConflict) as conflict:
        await ask("start_run", "wf", {"n": 2}, request_key="k")
    assert conflict.value.existing_run_id == run.run_id
    with pytest.raises(fencepost.InvalidRequest) as invalid:
        await ask("start_run", "wf", {"n": 1}, priority=9)
    assert invalid.value.violations
    outcomes = await ask("start_runs", [StartRun("wf", {"n": 1}), StartRun("nothing"), StartRun("wf", {})])
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds[1:] == [fencepost.UnknownWorkflow, fencepost.InputSchemaMismatch]


async def test_a_dedupe_key_finds_the_run_that_holds_it_until_that_has_ended(
    ask: Either, server: InProcessServer
) -> None:
    await ask("register_definition", manifest(1))
    first = await ask("start_run", "wf", {"n": 1}, dedupe_key="d")
    assert (first.created, first.input_differs) == (True, False)
    again = await ask("start_run", "wf", {"n": 1.0}, dedupe_key="d")
    assert (again.run_id, again.created, again.input_differs) == (first.run_id, False, False)
    assert (await ask("get", on=first)).dedupe_key == "d"
    assert [run.dedupe_key for run in await ask.all("list_runs", "wf")] == ["d"]
    async with running(Worker(server.grpc_address, [add_one])):
        assert await ask("result", on=first, timeout=30, type=int) == 2
        second = await ask("start_run", "wf", {"n": 2}, dedupe_key="d")
        assert second.created
        assert await ask("result", on=second, timeout=30, type=int) == 3


async def test_a_duplicate_with_another_input_is_a_conflict_or_bound_as_the_caller_says(ask: Either) -> None:
    await ask("register_definition", manifest(1))
    run = await ask("start_run", "wf", {"n": 1}, dedupe_key="d")
    with pytest.raises(fencepost.DedupeKeyConflict) as conflict:
        await ask("start_run", "wf", {"n": 2}, dedupe_key="d")
    assert conflict.value.existing_run_id == run.run_id
    assert conflict.value.metadata["existing_fingerprint"] != conflict.value.metadata["request_fingerprint"]
    bound = await ask("start_run", "wf", {"n": 2}, dedupe_key="d", on_active_duplicate="bind", request_key="k")
    assert (bound.run_id, bound.created, bound.input_differs) == (run.run_id, False, True)
    assert (await ask("find_run", "wf", "k")).run_id == run.run_id
    refused, found = await ask(
        "start_runs",
        [
            StartRun("wf", {"n": 3}, dedupe_key="d"),
            StartRun("wf", {"n": 3}, dedupe_key="d", on_active_duplicate="bind"),
        ],
    )
    assert isinstance(refused, fencepost.DedupeKeyConflict)
    assert refused.existing_run_id == run.run_id
    assert (found.run_id, found.created, found.input_differs) == (run.run_id, False, True)
    with pytest.raises(fencepost.InvalidRequest) as invalid:
        await ask("start_run", "wf", on_active_duplicate="bind")
    assert [violation.path for violation in invalid.value.violations] == ["on_active_duplicate"]


async def test_what_is_not_there_is_told(ask: Either) -> None:
    unknown = "00000000-0000-7000-8000-000000000000"
    for method in ("get_run", "wait_run"):
        with pytest.raises(fencepost.RunNotFound):
            await ask(method, unknown)
    for method in ("history", "watch_run"):
        with pytest.raises(fencepost.RunNotFound):
            await ask.all(method, unknown)
    with pytest.raises(fencepost.UnknownWorkflow):
        await ask("get_definition", "nothing")


async def test_a_run_that_goes_on_is_a_timeout(ask: Either) -> None:
    await ask("register_definition", manifest(1))
    run = await ask("start_run", "wf")
    with pytest.raises(TimeoutError, match="PENDING"):
        await ask("result", on=run, timeout=0.2)
    with pytest.raises(TimeoutError):
        await ask("wait_run", run.run_id, 0)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_start_whose_answer_was_lost_is_repeated_and_makes_one_run(
    server: InProcessServer, new_proxy: Callable[[str], Proxy], kind: type[Client | AsyncClient]
) -> None:
    proxy = new_proxy(server.grpc_address)
    ask = Either(kind(proxy.address))
    await ask("register_definition", manifest(1))
    proxy.blackhole("down")
    starting = asyncio.create_task(ask("start_run", "wf", {"n": 1}))
    async with AsyncClient(server.grpc_address) as other:

        async def committed() -> list[Any]:
            return [run async for run in other.list_runs()]

        await eventually(committed)
        proxy.heal()
        proxy.cut()
        run = await starting
        assert [found.run_id async for found in other.list_runs()] == [run.run_id]
    await ask.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_following_a_run_goes_on_after_breaks(
    server: InProcessServer, new_proxy: Callable[[str], Proxy], kind: type[Client | AsyncClient]
) -> None:
    proxy = new_proxy(server.grpc_address)
    ask = Either(kind(proxy.address))
    async with AsyncClient(server.grpc_address) as other:
        await other.register_definition(manifest(3))
        started = await other.start_run("wf", {"n": 1})
        seen: list[int] = []

        def note(events: Iterator[fencepost.Event]) -> None:
            seen.extend(event.seq for event in events)

        async def follow() -> None:
            if isinstance(ask.client, Client):
                await asyncio.to_thread(note, ask.client.watch_run(started.run_id))
            else:
                seen.extend([event.seq async for event in ask.client.watch_run(started.run_id)])

        following = asyncio.create_task(follow())
        for name in ("s1", "s2", "s3"):
            handler = step(name)(lambda x: x)
            async with running(Worker(server.grpc_address, [handler])):
                await eventually(lambda: proxy.connections)
                proxy.cut()

                async def gone_on(name: str = name) -> bool:
                    run = await started.get()
                    return run.ended or run.open_steps[0].handler > name

                await eventually(gone_on)
        await asyncio.wait_for(following, 30)
        events = [event.seq async for event in started.history()]
    assert seen == events
    await ask.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_no_server_is_an_error_of_ours_after_the_time(kind: type[Client | AsyncClient]) -> None:
    ask = Either(kind("127.0.0.1:1", timeout=0.2))
    with pytest.raises(fencepost.Unreachable) as caught:
        await ask("get_run", "00000000-0000-7000-8000-000000000000")
    assert caught.value.reason == "UNREACHABLE"
    await ask.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_another_server_is_asked_when_one_is_away(
    server: InProcessServer, kind: type[Client | AsyncClient]
) -> None:
    ask = Either(kind(f"127.0.0.1:1,{server.grpc_address}"))
    assert (await ask("register_definition", manifest(1))).created
    await ask.close()


@pytest.mark.parametrize("follow", [False, True])
async def test_calls_under_way_end_when_their_client_is_closed_and_later_ones_connect_anew(
    ask: Either, server: InProcessServer, follow: bool
) -> None:
    await ask("register_definition", manifest(1))
    started = await ask("start_run", "wf", {"n": 1})
    waits = ask.all("watch_run", started.run_id) if follow else ask("result", on=started)
    waiting = asyncio.create_task(waits)
    await eventually(lambda: server.app.engine.watches._count)
    await ask.close()
    try:
        with pytest.raises(fencepost.ClientClosed):
            await asyncio.wait_for(asyncio.shield(waiting), 20)
    finally:
        assert await ask("terminate", on=started) is RunState.TERMINATED  # ends the wait if nothing else has


async def test_times_that_are_none_are_refused_before_anything_is_sent(ask: Either) -> None:
    """NaN is the worst of them: no time ever comes up to it, so that the server would be asked again without end."""
    nan, infinite, run_id = float("nan"), float("inf"), "0" * 8
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "wait_run", {"timeout": nan}),
        (TypeError, "wait_run", {"timeout": "5"}),
        (ValueError, "query_run", {"name": "q", "timeout": infinite}),
        (TypeError, "query_run", {"name": "q", "timeout": "5"}),
        (ValueError, "cancel_run", {"grace": infinite}),
        (ValueError, "cancel_run", {"grace": nan}),
        (TypeError, "cancel_run", {"grace": "5"}),
    ]
    for kind, method, arguments in wrong:
        with pytest.raises(kind, match=r"no (number of seconds|length of time)"):
            await asyncio.wait_for(ask(method, run_id, **arguments), 30)
    for timeout in (nan, "5"):
        with pytest.raises((TypeError, ValueError), match=r"timeout: .* no number of seconds"):
            type(ask.client)("127.0.0.1:1", timeout=timeout)  # type: ignore[arg-type]  # as is to be found out


async def test_an_async_client_says_that_it_belongs_to_another_loop_until_it_is_closed(server: InProcessServer) -> None:
    client = AsyncClient(server.grpc_address)

    async def listed() -> list[fencepost.Run]:
        return [run async for run in client.list_runs()]

    assert await listed() == []
    with pytest.raises(RuntimeError, match="connections of another event loop"):
        await asyncio.to_thread(asyncio.run, listed())
    assert await listed() == []
    await client.close()

    async def listed_once() -> list[fencepost.Run]:
        async with client:
            return await listed()

    assert await asyncio.to_thread(asyncio.run, listed_once()) == []
