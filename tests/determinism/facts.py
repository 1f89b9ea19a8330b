"""What a history says that happened, by the sites of its program: nothing of what the function made of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fencepost.v1 import payload_pb2, run_pb2
from tests.determinism.programs import site_of_delay

SIGNAL_TIMEOUT = "SIGNAL_TIMEOUT"


@dataclass(frozen=True, slots=True)
class End:
    """Something ended by event ``seq``, with an output or the code of a failure."""

    seq: int
    output: Any = None
    code: str = ""


@dataclass
class Facts:
    """Read from the events of one run."""

    run_id: str
    input: Any = None
    steps: dict[int, End] = field(default_factory=dict)
    """Local steps, remote steps and children, by site."""
    given: dict[int, Any] = field(default_factory=dict)
    """Inputs of remote steps and children, by site."""
    timers: dict[int, int] = field(default_factory=dict)
    """When the timer of a site fired."""
    timeouts: dict[str, int] = field(default_factory=dict)
    """When the wait for a signal came to its end."""
    signals: dict[str, list[tuple[int, Any]]] = field(default_factory=lambda: defaultdict(list))
    patches: set[str] = field(default_factory=set)
    attributes: dict[str, str] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    """When an event was, in microseconds since 1970."""
    ending: tuple[int, str] | None = None
    """The event that announced the end of the run, and as what it was to end."""
    end: str = ""
    """The kind of the last event."""
    failure: str = ""
    """The code of the failure that the run ended with."""
    output: Any = None
    undoable: list[int] = field(default_factory=list)
    """The events by which steps with an undo handler completed."""
    undone: list[int] = field(default_factory=list)
    next_run_id: str = ""


def facts_of(run_id: str, events: Sequence[run_pb2.Event], output: payload_pb2.Payload | None) -> Facts:
    """Read a history. ``output`` is what the run says of itself."""
    facts = Facts(run_id)
    by_seq = {event.seq: event for event in events}
    if output is not None:
        facts.output = _json(output)
    for event in events:
        kind = event.WhichOneof("kind") or ""
        facts.end = kind
        facts.times[event.seq] = event.event_time.seconds * 1_000_000 + event.event_time.nanos // 1000
        reader = _READERS.get(kind)
        if reader is not None:
            reader(facts, event, by_seq)
    return facts


_Events = dict[int, run_pb2.Event]


def _json(payload: payload_pb2.Payload) -> Any:
    return json.loads(payload.json) if payload.json else None


def _started(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.input = _json(event.run_started.input)


def _local(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    ended = event.local_step_ended
    if ended.name.startswith("n"):
        site = int(ended.name[1:])
        assert site not in facts.steps, f"local step {site} ended twice"
        failed = ended.HasField("failure")
        facts.steps[site] = End(
            event.seq, None if failed else _json(ended.output), ended.failure.code if failed else ""
        )


def _scheduled(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    given = _json(event.step_scheduled.input)
    assert given["site"] not in facts.given, f"step {given} was scheduled twice"
    facts.given[given["site"]] = given


def _completed(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    completed = event.step_completed
    site = _json(events[completed.task_id].step_scheduled.input)["site"]
    assert site not in facts.steps, f"step {site} ended twice"
    facts.steps[site] = End(event.seq, _json(completed.output))


def _failed(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    failed = event.step_failed
    site = _json(events[failed.task_id].step_scheduled.input)["site"]
    facts.steps[site] = End(event.seq, code=failed.failure.code)


def _fired(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    fired = event.timer_fired
    timer = events.get(fired.timer_seq)
    if timer is None:
        return
    if fired.kind == run_pb2.TIMER_KIND_SLEEP:
        delay = timer.timer_started.delay
        facts.timers[site_of_delay(delay.seconds * 1_000_000 + delay.nanos // 1000)] = event.seq
    elif fired.kind == run_pb2.TIMER_KIND_SIGNAL_TIMEOUT:
        facts.timeouts[timer.signal_awaited.signal_name] = event.seq


def _received(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.signals[event.signal_received.signal_name].append((event.seq, _json(event.signal_received.payload)))


def _child_scheduled(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    given = _json(event.child_scheduled.input)
    assert given["site"] not in facts.given, f"child {given} was started twice"
    facts.given[given["site"]] = given


def _child(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    ended = event.child_ended
    site = _json(events[ended.child_seq].child_scheduled.input)["site"]
    if ended.state == run_pb2.RUN_STATE_COMPLETED:
        facts.steps[site] = End(event.seq, _json(ended.output))
    else:
        facts.steps[site] = End(event.seq, code=ended.failure.code or "CHILD_FAILED")


def _marked(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    assert event.patch_marked.patch_id not in facts.patches, "a patch is marked once"
    facts.patches.add(event.patch_marked.patch_id)


def _labelled(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.attributes.update(event.attributes_set.attributes)


def _ending(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    if facts.ending is None:
        facts.ending = (event.seq, run_pb2.RunState.Name(event.run_ending.state))


def _run_failed(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.failure = event.run_failed.failure.code


def _undo(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.undone.append(event.undo_scheduled.of_seq)


def _continued(facts: Facts, event: run_pb2.Event, events: _Events) -> None:
    facts.next_run_id = event.run_continued.next_run_id


_READERS = cast("dict[str, Any]", {
    "run_started": _started,
    "local_step_ended": _local,
    "step_scheduled": _scheduled,
    "step_completed": _completed,
    "step_failed": _failed,
    "timer_fired": _fired,
    "signal_received": _received,
    "child_scheduled": _child_scheduled,
    "child_ended": _child,
    "patch_marked": _marked,
    "attributes_set": _labelled,
    "run_ending": _ending,
    "run_failed": _run_failed,
    "undo_scheduled": _undo,
    "run_continued": _continued,
})  # fmt: skip
