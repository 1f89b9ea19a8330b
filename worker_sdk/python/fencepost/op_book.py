"""The book of one run's ops: what its function has asked for, and what of that the history has.

The function asks (`new_op` and what builds on it), the history records and ends (`record`, `settle`). Whatever the
function asks for is *unsent* until its event is fed at a replay, or its Advance was accepted. Invariants:

- Numbers are given in the order of calls; a cancelled op keeps its number.
- An op that is cancelled while it is unsent needs no event, but may have one: another worker may have sent it before it
  was fed what cancels. Then its cancellation is recorded as well.
- What was asked for on the events up to ``seen_seq`` is in the history; of the rest some may be, if it was too much for
  one Advance, and what is not is sent with the next.

No I/O. Callers: `code_run` feeds it, `workflow_context` and the deterministic loop ask.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from fencepost.codec import Codec, Value
from fencepost.decisions import Cancelled, Unsent
from fencepost.deterministic import DeterministicLoop, Evicted, NonDeterministic
from fencepost.errors import NotDecodable
from fencepost.models import Failure
from fencepost.ops import ATTRIBUTES, CHILD, LOCAL, SIGNAL, SLEEP, STEP, Handle, Op, op_text
from fencepost.sdk_log import SdkLog
from fencepost.signals import SignalBox
from fencepost.workflow_errors import NondeterminismError, OpFailed

logger = SdkLog("fencepost.workflow")

_MAX_FAILED = 32
_MAX_TIMER = 100 * 366 * 86_400.0
"""Seconds; the contract's bound. That of `ctx.sleep` is lower."""

shield: contextvars.ContextVar[bool] = contextvars.ContextVar("fencepost_shield", default=False)
"""Whether what is asked for here goes on when the run is about to end."""


class OpBook:
    """The ops of one run. It is the host of the run's loop: timers of the loop are ops too."""

    def __init__(self, run_id: str, seen_seq: int, on_input_change: Literal["warn", "block"]) -> None:
        self.run_id = run_id
        self.seq = 0
        """The last event of the history that is known here."""
        self.seen_seq = seen_seq
        """Up to where all that was decided is recorded. Of the next few decisions a part may be."""
        self.replayed = 0
        """The last event of the history that a replay began with."""
        self.on_input_change = on_input_change
        self.loop = DeterministicLoop(self)
        self.now = (0, 0)
        """Seconds and nanoseconds since 1970 of the last input."""
        self.ending: Failure | None = None
        """Why the run is about to end, if it is: to the function, a cancellation."""
        self.finished = False
        """Whether the function has ended."""
        self.querying = False
        self.evicted = False
        self.ops: dict[int, Op] = {}
        """By number, until they are recorded and ended."""
        self.recorded: dict[int, Op] = {}
        """By the event that recorded them, until they end."""
        self.unsent: dict[int | str, Unsent] = {}
        """By number; cancellations by the negative one, patches by their id."""
        self.to_begin: dict[int, Op] = {}
        """Local steps that nobody has begun."""
        self.signals = SignalBox()
        self.taken: list[int] = []
        self.ended_waits: list[int] = []
        self.marks: set[str] = set()
        """The patches that the history has."""
        self._failed: list[tuple[Handle[Any], Exception]] = []
        self.asked_at = 0
        """The last event that the function had been fed when it asked for an op last."""
        self.done: set[int] = set()
        """The local steps whose results a replay has."""
        self._patches: dict[str, bool] = {}
        self._last = 0

    # What the function asks for

    def new_op(self, kind: str, name: str) -> Op | None:
        """The next op; None if nothing new may be begun, because the function has ended or the run is about to."""
        if not self.loop.runs_here:
            self._refuse()
        if self.evicted:
            raise Evicted
        shielded = shield.get()
        if self.finished or (self.ending is not None and not shielded):
            return None
        self._last = number = self._last + 1
        self.asked_at = seq = self.seq
        op = Op(number, kind, name, seq, shielded)
        self.ops[number] = op
        return op

    def handle(self, op: Op | None, codec: Codec[Any] | None = None) -> Handle[Any]:
        """What the function awaits; cancelled already if there is no op."""
        if op is None:
            gone: Handle[Any] = Handle(self.loop, None, None)
            gone.cancel()
            return gone
        op.codec = codec
        handle: Handle[Any] = Handle(self.loop, self, op)
        op.handle = handle
        return handle

    def ask(self, op: Op | None) -> None:
        """The op is to be sent."""
        if op is not None:
            self.unsent[op.number] = op

    def wait_for_signal(self, op: Op | None) -> None:
        """The op is a wait for a signal. One that is there already is taken now."""
        if op is None:
            return
        self.unsent[op.number] = op
        there = self.signals.wait(op)
        if there is not None:
            self.take_signal(op, *there)

    def patched(self, patch_id: str) -> bool:
        """Whether the run goes the new way: as its history has it, or as the first call here decided."""
        if not self.loop.runs_here:
            self._refuse()
        known = self._patches.get(patch_id)
        if known is None:
            known = patch_id in self.marks
            if not known and self.seq > self.seen_seq:
                known = True
                self.unsent[patch_id] = patch_id
            self._patches[patch_id] = known
        return known

    def _refuse(self) -> NoReturn:
        if self.evicted:
            raise Evicted
        if self.querying:
            raise NonDeterministic("a query only reads: it can't ask for what is durable")
        raise NonDeterministic(
            "ctx is for the workflow's function and its tasks; its steps and other threads can't use it"
        )

    # The host of the loop

    def time(self) -> float:
        """The time of the last input, in seconds since 1970."""
        return self.now[0] + self.now[1] / 1e9

    def timer(self, delay: float, fire: Callable[[], None], /) -> Op | None:
        """A timer of the loop (asyncio.sleep and timeouts); None, never to fire, if the run is about to end.

        Raises ValueError for more than 100 years, which no server would take.
        """
        if delay > _MAX_TIMER:
            raise ValueError(f"{delay:g} s are over 100 years: wait without a limit, or for less")
        op = self.new_op(SLEEP, "")
        if op is not None:
            op.seconds = delay
            op.fire = fire
            self.unsent[op.number] = op
        return op

    def cancel_timer(self, token: object, /) -> None:
        """The loop forgets a timer."""
        if isinstance(token, Op):
            token.fire = None
            self.cancel_op(token)

    # Cancelling

    def cancel_op(self, op: Op) -> None:
        """Nobody awaits the op any more."""
        if op.cancelled or self.evicted:
            return
        op.cancelled = True
        op.cancelled_at = self.seq
        if op.kind is LOCAL:
            # One that was never begun has no event. One under way goes on, and is recorded when it ends.
            self.to_begin.pop(op.number, None)
            if op.local is not None:
                op.local.cancelled = True
            elif op.made_at > self.replayed:
                del self.ops[op.number]
            return
        if op.kind is SIGNAL:
            self.signals.give_up(op)
        if self.unsent.pop(op.number, None) is None:
            if not op.silent:
                self.unsent[-op.number] = Cancelled(op)
        elif op.made_at > self.replayed:
            # No history has it, so none will.
            del self.ops[op.number]

    def end(self, why: Failure) -> None:
        """The run is about to end: what is not shielded is cancelled, which the server needs not be told."""
        self.ending = why
        for op in list(self.ops.values()):
            if not op.shielded and op.handle is not None and not op.handle.done():
                op.silent = True
                op.handle.cancel()

    def cancel_open(self) -> None:
        """Stop everything that is open."""
        for op in list(self.ops.values()):
            if op.handle is not None:
                op.handle.cancel()
            elif op.fire is not None:
                self.cancel_timer(op)

    def has_shielded(self) -> bool:
        """Whether something goes on that the end of the run does not stop."""
        return any(op.shielded and op.awaited for op in self.ops.values())

    # What the history says

    def matched(self, number: int, kind: str, name: str, digest: bytes, seconds: float | None = None) -> Op:
        """The op that the event ``seq`` records. Raises NondeterminismError if the function asked for another."""
        op = self.ops.get(number)
        if op is None or op.seq or op.kind is not kind or op.name != name:
            asked = "nothing" if op is None or op.seq else op.text
            raise NondeterminismError(f"op {number}: history has {op_text(kind, name, seconds)}, code asks for {asked}")
        if op.digest != digest:
            self.input_changed(op, f"history has another input of {op.text}")
        self.unsent.pop(number, None)
        self.record(op, self.seq)
        return op

    def record(self, op: Op, seq: int) -> None:
        """The op has its event."""
        op.seq = seq
        if op.kind is LOCAL:
            del self.ops[op.number]
            return
        if op.kind is ATTRIBUTES:
            del self.ops[op.number]
        elif op.cancelled:
            self.recorded[seq] = op
            if not op.silent and -op.number not in self.unsent:
                self.unsent[-op.number] = Cancelled(op)
        elif op.kind is SIGNAL and not op.awaited:
            self._wait_ended(op)
        else:
            self.recorded[seq] = op

    def record_cancel(self, op: Op) -> None:
        """The op is stopped. Of a child that ends yet, the outcome is to come."""
        if op.kind is not CHILD:
            self._forget(op)

    def matched_cancel(self, number: int, of_seq: int) -> None:
        """As ``matched``, for an event that records a cancellation."""
        unsent = self.unsent.pop(-number, None)
        if not isinstance(unsent, Cancelled):
            op = self.ops.get(number) or self.recorded.get(of_seq)
            what = f"op {of_seq}" if op is None else op.text
            raise NondeterminismError(f"op {number}: history has cancel of {what}, code asks for nothing")
        self.record_cancel(unsent.op)

    def input_changed(self, op: Op, difference: str) -> None:
        """Warn of an input that is not what it was, or raise NondeterminismError, as configured."""
        message = f"op {op.number}: {difference}"
        if self.on_input_change == "block":
            raise NondeterminismError(message)
        logger.warning("[%s] %s", self.run_id, message)

    @property
    def has_results(self) -> bool:
        """Whether local steps have ended whose results are not on their way yet."""
        for unsent in self.unsent.values():  # noqa: SIM110 - no generator: this is asked for each step
            if type(unsent) is Op and unsent.kind is LOCAL:
                return True
        return False

    def check_complete(self) -> None:
        """All that is known was fed: what the function asked for before ``seen_seq`` must have been in it.

        Raises NondeterminismError.
        """
        for unsent in self.unsent.values():
            if isinstance(unsent, Op) and unsent.made_at <= self.seen_seq and unsent.kind is not LOCAL:
                raise NondeterminismError(f"op {unsent.number}: history has nothing, code asks for {unsent.text}")
        for unsent in self.unsent.values():
            # After all of them: what differs most often stops something as well.
            if isinstance(unsent, Cancelled) and unsent.op.cancelled_at <= self.seen_seq:
                op = unsent.op
                raise NondeterminismError(f"op {op.number}: history has nothing, code asks for cancel of {op.text}")

    # Results

    def resolve(self, op: Op, value: Value) -> None:
        """The op has a result."""
        handle = op.handle
        if handle is None or handle.done():
            return
        assert op.codec is not None  # all that have results have one
        op.handle = None  # the two refer to each other: the collector would have to find every one of them
        try:
            result = op.codec.decode(value)
        except NotDecodable as error:
            told = NotDecodable(f"{op.text}: {error.message}")
            told.__cause__ = error.__cause__
            self._raise_in(handle, told)
        else:
            handle.set_result(result)

    def reject(self, op: Op, error: Exception) -> None:
        """The op has failed, as the event ``seq`` says."""
        if isinstance(error, OpFailed):
            error.seq = self.seq
        handle = op.handle
        if handle is not None and not handle.done():
            op.handle = None
            self._raise_in(handle, error)

    def _raise_in(self, handle: Handle[Any], error: Exception) -> None:
        handle.set_exception(error)
        # Held here, because garbage collection would tell at any time that nobody has awaited it.
        self._failed.append((handle, error))
        if len(self._failed) >= _MAX_FAILED:
            unseen = [item for item in self._failed if item[0]._log_traceback]
            self._failed = unseen[: -_MAX_FAILED // 2]
            self.forget_failures()
            self._failed = unseen[-_MAX_FAILED // 2 :]

    def unnoticed(self) -> list[Exception]:
        """What has failed, and nobody has looked; each once."""
        errors = [error for handle, error in self._failed if handle._log_traceback]  # asyncio's own mark
        self.forget_failures()
        return errors

    def unawaited(self) -> list[str]:
        """What is open and was never awaited, for people."""
        handles = [(op, op.handle) for op in self.ops.values() if not op.cancelled]
        return [op.text for op, handle in handles if handle is not None and not handle.awaited and not handle.done()]

    def forget_failures(self) -> None:
        """Nobody needs to look at what has failed any more."""
        failed, self._failed = self._failed, []
        for handle, _ in failed:
            handle._log_traceback = False

    def take_signal(self, op: Op, seq: int, payload: Value) -> None:
        """The wait takes the signal of event ``seq``."""
        if self.seq > self.seen_seq:
            self.taken.append(seq)
        self.resolve(op, payload)
        if op.seq:
            self.recorded.pop(op.seq, None)
            self._wait_ended(op)

    def _wait_ended(self, op: Op) -> None:
        """A wait is recorded and has its signal: the server is told, unless it was before."""
        del self.ops[op.number]
        if self.seq > self.seen_seq:
            self.ended_waits.append(op.seq)

    def ended(self, seq: int) -> Op | None:
        """The op that event ``seq`` began has ended; None if nobody asks."""
        op = self.recorded.pop(seq, None)
        if op is not None:
            self.ops.pop(op.number, None)
        return op

    def _forget(self, op: Op) -> None:
        self.recorded.pop(op.seq, None)
        self.ops.pop(op.number, None)

    def has_open_work(self) -> bool:
        """Whether a remote step or a child is open."""
        return any(op.kind in {STEP, CHILD} for op in self.recorded.values())
