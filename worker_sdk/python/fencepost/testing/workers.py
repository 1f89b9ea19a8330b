"""Workers for environments: with what suits a test where the test does not say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fencepost.steps import Step
from fencepost.worker import Worker

_DRAIN_TIMEOUT = 2.0


def make_worker(
    address: str, steps: Sequence[Step[..., Any]], workflows: Sequence[Any], options: Mapping[str, Any]
) -> Worker:
    """A worker that does not run yet."""
    return Worker(address, steps, **{"drain_timeout": _DRAIN_TIMEOUT, **options})
