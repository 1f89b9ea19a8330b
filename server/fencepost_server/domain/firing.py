"""What a schedule does next, as a pure decision on its row under the row's lock.

A run is started in two steps, so that no start can be lost or made twice. First the decision is written down: the
fire time becomes ``starting_at`` and ``next_fire_at`` moves on. Then the run is started, under a key made of the
schedule and that fire time, and ``starting_at`` is taken away. Whoever finds ``starting_at`` some time later tries the
second step again, whichever server wrote it, and the key finds the run if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from fencepost_server.domain.schedule import Overlap, Spec, count_fires, delay, next_fire

MOST_TIMES = 1000
"""Fire times that one decision looks at."""
_TICK = timedelta(microseconds=1)
_SHORTEST_LOOK = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class State:
    """The part of a schedule's row that firing changes. All times but ``due_at`` are fire times."""

    next_fire_at: datetime | None
    starting_at: datetime | None = None
    """A run of it is to be started, or was, and that is not yet written down."""
    pending_at: datetime | None = None
    """It waits for the end of the last run."""
    last_fire_at: datetime | None = None
    """The last one that was started, queued or left out for a run under way."""
    skipped_overlap: int = 0
    skipped_missed: int = 0
    due_at: datetime | None = None
    """When somebody should look at the schedule again; None: never."""


@dataclass(frozen=True, slots=True)
class Patience:
    """``retry`` is how long a start may take before others try it too, ``look`` how long at most a fire time waits for
    the end of a run without a look at it.
    """

    retry: timedelta
    look: timedelta


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write, then whether ``state.starting_at`` is to be started now and the last run to be cancelled."""

    state: State
    start: bool = False
    cancel: bool = False


def decide(spec: Spec, key: str, state: State, now: datetime, *, running: bool, patience: Patience) -> Decision:
    """``key`` is the schedule's own; ``running``: its last run has not ended."""
    if state.starting_at is None and state.pending_at is not None and not running:
        state = replace(state, starting_at=state.pending_at, pending_at=None)
    looked = 0
    while state.starting_at is None and looked < MOST_TIMES:
        looked += 1
        at = state.next_fire_at
        if at is None or at + delay(spec, key, at) > now:
            break
        state = _handle(spec, key, state, at, now, running=running)
    if state.starting_at is not None:
        return Decision(replace(state, due_at=now + patience.retry), start=True)
    cancel = state.pending_at is not None and spec.overlap is Overlap.CANCEL_RUNNING
    return Decision(replace(state, due_at=_due(spec, key, state, now, patience)), cancel=cancel)


def _handle(spec: Spec, key: str, state: State, at: datetime, now: datetime, *, running: bool) -> State:
    """One fire time that is due; those long missed all at once."""
    if now - spec.catch_up > at + delay(spec, key, at):
        certain = max(at, now - spec.catch_up - spec.jitter - _TICK)
        missed = count_fires(spec, at - _TICK, certain)
        return replace(state, skipped_missed=state.skipped_missed + missed, next_fire_at=next_fire(spec, certain))
    state = replace(state, next_fire_at=next_fire(spec, at), last_fire_at=at)
    if not running or spec.overlap is Overlap.ALLOW:
        return replace(state, starting_at=at)
    if spec.overlap.queues and state.pending_at is None:
        return replace(state, pending_at=at)
    return replace(state, skipped_overlap=state.skipped_overlap + 1)


def _due(spec: Spec, key: str, state: State, now: datetime, patience: Patience) -> datetime | None:
    times = []
    if state.next_fire_at is not None:
        times.append(state.next_fire_at + delay(spec, key, state.next_fire_at))
    if state.pending_at is not None:
        # Whoever sees the run end tells of it; this is for when nobody does. Looks get rarer as the wait gets longer.
        times.append(now + min(max((now - state.pending_at) / 10, _SHORTEST_LOOK), patience.look))
    # One that has more to make up for comes behind those that are due already: they are looked at in that order.
    return max(min(times), now) if times else None


def paused(state: State, now: datetime) -> State:
    """It fires no more; what waits for the end of a run is left out. A start that was decided is still made."""
    return replace(
        state,
        next_fire_at=None,
        pending_at=None,
        skipped_overlap=state.skipped_overlap + (state.pending_at is not None),
        due_at=now if state.starting_at is not None else None,
    )


def resumed(spec: Spec, key: str, state: State, now: datetime) -> State:
    """It fires from now on, by a spec that may be new. What waits for the end of a run goes on waiting, if that is
    what the spec wants.
    """
    dropped = state.pending_at is not None and not spec.overlap.queues
    next_at = next_fire(spec, now)
    state = replace(
        state,
        next_fire_at=next_at,
        pending_at=None if dropped else state.pending_at,
        skipped_overlap=state.skipped_overlap + dropped,
    )
    if state.starting_at is not None or state.pending_at is not None:
        return replace(state, due_at=now)
    return replace(state, due_at=None if next_at is None else next_at + delay(spec, key, next_at))
