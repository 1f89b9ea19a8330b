"""Fixtures of all tests; each plugin says what it offers. docs/hacking.md tells how tests are laid out."""

from __future__ import annotations

pytest_plugins = [
    "tests.fixtures.hygiene",
    "tests.fixtures.databases",
    "tests.fixtures.processes",
    "tests.fixtures.servers",
    "tests.fixtures.proxy",
]
