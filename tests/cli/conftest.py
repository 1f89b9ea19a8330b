"""The fixture `fencepost`."""

from __future__ import annotations

import pytest

from tests.cli.program import Program
from tests.fixtures.servers import InProcessServer


@pytest.fixture
def fencepost(server: InProcessServer) -> Program:
    """Runs commands against `server`: ``await fencepost("runs", "list", "--json")``."""
    return Program(server.grpc_address)
