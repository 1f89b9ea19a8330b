"""Which child nodes a manifest has, and which of them lead back to it."""

from __future__ import annotations

import json
from typing import Any

from fencepost_server.domain.child_cycles import ChildPlace, child_nodes, cycles
from fencepost_server.domain.manifest import parse_manifest
from fencepost_server.domain.nodes import ChildNode, iter_nodes


def step(n: int) -> dict[str, Any]:
    return {"id": f"s{n}", "step": "s", "schema_check": "runtime"}


def child(n: int, workflow: str) -> dict[str, Any]:
    return {"id": f"c{n}", "workflow": workflow}


def canonical(*nodes: dict[str, Any]) -> str:
    return parse_manifest(json.dumps({"id": "a", "compatibility_id": "1", "sequence": nodes})).canonical


def test_child_nodes_are_found_wherever_nodes_stand_and_nowhere_else() -> None:
    text = canonical(
        {**step(1), "output_schema": {"enum": [{"workflow": "no"}], "properties": {"workflow": {"type": "string"}}}},
        child(1, "one"),
        {"id": "m", "map": {"over": "", "do": [child(2, "two"), {"id": "q", "map": {"over": "", "do": [step(9)]}}]}},
        {"id": "p", "parallel": [[step(2), child(3, "three")], [step(3)]]},
        {
            "id": "x",
            "choose": [
                {"when": {"at": "/a", "eq": 1}, "do": [child(4, "four")]},
                {"otherwise": [{"id": "y", "parallel": [[child(5, "five")]]}]},
            ],
        },
    )
    found = child_nodes(text)
    assert [place.workflow_id for place in found] == ["one", "two", "three", "four", "five"]
    manifest = parse_manifest(text)
    nodes = [
        ChildPlace(f"{path}/workflow", n.workflow) for n, path in iter_nodes(manifest.nodes) if isinstance(n, ChildNode)
    ]
    assert list(found) == nodes
    assert {place.workflow_id for place in found} == manifest.children
    assert child_nodes(canonical(step(1))) == ()


def test_each_child_that_leads_back_is_told_with_its_place_and_the_shortest_way() -> None:
    children = [ChildPlace(f"/{n}", name) for n, name in enumerate(["a", "b", "c", "d", "e", "nobody"])]
    others = {
        "b": frozenset({"c", "d"}),
        "c": frozenset({"d", "e"}),
        "d": frozenset({"a", "e"}),
        "e": frozenset({"e", "nobody"}),
    }
    assert [(fault.path, fault.message.partition(": ")[2]) for fault in cycles("a", children, others)] == [
        ("/0", "a → a"),
        ("/1", "a → b → d → a"),
        ("/2", "a → c → d → a"),
        ("/3", "a → d → a"),
    ]


def test_of_a_long_way_the_beginning_and_the_end_are_told() -> None:
    others = {f"w{n}": frozenset({f"w{n + 1}"}) for n in range(999)} | {"w999": frozenset({"a"})}
    (fault,) = cycles("a", [ChildPlace("/x", "w0")], others)
    assert "a → w0 → w1" in fault.message
    assert fault.message.endswith("w998 → w999 → a")
    assert len(fault.message) < 300
