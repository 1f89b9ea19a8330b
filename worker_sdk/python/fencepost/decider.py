"""Decides code runs: feeds them what the session hears, runs their local steps, and says what they decide.

It lives between two threads. The session's thread tells news (`Decider.tell`) and takes what is said (`Decider.take`);
everything else happens in the thread of the users' loop, in turns: one for all the news that has come meanwhile, and
what is decided in it is handed back with one wake-up. Invariants:

- A run has at most one Advance on its way, and its function runs only while there is none.
- A run in memory is gone on with only if it is at exactly what the server says that this session knows: the same event,
  the same Advance. Otherwise it is replayed from its history.
- What was not answered OK counts for nothing: the run is evicted, and the history decides.
- Whatever the code of one run does (never ends, raises, differs from its history) is the failure of that run's DECIDE
  task, and of no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from fencepost.advances import Answered, Asked, Behind, Given, Lost, News, Pushed, Refused, Repeated
from fencepost.code_run import CodeRun
from fencepost.failure import Completed, Failed, Released, clean, failed
from fencepost.frames import fill_ref
from fencepost.history_pages import Page, Reading
from fencepost.lease import CancelReason, DecideLease
from fencepost.local_steps import LocalSteps, Underway
from fencepost.models import FailureKind
from fencepost.queries import Answer, Queries
from fencepost.run_cache import Limits, RunCache, RunEntry
from fencepost.sdk_log import SdkLog
from fencepost.session import Session
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.watchdog import REPLAYED_A_SECOND, TurnInterrupted, Watchdog
from fencepost.workflow_errors import NondeterminismError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fencepost.identity import WorkflowKey
    from fencepost.workflow import Workflow

logger = SdkLog("fencepost.worker")

A = TypeVar("A")

DEADLOCK = "DEADLOCK"
HISTORY_NOT_READ = "HISTORY_NOT_READ"
WORKER_FAULT = "WORKER_FAULT"

_ENDS = frozenset({pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_FAIL, pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW})


Said: TypeAlias = "tuple[DecideLease, pb.AdvanceItem | Failed | Released] | Reading | Answer"
"""What the decider has to say to the session's thread."""


class Decider:
    """Decides the code runs of one worker; see the module. ``deliver`` is called in the session's loop when something
    was said, which `take` returns.
    """

    def __init__(
        self,
        workflows: Mapping[WorkflowKey, Workflow[..., Any]],
        users_loop: asyncio.AbstractEventLoop,
        session_loop: asyncio.AbstractEventLoop,
        limits: Limits,
        deliver: Callable[[], object],
    ) -> None:
        self.watchdog = Watchdog(limits.deadlock)
        self._limits = limits
        self._workflows = workflows
        self._users_loop = users_loop
        self._session_loop = session_loop
        self._deliver = deliver
        self._cache = RunCache(limits.cache)
        self._steps = LocalSteps(users_loop, limits.slots, self._local_ended, self._settle)
        self._queries = Queries(workflows, self.watchdog, self._say)
        self._news: deque[News | Page] = deque()
        self._turn_planned = False
        self._said: deque[Said] = deque()
        self._delivery_planned = False
        # What may have something to decide at the end of this turn.
        self._touched: list[RunEntry] = []
        self._closed = False

    # In the session's thread.

    def tell(self, news: Iterable[News | Page]) -> None:
        """Something was heard. The order is kept."""
        self._news.extend(news)
        if not self._turn_planned:
            self._turn_planned = True
            try:
                self._users_loop.call_soon_threadsafe(self._hear)
            except RuntimeError:
                # The loop was closed under us, by who called `run_async`: nothing is decided any more.
                logger.warning("the event loop of the workflows is closed")

    def take(self) -> list[Said]:
        """All that was said, in order."""
        # First the flag: what is said from here on plans a delivery of its own.
        self._delivery_planned = False
        said = []
        while self._said:
            said.append(self._said.popleft())
        return said

    def close(self) -> None:
        """The worker has ended: whatever is in memory goes."""
        try:
            self._users_loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            logger.debug("the event loop of the workflows was closed before their worker")

    @property
    def cached(self) -> int:
        """How many runs are in memory."""
        return len(self._cache)

    # In the users' loop.

    def _close(self) -> None:
        self._closed = True
        for entry in self._cache:
            self._evict(entry)
        self._steps.close()

    def _hear(self) -> None:
        """One turn: for all that has been heard."""
        self._turn_planned = False
        news = self._news
        while news and not self._closed:
            heard = news.popleft()
            try:
                self._hear_one(heard)
            except Exception as error:
                # What comes behind it is of other runs; whoever gets this one next may fare better.
                logger.exception("a fault of the SDK at a %s; the worker goes on", type(heard).__name__)
                lease = getattr(heard, "lease", None)
                if lease is not None:
                    self._fault(lease, error)
        if not self._steps.has_ready:
            self._settle()

    def _hear_one(self, heard: News | Page) -> None:
        if isinstance(heard, Answered):
            self._answered(heard)
        elif isinstance(heard, Given):
            self._given(heard.lease)
        elif isinstance(heard, Pushed):
            entry = self._of(heard.lease)
            if entry is not None:
                entry.target = max(entry.target, heard.pushed.last_seq)
                entry.buffer(list(heard.pushed.events))
                self._go_on(entry)
        elif isinstance(heard, Behind):
            entry = self._of(heard.lease)
            if entry is not None and heard.last_seq > entry.target:
                entry.target = heard.last_seq
                self._go_on(entry)
        elif isinstance(heard, Lost | Repeated):
            # After a repeat only the history has the numbers of its events: the run comes anew with it.
            self._give_back(heard.lease, Released())
        elif isinstance(heard, Refused):
            self._refused(heard)
        elif isinstance(heard, Page):
            self._page(heard)
        elif isinstance(heard, Asked):
            self._asked(heard)
        else:
            for entry in self._cache.leased():
                self._touch(entry)

    def _of(self, lease: DecideLease) -> RunEntry | None:
        """The run that is in memory under this very lease."""
        entry = self._cache.get(lease.run_id)
        return entry if entry is not None and entry.lease is lease else None

    def _touch(self, entry: RunEntry) -> None:
        if not entry.touched:
            entry.touched = True
            self._touched.append(entry)

    def _given(self, lease: DecideLease) -> None:
        """A DECIDE task has come."""
        events, lease.events = lease.events, []
        entry = self._cache.get(lease.run_id)
        if entry is not None and not entry.is_at(lease):
            self._evict(entry)
            entry = None
        if entry is None:
            workflow = self._workflows[lease.workflow_id, lease.compatibility_id]
            run = CodeRun(
                workflow,
                lease.run_id,
                seen_seq=lease.seen_seq,
                advance_no=lease.advance_no,
                user_id=lease.user_id,
                fencing_token=lease.token,
                on_input_change=self._limits.on_input_change,
                max_payload_bytes=lease.max_payload_bytes,
                max_advance_bytes=lease.max_advance_bytes,
            )
            entry = RunEntry(lease.run_id, run)
            if lease.after_seq:
                # They follow what this worker knew once, and has dropped since.
                events = []
        entry.lease = lease
        entry.run.leased(lease.token)
        entry.target = max(entry.target, lease.last_seq, lease.seen_seq)
        self._cache.hold(entry)
        self._trim()
        entry.buffer(events)
        self._go_on(entry)

    def _go_on(self, entry: RunEntry) -> None:
        """Feed what is known, once all of it is here, and begin the local steps that come of it."""
        lease = entry.lease
        if lease is None or entry.in_flight is not None or entry.reading is not None:
            return
        if entry.run.seq < entry.target and not self._feed(entry, lease):
            return
        if entry.asked:
            self._answer(entry)
        if not _leaves(lease):
            self._begin_steps(entry, lease)
        self._touch(entry)

    def _feed(self, entry: RunEntry, lease: DecideLease) -> bool:
        """Feed up to the target; False if that can't be done now, or has ended the run's stay."""
        events = entry.take_buffered()
        last = events[-1].seq if events else entry.run.seq
        if last < entry.target:
            entry.buffered = events + entry.buffered
            self._read(entry, lease, last, entry.target)
            return False
        return self._turn(entry, len(events), entry.run.feed, events)

    def _read(self, entry: RunEntry, lease: DecideLease, after: int, until: int) -> None:
        entry.reading = Reading(lease.owner, entry.run_id, after, until)
        self._say(entry.reading)

    def _page(self, page: Page) -> None:
        reading = page.reading
        if self._queries.page(page):
            return
        entry = self._cache.get(reading.run_id)
        if entry is None or entry.reading is not reading or entry.lease is None:
            return
        if page.error is not None:
            text = clean(f"the history can't be read: {page.error.reason}: {page.error.message}")
            logger.error("run %s: %s", entry.run_id, text)
            self._give_up(entry, Failed(FailureKind.OPERATIONAL, HISTORY_NOT_READ, text))
            return
        answer = entry.answer
        if answer is not None:
            answer.events.extend(page.events)
        else:
            entry.buffer(page.events)
        if not page.is_last:
            return
        entry.reading = None
        if answer is not None:
            entry.answer = None
            self._accept(entry, answer)
        else:
            self._go_on(entry)

    def _answered(self, heard: Answered) -> None:
        """An Advance was accepted."""
        entry = self._of(heard.lease)
        result = heard.result
        if entry is None:
            if result.kept:
                self._give_back(heard.lease, Released())
            return
        entry.in_flight = None
        if entry.ends and not result.end_refused:
            if result.kept:
                # A server that has more to say of a run which has ended here.
                self._say((heard.lease, Released()))
            self._evict(entry)
            return
        entry.kept = result.kept
        told = result.events[-1].seq if result.events else entry.run.seq
        before_own = seqs[0] - 1 if (seqs := result.seqs) else result.last_seq
        if told < before_own and told < (before_own := before_own - entry.run.events_before):
            # Not all of what came before its own events did fit.
            entry.answer = pb.AdvanceResult()
            entry.answer.CopyFrom(result)
            self._read(entry, heard.lease, told, before_own)
            return
        self._accept(entry, result)

    def _accept(self, entry: RunEntry, result: pb.AdvanceResult) -> None:
        entry.target = max(entry.target, result.last_seq)
        if not self._turn(entry, len(result.events), entry.run.accepted, result):
            return
        if not entry.kept:
            entry.lease = None
            entry.target = entry.run.seq
            entry.buffered = []
            self._cache.wait(entry)
            self._trim()
            if entry.asked:
                self._answer(entry)
            return
        self._go_on(entry)

    def _refused(self, heard: Refused) -> None:
        """An Advance was not accepted, but the lease stands: what is in memory counts for nothing."""
        run_id = heard.lease.run_id
        logger.error("run %s: what its worker decided was refused: %s: %s", run_id, heard.code, heard.message)
        failure = Failed(FailureKind.OPERATIONAL, clean(heard.code, 200), clean(heard.message))
        self._give_back(heard.lease, failure if heard.at_fault else Released())

    # Local steps.

    def _begin_steps(self, entry: RunEntry, lease: DecideLease) -> None:
        """Begin the local steps that the run asks for, and stop those that nobody awaits."""
        if entry.steps:
            for step in list(entry.steps.values()):
                if step.call.cancelled:
                    self._steps.stop(step, CancelReason.RUN_ENDED)
        calls = entry.run.local_steps()
        if calls:
            limit = lease.max_payload_bytes
            begun = [Underway(entry, call, limit) for call in calls]
            for step in begun:
                entry.steps[step.call.op] = step
            self._steps.begin(begun)

    def _local_ended(self, step: Underway, result: Completed | Failed) -> None:
        entry = step.entry
        assert entry is not None
        del entry.steps[step.call.op]
        entry.run.local_ended(step.call.op, result, step.attempt)
        self._touch(entry)

    # What is decided.

    def _settle(self) -> None:
        """The end of a turn: say what has been decided in it."""
        touched, self._touched = self._touched, []
        for entry in touched:
            entry.touched = False
            lease = entry.lease
            if lease is not None and entry.in_flight is None and entry.reading is None:
                try:
                    self._decide(entry, lease)
                except Exception as error:  # noqa: BLE001 - of whatever kind, it is the run's own
                    # Let out it would take the others of this turn along, at which nobody would look again.
                    self._turn_failed(entry, error)

    def _decide(self, entry: RunEntry, lease: DecideLease) -> None:
        leaves = _leaves(lease)
        tells_results = leaves and entry.run.book.has_results
        decision = entry.run.decision()
        if leaves:
            for step in [step for step in entry.steps.values() if not step.running]:
                del entry.steps[step.call.op]
                self._steps.drop(step)
            goes_on = decision is None or decision.outcome == pb.ADVANCE_OUTCOME_CONTINUE
            if goes_on and not tells_results and not entry.steps:
                self._give_up(entry, Released())
                return
        if decision is None:
            return
        item = pb.AdvanceItem()
        fill_ref(item.task, lease)
        decision.fill(item)
        entry.ends = decision.outcome in _ENDS
        entry.in_flight = item
        self._say((lease, item))

    def _block(self, entry: RunEntry, lease: DecideLease, error: NondeterminismError) -> None:
        """The code can't go on with the history: nothing but that is written."""
        logger.error("%s can't go on: %s", entry, error.message, exc_info=error.__cause__)
        item = pb.AdvanceItem()
        fill_ref(item.task, lease)
        entry.run.blocked(error).fill(item)
        self._drop_steps(entry)
        entry.ends = True
        entry.in_flight = item
        self._say((lease, item))

    def _say(self, said: Said) -> None:
        self._said.append(said)
        if not self._delivery_planned:
            self._delivery_planned = True
            try:
                self._session_loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                logger.debug("a workflow decided after its worker had ended")

    # The end of a stay.

    def _turn(self, entry: RunEntry, events: int, work: Callable[[A], object], argument: A) -> bool:
        """Let the function of a run go on, for so many events of its history. False if the run is gone after it."""
        try:
            self.watchdog.run(entry, events / REPLAYED_A_SECOND, work, argument)
        except NondeterminismError as error:
            lease = entry.lease
            assert lease is not None
            self._block(entry, lease, error)
            return False
        except TurnInterrupted:
            text = f"the workflow did not come to a wait within {self.watchdog.limit:g} s: it loops, or blocks"
            self._give_up(entry, Failed(FailureKind.OPERATIONAL, DEADLOCK, text))
            return False
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is the run's own
            self._turn_failed(entry, error)
            return False
        return True

    def _turn_failed(self, entry: RunEntry, error: Exception) -> None:
        """Something that is no end of the function: the task is tried again, here or elsewhere."""
        logger.error("%s could not be decided", entry, exc_info=error)
        failure = failed(error, 0)
        self._give_up(entry, Failed(FailureKind.OPERATIONAL, failure.code, failure.message))

    def _give_up(self, entry: RunEntry, outcome: Failed | Released) -> None:
        """Drop a run and say how its DECIDE task ends."""
        lease = entry.lease
        self._evict(entry)
        if lease is not None:
            self._say((lease, outcome))

    def _give_back(self, lease: DecideLease, outcome: Failed | Released) -> None:
        """As ``_give_up``, of a lease whose run may be in memory no longer: nobody would decide it."""
        entry = self._of(lease)
        if entry is not None:
            self._evict(entry)
        self._say((lease, outcome))

    def _fault(self, lease: DecideLease, error: Exception) -> None:
        """Give a lease up, so that its run does not stand still behind a line in a log. With an Advance on its way this
        is not heard: the answer to that finds no run then, and gives it back.
        """
        text = clean(f"a fault of the worker: {type(error).__name__}: {error}")
        self._give_back(lease, Failed(FailureKind.OPERATIONAL, WORKER_FAULT, text))

    def _drop_steps(self, entry: RunEntry) -> None:
        for step in list(entry.steps.values()):
            self._steps.drop(step)
        entry.steps.clear()

    def _evict(self, entry: RunEntry) -> None:
        """Take a run out of memory. No code of it has any effect from here on."""
        self._cache.remove(entry)
        self._drop_steps(entry)
        entry.lease = None
        if entry.reading is not None:
            entry.reading.given_up = True
            entry.reading = None
        asked, entry.asked = entry.asked, []
        self.watchdog.drop(entry, entry.run.evict)
        for question in asked:
            self._queries.replay(question)

    def _trim(self) -> None:
        for entry in self._cache.surplus():
            self._evict(entry)

    # Questions.

    def _asked(self, asked: Asked) -> None:
        query = asked.query
        entry = self._cache.get(query.run_id)
        if entry is None or (entry.lease is None and entry.run.seq != query.last_seq):
            self._queries.replay(asked)
            return
        entry.asked.append(asked)
        if entry.run.seq >= query.last_seq:
            self._answer(entry)
        else:
            entry.target = max(entry.target, query.last_seq)
            self._go_on(entry)

    def _answer(self, entry: RunEntry) -> None:
        """Answer what the run has seen enough for; one that waits sees no more of its own accord."""
        later = []
        for asked in entry.asked:
            if entry.run.seq >= asked.query.last_seq:
                self._queries.answer(asked, entry.run)
            elif entry.lease is None:
                self._queries.replay(asked)
            else:
                later.append(asked)
        entry.asked = later


def _leaves(lease: DecideLease) -> bool:
    """Whether the session of a lease wants to end: nothing new is begun there."""
    owner = lease.owner
    return isinstance(owner, Session) and owner.leaving
