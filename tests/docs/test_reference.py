"""The tables of the documentation say what the code says: settings, error codes, metrics, terms."""

from __future__ import annotations

import dataclasses
import re

from fencepost_server.config import ENV_PREFIX, Config
from fencepost_server.domain import errors
from fencepost_server.wire.status import code_of
from tests.docs.pages import ROOT


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the rows of a page's tables whose first cell is a name in code that matches ``first``."""
    text = (ROOT / page).read_text("utf-8")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(f"`{first}`", cells[0]):
            found.append([cells[0].strip("`"), *cells[1:]])
    return found


def classes() -> dict[str, type[errors.FencepostError]]:
    """The error classes by their reason."""
    found, waiting = {}, [errors.FencepostError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if not kind.__subclasses__():
            found[kind.reason] = kind
    return found


def test_every_error_is_listed_with_the_code_that_it_is_sent_with() -> None:
    codes = {reason: code_of(kind("")).name for reason, kind in classes().items()}
    assert {row[0]: row[1] for row in rows("docs/errors.md", "[A-Z_]+")} == codes


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    incomplete = [row[0] for row in rows("docs/errors.md", "[A-Z_]+") if len(row) != 5 or not row[2] or not row[4]]
    assert incomplete == []


def shown(value: object) -> str:
    """A default as people write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def setting_row(setting: dataclasses.Field[object]) -> str:
    """The row of a setting in the table of docs/operations.md."""
    low, high = setting.metadata["low"], setting.metadata["high"]
    limits = "" if low is None else f"{low:,g} … {high:,g}"
    default = shown(setting.default)
    return f"| `{setting.name}` | {f'`{default}`' if default else ''} | {limits} | {setting.metadata['doc']} |"


def test_the_table_of_settings_is_that_of_the_server() -> None:
    listed = re.findall(r"^\| `[a-z_]+` \|.*\|$", section("docs/operations.md", "Settings"), flags=re.MULTILINE)
    expected = [setting_row(setting) for setting in dataclasses.fields(Config)]
    assert listed == expected, "make the table anew:\n" + "\n".join(expected)
    assert ENV_PREFIX == "FENCEPOST_", "the page says so"


def section(page: str, heading: str) -> str:
    """The text of a page under a heading of the second level."""
    text = (ROOT / page).read_text("utf-8")
    match = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page} has no section {heading}"
    return match[1]
