"""Writes answers: tables in colour on a terminal, plain aligned text elsewhere, JSON for programs.

What came from outside never reaches a terminal as it is: control characters are shown, not obeyed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
"""Where texts of any length are cut if there is no terminal to ask for its width."""

_GAP = "  "
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*')
_SMALLEST_PLAIN, _LARGEST_PLAIN = -7, 20  # powers of ten, about where other writers of JSON draw the line as well
_STYLES: Mapping[str, str] = {
    "PENDING": "dim",
    "RUNNING": "cyan",
    "COMPLETED": "green",
    "FAILED": "bold red",
    "BLOCKED": "bold yellow",
    "WAITING": "dim",
    "PAUSED": "yellow",
    "ENDING": "yellow",
    "UNDOING": "yellow",
    "CANCELLED": "yellow",
    "TERMINATED": "red",
    "CONTINUED": "dim",
    "ACTIVE": "green",
    "PREVIOUS": "dim",
    "REMOVED": "red",
    "LEASED": "cyan",
    "RETRYING": "yellow",
    "PARKED": "red",
}


def on_terminal() -> bool:
    """Whether people read along."""
    return sys.stdout.isatty()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def visible(text: str) -> str:
    """``text`` in one line, with characters that a terminal would act upon, or nobody would see, spelled out."""
    if text.isprintable():
        return text
    return "".join(
        " " if c in "\n\r\t" else c if c.isprintable() or unicodedata.category(c) == "Zs" else _spelled(c) for c in text
    )


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, width: int = PLAIN_WIDTH) -> str:
    """The beginning of ``text``, visible, in at most ``width`` characters; an ellipsis tells that more follows."""
    text = visible(text[: width * 4])
    return text if len(text) <= width else text[: width - 1] + "…"


def local(time: dt.datetime | None, *, precise: bool = False) -> str:
    """A time in the local zone with its offset, to the second or the millisecond; '' for none."""
    if time is None:
        return ""
    here = time.astimezone()
    return here.isoformat(" ", "milliseconds" if precise else "seconds")


def lasted(seconds: float) -> str:
    """A duration as people say it: two units at most."""
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    return f"{hours} h {minutes_left} m" if hours else f"{minutes} m {left} s"


def style_of(word: str) -> str:
    """How a state is shown on a terminal."""
    return _STYLES.get(word, "")


def aligned(titles: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> str:
    """Rows under their titles as plain text."""
    lines = [tuple(titles), *(tuple(visible(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        (" " * indent + _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))).rstrip()
        for line in lines
    )


def show_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Sequence[str] = ()) -> None:
    """Write a table. On a terminal, columns that are not in ``whole`` are cut to its width."""
    if not on_terminal():
        write_line(aligned(titles, rows))
        return
    from rich.table import Table
    from rich.text import Text

    lines = [[visible(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, title in enumerate(titles):
        longest = max((len(line[column]) for line in lines), default=0) if title in whole else None
        table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=longest)
    for line in lines:
        table.add_row(*(Text(cell, style=style_of(cell)) for cell in line))
    _console().print(table)


def show_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Write names and values, one pair a line; pairs without a value are left out."""
    shown = [(name, visible(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    if not on_terminal():
        for name, value in shown:
            write_line(f"{name.ljust(width)}{_GAP}{value}")
        return
    from rich.text import Text

    console = _console()
    for name, value in shown:
        text = Text.assemble((name.ljust(width), "bold"), _GAP, (value, style_of(value)))
        console.print(text, overflow="fold")


def show_line(*parts: tuple[str, str]) -> None:
    """Write one line of (text, style) at once, for what comes bit by bit."""
    if not on_terminal():
        write_line("".join(visible(text) for text, _ in parts).rstrip())
        return
    from rich.text import Text

    _console().print(
        Text.assemble(*((visible(text), style) for text, style in parts)), overflow="ellipsis", no_wrap=True
    )


def room() -> int:
    """How many characters a long text may have."""
    if not on_terminal():
        return PLAIN_WIDTH
    import shutil

    return max(shutil.get_terminal_size().columns, 40)


def write_line(text: str) -> None:
    """Write text and see it leave; what the encoding of standard output lacks is spelled out."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def readable_json(text: str) -> str:
    """A JSON text, which may be canonical, in several lines and with numbers as people write them: 20, not 2e1."""
    import msgspec

    return _TOKEN.sub(lambda found: _plain(found[0]), msgspec.json.format(text, indent=2))


def _plain(token: str) -> str:
    """A string as it is, a number without an exponent unless it would be long."""
    if token.startswith('"') or "e" not in token.lower():
        return token
    number = decimal.Decimal(token)
    return f"{number:f}" if _SMALLEST_PLAIN <= number.adjusted() <= _LARGEST_PLAIN else token


def as_json(document: Any) -> str:
    """A document in one line; `msgspec.Raw` in it is JSON text that is kept to the letter."""
    import msgspec

    return msgspec.json.encode(document).decode()


def write_json(document: Any) -> None:
    """Write a document as a line of JSON, in UTF-8 whatever the locale."""
    sys.stdout.buffer.write(as_json(document).encode() + b"\n")
    sys.stdout.buffer.flush()
