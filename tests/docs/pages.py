"""The pages of the documentation as programs: what each fenced block of code is, and what a reader does with it.

The words after a block's language say that (Markdown viewers show only the language):

    ```python file=worker.py      saved under that name; also yaml, json, …; `hasten="sleep(9) -> sleep(0)"`: with that
                                  replaced, for a reader in a hurry
    ```bash run                   typed, and done before the reader goes on; `exit=3` if that is its exit code
    ```bash start                 typed in a terminal of its own, where it runs to the end of the page;
                                  `until="ready"`: the reader goes on when it has printed that
    ```bash server                starts the server that the page talks to
    ```text output                what the block before it has printed
    ```bash make                  typed in a checkout: verbs of the Makefile, which tests of their own cover
    ```bash by=tests/x/test_y.py  needs what a test machine has not; that test knows what can be checked of it

A block in `text` or `mermaid` without any such word is a picture. Any other block is a fault, so that no code is
shown which nobody runs; but for pages that have a test of their own (COVERED).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PICTURES = {"text", "mermaid"}
COVERED = {"docs/cli.md": "tests/cli/test_docs.py"}
"""Pages whose blocks a test of their own runs."""
MARKERS: Mapping[str, frozenset[str]] = {
    "file": frozenset({"hasten"}),
    "run": frozenset({"exit"}),
    "start": frozenset({"until"}),
    "server": frozenset(),
    "output": frozenset(),
    "make": frozenset(),
    "by": frozenset(),
}
"""What a block can be, each with the further words that it may have."""

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n`]*)\n(.*?)^ *\2`*~* *$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. ``kind`` is one of MARKERS, "picture", or "" for a block that says neither."""

    page: str
    line: int
    language: str
    kind: str
    value: str
    options: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The names of all pages: README.md and docs/*.md."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order. Raises ValueError for a fence that is never closed."""
    markdown = (ROOT / page).read_text("utf-8")
    found = [_block(page, markdown, match) for match in _FENCE.finditer(markdown)]
    rest = _FENCE.sub("", markdown)
    if re.search(r"^ *(```|~~~)", rest, re.MULTILINE):
        raise ValueError(f"{page}: a fence is not closed")
    return found


def _block(page: str, markdown: str, match: re.Match[str]) -> Block:
    line = markdown.count("\n", 0, match.start()) + 1
    language, *words = shlex.split(match[3]) or [""]
    options = dict(_pair(word) for word in words)
    text = re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE)
    kind = next((name for name in options if name in MARKERS), "")
    if not words and language in PICTURES:
        kind = "picture"
    value = options.pop(kind, "")
    if page in COVERED and not words:
        kind, value = "by", COVERED[page]
    return Block(page, line, language, kind, value, options, text)


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def fault(block: Block) -> str | None:
    """Why nobody could follow a block; None if somebody can."""
    if block.kind == "picture":
        return None
    if not block.kind:
        return f"{block}: nothing says how this {block.language or 'code'} is tested (see tests/docs/pages.py)"
    unknown = sorted(block.options.keys() - MARKERS[block.kind])
    if unknown:
        return f"{block}: {block.kind} does not know {', '.join(unknown)}"
    if block.kind in {"run", "start", "server", "make"} and block.language != "bash":
        return f"{block}: only bash is typed, not {block.language}"
    if block.kind in {"file", "by"} and not block.value:
        return f"{block}: {block.kind} needs a name"
    if "hasten" in block.options and block.text.count(hastened(block)[0]) != 1:
        return f"{block}: what is hastened must be in it once"
    return None


def hastened(block: Block) -> tuple[str, str]:
    """What takes long in a file, and what a reader in a hurry writes instead; both empty if nothing does."""
    slow, _, quick = block.options.get("hasten", "").partition(" -> ")
    return slow, quick
