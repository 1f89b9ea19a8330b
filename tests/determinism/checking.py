"""Compares runs that have lived with what is expected of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fencepost.v1 import run_pb2
from tests.determinism.facts import Facts, facts_of
from tests.determinism.living import Lived
from tests.determinism.outcomes import Expected
from tests.determinism.programs import Node

_CANCELLED = "RUN_STATE_CANCELLED"


def check_chain(chain: Sequence[Lived]) -> None:
    """Compare the runs that one program went through with what is expected of them. Raises AssertionError."""
    found = [check(each) for each in chain]
    for before, after in pairwise(found):
        assert before[0].next_run_id == after[0].run_id
        assert after[0].input["carry"] == before[1].sum, f"{after[0].run_id}: {after[0].input}"
    check_undo(chain, [facts for facts, _ in found])


def check_undo(chain: Sequence[Lived], found: Sequence[Facts]) -> None:
    """What had an undo handler and completed, in any run of the chain, is undone once, the last first."""
    last = found[-1]
    if last.end not in {"run_cancelled", "run_failed"}:
        assert not last.undone
        return
    nodes = _nodes(chain[0])
    wanted: list[int] = []
    for facts in reversed(found):
        ends = [end.seq for site, end in facts.steps.items() if nodes[site].mode == "undo" and not end.code]
        wanted += sorted(ends, reverse=True)
    assert last.undone == wanted, f"{last.run_id}: {last.undone} was undone, not {wanted}"


def _nodes(lived: Lived) -> dict[int, Node]:
    return {node.site: node for tree in lived.program.trees for node in tree.walk()}


def check(lived: Lived) -> tuple[Facts, Expected]:
    """Compare a run with what is expected of it."""
    output = lived.run.output if lived.run.state == run_pb2.RUN_STATE_COMPLETED else None
    facts = facts_of(lived.run.run_id, lived.events, output)
    expected = Expected(lived.program, facts)
    where = f"seed {lived.program.seed}, run {facts.run_id}"
    check_what_was_asked(lived, facts, expected, where)
    check_end(lived, facts, expected, where)
    return facts, expected


def check_what_was_asked(lived: Lived, facts: Facts, expected: Expected, where: str) -> None:
    """Every op of the history was to be asked for, with what it was given."""
    nodes = _nodes(lived)
    for site, given in facts.given.items():
        assert site in expected.begun, f"{where}: site {site} was to ask for nothing"
        assert given["last"] == expected.begun[site][1], f"{where}: site {site} was given {given}"
    for site, end in facts.steps.items():
        assert site in expected.begun, f"{where}: site {site} was to ask for nothing"
        if not end.code:
            assert end.output["last"] == expected.begun[site][1], f"{where}: site {site} ended with {end}"
            assert end.output["site"] == site
        elif nodes[site].kind != "child":
            # One that nobody waits for any more may be stopped, and is not tried again if it runs in the worker; nor is
            # any in a run that ends.
            ending = facts.ending is not None and end.seq > facts.ending[0]
            given_up = ("FLAKY", "LEASE_EXPIRED") if ending or nodes[site].kind == "local" else ()
            codes = {f"REFUSED_{site}", "StepCancelled", *given_up}
            assert end.code in codes, f"{where}: site {site} ended with {end}"
    for site in expected.clean_ups:
        assert site in facts.steps or nodes[site].kind != "local", f"{where}: clean-up {site} was left out"
    assert facts.patches <= expected.patched, where
    for name, value in facts.attributes.items():
        assert value == str(expected.begun[int(name[1:])][1]), f"{where}: {name}"


def check_end(lived: Lived, facts: Facts, expected: Expected, where: str) -> None:
    """The run ended as it was to."""
    out = expected.out
    if facts.ending is not None and facts.ending[1] == _CANCELLED:
        # Also if the function came to its end before the server knew, or by shielded work that was under way.
        assert facts.end == "run_cancelled", where
        assert out.kind in {"cancelled", "value", "failure"}, f"{where}: {out}"
    elif out.kind == "failure":
        assert (facts.end, facts.failure) == ("run_failed", out.value), f"{where}: {out}"
    else:
        assert out.kind == "value", f"{where}: {out}"
        if facts.input["part"] + 1 < len(lived.program.trees):
            assert facts.end == "run_continued", f"{where}: {out}"
            assert facts.next_run_id == lived.run.next_run_id != ""
        else:
            assert facts.end == "run_completed", f"{where}: {out}"
            assert facts.output == {"value": out.value, "sum": expected.sum}, where
