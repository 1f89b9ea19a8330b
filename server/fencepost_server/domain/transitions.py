"""Every state of a run × every event: what becomes of it. The one source of the table in docs/semantics.md and of the
tests of its cells.

What is not refused either acts, or is taken and changes nothing (a repeat, or a late comer to a run that has
decided otherwise: the first cause wins), or is recorded and acts later.

Calls and timers ask ``verdict`` before they act. What comes of steps, undo tasks and children is decided in
engine.steps, engine.undoing and engine.children, which do not ask: tests/engine/test_transitions.py holds them to
the table.
"""

from __future__ import annotations

from enum import Enum

from fencepost_server.domain.model import RunState


class RunEvent(Enum):
    """What can happen to a run. The value is the word for it in messages: "can't be …"."""

    SIGNAL = "signalled"
    CANCEL = "cancelled"
    TERMINATE = "terminated"
    PAUSE = "paused"
    RESUME = "resumed"
    RETRY = "retried"
    REMOVE = "removed"
    STEP_COMPLETED = "told that a step completed"
    STEP_FAILED = "told that a step failed for good"
    TIMER = "told that a timer fired"
    RUN_TIMEOUT = "timed out"
    CHILD_ENDED = "told that a child ended"
    UNDO_COMPLETED = "told that an undo completed"
    UNDO_FAILED = "told that an undo failed for good"


class Verdict(Enum):
    """What an event does to a run in a state."""

    ACT = "acts"
    KEEP = "is taken and changes nothing"
    LATER = "is recorded and acts later"
    REFUSE = "ILLEGAL_TRANSITION"
    NEVER = "can't happen"


_S, _E, _V = RunState, RunEvent, Verdict

_OPEN = (_S.PENDING, _S.RUNNING, _S.WAITING)
_CLOSED = (_S.COMPLETED, _S.FAILED, _S.CANCELLED, _S.TERMINATED, _S.CONTINUED)


def _row(
    open_: Verdict,
    paused: Verdict,
    blocked: Verdict,
    ending: Verdict,
    undoing: Verdict,
    closed: Verdict,
    **exceptions: Verdict,
) -> dict[RunState, Verdict]:
    row = {
        **dict.fromkeys(_OPEN, open_),
        _S.PAUSED: paused,
        _S.BLOCKED: blocked,
        _S.ENDING: ending,
        _S.UNDOING: undoing,
        **dict.fromkeys(_CLOSED, closed),
    }
    return row | {_S[name]: verdict for name, verdict in exceptions.items()}


_A, _K, _L, _R, _N = Verdict.ACT, Verdict.KEEP, Verdict.LATER, Verdict.REFUSE, Verdict.NEVER

TABLE: dict[RunEvent, dict[RunState, Verdict]] = {
    #                      open paused blocked ending undoing final
    _E.SIGNAL: _row(_A, _L, _A, _L, _L, _R),
    _E.CANCEL: _row(_A, _A, _A, _K, _K, _R, CANCELLED=_K),
    _E.TERMINATE: _row(_A, _A, _A, _A, _A, _R, TERMINATED=_K),
    _E.PAUSE: _row(_A, _K, _R, _R, _R, _R),
    _E.RESUME: _row(_K, _A, _K, _K, _K, _R),
    _E.RETRY: _row(_R, _R, _A, _R, _R, _R, FAILED=_A),
    _E.REMOVE: _row(_A, _A, _A, _A, _K, _K),
    _E.STEP_COMPLETED: _row(_A, _L, _A, _A, _N, _K, WAITING=_N),
    _E.STEP_FAILED: _row(_A, _A, _A, _A, _N, _K, WAITING=_N),
    _E.TIMER: _row(_A, _L, _A, _K, _K, _K),
    _E.RUN_TIMEOUT: _row(_A, _L, _A, _K, _K, _K),
    _E.CHILD_ENDED: _row(_A, _L, _A, _A, _K, _K),
    _E.UNDO_COMPLETED: _row(_N, _N, _N, _N, _A, _K),
    _E.UNDO_FAILED: _row(_N, _N, _N, _N, _A, _K),
}
"""event → state → verdict. BLOCKED is a run with a parked step; one whose undo failed is BLOCKED too, and then it has
decided what it ends as: cancel and timeouts change nothing, a signal is only recorded, and RETRY goes on with the undo.
"""


def verdict(state: RunState, event: RunEvent, *, undo_failed: bool = False) -> Verdict:
    """What an event does to a run in a state. ``undo_failed``: it is BLOCKED by an undo."""
    if undo_failed and state is _S.BLOCKED and event not in (_E.RETRY, _E.TERMINATE, _E.UNDO_COMPLETED, _E.UNDO_FAILED):
        return TABLE[event][_S.UNDOING] if event is not _E.PAUSE else Verdict.REFUSE
    return TABLE[event][state]
