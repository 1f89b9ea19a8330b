"""What is expected of programs where it is not what one would think at first."""

from __future__ import annotations

from tests.determinism.facts import End, Facts
from tests.determinism.outcomes import Expected
from tests.determinism.programs import Node, Program

STEP, CLEAN_UP = Node("local", 2), Node("local", 3)
CLEANING = Node("clean_up", 4, (STEP, CLEAN_UP))


def cancelled_amid(tree: Node) -> Expected:
    """A run that was cancelled while its first step was done and the second under way."""
    facts = Facts("run", input={"part": 0, "carry": 0}, ending=(4, "RUN_STATE_CANCELLED"))
    facts.steps[1] = End(3, {"site": 1, "v": 1, "last": 0})
    return Expected(Program(0, (Node("seq", 9, (Node("local", 1), tree)),)), facts)


def test_clean_up_is_asked_for_when_the_run_is_cancelled() -> None:
    assert cancelled_amid(CLEANING).clean_ups == {CLEAN_UP.site}


def test_the_clean_up_of_a_branch_may_be_cut_off_by_its_race_which_ends_with_its_first_branch() -> None:
    race = Node("race", 8, (Node("seq", 6, (Node("sleep", 5),)), CLEANING))
    expected = cancelled_amid(race)
    assert expected.out.kind == "cancelled"
    assert expected.clean_ups == set()
    assert CLEAN_UP.site in expected.begun, "it may have ended before"
