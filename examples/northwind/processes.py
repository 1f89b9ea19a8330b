"""Processes that the demo starts, and ends by their pid: the server and the workers.

Each has a process group of its own, so that Ctrl-C in a terminal reaches the demo alone, which then ends them in order.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fencepost_server.leash import leashed

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT = 5.0  # each of them is quick to end, unless what it needs for that has failed
LINES_SHOWN = 15


class ProcessEnded(Exception):
    """A process has ended by itself, or does not do what it is there for; the message has the end of its log."""


class PythonProcess:
    """A Python module that runs as a process; what it prints goes to ``log``."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        self._may_end = False
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                # On a leash: should the demo itself be killed, the kernel ends this process too.
                leashed([sys.executable, "-m", *arguments], at_death=signal.SIGTERM),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def check(self) -> None:
        """Raise ProcessEnded if it has ended by itself."""
        if not self._may_end and self._process.poll() is not None:
            raise self.failure(f"has ended with {self._process.returncode}")

    def failure(self, what: str) -> ProcessEnded:
        """An error about it, with the end of its log."""
        end = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
        return ProcessEnded("\n  ".join([f"{self.name} {what}; its last lines were:", *end]))

    def wait_for_line(self, beginning: str, timeout: float) -> str:
        """Wait until it has printed a whole line that begins so. Raises ProcessEnded."""
        give_up = time.monotonic() + timeout
        while True:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines(keepends=True):
                if line.startswith(beginning) and line.endswith("\n"):
                    return line
            self.check()
            if time.monotonic() > give_up:
                raise self.failure(f"was not ready within {timeout:g} s")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: it ends at once, whatever it is doing, and can tell nobody."""
        self._may_end = True
        self._process.kill()
        self._process.wait(END_TIMEOUT)

    def ask_to_end(self) -> None:
        """SIGTERM: it finishes what it is doing, and ends."""
        self._may_end = True
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # in case it is stopped

    def wait_for_end(self) -> None:
        """Wait until it has ended; if it takes too long, kill it."""
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()


class Processes:
    """The processes of the demo. They log to ``folder``, and are ended when the block ends.

    The first one, the server, ends last: the others still have to tell it what they have done.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[PythonProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in (self._all[1:], self._all[:1]):
            for process in group:
                process.ask_to_end()
            for process in group:
                process.wait_for_end()

    def start(self, name: str, *arguments: str) -> PythonProcess:
        """Start a Python module; ``arguments`` begin with its name."""
        process = PythonProcess(name, arguments, self._folder / f"{name}.log")
        self._all.append(process)
        return process

    def check(self) -> None:
        """Raise ProcessEnded if one of them has ended that was not killed."""
        for process in self._all:
            process.check()
