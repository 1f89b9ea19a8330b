"""A workflow with an op of every kind, and steps for it; the tests replay what it did with other code."""

from __future__ import annotations

import asyncio

import fencepost
from fencepost import PermanentError, WorkflowContext, step, workflow

DAY = 86_400.0


async def price(item: str) -> int:
    return 100 * len(item)


def tax(cents: int) -> int:
    return cents // 5


async def refuse(item: str) -> int:
    raise PermanentError(f"no {item}", code="SOLD_OUT")


@step("kit.charge")
async def charge(cents: int) -> str:
    return f"charged {cents}"


@workflow("kit.parcel", compatibility_id="1")
async def parcel(ctx: WorkflowContext, weight: int) -> str:
    await ctx.sleep(DAY)
    return f"parcel of {weight}"


@workflow("kit.order", compatibility_id="1")
async def order(ctx: WorkflowContext, items: list[str]) -> dict[str, object]:
    cents = 0
    refused = said = ""
    for item in items:
        cents += await ctx.run(price, item)
    ctx.set_attributes({"cents": str(cents)})
    first, second = await asyncio.gather(ctx.run(tax, cents), ctx.call(charge, cents))
    try:
        await ctx.run(refuse, "gift")
    except fencepost.StepFailed as error:
        refused = error.code
    if ctx.patched("ask-first"):
        async with asyncio.timeout(30 * DAY):
            said = await ctx.signal("approve", type=str, timeout=7 * DAY)
    sent = await ctx.child(parcel, ctx.random.randrange(1_000_000))
    return {"said": said, "tax": first, "charged": second, "refused": refused, "sent": sent, "id": str(ctx.uuid4())}


STEPS = [charge]
WORKFLOWS = [order, parcel]
