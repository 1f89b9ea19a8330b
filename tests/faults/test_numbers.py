"""Numbers that have grown for years: event numbers, tokens and message numbers past 2^31 and 2^53, the millionth
attempt, and JSON integers that no float holds (row 25 of the field's failures).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fencepost import AsyncClient, StepContext, Worker
from fencepost import step as sdk_step
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import AT_ONCE, HANDLERS, OPERATIONAL, Scene, given, state_of, step, value_of, workflow
from tests.engine.rows import execute, fetch
from tests.faults.crashing import SETTINGS
from tests.faults.scene import Scene as Stage
from tests.fixtures.api import kinds
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK
from tests.sdk.running import running

LARGE = pytest.mark.parametrize("large", [2**31 - 5, 2**53 - 5, 2**62], ids=["2^31", "2^53", "2^62"])
INTEGERS = [2**31, 2**53 + 1, -(2**63) - 1, 2**64 + 1, 10**30 + 7]
EVERYTHING = (
    step("a"),
    {
        "id": "all",
        "parallel": [
            [{"id": "each", "map": {"over": "", "do": [step("b")], "max_parallel": 1}}],
            [{"id": "wait", "wait_signal": "go", "timeout": "1h"}],
            [{"id": "nap", "sleep": "1h"}],
            [{"id": "kid", "workflow": "kid"}],
        ],
    },
    step("c", undo={"retry": {"max_attempts": 1}}, input={"kid": {"$from": "all#/kid"}}),
    step("d"),
)


async def open_scene(stage: Stage) -> Scene:
    """A server, and a worker of all handlers."""
    server = await stage.serve(**SETTINGS)
    worker = await stage.raw(server.grpc_address, handlers=HANDLERS, capacity=100)
    return Scene(server, stage.api(server.grpc_address), worker, stage.dsn)


@LARGE
async def test_a_run_with_a_very_long_history_goes_on_as_any_other(scene: Stage, large: int) -> None:
    """Its next event has a large number: so have its tasks, timers, waits, scopes, children, undo and messages."""
    s = await open_scene(scene)
    await s.api.register(workflow(step("g"), workflow_id="kid"))
    run_id = await s.run(*EVERYTHING)
    a = await s.task("a")
    await execute(s.dsn, "update run set next_seq = %s", [large])
    await execute(s.dsn, "select setval(pg_get_serial_sequence('message', 'message_id'), %s)", [large])
    await s.complete(a, [1, 2])
    first, g = await s.tasks("b", "g")
    assert first.task.task_id > large
    await s.complete(g, "kid's")
    await s.complete(first, 10)
    await s.do("b", output=20)
    assert await s.signal(run_id, data="signal") > large
    await s.hurry(run_id, "SLEEP")
    c = await s.task("c")
    assert given(c) == {"kid": "kid's"}
    assert (await s.worker.checkpoint(c, 2**53 + 1, '"far"')).outcome == OK
    assert (await s.worker.checkpoint(c, 2**53, '"less"')).outcome == ALREADY_DONE
    await s.complete(c)
    await s.fail(await s.task("d"))
    await s.fail(await s.task("undo-c"))
    assert state_of(await s.api.get(run_id)) == "BLOCKED"
    await s.call("Retry", run_id)
    await s.do("undo-c")
    assert state_of(await s.api.wait(run_id)) == "FAILED"
    events = [event async for event in s.api.watch(run_id, large - 1)]
    numbers = [event.seq for event in events]
    assert numbers == list(range(large, large + len(events)))
    joined = next(event.scope_closed.output for event in reversed(events) if event.HasField("scope_closed"))
    assert value_of(joined) == {"each": [10, 20], "wait": "signal", "nap": [1, 2], "kid": "kid's"}
    assert kinds(events)[-1] == "run_failed"
    assert (await s.api.get(run_id)).last_seq == numbers[-1]


@LARGE
async def test_a_token_that_has_grown_for_years_grows_on_and_is_compared_exactly(scene: Stage, large: int) -> None:
    """Two tokens that are the same float are two tokens."""
    s = await open_scene(scene)
    await s.worker.capacity(0)
    await s.run(step("a", undo=True, retry=AT_ONCE), step("b"))
    await execute(s.dsn, "update task set token = %s", [large])
    await s.worker.capacity(100)
    stale = await s.task("a")
    await s.fail(stale, OPERATIONAL)
    a = await s.task("a")
    assert a.task.fencing_token > stale.task.fencing_token > large
    for token in (a.task.fencing_token - 1, a.task.fencing_token + 1):
        ref = pb.TaskRef(run_id=a.task.run_id, task_id=a.task.task_id, fencing_token=token)
        assert (await s.worker.complete(ref)).outcome == LEASE_LOST
    assert [result.outcome for result in await s.worker.heartbeat([a])] == [OK]
    await s.complete(a)
    assert (await s.worker.complete(a)).outcome == ALREADY_DONE
    await s.fail(await s.task("b"))
    undo = await s.task("undo-a")
    assert undo.task.fencing_token > a.task.fencing_token
    await s.complete(undo)


async def test_the_millionth_attempt_is_made_after_the_longest_delay(scene: Stage) -> None:
    s = await open_scene(scene)
    retry = {"max_attempts": 1_000_000, "initial_delay": "1ms", "multiplier": 2, "max_delay": "1h", "jitter": 0}
    run_id = await s.run(step("a", retry=retry))
    task = await s.task("a")
    await s.worker.capacity(0)
    await s.fail(task, OPERATIONAL)
    grown = "update task set attempt = 999998, operational_failures = 999998, visible_at = clock_timestamp()"
    await execute(s.dsn, grown)
    await s.worker.capacity(100)
    task = await s.task("a")
    assert task.attempt == 999_999
    await s.fail(task, OPERATIONAL)
    [(delay,)] = await fetch(s.dsn, "select extract(epoch from visible_at - clock_timestamp())::float from task")
    assert 3500 < delay <= 3600
    await execute(s.dsn, "update task set visible_at = clock_timestamp()")
    last = await s.task("a")
    assert last.attempt == 1_000_000
    await s.fail(last, OPERATIONAL)
    failure = await s.failure(run_id)
    assert failure.attempt == 1_000_000


async def test_integers_of_any_size_pass_the_server_unharmed(scene: Stage) -> None:
    """As the text that a worker gets: of inputs, items of a map, what a mapping builds, joined outputs, signals."""
    s = await open_scene(scene)
    built = step("c", input={"sum": {"$from": "each#"}, "first": {"$from": "#/0"}, "fixed": INTEGERS[3]})
    run_id = await s.run(
        {"id": "each", "map": {"over": "", "do": [step("b")]}}, built, {"id": "w", "wait_signal": "go"}, step("d"),
        data=INTEGERS,
    )  # fmt: skip
    for task in await s.worker.tasks(len(INTEGERS)):
        assert task.input.json == str(given(task))
        assert given(task) in INTEGERS
        await s.complete(task, given(task))
    c = await s.task("c")
    assert json.loads(c.input.json, parse_float=_no_float) == {
        "sum": INTEGERS,
        "first": INTEGERS[0],
        "fixed": INTEGERS[3],
    }
    await s.complete(c)
    await s.signal(run_id, data=INTEGERS)
    d = await s.task("d")
    assert json.loads(d.input.json, parse_float=_no_float) == INTEGERS
    await s.complete(d, INTEGERS)
    assert await s.output(run_id) == INTEGERS


def _no_float(text: str) -> float:
    raise AssertionError(f"an integer came as {text}")


async def test_integers_of_any_size_pass_the_python_sdk_unharmed(scene: Stage) -> None:
    server = await scene.serve(**SETTINGS)
    seen: list[Any] = []

    @sdk_step("b")
    def item(ctx: StepContext, value: int) -> int:
        seen.append(value)
        return value + 1

    @sdk_step("c")
    async def whole(ctx: StepContext, value: Any) -> Any:
        await ctx.checkpoint(value)
        seen.append(value)
        return value

    nodes = (
        {"id": "each", "map": {"over": "", "do": [step("b")]}},
        step("c", input={"each": {"$from": "each#"}, "input": {"$from": "#"}}),
        {"id": "w", "wait_signal": "go"},
    )
    async with running(Worker(server.grpc_address, [item, whole])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(workflow(*nodes))
        run = await client.start_run("wf", INTEGERS)
        await client.signal_run(run.run_id, "go", INTEGERS)
        assert await run.result(timeout=30) == INTEGERS
    assert sorted(seen[:-1]) == sorted(INTEGERS)
    assert seen[-1] == {"each": [value + 1 for value in INTEGERS], "input": INTEGERS}
