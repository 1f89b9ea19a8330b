"""The workflow: charge, wait for the end of the month or for a change, and go on as new.

A run that went on for years would have a history without end, and a replay as long. So each month is a run, with the
subscription as its input; signals that came amid the change of months belong to the next one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import fencepost
from fencepost import Handle, PermanentError, Retry, StepContext, StepFailed, WorkflowContext, step, workflow

MONTH = 30 * 86_400.0
PRICES = {"basic": 500, "plus": 900, "family": 1400}  # in cents


@dataclass(frozen=True)
class Subscription:
    """What is known of a subscription at the beginning of a month. ``month`` is how many seconds that has."""

    customer: str
    plan: str
    months: int = 0
    paid: int = 0
    month: float = MONTH


@workflow("subscription", compatibility_id="1")
async def subscription(ctx: WorkflowContext, now: Subscription) -> Subscription:
    """One month. Returns the subscription as it was when it ended."""
    ctx.on_query("subscription", lambda: asdict(now))
    ctx.set_attributes({"customer": now.customer, "plan": now.plan})
    ends = ctx.sleep(now.month)
    try:
        price = PRICES[now.plan]
        await ctx.call(charge, {"customer": now.customer, "cents": price}, retry=Retry(max_attempts=10))
    except StepFailed as failed:
        ctx.logger.warning("%s can't be charged: %s", now.customer, failed)
        return now
    now = replace(now, months=now.months + 1, paid=now.paid + price)

    upgrade, cancel = ctx.signal("upgrade", type=str), ctx.signal("cancel")
    while True:
        while upgrade.done():
            if upgrade.result() in PRICES:
                now = replace(now, plan=upgrade.result())  # its price from the next month on
                ctx.set_attributes({"plan": now.plan})
            upgrade = ctx.signal("upgrade", type=str)
        if cancel.done() or ends.done():
            break
        waits: list[Handle[Any]] = [ends, upgrade, cancel]
        await fencepost.wait(waits, return_when="FIRST_COMPLETED")
    if not cancel.done():
        ctx.continue_as_new(now)
    await ends  # what is paid for is served
    return now


@step("subscription.charge")
def charge(bill: dict[str, Any], ctx: StepContext) -> str:
    """Ask a payment provider, which knows by the idempotency key if it has been asked this before."""
    if bill["cents"] <= 0:
        raise PermanentError("nothing to charge", code="NOTHING_TO_CHARGE")
    return f"payment {ctx.idempotency_key}"


STEPS = (charge,)
