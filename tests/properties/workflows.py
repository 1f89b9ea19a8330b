"""The workflows that the state machine runs: small, and between them every kind of node but children.

Times are either nothing or longer than any test. ``PLAIN`` has nothing but steps, for servers that know no more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

Manifest = Mapping[str, Any]

LEASE = "1d"
AT_ONCE = {"initial_delay": "0s", "jitter": 0, "max_attempts": 2, "max_corrective_attempts": 2}
LATER = {"initial_delay": "1h", "max_delay": "1d", "jitter": 0, "max_attempts": 3}


def step(node_id: str, *, undo: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A step node whose handler is its id with ``do-`` before it, and ``undo-`` for its undoing."""
    node: dict[str, Any] = {"id": node_id, "step": f"do-{node_id}", "lease": LEASE, "retry": AT_ONCE, **more}
    if undo is not None:
        node["undo"] = {"step": f"undo-{node_id}", "lease": LEASE, "retry": AT_ONCE, **undo}
    return node


def workflow(workflow_id: str, *nodes: Mapping[str, Any], **more: Any) -> Manifest:
    """A manifest of a sequence."""
    return {"id": workflow_id, "compatibility_id": "1", **more, "sequence": list(nodes)}


PLAIN = (
    workflow("one", step("a")),
    workflow("two", step("a", output_schema={"type": "object"}), step("b", retry=LATER)),
    workflow("three", step("a", retry={**AT_ONCE, "max_attempts": 1}), step("b"), step("c", retry=LATER)),
)
UNDO = (
    workflow("undo", step("a", undo={}), step("b", undo={"undo_unfinished": True}), step("c", undo={})),
    workflow("mixed", step("a", undo={}), step("b"), step("c", undo={"undo_unfinished": True})),
)
PARALLEL = (
    workflow(
        "parallel",
        {"id": "both", "parallel": [[step("a", undo={}), step("b")], [step("c", undo={"undo_unfinished": True})]]},
        step("d", undo={}),
    ),
)
MAP = (
    workflow(
        "map",
        {"id": "each", "map": {"over": "/items", "do": [step("a", undo={})], "max_parallel": 2}},
        step("b"),
    ),
)
CHOOSE = (
    workflow(
        "choose",
        {
            "id": "way",
            "choose": [
                {"when": {"at": "/way", "eq": 1}, "do": [step("a", undo={}), step("b")]},
                {"when": {"at": "/way", "gt": 1}, "do": [step("c")]},
            ],
        },
        step("d"),
    ),
)
WAITS = (
    workflow(
        "waits",
        step("a", undo={}),
        {"id": "nap", "sleep": "30d"},
        {"id": "go", "wait_signal": "go", "timeout": "30d"},
        step("b"),
    ),
    workflow(
        "signals",
        {"id": "first", "wait_signal": "go"},
        {"id": "blink", "sleep": "1ms"},
        {"id": "second", "wait_signal": "go"},
        step("a"),
    ),
)
LIMITS = (
    workflow(
        "limits",
        step("a", undo={}, queue_timeout="1d"),
        step("b", total_timeout="1d", undo={"undo_unfinished": True}),
        step("c"),
    ),
)
NESTED = (
    workflow(
        "nested",
        {
            "id": "each",
            "map": {
                "over": "/items",
                "max_parallel": 3,
                "do": [
                    {
                        "id": "way",
                        "choose": [
                            {
                                "when": {"at": "", "eq": 1},
                                "do": [
                                    {
                                        "id": "both",
                                        "parallel": [
                                            [step("a", undo={})],
                                            [{"id": "go", "wait_signal": "go"}, step("b", undo={})],
                                        ],
                                    }
                                ],
                            },
                            {"otherwise": [{"id": "nap", "sleep": "30d"}]},
                        ],
                    }
                ],
            },
        },
    ),
)
INPUT = (
    workflow(
        "input",
        step("a", undo={}),
        step("b", undo={}, input={"way": {"$from": "#/way"}, "before": [{"$from": "a#"}]}),
        step("c", input={"$from": "a#/items"}),
    ),
)
WHOLE = (*INPUT, *UNDO, *PARALLEL, *MAP, *CHOOSE, *WAITS, *LIMITS, *NESTED)
INPUTS = ({"way": 1, "items": []}, {"way": 2, "items": [1, 2]}, {"way": 0, "items": [2, 1, 3]}, {"items": None})


def handlers(manifest: Manifest) -> frozenset[str]:
    """The names that a worker has to offer for a workflow."""
    return frozenset(_handlers(manifest["sequence"]))


def _handlers(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("step"), str):
            yield value["step"]
        for inner in value.values():
            yield from _handlers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _handlers(inner)


@functools.cache
def all_handlers() -> tuple[str, ...]:
    """The names of all workflows here."""
    return tuple(sorted(frozenset().union(*map(handlers, (*PLAIN, *WHOLE)))))
