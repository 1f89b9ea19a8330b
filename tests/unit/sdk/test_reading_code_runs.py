"""Runs of code workflows, as a client reads and asks them over a channel that a test answers."""

from __future__ import annotations

import time

import pytest

from fencepost import Client, NoWorker, Value
from fencepost.calls import Requests
from fencepost.models import run_of as value_of_run
from fencepost.plans import Pause
from fencepost.v1 import payload_pb2
from fencepost.v1 import run_service_pb2 as runs
from tests.unit.sdk.answering import Server, event_of, method, run_of
from tests.unit.sdk.test_control import shown


def test_events_of_code_runs_tell_what_their_ops_are(server: Server, client: Client) -> None:
    step, failed, scheduled, timer, labels = (
        event_of(1, "local_step_ended"),
        event_of(2, "local_step_ended"),
        event_of(3, "step_scheduled"),
        event_of(4, "timer_started"),
        event_of(5, "attributes_set"),
    )
    step.local_step_ended.op, step.local_step_ended.name, step.local_step_ended.attempts = 7, "charge", 3
    step.local_step_ended.input_hash = b"h"
    failed.local_step_ended.failure.code = "C"
    scheduled.step_scheduled.op = 8
    timer.timer_started.delay.FromMilliseconds(1500)
    labels.attributes_set.attributes["stage"] = "two"
    patch, stopped, continued = event_of(6, "patch_marked"), event_of(7, "op_cancelled"), event_of(8, "run_continued")
    patch.patch_marked.patch_id = "fix"
    stopped.op_cancelled.op, stopped.op_cancelled.of_seq = 8, 3
    continued.run_continued.next_run_id = "r2"
    seen = shown(server, client, step, failed, scheduled, timer, labels, patch, stopped, continued)
    assert (seen[0].op, seen[0].node_id, seen[0].attempt, seen[0].input_hash) == (7, "charge", 3, b"h")
    assert (seen[0].payload, seen[1].payload, seen[2].payload) == (Value(), None, Value())
    assert seen[1].failure is not None
    assert (seen[3].delay, seen[4].attributes, seen[5].patch_id) == (1.5, {"stage": "two"}, "fix")
    assert (seen[6].op, seen[6].of_seq, seen[7].next_run_id) == (8, 3, "r2")
    assert [event.kind.is_final for event in seen] == [False] * 7 + [True]
    assert [str(seen[n]) for n in (0, 3, 4, 5, 7)] == [
        "1 local_step_ended op 7 charge attempt 3",
        "4 timer_started 1.5 s",
        "5 attributes_set stage=two",
        "6 patch_marked fix",
        "8 run_continued r2",
    ]


def test_a_code_run_is_asked_and_its_answer_is_decoded(server: Server, client: Client) -> None:
    asked = server.ask(lambda: client.handle("r1").query("progress", {"of": 1}, timeout=2.5, type=list[int]))
    request = server.answer(method("QueryRun"), runs.QueryRunResponse(output=payload_pb2.Payload(json="[1, 2]")))
    assert asked.result(30) == [1, 2]
    assert (request.run_id, request.name, request.input.json) == ("r1", "progress", '{"of":1}')
    assert request.timeout.ToMilliseconds() == 2500


def test_a_run_tells_the_others_of_its_chain_and_why_it_waits() -> None:
    message = run_of("CONTINUED")
    message.next_run_id, message.previous_run_id, message.waiting_reason = "r2", "r0", "NO_WORKER"
    message.open_steps.add(task_id=1, decide=True)
    run = value_of_run(message)
    assert (run.next_run_id, run.previous_run_id, run.waiting_reason) == ("r2", "r0", "NO_WORKER")
    assert run.open_steps[0].decide
    assert run.ended


@pytest.mark.parametrize(("timeout", "patience"), [(10.0, 30.0), (10.0, 1.0), (0.0, 30.0)])
def test_a_query_that_no_worker_can_answer_is_asked_again_for_its_timeout_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, timeout: float, patience: float
) -> None:
    """Whatever the client's patience with servers that do not answer. Its time is counted here, not waited for."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    plan = Requests("default", patience).query_run("r1", "progress", None, timeout, int)
    asked: list[float] = []

    def ask_until_it_is_refused() -> None:
        nonlocal now
        action = next(plan)
        while True:
            if isinstance(action, Pause):
                now += action.seconds
                action = next(plan)
                continue
            assert isinstance(action.request, runs.QueryRunRequest)
            asked.append(now - 100 + action.request.timeout.ToNanoseconds() / 1e9)
            action = plan.throw(NoWorker("no connected worker"))

    with pytest.raises(NoWorker):
        ask_until_it_is_refused()
    assert now - 100 <= timeout
    assert asked == [pytest.approx(timeout)] * len(asked), "no answer is waited for any longer, either"
    assert (len(asked) > 1) == (timeout > 0)
