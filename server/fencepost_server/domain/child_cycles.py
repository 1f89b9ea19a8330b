"""Cycles of workflows that run each other as children: a run of one would start runs without end.

`child_nodes` reads canonical manifests, so that it serves stored ones without checking them anew. `cycles` is given
what was found of the others and knows nothing of where it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fencepost_server.domain.violation import Violation

CHILD_MARK = '"workflow":'
"""A canonical manifest without this text has no child node."""

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ChildPlace:
    """Where a manifest names the workflow of a child: a JSON Pointer, and the workflow's id."""

    path: str
    workflow_id: str


def child_nodes(canonical: str) -> tuple[ChildPlace, ...]:
    """All child nodes of a valid manifest in its canonical form, wherever they stand, in the order of the text."""
    if CHILD_MARK not in canonical:
        return ()
    return tuple(_of_sequence(json.loads(canonical)["sequence"], "/sequence"))


def _of_sequence(nodes: Sequence[Mapping[str, object]], path: str) -> Iterator[ChildPlace]:
    for index, node in enumerate(nodes):
        place = f"{path}/{index}"
        if isinstance(workflow_id := node.get("workflow"), str):
            yield ChildPlace(f"{place}/workflow", workflow_id)
        for body, where in _bodies(node, place):
            yield from _of_sequence(body, where)


def _bodies(node: Mapping[str, object], path: str) -> Iterator[tuple[Sequence[Mapping[str, object]], str]]:
    """The sequences directly inside a node."""
    if isinstance(branches := node.get("parallel"), list):
        for index, branch in enumerate(branches):
            yield branch, f"{path}/parallel/{index}"
    if isinstance(mapped := node.get("map"), dict):
        yield mapped["do"], f"{path}/map/do"
    if isinstance(cases := node.get("choose"), list):
        for index, case in enumerate(cases):
            key = "do" if "do" in case else "otherwise"
            yield case[key], f"{path}/choose/{index}/{key}"


def cycles(
    workflow_id: str, children: Sequence[ChildPlace], others: Mapping[str, AbstractSet[str]]
) -> tuple[Violation, ...]:
    """A fault for each child node of a workflow that leads back to it, with the shortest way.

    ``others`` has, for each workflow that can be reached, the ids of its children; one that is missing has none.
    """
    parents: dict[str, list[str]] = {}
    for parent, found in others.items():
        for child in found:
            parents.setdefault(child, []).append(parent)
    onward = {workflow_id: ""}  # workflow → the next one on the shortest way to workflow_id
    front = [workflow_id]
    while front:
        further = []
        for child in front:
            for parent in sorted(parents.get(child, ())):
                if parent not in onward:
                    onward[parent] = child
                    further.append(parent)
        front = further
    return tuple(
        Violation(
            place.path, f"the workflow would be a child of itself: {_way(workflow_id, place.workflow_id, onward)}"
        )
        for place in children
        if place.workflow_id in onward
    )


def _way(workflow_id: str, first: str, onward: Mapping[str, str]) -> str:
    """``a → b → a``; of a long way the beginning and the end."""
    way = [workflow_id, first]
    while way[-1] != workflow_id:
        way.append(onward[way[-1]])
    if len(way) > _SHOWN:
        way[_SHOWN // 2 : -_SHOWN // 2] = ["…"]
    return " → ".join(way)
