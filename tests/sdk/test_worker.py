"""The worker against a real server: every step is run, recorded once, and fails as it means to."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import fencepost
from fencepost import (
    AsyncClient,
    CorrectiveError,
    FailureKind,
    OperationalError,
    PermanentError,
    RunFailed,
    RunState,
    StepContext,
    Worker,
    step,
)
from tests.fixtures.manifests import manifest
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.peeking import count_renewals
from tests.sdk.running import Running, running

FAST = {"max_attempts": 2, "initial_delay": "50ms", "jitter": 0, "max_corrective_attempts": 3}


@dataclass
class Order:
    id: int
    lines: list[int]


@dataclass
class Priced:
    id: int
    total: int


@step("s1")
async def price(order: Order, ctx: StepContext) -> Priced:
    assert ctx.attempt == 1
    return Priced(order.id, sum(order.lines))


@step("s2")
def double(priced: Priced) -> Priced:
    return Priced(priced.id, 2 * priced.total)


async def test_a_run_goes_through_async_and_sync_handlers(server: InProcessServer) -> None:
    async with running(Worker(server.grpc_address, [price, double])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(2))
        run = await client.start_run("wf", Order(2**70, [1, 2**70]))
        assert await run.result(timeout=30, type=Priced) == Priced(2**70, 2 * (1 + 2**70))
        kinds = [event.kind async for event in run.events()]
        assert kinds[0] == "run_started"
        assert kinds[-1] == "run_completed"
        assert (await run.get()).state is RunState.COMPLETED


async def test_a_worker_runs_in_the_loop_of_its_caller(server: InProcessServer) -> None:
    loops = []

    @step("s1")
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    worker = Worker(server.grpc_address, [note])
    life = asyncio.create_task(worker.run_async())
    async with AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1))
        await (await client.start_run("wf")).result(timeout=30)
    assert loops == [asyncio.get_running_loop()]
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    assert worker.stats().held == 0


async def test_the_loops_of_a_worker_are_made_by_its_factory(server: InProcessServer) -> None:
    class Made(asyncio.SelectorEventLoop):
        """A loop of the user's choice."""

    made, loops = [], []

    def make() -> Made:
        made.append(Made())
        return made[-1]

    @step("s1")
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    worker = Worker(server.grpc_address, [note], loop_factory=make)
    async with running(worker), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1))
        await (await client.start_run("wf")).result(timeout=30)
    assert len(made) == 2, "one for the steps, one for the session"
    assert loops[0] in made
    assert all(loop.is_closed() for loop in made)


async def failure_of(
    server: InProcessServer, handler: Callable[..., Any], node: dict[str, Any] | None = None
) -> fencepost.Failure:
    """The failure that a run of one step ends with."""
    async with running(Worker(server.grpc_address, [step("s1")(handler)])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry=FAST, **(node or {})))
        run = await client.start_run("wf", 1)
        with pytest.raises(RunFailed) as caught:
            await run.result(timeout=30)
    return caught.value.failure


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def wrapped() -> None:
    raise RuntimeError("around") from PermanentError("inside", code="INSIDE")


@pytest.mark.parametrize(
    "handler",
    [
        raising(PermanentError("no", code="INSIDE")),
        wrapped,
        raising(ExceptionGroup("many", [KeyError("x"), PermanentError("no", code="INSIDE")])),
    ],
    ids=["plain", "raised from", "in a group"],
)
async def test_a_permanent_failure_is_not_tried_again_however_it_is_wrapped(
    server: InProcessServer, handler: Callable[..., Any]
) -> None:
    failure = await failure_of(server, handler)
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.PERMANENT, "INSIDE", 1)


async def test_an_unknown_error_is_tried_again(server: InProcessServer) -> None:
    failure = await failure_of(server, raising(KeyError("x")))
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.OPERATIONAL, "KeyError", 2)


@pytest.mark.parametrize(
    "output",
    [math.nan, b"x", {1}, "\ud800", object(), "x" * 10_000_000, [1e308 * 10]],
    ids=["nan", "bytes", "set", "surrogate", "object", "10 MB", "infinity"],
)
async def test_an_output_that_can_not_be_recorded_fails_the_run_at_once(server: InProcessServer, output: Any) -> None:
    failure = await failure_of(server, lambda: output)
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.PERMANENT, "OUTPUT_NOT_RECORDABLE", 1)


async def test_an_output_that_only_the_server_can_not_record_fails_the_run_at_once(
    server: InProcessServer,
) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    failure = await failure_of(server, lambda: deep)
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.PERMANENT, "OUTPUT_NOT_RECORDABLE", 1)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "é" * 5_000_000], ids=["NUL", "surrogate", "10 MB"])
async def test_an_error_with_any_text_is_recorded(server: InProcessServer, text: str) -> None:
    failure = await failure_of(server, raising(PermanentError(text)))
    assert failure.kind is FailureKind.PERMANENT
    assert failure.message == ("\ufffd" if text == "\ud800" else text if len(text) < 9 else "é" * 9_999 + "…")


async def test_an_input_that_does_not_fit_fails_the_run_at_once(server: InProcessServer) -> None:
    def handle(order: Order) -> None: ...

    failure = await failure_of(server, handle)
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.PERMANENT, "INPUT_NOT_DECODABLE", 1)


async def test_feedback_reaches_the_next_attempt(server: InProcessServer) -> None:
    seen: list[tuple[int, Any]] = []

    @step("s1")
    def improve(ctx: StepContext) -> int:
        seen.append((ctx.attempt, ctx.feedback))
        if len(seen) < 3:
            raise CorrectiveError("too long", feedback={"max": len(seen)})
        return len(seen)

    async with running(Worker(server.grpc_address, [improve])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry=FAST))
        assert await (await client.start_run("wf")).result(timeout=30) == 3
    assert seen == [(1, None), (2, {"max": 1}), (3, {"max": 2})]


async def test_a_retry_delay_of_the_steps_own_is_kept(server: InProcessServer) -> None:
    times: list[float] = []

    @step("s1")
    def busy() -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            raise OperationalError("busy", retry_after=0.5)

    async with running(Worker(server.grpc_address, [busy])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry={**FAST, "initial_delay": "1m"}))
        await (await client.start_run("wf")).result(timeout=30)
    assert 0.4 < times[1] - times[0] < 50


async def test_an_attempt_that_takes_too_long_is_cancelled_and_fails(server: InProcessServer) -> None:
    reasons: list[Any] = []

    async def hang(ctx: StepContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            reasons.append(ctx.cancel_reason)

    failure = await failure_of(server, hang, {"timeout": "300ms"})
    assert (failure.kind, failure.code, failure.attempt) == (FailureKind.OPERATIONAL, "ATTEMPT_TIMEOUT", 2)
    assert set(reasons) == {"ATTEMPT_TIMEOUT"}  # one whose time is up before it begins has none


async def test_context_is_stable_where_it_must_be(server: InProcessServer) -> None:
    seen: list[tuple[int, int, str, str]] = []

    @step("s1")
    def note(ctx: StepContext) -> None:
        seen.append((ctx.attempt, ctx.fencing_token, ctx.idempotency_key, ctx.user_id))
        if ctx.attempt == 1:
            raise KeyError("once")

    async with running(Worker(server.grpc_address, [note])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry=FAST))
        await (await client.start_run("wf", user_id="ann")).result(timeout=30)
    (_, token, key, user), (_, later, same, _) = seen
    assert later > token
    assert same == key
    assert user == "ann"


async def test_blocked_handlers_do_not_silence_heartbeats(in_process_server: Callable[..., Any], dsn: str) -> None:
    """Row 29 of the field's failures: a thread and the event loop, each blocked for as long as ten heartbeats take, and
    none of these is left out.
    """
    server = await in_process_server(dsn, heartbeat_interval=0.2)
    renewals = count_renewals(server)
    attempts: list[int] = []
    go = threading.Event()

    @step("s1")
    def block_a_thread(x: Any, ctx: StepContext) -> int:
        attempts.append(ctx.attempt)
        assert go.wait(60)
        return 1

    @step("s2")
    async def block_the_loop(x: Any, ctx: StepContext) -> int:
        attempts.append(ctx.attempt)
        assert go.wait(60)
        return 2

    async with (
        running(Worker(server.grpc_address, [block_a_thread, block_the_loop])) as (run,),
        AsyncClient(server.grpc_address) as client,
    ):
        for number, name in enumerate(("s1", "s2")):
            await client.register_definition(
                {"id": name, "compatibility_id": "1", "sequence": [{"id": "n", "step": name}]}
            )
            assert number == int(name[1]) - 1
        runs = [await client.start_run(name) for name in ("s1", "s2")]
        await eventually(lambda: len(attempts) == 2)
        renewals.clear()
        await eventually(lambda: all(renewals[started.run_id] >= 10 for started in runs))
        go.set()
        assert [await started.result(timeout=30) for started in runs] == [1, 2]
    assert attempts == [1, 1]
    assert run.worker.stats().lost == 0


@pytest.mark.usefixtures("busy_collector")
async def test_many_runs_complete_while_garbage_is_collected_all_the_time(server: InProcessServer) -> None:
    await complete(server, 60)


async def complete(server: InProcessServer, runs: int) -> None:
    @step("s1")
    async def inc(x: int) -> int:
        return x + 1

    @step("s2")
    def inc_sync(x: int) -> int:
        return x + 1

    async with (
        running(Worker(server.grpc_address, [inc, inc_sync], slots=50)) as (run,),
        AsyncClient(server.grpc_address) as client,
    ):
        await client.register_definition(manifest(2))
        handles = await client.start_runs([fencepost.StartRun("wf", n) for n in range(runs)])
        results = [
            await handle.result(timeout=30) for handle in handles if isinstance(handle, fencepost.AsyncRunHandle)
        ]
    assert results == [n + 2 for n in range(runs)]
    await eventually(lambda: run.worker.stats().completed == 2 * runs)


async def test_many_runs_complete_side_by_side(server: InProcessServer) -> None:
    await complete(server, 300)


async def test_a_worker_can_run_again_and_a_stop_before_is_kept(server: InProcessServer) -> None:
    worker = Worker(server.grpc_address, [price])
    for _ in range(2):
        async with running(worker):
            assert worker.stats().held == 0
    worker.stop()
    stopped = Running(worker)
    await stopped.end()
    assert stopped.error is None
    async with running(worker):
        again = Running(worker)
        await again.end()
        assert isinstance(again.error, RuntimeError)


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        (ValueError, {"slots": 0}),
        (ValueError, {"slots": 10_001}),
        (ValueError, {"drain_timeout": -1}),
        (ValueError, {"target": ""}),
        (ValueError, {"steps": []}),
        (ValueError, {"steps": [price, price]}),
        (TypeError, {"steps": [len]}),
    ],
    ids=str,
)
def test_settings_that_can_not_be_are_refused(fault: type[Exception], settings: dict[str, Any]) -> None:
    with pytest.raises(fault):
        Worker(**{"target": "127.0.0.1:1", "steps": [price], **settings})
