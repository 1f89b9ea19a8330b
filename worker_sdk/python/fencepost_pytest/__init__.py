"""The pytest plugin of `fencepost.testing`: the fixture `fencepost_env`.

pytest imports this in every project of an environment in which the SDK is installed, so it is a package of its own and
imports nothing: what a test needs is loaded by the first test that needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fencepost.testing import AsyncEnvironment, Environment

MARKER = "fencepost"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", f"{MARKER}(**options): what TestServer.start takes, for the fixture fencepost_env"
    )


@pytest.fixture
def fencepost_env(request: pytest.FixtureRequest) -> Iterator[AsyncEnvironment | Environment]:
    """A server of the test's own, with time that skips: an `AsyncEnvironment` for ``async def`` tests, whichever
    plugin runs them, an `Environment` for others.

    ``@pytest.mark.fencepost(auto_skip=False)`` gives options to `TestServer.start`; the closest marker decides each.
    """
    from fencepost.testing import TestServer

    options: dict[str, object] = {}
    for marker in request.node.iter_markers(MARKER):
        if marker.args:
            raise pytest.UsageError(f"marker {MARKER} takes options by name, such as auto_skip=False: {marker.args}")
        options = {**marker.kwargs, **options}
    starting = TestServer.start(**options)  # type: ignore[arg-type]  # whoever wrote the marker is told at run time
    if inspect.iscoroutinefunction(request.function):
        yield starting.begin_async()
        starting.end()
        return
    with starting as environment:
        yield environment
