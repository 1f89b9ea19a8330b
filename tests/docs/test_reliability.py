"""docs/reliability.md: each fault of the matrix names a test that is there, and the soak has each kind of fault."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.faults.soak.disk import ACTS
from tests.faults.soak.faults import KINDS
from tests.faults.soak.graphs import LEASE
from tests.faults.soak.recovery import BOUNDS, OF_KIND
from tests.faults.soak.stage import GRACE

PAGE = ROOT / "docs" / "reliability.md"


def matrix() -> list[list[str]]:
    """The cells of the failure matrix."""
    table = PAGE.read_text("utf-8").partition("## The failure matrix")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] != "fault"]


def test_each_fault_says_what_happens_and_names_a_test_that_is_there() -> None:
    wrong = []
    for row in matrix():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
        if len(row) != 4 or not row[0] or not row[1] or not (named or row[-1].startswith("soak")):
            wrong.append(f"{row[0]}: something is missing")
        for path, name in named:
            file = ROOT / path
            if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text("utf-8"), re.MULTILINE):
                wrong.append(f"{row[0]}: there is no {path}::{name}")
    assert wrong == []


def soaks() -> list[tuple[str, str, bool, list[str]]]:
    """Of each row that the soak plays: the fault, the bound, whether the soak holds that, and the kinds of faults."""
    found = []
    for fault, _, bound, tests in matrix():
        if tests.startswith("soak"):
            # Where the soak has no bound, somebody else has it.
            assert not seconds(bound) or "::" in tests or tests.startswith("soak: "), fault
            how, _, kinds = tests.partition(";")[0].partition(": ")
            found.append((fault, bound, how == "soak", re.findall("`([^`]+)`", kinds)))
    return found


def seconds(bound: str) -> float | None:
    """What a bound comes to with the settings of the soak: `setting`, number s, or `setting` + number s."""
    settings = {"disconnect_grace": GRACE, "lease": LEASE}
    found = re.match(r"(?:`(\w+)`)?(?: \+ )?(?:([\d.]+) s\b)?", bound)
    assert found is not None
    return settings.get(found[1], 0.0) + float(found[2] or 0) if found[0] else None


def test_the_rows_of_the_soak_name_its_kinds_of_faults_and_all_of_them() -> None:
    named = {kind for _, _, _, kinds in soaks() for kind in kinds}
    assert sorted(fault for fault, _, _, kinds in soaks() if not kinds) == []
    assert sorted(named) == sorted({*KINDS, *ACTS})


def test_the_bounds_that_the_soak_is_said_to_hold_are_those_that_it_holds() -> None:
    wrong = []
    held = set()
    for fault, bound, holds, kinds in soaks():
        for kind in kinds if holds else ():
            known = {name: BOUNDS[name] for name in OF_KIND.get(kind, ())}
            names = {name for name, each in known.items() if each == seconds(bound)}
            held |= names
            if bound and not names:
                wrong.append(f"{fault}: {bound}, but {kind} is held to {known}")
    assert wrong == []
    assert sorted(BOUNDS.keys() - held) == [], "held by the soak, and not on the page"


def test_the_page_counts_the_kinds_of_faults_as_they_are() -> None:
    assert len(KINDS) == 31
    assert "thirty-one kinds of faults" in PAGE.read_text("utf-8")
