"""Writes the tables of the documentation that the code has: settings, and what may happen to a run in which state.

Run it after a change of a setting or a transition; tests compare page and code. Each table is between two marks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fencepost_server.config import Config
from fencepost_server.domain.model import RunState
from fencepost_server.domain.transitions import TABLE

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "operations.md"
BEGIN, END = "<!-- settings: scripts/docs.py -->", "<!-- end of settings -->"
TRANSITIONS_PAGE = DOCS / "semantics.md"
TRANSITIONS_BEGIN, TRANSITIONS_END = "<!-- transitions: scripts/docs.py -->", "<!-- end of transitions -->"


def settings_table() -> str:
    """The table, with its head and a row for each setting."""
    head = ["| setting | default | range | |", "|---|---|---|---|"]
    return "\n".join([*head, *map(_row, dataclasses.fields(Config))])


def _row(setting: dataclasses.Field[Any]) -> str:
    low, high = setting.metadata["low"], setting.metadata["high"]
    limits = "" if low is None else f"{_shown(low)} … {_shown(high)}"
    default = _shown(setting.default)
    return f"| `{setting.name}` | {default and f'`{default}`'} | {limits} | {setting.metadata['doc']} |"


def _shown(value: object) -> str:
    """A value as it may be given, without the digits that nobody writes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def transitions_table() -> str:
    """The table of states and events. States that differ nowhere share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for state in _ORDER:
        columns.setdefault(tuple(row[state].value for row in TABLE.values()), []).append(state.name)
    head = [
        f"| event | {' | '.join(', '.join(names) for names in columns.values())} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    cells = zip(TABLE, zip(*columns, strict=True), strict=True)
    return "\n".join([*head, *(f"| {event.name} | {' | '.join(row)} |" for event, row in cells)])


_ORDER = (
    *(RunState.PENDING, RunState.RUNNING, RunState.WAITING, RunState.PAUSED, RunState.BLOCKED, RunState.ENDING),
    *(RunState.UNDOING, RunState.COMPLETED, RunState.CONTINUED, RunState.FAILED, RunState.CANCELLED),
    RunState.TERMINATED,
)


def with_table(page: str) -> str:
    """The text of the page with the table of today. Raises ValueError if the marks are missing."""
    return _between(page, BEGIN, settings_table(), END)


def with_transitions(page: str) -> str:
    """The text of the page on semantics with the table of today. Raises ValueError if the marks are missing."""
    return _between(page, TRANSITIONS_BEGIN, transitions_table(), TRANSITIONS_END)


def _between(page: str, begin: str, table: str, end: str) -> str:
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page lacks {begin} or {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main() -> None:
    """Write the pages."""
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    TRANSITIONS_PAGE.write_text(with_transitions(TRANSITIONS_PAGE.read_text("utf-8")), "utf-8")
    print(f"wrote {len(dataclasses.fields(Config))} settings to {PAGE.name}")
    print(f"wrote {len(TABLE)} events to {TRANSITIONS_PAGE.name}")


if __name__ == "__main__":
    main()
