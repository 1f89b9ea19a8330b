"""Fixtures of all tests; each plugin says what it offers. docs/hacking.md tells how tests are laid out."""

from __future__ import annotations

import signal

# Whoever runs tests in the background may have had these ignored, and every process that a test starts would
# inherit that: none of them could be interrupted.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

pytest_plugins = [
    "tests.fixtures.hygiene",
    "tests.fixtures.databases",
    "tests.fixtures.pooler",
    "tests.fixtures.processes",
    "tests.fixtures.servers",
    "tests.fixtures.proxy",
]
