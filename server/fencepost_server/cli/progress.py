"""Progress bars on standard error, for people only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(title: str, total: int | None, *, shown: bool, counted: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar that goes away at the end; gives the function that sets how much is done, of ``total`` if that is known.

    ``counted``: the numbers mean something to people.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count: list[Any] = [MofNCompleteColumn()] if counted else []
    columns = [TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
