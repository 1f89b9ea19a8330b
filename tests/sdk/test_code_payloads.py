"""Values that Python can write and the server does not take, wherever code workflows may meet them: each is the failure
of what has made it, and never that of the worker that decides.
"""

from __future__ import annotations

from typing import Any

import pytest

from fencepost import (
    AsyncClient,
    CorrectiveError,
    NotEncodable,
    QueryFailed,
    Retry,
    RunFailed,
    StepFailed,
    Value,
    Worker,
    WorkflowContext,
    step,
    workflow,
)
from tests.fixtures.servers import InProcessServer
from tests.sdk.running import running

ONCE = Retry(max_attempts=1, max_corrective_attempts=1)
KINDS = ("deep", "digits", "keys", "text")
calls: list[str] = []


def odd(kind: str) -> Any:
    """What can't be recorded."""
    if kind == "deep":
        nested: list[Any] = []
        for _ in range(200):
            nested = [nested]
        return nested
    return {"digits": 10**1000, "keys": {1: "one", "1": "another"}, "text": Value(json="{no JSON")}[kind]


def make(kind: str) -> Any:
    calls.append(kind)
    return odd(kind)


def complain(kind: str) -> None:
    raise CorrectiveError("better", feedback=odd(kind))


@step("payloads.same")
async def same(value: Any) -> Any:
    return value


@workflow("payloads.ops", compatibility_id="1")
async def ops(ctx: WorkflowContext, kind: str) -> list[str]:
    told = []
    for op in (
        lambda: ctx.run(make, kind),
        lambda: ctx.run(complain, kind, retry=ONCE),
        lambda: ctx.call(same, odd(kind)),
        lambda: ctx.child("payloads.ends", odd(kind)),
        lambda: ctx.run(len, odd(kind), undo="payloads.undo"),
        lambda: ctx.continue_as_new(odd(kind)),
    ):
        try:
            await op()
        except (StepFailed, NotEncodable) as error:
            told.append(error.code if isinstance(error, StepFailed) else error.reason)
    return told


@workflow("payloads.ends", compatibility_id="1")
async def ends(ctx: WorkflowContext, kind: str) -> Any:
    ctx.on_query("odd", lambda: odd(kind))
    await ctx.signal("go")
    return odd(kind)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_server_does_not_take_is_the_failure_of_what_has_made_it(
    kind: str, server: InProcessServer
) -> None:
    calls.clear()
    worker = Worker(server.grpc_address, [same], workflows=[ops, ends])
    async with running(worker), AsyncClient(server.grpc_address) as client:
        made = await client.start_run(ops, kind)
        assert await made.result(timeout=30) == [
            "OUTPUT_NOT_RECORDABLE",
            "CorrectiveError",
            *["NOT_ENCODABLE"] * 4,
        ]
        assert calls == [kind], "it has run once"
        ended = await client.start_run(ends, kind)
        with pytest.raises(QueryFailed, match="NotEncodable"):
            await ended.query("odd")
        await ended.signal("go")
        with pytest.raises(RunFailed, match="OUTPUT_NOT_RECORDABLE"):
            await ended.result(timeout=30)
