"""The workflow of a new colleague: prepare, ask the manager, remind, and go on or take everything back.

The function reads as if it ran for days in one process. It does not: while it waits nothing of it needs to be in
memory, and after each restart it is replayed up to where it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from examples.onboarding.office import office
from fencepost import NotDecodable, PermanentError, SignalTimeout, StepContext, WorkflowContext, undo, workflow

DAY = 86_400.0
REMINDERS = 3


@dataclass(frozen=True)
class Hire:
    """Who comes. ``day`` is how many seconds a day has, for whoever has no days to watch."""

    name: str
    manager: str
    day: float = DAY


@dataclass(frozen=True)
class Answer:
    """The payload of the signal ``approval``."""

    approved: bool
    by: str


@dataclass(frozen=True)
class Onboarded:
    """What came of it."""

    account: str
    laptop: str
    approved_by: str
    reminders: int


@workflow("onboarding", compatibility_id="1")
async def onboarding(ctx: WorkflowContext, hire: Hire) -> Onboarded:
    """Prepare all, wait for the approval, let the colleague in."""
    reminders = 0

    def progress() -> dict[str, Any]:
        return {"hire": hire.name, "reminders": reminders}

    ctx.on_query("progress", progress)
    ctx.set_attributes({"manager": hire.manager})
    try:
        account, laptop = await asyncio.gather(
            ctx.run(open_account, hire.name, undo=close_account),
            ctx.run(order_laptop, hire.name, undo=return_laptop),
        )
        await ctx.run(mail, hire.manager, f"May {hire.name} come?")
        answer = None
        while answer is None:
            try:
                answer = await ctx.signal("approval", type=Answer, timeout=2 * hire.day)
            except NotDecodable as error:
                # Somebody's slip of the pen: uncaught, it would fail the run, and all would be taken back.
                ctx.logger.warning("an approval that can't be read, so the wait goes on: %s", error)
            except SignalTimeout:
                if reminders == REMINDERS:
                    raise PermanentError(f"{hire.manager} does not answer", code="NO_ANSWER") from None
                reminders += 1
                await ctx.run(mail, hire.manager, f"May {hire.name} come? Reminder {reminders}")
    except asyncio.CancelledError:
        # The run ends as CANCELLED, whatever is done here. What is shielded still works, and comes before the undo.
        with ctx.shielded():
            await ctx.run(mail, hire.name, "There was a mistake. We are sorry.")
        raise
    if not answer.approved:
        raise PermanentError(f"{answer.by} says no", code="NOT_APPROVED")
    await ctx.run(mail, hire.name, f"Welcome! Your account is {account}.")
    return Onboarded(account, laptop, answer.by, reminders)


# Local steps: functions that the workflow has run in its own worker, each recorded once when it has ended.


def open_account(name: str, ctx: StepContext) -> str:
    """Returns the account."""
    office.do(ctx, name, "account opened")
    return f"{name.lower()}@example.com"


def order_laptop(name: str, ctx: StepContext) -> str:
    """Returns the order."""
    office.do(ctx, name, "laptop ordered")
    return f"laptop for {name}"


def mail(person: str, text: str, ctx: StepContext) -> None:
    """Send a mail."""
    office.do(ctx, person, text)


# What undoes them: steps that any worker of this queue may run, so they have names of their own.


@undo("onboarding.close_account")
def close_account(name: str, account: str, ctx: StepContext) -> None:
    """The run has failed or was cancelled: nobody is to have the account."""
    office.do(ctx, name, f"account {account} closed")


@undo("onboarding.return_laptop")
def return_laptop(name: str, order: str, ctx: StepContext) -> None:
    """The laptop goes back."""
    office.do(ctx, name, f"{order} sent back")


UNDO = (close_account, return_laptop)
