"""Runs that are cancelled or fail, with real workers: steps stop in time or do no harm, completed ones are undone."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from fencepost import (
    AlreadyUndone,
    AsyncClient,
    AsyncRunHandle,
    CancelReason,
    OperationalError,
    PermanentError,
    RunCancelled,
    RunFailed,
    RunState,
    RunTerminated,
    Step,
    StepContext,
    TaskKind,
    Worker,
    step,
    undo,
)
from tests.fixtures.manifests import manifest
from tests.fixtures.servers import InProcessServer
from tests.fixtures.waiting import eventually
from tests.sdk.running import running

ONCE = {"max_attempts": 1}
AT_ONCE = {"max_attempts": 5, "initial_delay": "10ms", "jitter": 0}


@dataclass
class Order:
    id: int


@dataclass
class Receipt:
    cents: int


@step("s1")
def reserve(order: Order) -> Receipt:
    return Receipt(order.id * 100)


@step("s2")
async def charge(receipt: Receipt) -> Receipt:
    return Receipt(receipt.cents + 1)


@step("s3")
def refuse() -> None:
    raise PermanentError("discontinued", code="DISCONTINUED")


def undoable(**last: Any) -> str:
    """Three steps, of which the first two can be undone."""
    nodes = {f"n{number}": {"undo": {"step": f"u{number}", "retry": AT_ONCE}} for number in (1, 2)}
    return manifest(3, retry=ONCE, nodes={**nodes, "n3": last})


async def kinds_of(run: AsyncRunHandle) -> list[str]:
    return [event.kind.value async for event in run.history()]


# Undo.


async def test_completed_steps_are_undone_in_reverse_with_their_inputs_and_outputs(server: InProcessServer) -> None:
    undone: list[Any] = []

    @undo("u1")
    def unreserve(order: Order, receipt: Receipt, ctx: StepContext) -> None:
        undone.append((ctx.kind, ctx.node_id, ctx.unfinished, order, receipt))

    @undo("u2")
    async def refund(receipt: Receipt, charged: Receipt, ctx: StepContext) -> int:
        undone.append((ctx.kind, ctx.node_id, ctx.unfinished, receipt, charged))
        return -charged.cents

    handlers: list[Step[..., Any]] = [reserve, charge, refuse, unreserve, refund]
    async with running(Worker(server.grpc_address, handlers)), AsyncClient(server.grpc_address) as client:
        await client.register_definition(undoable())
        run = await client.start_run("wf", Order(7))
        with pytest.raises(RunFailed) as caught:
            await run.result(timeout=30)
        assert (caught.value.failure.code, caught.value.state) == ("DISCONTINUED", RunState.FAILED)
        assert undone == [
            (TaskKind.UNDO, "n2", False, Receipt(700), Receipt(701)),
            (TaskKind.UNDO, "n1", False, Order(7), Receipt(700)),
        ]
        events = [event async for event in run.history() if event.kind == "undo_completed"]
        assert [event.payload.decode() for event in events if event.payload is not None] == [-701, None]
        with pytest.raises(AlreadyUndone):
            await run.retry("after all")


async def test_an_undo_is_tried_again_and_goes_on_from_its_own_checkpoint(server: InProcessServer) -> None:
    seen: list[tuple[int, Any]] = []
    keys: set[str] = set()

    @undo("u1")
    def unreserve(order: Any, receipt: Any, ctx: StepContext) -> None:
        seen.append((ctx.attempt, ctx.last_checkpoint))
        keys.add(ctx.idempotency_key)
        ctx.checkpoint(ctx.attempt)
        if ctx.attempt < 3:
            raise OperationalError("busy", retry_after=0)

    @undo("u2")
    def nothing() -> None: ...

    handlers: list[Step[..., Any]] = [reserve, charge, refuse, unreserve, nothing]
    async with running(Worker(server.grpc_address, handlers)), AsyncClient(server.grpc_address) as client:
        await client.register_definition(undoable())
        with pytest.raises(RunFailed):
            await (await client.start_run("wf", Order(7))).result(timeout=30)
    assert seen == [(1, None), (2, 1), (3, 2)]
    assert len(keys) == 1


async def test_a_step_that_did_not_complete_is_undone_without_an_output_if_its_node_says_so(
    server: InProcessServer,
) -> None:
    undone: list[Any] = []

    @step("s1")
    def half() -> None:
        raise PermanentError("half way")

    @undo("u1")
    def unhalf(order: Order, receipt: Receipt | None, ctx: StepContext) -> None:
        undone.append((order, receipt, ctx.unfinished))

    async with running(Worker(server.grpc_address, [half, unhalf])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, retry=ONCE, undo={"step": "u1", "undo_unfinished": True}))
        with pytest.raises(RunFailed):
            await (await client.start_run("wf", Order(7))).result(timeout=30)
    assert undone == [(Order(7), None, True)]


# Cancel.


class Stopping:
    """A step s1 that is under way when its run is cancelled, and what it saw of that."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.seen: list[Any] = []

    async def obey(self, ctx: StepContext) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append((ctx.cancel_reason, 5 < (ctx.grace_remaining or 0) <= 30))

    async def finish(self, ctx: StepContext) -> str:
        self.begun.set()
        try:
            return str(await asyncio.Event().wait())
        except asyncio.CancelledError:
            self.seen.append((ctx.cancel_reason, 5 < (ctx.grace_remaining or 0) <= 30))
            return "in its grace"

    def obey_in_a_thread(self, ctx: StepContext) -> None:
        self.begun.set()
        assert ctx.wait_cancelled(60)
        self.seen.append((ctx.cancel_reason, 5 < (ctx.grace_remaining or 0) <= 30))
        ctx.raise_if_cancelled()

    def ignore(self, ctx: StepContext) -> str:
        self.begun.set()
        assert self.go.wait(60)
        self.seen.append(ctx.cancel_reason)
        return "too late"

    def ignore_and_raise(self, ctx: StepContext) -> str:
        self.ignore(ctx)
        raise PermanentError("too late")


@pytest.mark.parametrize(
    ("how", "completed"), [("obey", False), ("obey_in_a_thread", False), ("finish", True)], ids=str
)
async def test_a_cancelled_step_may_end_as_it_likes_in_its_grace(
    server: InProcessServer, how: str, completed: bool
) -> None:
    stopping = Stopping()
    handler = step("s1")(getattr(stopping, how))
    undone: list[str] = []

    @undo("u1")
    def note(input: Any, output: str) -> None:
        undone.append(output)

    async with running(Worker(server.grpc_address, [handler, note])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(2, retry=AT_ONCE, nodes={"n1": {"undo": {"step": "u1"}}}))
        run = await client.start_run("wf")
        await eventually(stopping.begun.is_set)
        assert await run.cancel("enough", grace=30) is RunState.ENDING
        with pytest.raises(RunCancelled) as caught:
            await run.result(timeout=30)
        assert caught.value.failure.code == "RUN_CANCELLED"
        assert caught.value.run.open_steps == ()
        kinds = await kinds_of(run)
        assert kinds.count("step_scheduled") == 1, "nothing downstream"
        assert ("step_completed" in kinds) is completed
    assert stopping.seen == [(CancelReason.RUN_CANCELLED, True)]
    assert undone == (["in its grace"] if completed else [])


@pytest.mark.parametrize("how", ["ignore", "ignore_and_raise"])
async def test_a_step_that_ignores_its_cancel_does_no_harm_and_is_told_in_the_end(
    server: InProcessServer, how: str
) -> None:
    stopping = Stopping()
    handler = step("s1")(getattr(stopping, how))
    async with (
        running(Worker(server.grpc_address, [handler])) as (worker,),
        AsyncClient(server.grpc_address) as client,
    ):
        await client.register_definition(manifest(2, retry=AT_ONCE))
        run = await client.start_run("wf")
        await eventually(stopping.begun.is_set)
        await run.cancel(grace=0.1)
        assert (await run.wait(timeout=30)).state is RunState.CANCELLED
        await eventually(lambda: worker.worker.stats().lost == 1)
        before = await kinds_of(run)
        stopping.go.set()
        await eventually(lambda: stopping.seen)
        await eventually(lambda: worker.worker.stats().held == 0)
        assert await kinds_of(run) == before
        assert before.count("step_scheduled") == 1
        assert (await run.get()).state is RunState.CANCELLED
    assert stopping.seen == [CancelReason.LEASE_LOST]


async def test_a_step_whose_run_is_terminated_is_stopped_at_once_and_nothing_is_undone(
    server: InProcessServer,
) -> None:
    stopping = Stopping()
    handler = step("s1")(stopping.obey)
    async with running(Worker(server.grpc_address, [handler])), AsyncClient(server.grpc_address) as client:
        await client.register_definition(manifest(1, undo={"step": "u1", "undo_unfinished": True}))
        run = await client.start_run("wf")
        await eventually(stopping.begun.is_set)
        assert await run.terminate("now") is RunState.TERMINATED
        with pytest.raises(RunTerminated) as caught:
            await run.result(timeout=30)
        assert caught.value.state is RunState.TERMINATED
        await eventually(lambda: stopping.seen)
        assert "undo_scheduled" not in await kinds_of(run)
    assert stopping.seen == [(CancelReason.LEASE_LOST, False)]


async def test_a_branch_that_fails_for_good_stops_its_sibling_and_what_that_completes_is_undone(
    server: InProcessServer,
) -> None:
    stopping = Stopping()
    undone: list[str] = []

    @step("s2")
    def fail() -> None:
        assert stopping.begun.wait(60)
        raise PermanentError("no")

    @undo("u1")
    def note(input: Any, output: str) -> None:
        undone.append(output)

    sibling = {"id": "a", "step": "s1", "undo": {"step": "u1"}}
    both = {"id": "both", "parallel": [[sibling], [{"id": "b", "step": "s2"}]]}
    definition = json.dumps({"id": "wf", "compatibility_id": "1", "sequence": [both]})
    handlers: list[Step[..., Any]] = [step("s1")(stopping.finish), fail, note]
    async with running(Worker(server.grpc_address, handlers)), AsyncClient(server.grpc_address) as client:
        await client.register_definition(definition)
        with pytest.raises(RunFailed):
            await (await client.start_run("wf")).result(timeout=30)
    assert stopping.seen == [(CancelReason.RUN_ENDED, True)]
    assert undone == ["in its grace"]


async def test_an_undo_that_fails_for_good_blocks_the_run_until_a_person_has_repaired_or_skipped_it(
    server: InProcessServer,
) -> None:
    repaired = threading.Event()

    @undo("u1")
    def never() -> None:
        raise PermanentError("no")

    @undo("u2")
    def until_repaired() -> None:
        if not repaired.is_set():
            raise PermanentError("broken")

    handlers: list[Step[..., Any]] = [reserve, charge, refuse, never, until_repaired]
    async with running(Worker(server.grpc_address, handlers)), AsyncClient(server.grpc_address) as client:
        await client.register_definition(undoable())
        run = await client.start_run("wf", Order(7))

        async def blocked_at(node_id: str) -> bool:
            found = await run.get()
            return found.state is RunState.BLOCKED and found.failure is not None and found.failure.node_id == node_id

        await eventually(lambda: blocked_at("n2"))
        assert (await run.get()).ending is RunState.FAILED
        repaired.set()
        assert not (await run.retry("repaired")).is_final
        await eventually(lambda: blocked_at("n1"))
        await run.retry("settled by hand", skip_undo=True)
        with pytest.raises(RunFailed) as caught:
            await run.result(timeout=30)
        assert caught.value.failure.code == "DISCONTINUED"
        kinds = await kinds_of(run)
        assert (kinds.count("undo_failed"), kinds.count("undo_completed"), kinds.count("undo_skipped")) == (2, 1, 1)
