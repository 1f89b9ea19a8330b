"""Runs `fencepost` as people do: the installed program, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fixtures.processes import environment

PROGRAM = Path(sys.executable).with_name("fencepost")
# Of a command that hangs: one that makes a database takes half a minute where all CPUs are busy.
TIMEOUT = 120.0
_PRESSES, _NOTICED_WITHIN = 3, 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[Any]:
        """The lines of standard output as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def document(self) -> Any:
        """The only line of standard output as JSON."""
        (document,) = self.documents
        return document

    @property
    def error(self) -> str:
        """Standard error after making sure that it is no traceback and the command failed."""
        assert self.code != 0, self
        assert "Traceback" not in self.err, self.err
        return self.err


def run(*arguments: str, stdin: str = "", **variables: str) -> Result:
    """Run a command to its end, blocking."""
    done = subprocess.run(
        [PROGRAM, *arguments],
        input=stdin.encode(),
        env=environment(variables),
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


class Program:
    """Runs commands against one server, while the test's event loop serves."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __call__(self, *arguments: str, stdin: str = "", **variables: str) -> Result:
        """Run a command to its end."""
        process = await self.start(*arguments, **variables)
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), TIMEOUT)
        assert process.returncode is not None
        return Result(process.returncode, out.decode(), err.decode())

    async def start(self, *arguments: str, **variables: str) -> asyncio.subprocess.Process:
        """Start a command; the test sees to its end."""
        return await asyncio.create_subprocess_exec(
            PROGRAM,
            *arguments,
            env=environment({"FENCEPOST_ADDRESS": self.address, **variables}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def on_terminal(
        self, *arguments: str, columns: int = 120, typed: str = "", interrupted_at: str = ""
    ) -> Result:
        """Run a command on a terminal to its end; what it writes is all in ``out``, as is what was ``typed``. It gets
        a SIGINT, as by Ctrl-C, when it has written ``interrupted_at``, and another one as long as it takes no notice.
        """
        controller, terminal = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *arguments,
            env=environment({"FENCEPOST_ADDRESS": self.address, "COLUMNS": str(columns), "TERM": "xterm-256color"}),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        try:
            os.write(controller, typed.encode())
            written = ""
            if interrupted_at:
                written = await asyncio.wait_for(asyncio.to_thread(_read, controller, interrupted_at), TIMEOUT)
                await _interrupt(process)
            written += await asyncio.wait_for(asyncio.to_thread(_read, controller), TIMEOUT)
            return Result(await asyncio.wait_for(process.wait(), TIMEOUT), written, "")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(controller)


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Press Ctrl-C until the process has ended. Python looks at a signal that comes in the very moment before it begins
    to read from the terminal only after it has read something, so that one may not be enough.
    """
    for _ in range(_PRESSES):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _NOTICED_WITHIN)
            return


def _read(descriptor: int, until: str = "") -> str:
    """All that comes, or what comes up to a certain text."""
    chunks: list[bytes] = []
    while not until or until.encode() not in b"".join(chunks):
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the last process that had the terminal open has gone
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode(errors="replace")
