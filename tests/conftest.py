"""Fixtures of all tests; each plugin says what it offers. docs/hacking.md tells how tests are laid out."""

from __future__ import annotations

import os
import signal
import sys

# Tests start thousands of Python processes. Where bytecode isn't to be written, each of them would compile all that it
# imports: a server takes thrice as long to start, and each test worker to collect.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Whoever runs tests in the background may have had these ignored, and every process that a test starts would
# inherit that: none of them could be interrupted.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

pytest_plugins = [
    "tests.fixtures.collecting",
    "tests.fixtures.hygiene",
    "tests.fixtures.databases",
    "tests.fixtures.pooler",
    "tests.fixtures.processes",
    "tests.fixtures.servers",
    "tests.fixtures.proxy",
]
