"""What one page of Markdown has: words, headings, blocks of code, links. Pure but for reading the file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Page:
    """What was found. ``links`` are those to other pages and to headings, ``anchors`` what can be linked to."""

    name: str
    words: int
    blocks: int
    anchors: list[str]
    links: list[str]


def read_page(path: Path) -> Page:
    """Read one page. Raises OSError."""
    text = path.read_text("utf-8")
    prose = _FENCE.sub("", text)
    links = [link for link in _LINK.findall(prose) if ".md" in link or link.startswith("#")]
    return Page(
        path.name,
        len(prose.split()),
        len(_FENCE.findall(text)),
        [anchor(heading) for heading in _HEADING.findall(prose)],
        [link for link in links if "/" not in link],
    )


def anchor(heading: str) -> str:
    """How a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
