"""What every history has to be, whatever happened to its run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fencepost.v1 import run_pb2
from tests.engine.rows import fetch
from tests.fixtures.api import Api, kinds

FINAL = {"run_completed": run_pb2.RUN_STATE_COMPLETED, "run_failed": run_pb2.RUN_STATE_FAILED}
ENDS = {
    **FINAL,
    "run_cancelled": run_pb2.RUN_STATE_CANCELLED,
    "run_terminated": run_pb2.RUN_STATE_TERMINATED,
}
UNDO_ENDS = ("undo_completed", "undo_failed")


def check_history(events: Sequence[run_pb2.Event], nodes: Sequence[str]) -> None:
    """A history that may have been cut off anywhere: numbers, times, order of events, tokens and references (I3,
    I4, I5).
    """
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    times = [event.event_time.ToNanoseconds() for event in events]
    assert times == sorted(times), "time ran backwards"
    rest = list(events)
    assert rest.pop(0).WhichOneof("kind") == "run_started"
    input_seq = 1
    for node in nodes:
        if not rest:
            return
        output_seq = _check_step(rest, node, input_seq)
        if output_seq is None:
            return
        input_seq = output_seq
    if rest:
        assert kinds(rest) == ["run_completed"]
        assert rest[0].run_completed.output_seq == input_seq


def _check_step(rest: list[run_pb2.Event], node: str, input_seq: int) -> int | None:
    """Take the events of one step off ``rest``. Returns the event of its output, None if there is none."""
    scheduled = rest.pop(0)
    assert scheduled.step_scheduled.node_id == node
    assert scheduled.step_scheduled.input_seq == input_seq
    last_token, failed = 0, set()
    while rest:
        event = rest.pop(0)
        kind = str(event.WhichOneof("kind"))
        if kind == "run_blocked":
            assert rest == []
            return None
        said = getattr(event, kind)
        assert kind in ("step_retrying", "step_completed", "step_failed"), kind
        assert (said.task_id, said.node_id) == (scheduled.seq, node)
        assert said.fencing_token > last_token, "a token did not grow"
        last_token = said.fencing_token
        if kind == "step_completed":
            return event.seq
        if kind == "step_failed":
            assert kinds(rest) == ["run_failed"]
            assert rest[0].run_failed.failure.code == said.failure.code
            rest.clear()
            return None
        assert said.failure.kind not in failed, "only the first failure of each kind is an event"
        failed.add(said.failure.kind)
    return None


async def check_run(api: Api, dsn: str, run_id: str, nodes: Sequence[str]) -> list[run_pb2.Event]:
    """A run's history is legal, and its rows say what it says (I4). Returns the history."""
    events = await api.history(run_id)
    check_history(events, nodes)
    run = await api.get(run_id)
    last = kinds(events)[-1]
    assert run.last_seq == len(events)
    assert run.state == FINAL.get(last, run.state)
    [(next_seq, output_seq, ended, is_last, tasks)] = await fetch(
        dsn,
        """select next_seq, output_seq, ended_at is not null,
                  last_event_at = (select max(at) from event where run_id = r.run_id),
                  (select array_agg(task_id) from task where run_id = r.run_id)
           from run r where run_id = %s""",
        [run_id],
    )
    assert (next_seq, is_last) == (len(events) + 1, True)
    assert ended == (last in FINAL) == run.HasField("end_time")
    if ended:
        assert tasks is None
        assert run.end_time == events[-1].event_time
    else:
        [open_step] = [event.seq for event in events if event.WhichOneof("kind") == "step_scheduled"][-1:]
        assert tasks == [open_step]
    if last == "run_completed":
        assert output_seq == events[-1].run_completed.output_seq
        assert run.output == events[output_seq - 1].step_completed.output
    else:
        assert output_seq is None
        assert not run.HasField("output")
    return events


async def check_end(api: Api, run_id: str, timeout: float = 30.0) -> list[run_pb2.Event]:
    """A run of any workflow has ended once, as its last event says (I4); each step and each undo ended once at most
    (I5), and what was undone had completed, in reverse order (I8). Returns the history.
    """
    run = await api.wait(run_id, timeout)
    events = await api.history(run_id, page_size=1000)
    times = [event.event_time.ToNanoseconds() for event in events]
    assert times == sorted(times), "time ran backwards"
    ended = [kind for kind in kinds(events) if kind in ENDS]
    if "run_retried" not in kinds(events):
        assert len(ended) == 1, "it ended more than once"
    assert kinds(events)[-1] == ended[-1], "something was written after the end"
    assert run.state == ENDS[ended[-1]]
    ends: list[tuple[int, int]] = []
    for event in events:
        kind = str(event.WhichOneof("kind"))
        if kind in ("step_completed", *UNDO_ENDS):
            ends.append((getattr(event, kind).task_id, event.seq))
    assert len({task_id for task_id, _ in ends}) == len(ends), "a step ended twice"
    undone = [event.undo_scheduled.of_seq for event in events if event.WhichOneof("kind") == "undo_scheduled"]
    assert undone == sorted(set(undone), reverse=True)
    assert all(events[of - 1].WhichOneof("kind") == "step_completed" for of in undone)
    return events


def tokens_of(events: Sequence[run_pb2.Event]) -> list[int]:
    """The fencing tokens in a history, in its order."""
    found = []
    for event, kind in itertools.product(events, ("step_retrying", "step_completed", "step_failed")):
        if event.WhichOneof("kind") == kind:
            found.append(getattr(event, kind).fencing_token)
    return found
