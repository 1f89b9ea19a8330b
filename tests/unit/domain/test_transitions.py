"""The table of states and events: complete, of one piece with itself, and as the page on semantics has it. What each
cell does to a run on a server: tests/engine/test_transitions.py.
"""

from __future__ import annotations

import pytest

from fencepost_server.domain.model import RunState
from fencepost_server.domain.transitions import TABLE, RunEvent, Verdict, verdict
from scripts.docs import TRANSITIONS_PAGE, with_transitions

CALLS = (
    RunEvent.SIGNAL,
    RunEvent.CANCEL,
    RunEvent.TERMINATE,
    RunEvent.PAUSE,
    RunEvent.RESUME,
    RunEvent.RETRY,
)


def test_every_event_has_a_verdict_in_every_state() -> None:
    assert set(TABLE) == set(RunEvent)
    for event, row in TABLE.items():
        assert set(row) == set(RunState), event
        for state in RunState:
            assert verdict(state, event) is row[state]


def test_a_caller_is_refused_or_heard_and_what_happens_by_itself_is_never_refused() -> None:
    for event, row in TABLE.items():
        if event in CALLS:
            assert Verdict.NEVER not in row.values()
        else:
            assert Verdict.REFUSE not in row.values()


def test_final_states_are_left_by_a_retry_of_a_failed_run_only() -> None:
    """I4."""
    for event, row in TABLE.items():
        for state in RunState:
            if state.final:
                allowed = {Verdict.REFUSE, Verdict.KEEP}
                if (event, state) == (RunEvent.RETRY, RunState.FAILED):
                    allowed = {Verdict.ACT}
                assert row[state] in allowed, (event, state)


def test_what_a_call_has_done_it_may_be_asked_for_again() -> None:
    repeats = (
        (RunEvent.CANCEL, RunState.ENDING),
        (RunEvent.CANCEL, RunState.CANCELLED),
        (RunEvent.TERMINATE, RunState.TERMINATED),
        (RunEvent.PAUSE, RunState.PAUSED),
        (RunEvent.RESUME, RunState.RUNNING),
    )
    for event, state in repeats:
        assert TABLE[event][state] is Verdict.KEEP


@pytest.mark.parametrize("event", RunEvent)
def test_a_run_whose_undo_failed_has_decided_how_it_ends(event: RunEvent) -> None:
    found = verdict(RunState.BLOCKED, event, undo_failed=True)
    if event in (RunEvent.RETRY, RunEvent.TERMINATE):
        assert found is Verdict.ACT
    elif event is RunEvent.PAUSE:
        assert found is Verdict.REFUSE
    elif event in (RunEvent.UNDO_COMPLETED, RunEvent.UNDO_FAILED):
        assert found is Verdict.NEVER
    else:
        assert found is TABLE[event][RunState.UNDOING]
        assert found is not Verdict.ACT


def test_the_table_of_the_documentation_is_this_one() -> None:
    page = TRANSITIONS_PAGE.read_text("utf-8")
    assert page == with_transitions(page), "write it anew: .venv/bin/python scripts/docs.py"
