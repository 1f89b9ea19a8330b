"""Figures of rounds, their medians, and how they are shown: tables for people, one object for programs."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under ``columns``; the first column is names, the others are numbers."""

    title: str
    columns: Row
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark has found. ``result`` can be written as JSON; ``notes`` are sentences below the tables."""

    result: dict[str, Any]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())

    def show(self) -> None:
        """Print the tables: with lines and colours on a terminal, else as plain text."""
        for table in self.tables:
            if sys.stdout.isatty():
                _show_rich(table)
            else:
                _show_plain(table)
        for note in self.notes:
            print(note)


def _show_rich(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*row)
    Console().print(shown)


def _show_plain(table: Table) -> None:
    widths = [max(len(row[index]) for row in (table.columns, *table.rows)) for index in range(len(table.columns))]
    print(table.title)
    for row in (table.columns, *table.rows):
        cells = [
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
    print()


def rounded(value: float) -> float | int:
    """With as many digits as mean something: three at least, whole numbers from 1,000 on."""
    if abs(value) >= 1000:
        return round(value)
    return float(f"{value:.4g}")


def text(value: float) -> str:
    """The same for people."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of each round."""

    name: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """What it is reported as."""
        return statistics.median(self.values)

    def row(self) -> Row:
        """For a table with the columns median, lowest, highest."""
        return (self.name, text(self.median), text(min(self.values)), text(max(self.values)))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of ``values`` do not exceed; the nearest rank, none made up."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
