"""Workers for environments: with what suits a test where the test does not say otherwise."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fencepost.steps import Step
from fencepost.testing.always_replaying import AlwaysReplaying
from fencepost.testing.kit import Stalled
from fencepost.worker import Worker
from fencepost.workflow import Workflow

_DRAIN_TIMEOUT = 2.0
_CONNECT_TIMEOUT = 30.0
_PAUSE = 0.002


class Patience:
    """How long a worker may take to connect."""

    def __init__(self) -> None:
        self._end = time.monotonic() + _CONNECT_TIMEOUT

    def pause(self) -> float:
        """How many seconds to wait for it before the next look. Raises Stalled when that has been enough."""
        if time.monotonic() > self._end:
            raise Stalled(f"the worker has not connected within {_CONNECT_TIMEOUT:g} s; its log says why")
        return _PAUSE


def make_worker(
    address: str, steps: Sequence[Step[..., Any]], workflows: Sequence[Workflow[..., Any]], options: Mapping[str, Any]
) -> Worker:
    """A worker that does not run yet. ``options`` are its own and ``always_replay``."""
    always_replay = bool(options.get("always_replay"))
    given = {name: value for name, value in options.items() if name != "always_replay"}
    if always_replay:
        given["workflow_cache"] = 0
    worker = Worker(address, steps, workflows=workflows, **{"drain_timeout": _DRAIN_TIMEOUT, **given})
    if always_replay:
        worker._decider = AlwaysReplaying
    return worker
