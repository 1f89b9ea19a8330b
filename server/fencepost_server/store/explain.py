"""Driver errors of a start, for the people at the command line. Servers that serve never tell these to callers."""

from __future__ import annotations

import psycopg


def explain(error: BaseException) -> str:
    """A sentence for a driver's error, or the text of any other."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if not isinstance(error, psycopg.Error):
        return text
    if error.sqlstate is not None:
        return f"the database refused ({error.sqlstate}): {text}"
    if isinstance(error, psycopg.ProgrammingError):
        return f"the connection string can't be used: {text}"
    return f"the database can't be reached: {text}"
