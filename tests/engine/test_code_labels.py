"""What a code run may not give itself: more labels than a run has (semantics, code runs)."""

from __future__ import annotations

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.code import AS_NEW, COMPLETE, CONTINUE, FAIL, Code, another_decider, call, local, payload
from tests.engine.flows import PERMANENT, state_of
from tests.fixtures.raw_worker import LEASE_LOST, OK


def labels(first: int, number: int) -> list[pb.Command]:
    """One label each, by ops from ``first`` on."""
    return [
        pb.Command(op=op, set_attributes=pb.SetAttributes(attributes={f"k{op}": "v"}))
        for op in range(first, first + number)
    ]


async def test_a_run_that_gives_itself_too_many_labels_is_blocked_at_once(code: Code) -> None:
    """I12: no further try could mend it, and each would run the local steps once more."""
    run_id = await code.start(attributes={"who": "me"})
    run = await code.take()
    lost = await run.advance(local(1), *labels(2, 40), call(42, "a"), outcome=CONTINUE)
    assert lost.outcome == LEASE_LOST
    blocked = await code.scene.api.get(run_id)
    assert (state_of(blocked), blocked.failure.code) == ("BLOCKED", "DECIDER_FAILING")
    assert blocked.failure.message == "the run would have 41 attributes; at most 32 are accepted"
    assert dict(blocked.attributes) == {"who": "me"}
    assert await code.scene.kinds(run_id) == ["run_started", "run_blocked"], "nothing of it counts"
    await code.decider.no_task()  # that process has tried
    other = await another_decider(code.scene)  # one with code that was mended
    again = await code.take(other)
    assert (await again.complete("ok", *labels(1, 31))).outcome == OK
    assert len((await code.scene.api.wait(run_id)).attributes) == 32
    await other.close()


@pytest.mark.parametrize("outcome", [COMPLETE, FAIL, AS_NEW])
async def test_an_end_with_too_many_labels_is_none(code: Code, outcome: pb.AdvanceOutcome.ValueType) -> None:
    run_id = await code.start()
    run = await code.take()
    failure = run_pb2.Failure(kind=PERMANENT, code="X", message="x") if outcome == FAIL else None
    output = None if outcome == FAIL else payload(1)
    lost = await run.advance(*labels(1, 33), outcome=outcome, output=output, failure=failure)
    assert (lost.outcome, state_of(await code.scene.api.get(run_id))) == (LEASE_LOST, "BLOCKED")
