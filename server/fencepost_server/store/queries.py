"""Loads the named statements of ``sql/*.sql``.

A statement begins with ``-- name: <name>``; the comment lines after it say which locks it takes in which order
and which index it uses, and stay in the text, so that they show up in pg_stat_activity.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def statements(file: str) -> dict[str, bytes]:
    """All statements of ``sql/<file>.sql`` by name."""
    text = (files(__package__) / "sql" / f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return {name: body.strip().rstrip(";").encode() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def query(file: str, name: str) -> bytes:
    """One statement. KeyError if there is none of that name."""
    return statements(file)[name]
