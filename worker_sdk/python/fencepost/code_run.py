"""One run of a code workflow in memory: fed numbered events, it runs the function and says what is to be done.

The function is fed inputs only (results, signals, timers, its cancellation), one at a time in the order of their
numbers, and runs until it blocks after each; events that record what it asked for are only matched. So what it does
depends on the order of events alone. A local step's result is an input like any other: it is sent first, and fed when
its Advance was accepted, after all events with lower numbers.

No I/O and no threads of its own; used by one thread at a time, which may have another event loop running. What a
watchdog raises into a turn leaves through whatever method ran it; the run is good for nothing then but `evict`.

Caller: the worker's decider.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any, Literal

from fencepost.codec import Value
from fencepost.decisions import Cancelled, Decision, Unsent, events_before, fitting
from fencepost.deterministic.guard import guarded
from fencepost.errors import NotDecodable, NotEncodable
from fencepost.failure import INPUT_NOT_DECODABLE, Completed, Failed, clean, not_recordable
from fencepost.history import HANDLERS, passed_by, payload_of
from fencepost.lease import MAX_ADVANCE_BYTES
from fencepost.models import Failure, FailureKind
from fencepost.op_book import OpBook, logger
from fencepost.ops import ATTRIBUTES, LOCAL, LocalCall, Op
from fencepost.outcomes import CancelIgnored, continue_as_new_of, failed_seq_of, failure_of_function, step_failed
from fencepost.recordable import recordable
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.watchdog import TurnInterrupted
from fencepost.workflow import Workflow
from fencepost.workflow_context import WorkflowContext
from fencepost.workflow_errors import NondeterminismError

_CONTINUE, _WAIT = pb.ADVANCE_OUTCOME_CONTINUE, pb.ADVANCE_OUTCOME_WAIT
_COMPLETE, _FAIL = pb.ADVANCE_OUTCOME_COMPLETE, pb.ADVANCE_OUTCOME_FAIL
_CONTINUE_AS_NEW, _BLOCK = pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW, pb.ADVANCE_OUTCOME_BLOCK
_MAX_CANCELS = 100
_MAX_TOLD = 5
_MAX_PAYLOAD_BYTES = 1 << 20
_ADVANCE_SLACK = 2048

_End = tuple[pb.AdvanceOutcome.ValueType, Value | None, Failed | None]
_GOES_ON: _End = (_CONTINUE, None, None)
_WAITS: _End = (_WAIT, None, None)


class CodeRun:
    """One run of ``workflow`` in memory.

    ``seen_seq`` and ``advance_no`` are those of the DECIDE task. ``on_input_change`` says what becomes of an op whose
    input is not what the history has: a warning, or NondeterminismError. ``max_payload_bytes`` bounds its output,
    ``max_advance_bytes`` each of its Advances.
    """

    def __init__(
        self,
        workflow: Workflow[..., Any],
        run_id: str,
        *,
        seen_seq: int,
        advance_no: int,
        user_id: str = "",
        fencing_token: int = 0,
        on_input_change: Literal["warn", "block"] = "warn",
        max_payload_bytes: int = _MAX_PAYLOAD_BYTES,
        max_advance_bytes: int = MAX_ADVANCE_BYTES,
    ) -> None:
        self.workflow = workflow
        self.run_id = run_id
        self.advance_no = advance_no
        self.fencing_token = fencing_token
        self._max_payload_bytes = max_payload_bytes
        self._max_advance_bytes = max_advance_bytes - _ADVANCE_SLACK
        self.book = OpBook(run_id, seen_seq, on_input_change)
        self._context = WorkflowContext(self.book, workflow, user_id, max_payload_bytes)
        self.count = self._context.count
        self._kept: list[run_pb2.Event] = []
        self._main: asyncio.Task[Any] | None = None
        self._end: _End | None = None
        self._failed_seq = 0
        self._error: BaseException | None = None
        self._passed: frozenset[int] = frozenset()
        self._under_way: dict[int, Op] = {}
        self._in_flight: tuple[Decision, list[Unsent]] | None = None
        self._idle = False
        self._over = False
        self._stuck = False

    def __repr__(self) -> str:
        return f"<CodeRun {self.run_id} {self.workflow.workflow_id} seq={self.seq}>"

    # What is known of it

    @property
    def seq(self) -> int:
        """The number of the last event known: fed, or its own and accepted."""
        return self.book.seq

    @property
    def seen_seq(self) -> int:
        """Up to where what the function decided is recorded: replay has to come to the same."""
        return self.book.seen_seq

    @property
    def cancelled(self) -> bool:
        """Whether the run is about to end."""
        return self.book.ending is not None

    @property
    def should_continue_as_new(self) -> bool:
        """Whether the history is so long that the function had better continue as new."""
        return self._context.should_continue_as_new

    @property
    def over(self) -> bool:
        """Whether its end was accepted, or is in the history."""
        return self._over

    @property
    def waiting(self) -> bool:
        """Whether there is nothing to do until the server has events."""
        return self._idle and self._in_flight is None and not self._under_way and not self.book.unsent

    @property
    def owes_results(self) -> bool:
        """Whether local steps are under way, or have ended and are not recorded: they would be lost with this."""
        return bool(self._under_way) or self.book.has_results

    @property
    def events_before(self) -> int:
        """How many events of its own the Advance on its way writes before that of its first command."""
        return 0 if self._in_flight is None else events_before(self._in_flight[1])

    # What it is fed

    def feed(self, events: Iterable[run_pb2.Event], *, more: bool = False) -> None:
        """Feed the events that follow ``seq``, without gaps.

        All that is known when a replay begins has to come in one call, because what the code asks for is compared with
        it; whoever reads it in pages says ``more`` with all but the last, and what comes with it is only kept. Raises
        NondeterminismError with the first difference, ValueError for a gap.
        """
        self._kept.extend(events)
        if more:
            return
        events, self._kept = self._kept, []
        try:
            self._feed(events)
        except NondeterminismError as error:
            raise self._with_failure(error) from self._error
        if not self._fails:
            self.book.check_complete()

    def _with_failure(self, error: NondeterminismError) -> NondeterminismError:
        """The difference, with what the function has raised before it came so far: most often that is the cause."""
        failure = self._end[2] if self._end is not None else None
        if failure is None:
            return error
        return NondeterminismError(f"{error.message}: it has failed with {failure.code}: {failure.message}")

    def _feed(self, events: Iterable[run_pb2.Event]) -> None:
        told = [(event, event.WhichOneof("kind")) for event in events]
        book = self.book
        if not book.seq and told:
            book.replayed = told[-1][0].seq
            # What a replay is told at a call of `patched` comes later in the history than the call.
            book.marks.update(event.patch_marked.patch_id for event, kind in told if kind == "patch_marked")
            self._passed = passed_by(told)
            passed = self._passed
            book.done.update(
                event.local_step_ended.op
                for event, kind in told
                if kind == "local_step_ended" and event.seq not in passed
            )
        passed = self._passed
        for event, kind in told:
            seq = event.seq
            if seq != book.seq + 1:
                raise ValueError(f"event {seq} of run {self.run_id} does not follow {book.seq}")
            book.seq = seq
            self._idle = False
            if passed and seq in passed:
                continue
            handler = HANDLERS.get(kind or "")
            if handler is not None and handler(self, event):
                self._turn()

    def leased(self, fencing_token: int) -> None:
        """The DECIDE task is held anew, or under another token: if the function waits, that is told again."""
        self.fencing_token = fencing_token
        self._idle = False

    # What it wants done

    def local_steps(self) -> list[LocalCall]:
        """The local steps to begin now, each told once. None before all that is recorded was fed."""
        book = self.book
        if not book.to_begin or self._kept or book.seq < book.seen_seq or self._end is not None:
            return []
        begun = list(book.to_begin.values())
        book.to_begin.clear()
        calls = []
        for op in begun:
            assert op.call is not None  # all local ops have one
            op.local = LocalCall(op.number, op.name, op.call, self.run_id, self.fencing_token)
            if op.options:
                op.local.max_output_bytes = self._max_advance_bytes - op.input.size - len(op.options)
            self._under_way[op.number] = op
            calls.append(op.local)
        return calls

    def local_ended(self, op: int, result: Completed | Failed, attempts: int) -> None:
        """A local step that was begun has ended, after so many attempts: to be recorded with the next Advance."""
        ended = self._under_way.pop(op)
        ended.result = (result, attempts)
        self.book.unsent[op] = ended

    def decision(self) -> Decision | None:
        """What to send now; None if there is nothing, or an Advance is on its way.

        The caller sends it, again if need be, until it is answered: `accepted` if that is OK, `evict` if not.
        """
        book = self.book
        if self._in_flight is not None or self._over or self._kept or book.seq < book.seen_seq or not book.seq:
            return None
        fails = self._fails
        if fails:
            self._drop_unsent()
        outcome, output, failure = self._outcome()
        ends = outcome not in (_CONTINUE, _WAIT)
        if not book.unsent and not ends and (outcome == _CONTINUE or self._idle):
            return None
        unsent, commands, room = fitting(book.unsent, self._max_advance_bytes, ends=self._end is not None)
        if fails:
            # What is recorded yet was asked for before: if the run is retried, what came then is decided on anew.
            # Unless the function has acted on the failure that it ended with: then it can't be retried.
            book.unsent = dict(list(book.unsent.items())[len(unsent) :])
            acted = 0 < self._failed_seq <= book.asked_at
            seen = book.seq if ends or acted else book.seen_seq
            failed_seq = self._failed_seq if ends else 0
            decision = Decision(
                self.advance_no + 1, seen, outcome, commands, output=output, failure=failure, failed_seq=failed_seq
            )
        elif len(unsent) < len(book.unsent) or (commands and output is not None and output.size > room):
            # The rest goes with the next Advance, and only then the run waits or ends. Until then not all that was
            # decided on the events seen is recorded, so they do not count as seen.
            book.unsent = dict(list(book.unsent.items())[len(unsent) :])
            decision = Decision(self.advance_no + 1, book.seen_seq, _CONTINUE, commands)
        else:
            book.unsent = {}
            decision = Decision(self.advance_no + 1, book.seq, outcome, commands, output=output, failure=failure)
            if book.taken or book.ended_waits:
                decision.taken_signals, decision.ended_waits = book.taken, book.ended_waits
                book.taken, book.ended_waits = [], []
        if ends:
            self._tell_end(failure)
        elif outcome == _WAIT and not self._stuck and not any(op.awaited for op in book.ops.values()):
            self._stuck = True
            logger.warning("[%s] the function waits for nothing durable: only a cancellation can end that", self.run_id)
        self._in_flight = (decision, unsent)
        return decision

    def _tell_end(self, failure: Failed | None) -> None:
        """Log what nobody would see otherwise: where a function has raised, and which failures it has not looked at."""
        error, self._error = self._error, None
        if error is not None and failure is not None and failure.unexpected:
            logger.error(
                "[%s] workflow %s fails: %s", self.run_id, self.workflow.workflow_id, failure.message, exc_info=error
            )
        for unnoticed in self.book.unnoticed():
            logger.warning("[%s] nobody has awaited what failed: %s", self.run_id, unnoticed)

    @property
    def _fails(self) -> bool:
        return self._end is not None and self._end[0] == _FAIL

    def _drop_unsent(self) -> None:
        """The function has failed: what it asked for last would be stopped at once. What has happened is recorded, and
        the way that a patch went; then the run fails, so that a retry has nothing to take back.
        """
        for key, item in list(self.book.unsent.items()):
            if isinstance(item, Cancelled) or (isinstance(item, Op) and item.kind not in (LOCAL, ATTRIBUTES)):
                del self.book.unsent[key]

    def _outcome(self) -> _End:
        if self._under_way:
            return _GOES_ON
        if self._end is None:
            # It goes on with what has ended here as soon as that is recorded.
            return _GOES_ON if self.book.to_begin or self.book.has_results else _WAITS
        if self._fails and self.book.unsent:
            return _GOES_ON
        if self._end[0] == _CONTINUE_AS_NEW and (self.book.unsent or self.book.has_open_work()):
            # What was open was cancelled: it has to be over before another run goes on.
            return _GOES_ON if self.book.unsent else _WAITS
        return self._end

    def accepted(self, result: pb.AdvanceResult) -> None:
        """The Advance on its way was answered OK: feed the events that came before its own, then the results of its
        local steps. ``result.events`` is complete, the caller has read what did not fit. Raises as `feed`.
        """
        assert self._in_flight is not None, "nothing was sent"
        (decision, sent), self._in_flight = self._in_flight, None
        seqs, events, outcome = result.seqs, result.events, decision.outcome
        if len(seqs) != len(sent):
            raise ValueError(f"{len(sent)} commands were sent, {len(seqs)} were answered")
        book = self.book
        self.advance_no = decision.advance_no
        book.seen_seq = decision.seen_seq
        self._idle = outcome == _WAIT and not result.kept
        self._over = outcome not in (_CONTINUE, _WAIT) and not result.end_refused
        if events:
            self._feed([event for event in events if event.seq > book.seq])
        at = result.event_time
        stamp = (at.seconds, at.nanos)
        for item, seq in zip(sent, seqs, strict=True):
            # Between them may be events that are no inputs, which the server writes along.
            if seq <= book.seq:
                raise ValueError(f"event {seq} of run {self.run_id} is known already")
            book.seq = seq
            if isinstance(item, Op):
                self._recorded(item, seq, stamp)
            elif isinstance(item, Cancelled):
                book.record_cancel(item.op)

    def _recorded(self, op: Op, seq: int, stamp: tuple[int, int]) -> None:
        book = self.book
        book.record(op, seq)
        if op.kind is not LOCAL:
            self.count(op.input)
            return
        assert op.result is not None  # it was sent because it ended
        book.now = stamp
        result, attempts = op.result
        if isinstance(result, Completed):
            self.count(result.output)
            book.resolve(op, result.output)
        else:
            book.reject(op, step_failed(op, result, attempts))
        self._turn()

    def blocked(self, error: NondeterminismError) -> Decision:
        """What to send when the code does not fit the history: the run is BLOCKED, until other code comes."""
        failure = Failed(FailureKind.PERMANENT, error.reason, clean(error.message))
        return Decision(self.advance_no + 1, self.book.seen_seq, _BLOCK, failure=failure)

    def query(self, name: str, payload: Value) -> Value:
        """Answer a question. Raises UnknownQuery, NotDecodable, NotEncodable, and whatever the handler raises."""
        book = self.book
        book.querying = True
        try:
            with guarded():
                return self._context.answer(name, payload)
        finally:
            book.querying = False

    def evict(self) -> None:
        """Drop the function where it stands: no code of it gets anything any more."""
        self._over = True
        self.book.evicted = True
        self.book.forget_failures()
        self.book.loop.evict()
        self._kept, self._in_flight, self._error = [], None, None
        self._under_way.clear()

    # The function

    def begin(self, started: run_pb2.Event) -> None:
        """Call the function with the run's input."""
        book = self.book
        given = payload_of(started.run_started.input)
        self.count(given)
        try:
            arguments = self.workflow.arguments(given)
        except NotDecodable as error:
            failure = Failed(
                FailureKind.PERMANENT,
                INPUT_NOT_DECODABLE,
                clean(f"input of workflow {self.workflow.workflow_id}: {error.message}"),
            )
            self._ends(_FAIL, None, failure)
            return
        self._main = book.loop.create_task(self._call(arguments), name=self.workflow.workflow_id)

    async def _call(self, arguments: tuple[Any, ...]) -> Any:
        return await self.workflow.function(self._context, *arguments)

    def end(self, why: Failure) -> None:
        """The run is about to end; the first cause counts."""
        if self.book.ending is None:
            self.book.end(why)

    def _turn(self) -> None:
        """Run the function until it blocks, and look if it has ended."""
        self._run()
        main = self._main
        if main is None or self._end is not None:
            return
        book = self.book
        if book.ending is not None:
            cancels = 0
            # What it awaits now is no op: nothing but a cancellation can end that.
            while not main.done() and not book.has_shielded() and self._end is None:
                cancels += 1
                if cancels > _MAX_CANCELS:
                    self._fail(CancelIgnored("the function goes on awaiting, however often it is cancelled"))
                    return
                main.cancel()
                self._run()
        if main.done() and self._end is None:
            self._function_ended(main)

    def _run(self) -> None:
        loop = self.book.loop
        with guarded():
            while True:
                try:
                    loop.run_until_blocked()
                    return
                except (SystemExit, KeyboardInterrupt) as error:
                    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                        # There it may be somebody at the keyboard, who means the program.
                        raise
                    # A task of the user's raised it, and has it as its outcome.
                except TurnInterrupted:
                    raise
                except BaseException as error:  # noqa: BLE001 - raised by callbacks of the user's: the run's failure
                    if self._end is None:
                        self._fail(error)

    def _function_ended(self, main: asyncio.Task[Any]) -> None:
        error: BaseException | None
        error = asyncio.CancelledError() if main.cancelled() else main.exception()
        if error is None:
            self._tell_unawaited()
            self._complete(main.result())
            return
        again = continue_as_new_of(error)
        if again is None:
            self._fail(error)
        else:
            self._ends(_CONTINUE_AS_NEW, again.input)
            self.book.cancel_open()

    def _tell_unawaited(self) -> None:
        """Log what the function began, never awaited, and leaves open: most often an await was forgotten."""
        book = self.book
        if book.ending is None and book.seq > book.seen_seq and (left := book.unawaited()):
            more = f" and {len(left) - _MAX_TOLD} more" if len(left) > _MAX_TOLD else ""
            logger.warning(
                "[%s] workflow %s returned while %s%s was open, and nobody had awaited it: that ends with the run",
                self.run_id,
                self.workflow.workflow_id,
                ", ".join(left[:_MAX_TOLD]),
                more,
            )

    def _complete(self, value: object) -> None:
        try:
            output = recordable(self.workflow.encode_output(value), given=value)
            if output.size > self._max_payload_bytes:
                raise NotEncodable(f"{output.size} bytes, over the limit of {self._max_payload_bytes}")
        except NotEncodable as error:
            self._ends(_FAIL, None, not_recordable(error.message))
        except TurnInterrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's classes are written in here: the run's failure
            self._fail(error)
        else:
            self._ends(_COMPLETE, output)

    def _fail(self, error: BaseException) -> None:
        self._failed_seq = failed_seq_of(error)
        self._error = error
        self._ends(_FAIL, None, failure_of_function(error, self.book.ending))

    def _ends(self, outcome: pb.AdvanceOutcome.ValueType, output: Value | None, failure: Failed | None = None) -> None:
        """The function has ended. What tasks of it still run can begin nothing any more."""
        self._end = (outcome, output, failure)
        self.book.finished = True
        self.book.to_begin.clear()
