"""The decider between two loops, against a server that is a list of events: what it says, keeps and drops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from fencepost import PermanentError, StepFailed, Workflow, WorkflowContext, workflow
from fencepost.advances import Answered, Asked, Given, Leaving, Lost, News, Pushed, Refused, Repeated
from fencepost.codec import NULL
from fencepost.decider import Decider
from fencepost.decisions import Decision
from fencepost.failure import Failed, Released
from fencepost.history_pages import Page, Reading
from fencepost.identity import DECIDING, Identity
from fencepost.lease import DecideLease, clock
from fencepost.ledger import Counters
from fencepost.models import FailureKind, value_of
from fencepost.queries import Answer
from fencepost.run_cache import Limits
from fencepost.session import Session
from fencepost.v1 import worker_service_pb2 as pb
from tests.fixtures.waiting import eventually
from tests.unit.sdk.replaying import COMPLETE, CONTINUE, WAIT, Story
from tests.unit.sdk.test_watchdog import spin, watching

BLOCK = pb.ADVANCE_OUTCOME_BLOCK


def decision_of(item: pb.AdvanceItem) -> Decision:
    """An Advance that was sent, as `Story` wants it."""
    output = value_of(item.output) if item.HasField("output") else None
    failure = Failed(FailureKind.PERMANENT, item.failure.code, "") if item.HasField("failure") else None
    taken, waits = list(item.taken_signals), list(item.ended_waits)
    return Decision(item.advance_no, item.seen_seq, item.outcome, list(item.commands), taken, waits, output, failure)


class Stage:
    """A decider in the test's own loop. Advances are answered by each run's story, unless ``answers`` is False."""

    def __init__(self, *flows: Workflow[..., Any], cache: int = 10, deadlock: float = 2.0) -> None:
        self.flows: Mapping[tuple[str, str], Workflow[..., Any]] = {
            (flow.workflow_id, flow.compatibility_id): flow for flow in flows
        }
        loop = asyncio.get_running_loop()
        self.decider = Decider(self.flows, loop, loop, Limits(10, cache, deadlock), self._deliver)
        self.stories: dict[str, Story] = {}
        self.leases: dict[str, DecideLease] = {}
        self.items: list[tuple[str, pb.AdvanceItem]] = []
        self.ended: list[tuple[str, Failed | Released]] = []
        self.readings: list[Reading] = []
        self.answered: list[Answer] = []
        self.deliveries = 0
        self.answers = True
        self.tokens = 0
        identity = Identity("default", "w", "0123456789abcdef", "0", {}, {}, 3 << 20, self.flows)
        self.session = Session(identity, Counters(), capacity=1, workflow_capacity=10)

    def begin(self, flow: Workflow[..., Any], run: str = "r", input: object = None, **fields: int) -> Story:
        self.stories[run] = story = Story(input)
        self.give(flow, run, **fields)
        return story

    def give(self, flow: Workflow[..., Any], run: str = "r", *, after: int = 0, most: int = 1_000) -> None:
        """Lease the run; its events after ``after``, at most so many."""
        story = self.stories[run]
        self.tokens += 1
        task = pb.Task(kind=pb.TASK_KIND_DECIDE, workflow_id=flow.workflow_id)
        task.task.CopyFrom(pb.TaskRef(run_id=run, task_id=1, fencing_token=self.tokens))
        decide = task.decide
        decide.events.extend(story.history[after : after + most])
        decide.after_seq, decide.last_seq = after, story.last_seq
        decide.advance_no, decide.seen_seq = story.advance_no, story.seen_seq
        decide.compatibility_id = flow.compatibility_id
        lease = DecideLease(
            owner=self.session, step=DECIDING, task=task, expires_at=clock() + 60, lease_seconds=60.0,
            max_payload_bytes=1 << 20, input=NULL,
        )  # fmt: skip
        self.leases[run] = lease
        self.tell(Given(lease))

    def tell(self, *news: News | Page) -> None:
        self.decider.tell(news)

    def push(self, run: str = "r") -> None:
        """Tell the last event of a run."""
        story = self.stories[run]
        pushed = pb.RunEvents(after_seq=story.last_seq - 1, events=story.history[-1:], last_seq=story.last_seq)
        self.tell(Pushed(self.leases[run], pushed))

    def _deliver(self) -> None:
        self.deliveries += 1
        for said in self.decider.take():
            if isinstance(said, Reading):
                self.readings.append(said)
            elif isinstance(said, Answer):
                self.answered.append(said)
            else:
                lease, what = said
                if isinstance(what, pb.AdvanceItem):
                    self.items.append((lease.run_id, what))
                    if self.answers and what.outcome != BLOCK:
                        self.answer(lease, what)
                else:
                    self.ended.append((lease.run_id, what))

    def answer(self, lease: DecideLease, item: pb.AdvanceItem, forgotten: int = 0) -> None:
        """As the story answers it, but without the last so many of the events that come before."""
        result = self.stories[lease.run_id].advance(decision_of(item))
        if forgotten:
            del result.events[-forgotten:]
        self.tell(Answered(lease, result))

    def has_sent(self, run: str) -> bool:
        return any(name == run for name, _item in self.items)

    def output_of(self, run: str) -> str:
        """What it completed with, as JSON text."""
        return next(item.output.json for name, item in self.items if name == run and item.outcome == COMPLETE)

    @property
    def outcomes(self) -> list[int]:
        return [item.outcome for _run, item in self.items]

    async def said(self, count: int) -> list[int]:
        await eventually(lambda: len(self.items) >= count)
        assert len(self.items) == count, self.items
        return self.outcomes


def plus_one(value: int) -> int:
    return value + 1


async def plus_two(value: int) -> int:
    return value + 2


@workflow("steps", compatibility_id="1")
async def steps(ctx: WorkflowContext, start: int) -> int:
    value = await ctx.run(plus_two, start)
    return await ctx.run(plus_one, value)


@workflow("waits", compatibility_id="1")
async def waits(ctx: WorkflowContext) -> list[int]:
    return [await ctx.signal("say", type=int) for _ in range(2)]


@pytest_asyncio.fixture
async def stage_of() -> AsyncIterator[Callable[..., Stage]]:
    """Makes stages, and takes what is left on them out of memory."""
    made: list[Stage] = []

    def make(*flows: Workflow[..., Any], **settings: Any) -> Stage:
        made.append(Stage(*flows, **settings))
        return made[-1]

    yield make
    for stage in made:
        stage.decider.close()
    await eventually(lambda: not any(stage.decider.cached for stage in made))


async def test_many_runs_are_decided_with_one_wake_up_each_way(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(steps)
    for number in range(50):
        stage.begin(steps, f"r{number}", number)
    await stage.said(150)
    assert stage.outcomes.count(CONTINUE) == 100
    assert stage.outcomes.count(COMPLETE) == 50
    # A step in a thread may end by itself; the others all end together.
    assert stage.deliveries < 110
    await eventually(lambda: stage.decider.cached == 0)
    assert [stage.output_of(f"r{number}") for number in range(50)] == [str(number + 3) for number in range(50)]


async def test_a_run_that_waits_goes_on_in_memory_only_where_the_server_knows_it_to_be(
    stage_of: Callable[..., Stage],
) -> None:
    calls: list[None] = []

    @workflow("noted", compatibility_id="1")
    async def noted(ctx: WorkflowContext) -> list[int]:
        calls.append(None)
        return [await ctx.signal("say", type=int) for _ in range(3)]

    stage = stage_of(noted)
    story = stage.begin(noted)
    assert await stage.said(1) == [WAIT]
    assert stage.decider.cached == 1
    known = story.last_seq
    story.signal("say", 1)
    stage.give(noted, after=known)
    await stage.said(2)
    assert len(calls) == 1
    # Leased to it as if it had never heard of the run.
    story.signal("say", 2)
    stage.give(noted, after=0)
    await stage.said(3)
    assert len(calls) == 2
    story.signal("say", 3)
    stage.stories["r"].advance_no += 1  # somebody else has decided meanwhile
    stage.give(noted, after=story.last_seq - 1)
    (reading,) = await eventually(lambda: stage.readings)
    assert (reading.after_seq, reading.until_seq) == (0, story.last_seq)


async def test_a_history_that_did_not_come_whole_is_read_before_anything_is_fed(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(waits)
    story = stage.begin(waits)
    await stage.said(1)
    for number in range(2):
        story.signal("say", number)
    stage.tell(Lost(stage.leases["r"]))
    stage.decider.take()
    stage.give(waits, most=1)
    (reading,) = await eventually(lambda: stage.readings)
    assert (reading.after_seq, reading.until_seq) == (1, story.last_seq)
    stage.tell(Page(reading, story.history[1:3], is_last=False))
    stage.tell(Page(reading, story.history[3:], is_last=True))
    assert await stage.said(2) == [WAIT, COMPLETE]


async def test_events_before_its_own_that_did_not_fit_the_answer_are_read(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(steps)
    stage.answers = False
    story = stage.begin(steps, input=1)
    await stage.said(1)
    story.signal("noise", 1)
    story.signal("noise", 2)
    stage.answer(stage.leases["r"], stage.items[0][1], forgotten=2)
    (reading,) = await eventually(lambda: stage.readings)
    assert (reading.after_seq, reading.until_seq) == (1, 3)
    stage.answers = True
    stage.tell(Page(reading, story.history[1:3], is_last=True))
    await stage.said(3)
    assert stage.output_of("r") == "4"


@pytest.mark.parametrize("fails", [True, False])
async def test_the_event_just_before_its_own_is_read_if_it_did_not_fit_the_answer(
    stage_of: Callable[..., Stage], fails: bool
) -> None:
    """Also if its own is of a step that can be undone: only of one that has completed, its input comes before it."""

    def act() -> None:
        if fails:
            raise PermanentError("no", code="NO")

    @workflow("acts", compatibility_id="1")
    async def acts(ctx: WorkflowContext) -> Any:
        try:
            await ctx.run(act, undo="take-back")
        except StepFailed:
            return await ctx.signal("say")
        return await ctx.signal("say")

    stage = stage_of(acts)
    stage.answers = False
    story = stage.begin(acts)
    await stage.said(1)
    story.signal("say", "heard")
    stage.answer(stage.leases["r"], stage.items[0][1], forgotten=1)
    (reading,) = await eventually(lambda: stage.readings)
    assert (reading.after_seq, reading.until_seq) == (1, 2)
    stage.answers = True
    stage.tell(Page(reading, story.history[1:2], is_last=True))
    await eventually(lambda: stage.outcomes[-1] == COMPLETE)
    assert stage.output_of("r") == '"heard"'


async def test_events_that_come_amid_an_advance_are_fed_after_its_answer(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(waits)
    stage.answers = False
    story = stage.begin(waits)
    await stage.said(1)
    story.signal("say", 5)
    stage.push()
    await asyncio.sleep(0)
    assert len(stage.items) == 1, "one Advance at a time"
    stage.answers = True
    stage.answer(stage.leases["r"], stage.items[0][1])
    await stage.said(2)
    story.signal("say", 6)
    stage.give(waits, after=story.last_seq - 1)
    await stage.said(3)
    assert stage.output_of("r") == "[5,6]"


async def test_what_was_not_accepted_counts_for_nothing(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(waits)
    stage.answers = False
    for run, news in (
        ("lost", Lost),
        ("repeated", Repeated),
        ("refused", partial(Refused, code="ADVANCE_OUT_OF_ORDER", message="no", at_fault=False)),
        ("at fault", partial(Refused, code="PAYLOAD_TOO_LARGE", message="so large", at_fault=True)),
    ):
        stage.begin(waits, run)
        await eventually(partial(stage.has_sent, run))
        stage.tell(news(stage.leases[run]))
    await eventually(lambda: len(stage.ended) == 4)
    assert stage.decider.cached == 0
    ended = dict(stage.ended)
    assert ended["repeated"] == ended["refused"] == Released()
    failure = ended["at fault"]
    assert isinstance(failure, Failed)
    assert (failure.code, failure.message) == ("PAYLOAD_TOO_LARGE", "so large")


async def test_code_that_differs_says_so_and_nothing_else(stage_of: Callable[..., Stage]) -> None:
    @workflow("waits", compatibility_id="1")
    async def changed(ctx: WorkflowContext) -> None:
        await ctx.sleep(30)

    stage = stage_of(changed)
    story = stage.stories["r"] = Story()
    first = stage_of(waits)
    first.stories["r"] = story
    first.give(waits)
    await first.said(1)
    stage.give(changed)
    assert await stage.said(1) == [BLOCK]
    item = stage.items[0][1]
    assert not item.commands
    assert item.failure.code == "NONDETERMINISM"
    assert item.failure.message == "op 1: history has signal say, code asks for sleep 30s"
    stage.tell(Answered(stage.leases["r"], pb.AdvanceResult()))
    await eventually(lambda: stage.decider.cached == 0)


async def test_the_run_that_has_waited_longest_goes_first(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(waits, cache=2)
    for run in ("a", "b", "c"):
        stage.begin(waits, run)
        await eventually(partial(stage.has_sent, run))
    await eventually(lambda: stage.decider.cached == 2)
    for run in ("a", "c"):
        stage.stories[run].signal("say", 1)
        stage.give(waits, run, after=stage.stories[run].last_seq - 1)
    (reading,) = await eventually(lambda: stage.readings)
    assert reading.run_id == "a"


async def test_a_session_that_leaves_gives_back_what_has_nothing_to_record(stage_of: Callable[..., Stage]) -> None:
    go = asyncio.Event()

    async def hold() -> int:
        await go.wait()
        return 1

    @workflow("holding", compatibility_id="1")
    async def holding(ctx: WorkflowContext) -> int:
        value = await ctx.run(hold)
        return await ctx.run(plus_one, value)

    stage = stage_of(holding)
    stage.begin(holding)
    await asyncio.sleep(0)
    stage.session.leave()
    stage.tell(Leaving())
    await asyncio.sleep(0)
    assert stage.ended == [], "a local step is under way"
    go.set()
    assert await stage.said(1) == [CONTINUE]
    await eventually(lambda: stage.ended)
    assert stage.ended == [("r", Released())]
    assert len(stage.stories["r"].history) == 2, "the step was recorded, and the next one was not begun"


async def test_a_session_that_leaves_tells_of_a_step_that_ended_while_an_advance_was_on_its_way(
    stage_of: Callable[..., Stage],
) -> None:
    """The answer to that Advance says nothing of the step: given back without it, the run would act again elsewhere."""
    go = asyncio.Event()

    async def hold() -> int:
        await go.wait()
        return 1

    @workflow("holding", compatibility_id="1")
    async def holding(ctx: WorkflowContext) -> int:
        await ctx.signal("go")
        value = await ctx.run(hold)
        return await ctx.run(plus_one, value)

    stage = stage_of(holding)
    stage.answers = False
    stage.stories["r"] = story = Story()
    story.signal("go")
    stage.give(holding)
    await stage.said(1)
    stage.session.leave()
    stage.tell(Leaving())
    go.set()
    entry = stage.decider._cache.get("r")
    assert entry is not None
    await eventually(lambda: entry.run.book.has_results)
    stage.answers = True
    stage.answer(stage.leases["r"], stage.items[0][1])
    await eventually(lambda: stage.ended)
    assert stage.ended == [("r", Released())]
    assert story.kinds[-1] == "local_step_ended"


async def test_a_run_that_does_not_end_after_a_question_holds_up_no_other_news(stage_of: Callable[..., Stage]) -> None:
    @workflow("endless", compatibility_id="1")
    async def endless(ctx: WorkflowContext) -> None:
        ctx.on_query("name", lambda: "endless")
        try:
            await ctx.signal("never")
        finally:
            try:
                watchdog.limit = 0.05  # for this turn alone: any other may be held up by a busy machine
                spin()
            finally:
                watchdog.limit = 60.0

    stage = stage_of(endless, waits, deadlock=60.0)
    watchdog = stage.decider.watchdog
    story = Story()
    query = pb.Query(query_id="q", run_id="q", workflow_id="endless", compatibility_id="1", name="name", last_seq=1)
    stage.tell(Asked(stage.session, query, 1 << 20))
    (reading,) = await eventually(lambda: stage.readings)
    with watching(watchdog):
        stage.stories["r"] = Story()
        stage.tell(Page(reading, story.history, is_last=True))
        stage.give(waits)
        await stage.said(1)
    assert stage.answered[0].item.output.json == '"endless"'


async def test_a_run_whose_decision_can_not_be_written_takes_no_other_of_its_turn_along(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, filled = Decision.fill, list[Decision]()

    def broken_once(decision: Decision, item: pb.AdvanceItem) -> None:
        filled.append(decision)
        if len(filled) == 1:
            raise KeyError("of whatever kind")
        fill(decision, item)

    monkeypatch.setattr(Decision, "fill", broken_once)
    stage = stage_of(waits)
    for run in "abc":
        stage.begin(waits, run)
    assert await stage.said(2) == [WAIT, WAIT]
    assert [(run, type(said)) for run, said in stage.ended] == [("a", Failed)]


async def test_a_run_at_which_the_sdk_itself_fails_is_given_up_and_not_kept_for_ever(
    stage_of: Callable[..., Stage],
) -> None:
    """Its lease would be renewed while nobody decides."""
    stage = stage_of(waits)
    stage.flows.clear()  # type: ignore[attr-defined]  # a task for what this worker has not
    stage.begin(waits)
    await eventually(lambda: bool(stage.ended))
    [(run, said)] = stage.ended
    assert run == "r"
    assert isinstance(said, Failed)
    assert (said.kind, said.code) == (FailureKind.OPERATIONAL, "WORKER_FAULT")


async def test_a_run_at_which_the_sdk_fails_amid_an_advance_is_given_up_when_that_is_answered(
    stage_of: Callable[..., Stage],
) -> None:
    """Before, nothing can be said of the lease: only one thing at a time."""
    stage = stage_of(steps)
    stage.answers = False
    stage.begin(steps, input=1)
    await stage.said(1)
    lease = stage.leases["r"]
    stage.tell(Pushed(lease, None))  # type: ignore[arg-type]  # a fault of whatever kind
    await eventually(lambda: stage.decider.cached == 0)
    answers: list[Callable[[], None]] = [
        partial(stage.answer, lease, stage.items[0][1]),
        partial(stage.tell, Repeated(lease)),
        partial(stage.tell, Refused(lease, "OVERLOADED", "not now", at_fault=False)),
    ]
    for answer in answers:
        stage.ended.clear()
        answer()
        await eventually(lambda: stage.ended)
        assert stage.ended == [("r", Released())]
