"""What is told about two manifests that differ."""

from __future__ import annotations

import json

import pytest

from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.manifest_diff import MAX_DIFFERENCES, difference


def nodes(*ids: str, **more: object) -> dict[str, object]:
    """Return a value with nodes of these ids."""
    return {"sequence": [{"id": name, "step": name} for name in ids], **more}


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 1}, {"a": True}, ["/a: 1 → true"]),
        ({"a": "30s"}, {}, ['/a: "30s" → not set']),
        ({}, {"a/b": [1]}, ["/a~1b: not set → [1]"]),
        ({"a": {"b": 0.5, "c": 1}}, {"a": {"b": 100, "c": 1}}, ["/a/b: 0.5 → 100"]),
        ({"a": {}}, {"a": []}, ["/a: {} → []"]),
        ({"enum": [1, 2]}, {"enum": [1, 3, 4]}, ["/enum/1: 2 → 3", "/enum/2: not set → 4"]),
        ({"enum": [1, 2]}, {"enum": [1]}, ["/enum/1: 2 → not set"]),
        ({"a": "x" * 100}, {"a": "y"}, ['/a: "' + "x" * 59 + '… → "y"']),
        (nodes("a", "c"), nodes("a", "b", "c"), ['/sequence/1: new node "b"']),
        (nodes("a", "b", "c"), nodes("c"), ['/sequence: without ["a", "b"]']),
        (nodes("a", "b"), nodes("b", "a"), ['/sequence: order ["a", "b"] → ["b", "a"]']),
        (
            {"sequence": [{"id": "a", "step": "x"}, {"id": "b", "step": "y"}]},
            {"sequence": [{"id": "new", "step": "z"}, {"id": "b", "step": "w"}]},
            ['/sequence: without ["a"]', '/sequence/0: new node "new"', '/sequence/1/step: "y" → "w"'],
        ),
    ],
)
def test_differences_are_listed_by_path(old: object, new: object, lines: list[str]) -> None:
    assert difference(canonical_value(old), canonical_value(new)) == lines


def test_the_list_is_limited() -> None:
    lines = difference("{}", json.dumps({str(n): n for n in range(200)}))
    assert len(lines) == MAX_DIFFERENCES + 1
    assert lines[-1] == "and 150 more"
