"""Follows a page as somebody would who has just found it: saves its files, types its commands, and compares what
they print with what the page shows.

Commands run in a folder of the reader's own, in which `.venv` and `examples` are this checkout's. Addresses on the
page are those of a server with default settings; they are replaced by those of the test's server. Variables and
functions of one block are known in the next, as in a terminal.

Printed text is compared line by line. Ids, times and durations differ each time: any other one will do. `…`
stands for anything in its line, and alone in a line for any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.docs.pages import ROOT, Block, blocks, hastened
from tests.fixtures.processes import Process, environment

# Of a command that hangs: one that starts a PostgreSQL may take half a minute where all CPUs are busy.
COMMAND_TIMEOUT = 120.0
UNTIL_TIMEOUT = 120.0

_ALIKE = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "(id)"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?"), "(time)"),
)

# Kept from block to block: variables and functions, but for what bash itself made read-only.
_REMEMBER = """
_remember() { { declare -p | grep -Ev '^declare -[A-Za-z-]*r'; declare -f; } > "$READER_STATE"; }
trap _remember EXIT
"""


def alike(text: str) -> str:
    """``text`` without what differs each time."""
    for pattern, name in _ALIKE:
        text = pattern.sub(name, text)
    return text


def shows(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows."""
    lines = [line.rstrip() for line in alike(shown).strip("\n").split("\n")]
    parts = []
    for line in lines:
        if line.strip() == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(".*".join(re.escape(part) for part in line.split("…")) + r"[^\S\n]*\n")
    return re.fullmatch("".join(parts), alike(printed).strip("\n") + "\n") is not None


class Reader:
    """One reader of one page. ``places`` maps what pages say to what it is here, ``variables`` are the terminal's."""

    def __init__(
        self,
        folder: Path,
        places: Mapping[str, str],
        adopt: Callable[[Process], None],
        *,
        variables: Mapping[str, str] | None = None,
        programs: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._places = places
        self._adopt = adopt
        self._started: list[Process] = []
        self._printed = ""
        self._state = folder / ".state"
        folder.mkdir()
        for name, target in ((".venv", Path(sys.prefix)), ("examples", ROOT / "examples")):
            (folder / name).symlink_to(target, target_is_directory=True)
        path = [str(Path(sys.prefix) / "bin"), *programs, os.environ.get("PATH", "")]
        self._variables = {
            "PATH": os.pathsep.join(path),
            "READER_STATE": str(self._state),
            "NO_COLOR": "1",
            "COLUMNS": "120",
            **(variables or {}),
        }

    def follow(self, page: str) -> list[Block]:
        """Do all that a page says, in order; then end what was started. Returns its blocks.

        Raises AssertionError where the page is wrong.
        """
        found = blocks(page)
        for block in found:
            self.do(block)
        for process in reversed(self._started):
            if process.running:
                assert process.terminate() == 0, process.logs
            else:
                assert process.returncode == 0, process.logs
        return found

    def do(self, block: Block) -> None:
        """Do what one block says."""
        match block.kind:
            case "file":
                path = self._folder / block.value
                path.parent.mkdir(parents=True, exist_ok=True)
                slow, quick = hastened(block)
                text = block.text.replace(slow, quick) if slow else block.text
                path.write_text(self._here(text), "utf-8")
            case "run":
                self._run(block)
            case "start":
                self._start(block)
            case "output":
                printed = self._printed
                assert shows(self._here(block.text), printed), (
                    f"{block} shows\n{block.text}\nbut this was printed\n{printed}"
                )
            case _:
                pass  # pictures, and what other tests cover

    def _here(self, text: str) -> str:
        for said, meant in self._places.items():
            text = text.replace(said, meant)
        return text

    def _run(self, block: Block) -> None:
        script = self._here(block.text)
        if self._state.exists():
            script = f'. "$READER_STATE"\n{script}'
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", _REMEMBER + script],
            cwd=self._folder,
            env=environment(self._variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        wanted = int(block.options.get("exit", "0"))
        assert done.returncode == wanted, (
            f"{block} ended with {done.returncode}, not {wanted}:\n{block.text}\n{done.stdout}\n{done.stderr}"
        )
        self._printed = done.stdout + (done.stderr if wanted else "")

    def _start(self, block: Block) -> None:
        log = self._folder / f"terminal-{len(self._started)}.log"
        argv = ["/bin/bash", "-c", f"exec {self._here(block.text).strip()}"]
        process = Process(argv, log, variables=self._variables, cwd=self._folder)
        self._adopt(process)
        process.start()
        self._started.append(process)
        until = block.options.get("until")
        if until:
            process.wait_logged(self._here(until), UNTIL_TIMEOUT)
            self._printed = process.logs
