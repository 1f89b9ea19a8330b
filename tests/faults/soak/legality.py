"""Whether each event of a history could happen in the state in which its run was: the server's own table of
transitions, walked along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from fencepost.v1 import run_pb2
from fencepost_server.domain.model import RunState
from fencepost_server.domain.transitions import RunEvent, Verdict, verdict

HAPPENS = {
    "signal_received": RunEvent.SIGNAL,
    "run_terminated": RunEvent.TERMINATE,
    "run_paused": RunEvent.PAUSE,
    "run_resumed": RunEvent.RESUME,
    "run_retried": RunEvent.RETRY,
    "step_completed": RunEvent.STEP_COMPLETED,
    "step_failed": RunEvent.STEP_FAILED,
    "timer_fired": RunEvent.TIMER,
    "child_ended": RunEvent.CHILD_ENDED,
    "undo_completed": RunEvent.UNDO_COMPLETED,
    "undo_failed": RunEvent.UNDO_FAILED,
}
LEADS_TO = {
    "run_paused": RunState.PAUSED,
    "run_resumed": RunState.RUNNING,
    "run_blocked": RunState.BLOCKED,
    "run_ending": RunState.ENDING,
    "undo_scheduled": RunState.UNDOING,
    "run_completed": RunState.COMPLETED,
    "run_failed": RunState.FAILED,
    "run_cancelled": RunState.CANCELLED,
    "run_terminated": RunState.TERMINATED,
    "run_continued": RunState.CONTINUED,
}
_ONE_AT_A_TIME = {"step_completed", "step_failed", "step_cancelled", "undo_completed", "undo_failed"}


def _is_early(event: run_pb2.Event, due: Mapping[int, Timestamp]) -> bool:
    """Both times are of the database's clock: a server whose own is ahead must not fire before it."""
    at = due.get(event.timer_fired.timer_seq)
    return at is not None and event.event_time.ToNanoseconds() < at.ToNanoseconds()


def illegal_events(events: Sequence[run_pb2.Event], *, code: bool) -> list[str]:
    """What of a history could not happen when it did. ``code``: in a code run timers go on while it cleans up."""
    found: list[str] = []
    state, undo_failed = RunState.RUNNING, False
    over: set[int] = set()
    due = {event.seq: event.timer_started.fire_time for event in events if event.HasField("timer_started")}
    due |= {event.seq: event.signal_awaited.timeout_time for event in events if event.HasField("signal_awaited")}
    for event in events:
        kind = str(event.WhichOneof("kind"))
        if kind == "timer_fired" and _is_early(event, due):
            found.append(f"event {event.seq}: a timer fired before its time")
        what = HAPPENS.get(kind)
        cleaning_up = code and kind == "timer_fired" and state is RunState.ENDING
        if what is not None and not cleaning_up:
            said = verdict(state, what, undo_failed=undo_failed)
            if said not in (Verdict.ACT, Verdict.LATER):
                found.append(f"event {event.seq}: {kind} in {state.name} {said.value}")
        if kind in _ONE_AT_A_TIME:
            task_id = getattr(event, kind).task_id
            if task_id in over:
                found.append(f"event {event.seq}: task {task_id} ended twice")
            if kind in {"step_completed", "undo_completed"}:
                over.add(task_id)
        if kind == "run_retried":
            state = RunState.UNDOING if undo_failed else RunState.RUNNING
        state = LEADS_TO.get(kind, state)
        undo_failed = kind == "undo_failed" or (undo_failed and kind == "run_blocked")
    return found
