"""Writes the table of settings in docs/operations.md from `fencepost_server.config.Config`.

Run it after a change of a setting; a test compares the two. The table is between two marks in the page.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fencepost_server.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- settings: scripts/docs.py -->", "<!-- end of settings -->"


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


def with_table(page: str) -> str:
    """The text of the page with the table of today. Raises ValueError if the marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{settings_table()}\n\n{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
    print(f"wrote {len(dataclasses.fields(Config))} settings to {PAGE.name}")


if __name__ == "__main__":
    main()
