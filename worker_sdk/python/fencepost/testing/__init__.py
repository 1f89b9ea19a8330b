"""The test kit: a whole server in the test's process, time that skips, and histories replayed.

Needs the server and its embedded PostgreSQL, which the SDK itself does not: install ``fencepost[testing]``. (Replaying
needs neither.) With pytest, the fixture `fencepost_env` is there by itself.
"""

from __future__ import annotations

from fencepost.testing.async_environment import AsyncEnvironment
from fencepost.testing.environment import Environment
from fencepost.testing.histories import HistoryUnreadable
from fencepost.testing.kit import KitMissing, Stalled
from fencepost.testing.replaying import Replay, Replayer
from fencepost.testing.server import TestServer

__all__ = [
    "AsyncEnvironment",
    "Environment",
    "HistoryUnreadable",
    "KitMissing",
    "Replay",
    "Replayer",
    "Stalled",
    "TestServer",
]
