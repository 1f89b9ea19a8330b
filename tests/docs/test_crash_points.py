"""docs/crash-points.md is complete: each row says all that it should, and names a test that is there."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

PAGE = "docs/crash-points.md"
NO_TEST = "no test"


def rows() -> list[list[str]]:
    """The cells of all rows of the page's tables, without heads and rules."""
    lines = (ROOT / PAGE).read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[-1] != "kept by"]


def test_each_crash_point_says_what_is_there_who_goes_on_and_what_can_not_be() -> None:
    found = rows()
    assert len(found) > 30
    # Who sees nothing at all needs no words.
    assert [row[0] for row in found if len(row) != 6 or not all(row[i] for i in (0, 1, 2, 4, 5))] == []


def test_each_crash_point_names_the_invariant_and_the_test_that_hold_it() -> None:
    wrong = []
    for row in rows():
        invariants, _, held = row[-1].partition("; ")
        if not re.fullmatch(r"I\d+(, I\d+)*", invariants):
            wrong.append(f"{row[0]}: {invariants}")
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", held)
        if not named and not held.startswith(NO_TEST):
            wrong.append(f"{row[0]}: names no test")
        for path, name in named:
            file = ROOT / path
            if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text("utf-8"), re.MULTILINE):
                wrong.append(f"{row[0]}: there is no {path}::{name}")
    assert wrong == []
