"""docs/reliability.md: each fault of the matrix names a test that is there, and the soak has each kind of fault."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.faults.soak.faults import KINDS

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
    assert len(matrix()) > 15
    assert wrong == []


def test_the_page_counts_the_kinds_of_faults_as_they_are() -> None:
    assert len(KINDS) == 30
    assert "thirty kinds of faults" in PAGE.read_text("utf-8")
