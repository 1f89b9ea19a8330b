"""What differs between two manifests, for a deployer who is refused because of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fencepost_server.domain.jsontext import canonical_value, parse
from fencepost_server.domain.violation import pointer, shown

MAX_DIFFERENCES = 50
"""So many are listed unless somebody asks for more; a last line tells how many more there are."""


def difference(old: str, new: str, most: int = MAX_DIFFERENCES) -> list[str]:
    """Return the differences between two canonical manifests, one line each: path, old value → new value.

    Nodes are compared by their id, so that one that was put in does not make all that follow differ; their
    paths are those of the new manifest. [] means that the two are equal.
    """
    lines = list(_compare("", parse(old), parse(new)))
    more = len(lines) - most
    return [*lines[:most], f"and {more} more"] if more > 0 else lines


def _compare(path: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            below = path + pointer((key,))
            if key not in old:
                yield f"{below}: not set → {shown(new[key])}"
            elif key not in new:
                yield f"{below}: {shown(old[key])} → not set"
            else:
                yield from _compare(below, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        old_nodes, new_nodes = _by_id(old), _by_id(new)
        if old_nodes is not None and new_nodes is not None:
            yield from _compare_nodes(path, old_nodes, new_nodes)
        else:
            yield from _compare_items(path, old, new)
    elif canonical_value(old) != canonical_value(new):
        yield f"{path}: {shown(old)} → {shown(new)}"


def _compare_items(path: str, old: list[object], new: list[object]) -> Iterator[str]:
    for index in range(max(len(old), len(new))):
        if index >= len(old):
            yield f"{path}/{index}: not set → {shown(new[index])}"
        elif index >= len(new):
            yield f"{path}/{index}: {shown(old[index])} → not set"
        else:
            yield from _compare(f"{path}/{index}", old[index], new[index])


def _compare_nodes(path: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    gone = [name for name in old if name not in new]
    if gone:
        yield f"{path}: without {shown(gone)}"
    for index, (name, node) in enumerate(new.items()):
        if name in old:
            yield from _compare(f"{path}/{index}", old[name], node)
        else:
            yield f"{path}/{index}: new node {shown(name)}"
    before, after = [name for name in old if name in new], [name for name in new if name in old]
    if before != after:
        yield f"{path}: order {shown(before)} → {shown(after)}"


def _by_id(items: list[object]) -> dict[str, object] | None:
    """Return the items by their ids, or None if they are not all objects with an id of their own."""
    named: dict[str, object] = {
        item["id"]: item for item in items if isinstance(item, dict) and isinstance(item.get("id"), str)
    }
    return named if items and len(named) == len(items) else None
