"""The workflow that is measured: a sequence of steps that do nothing, as every peer runs it.

Each step takes {"n": i} and returns {"n": i + 1}, so that a run's output tells whether each step ran once.
"""

from __future__ import annotations

from typing import Any

from benchmarks.plan import STEPS

WORKFLOW = "bench"
INPUT = {"n": 0}
UNDONE, UNDO, REFUSE, ITEM = "bench.undone", "bench.undo", "bench.refuse", "bench.item"
"""Handlers of the benchmarks `undo` and `fanout`."""


def node_id(index: int) -> str:
    """The node of a step, from 0."""
    return f"n{index + 1}"


def handler_name(index: int) -> str:
    """The handler of a step, from 0."""
    return f"bench.s{index + 1}"


def manifest(workflow: str = WORKFLOW, queue: str = "default") -> dict[str, Any]:
    """The definition, as it is registered."""
    nodes = [{"id": node_id(index), "step": handler_name(index), "queue": queue} for index in range(STEPS)]
    return {"id": workflow, "compatibility_id": "1", "sequence": nodes}
