"""What flows through a graph: whether each node takes what the one before it gives, as far as schemas tell.

A node's input is what the node before it in its sequence gives; the first node of a branch or of a case gets
the container's input, that of a map's body an item of the array at `over`. What is given may be one of
several things, after a choice or a sleep behind one: each of them has to be taken. What is given by a part
of the manifest that has faults is not compared, so that one fault is told once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from fencepost_server.domain.json_pointer import parse_pointer
from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.manifest_reader import Faults
from fencepost_server.domain.nodes import (
    ChildNode,
    ChooseNode,
    MapNode,
    Node,
    ParallelNode,
    SignalNode,
    SleepNode,
    StepNode,
)
from fencepost_server.domain.schema_compose import Composer, NoArray
from fencepost_server.domain.schema_match import WorkBudget, mismatch
from fencepost_server.domain.violation import shown

# Work for the comparison of all schemas of one manifest: a second or two at the worst.
_MATCHING_WORK = 200_000
# To compare what is equal takes time too. It is charged where containers make more of few schemas: a million pairs
# of small ones, or a large one that is composed or that many branches take. In a plain sequence each schema meets
# one other, and what was registered when there was nothing else costs what it did.
_STEPS_PER_PAIR = 3
_CHARS_PER_STEP = 100
_SCHEMAS_PER_STEP = 2
_TOO_MUCH = "the schemas are too large or too entangled to compare"


@dataclass(frozen=True, slots=True)
class _Given:
    """One thing that may be given: the place and name of its giver, and its schema (None: not known).

    `unchecked`: its giver leaves it to run time whether it is what the workflow returns. `composed`: the schema is
    not one that the manifest has.
    """

    path: str
    schema: object | None
    what: str
    unchecked: bool = False
    composed: bool = False


_Flow = tuple[_Given, ...]
"""What may be given at one place; nothing means that it is not known what, because of faults."""


def match_schemas(
    input_schema: object | None,
    output_schema: object | None,
    nodes: tuple[Node, ...],
    unread: Collection[str],
    faults: Faults,
) -> None:
    """Note where one side gives what the next one does not take.

    `unread` has the paths of nodes, and of `over` of maps, that have faults and tell nothing of what they give.
    """
    matcher = _Matcher(unread, faults)
    given = matcher.known(_Given("/input_schema", input_schema, "the input of the workflow"))
    for result in matcher.through(nodes, "/sequence", given):
        if not result.unchecked:
            matcher.compare((result,), "/output_schema", output_schema)


class _Matcher:
    def __init__(self, unread: Collection[str], faults: Faults) -> None:
        self._unread = unread
        self._faults = faults
        self._budget = WorkBudget(_MATCHING_WORK)
        self._composer = Composer(self._budget)
        # By identity, with the schema, so that no other one gets its identity while this lives.
        self._texts: dict[int, tuple[object, str]] = {}
        self._met: set[str] = set()
        self._reasons: dict[tuple[str, str], str | None] = {}

    def known(self, given: _Given) -> _Flow:
        """Return what is given, or nothing if its schema has faults."""
        return () if given.path in self._faults.bad_schemas else (given,)

    def through(self, nodes: tuple[Node, ...], path: str, given: _Flow) -> _Flow:
        """Compare all in a sequence that gets `given`; return what its last node gives."""
        if not nodes:
            return ()
        for index, node in enumerate(nodes):
            given = self._through_node(node, f"{path}/{index}", given)
        return given

    def compare(self, given: _Flow, path: str, taken: object | None) -> None:
        """Note what of `given` is not taken by the schema at `path`."""
        if path in self._faults.bad_schemas or taken is None:
            return
        for one in given:
            alone = len(given) == 1 and not one.composed and one.path not in self._met
            self._met.add(one.path)
            reason = mismatch(one.schema, taken, self._budget) if alone else self._reason(one.schema, taken)
            if reason is not None and one.schema is None and not one.composed:
                self._faults.add(path, f"does not take {one.what}: may be anything ({one.path} is not set)")
            elif reason is not None:
                self._faults.add(path, f"does not take {one.what} ({one.path}): {reason}")

    def _through_node(self, node: Node, path: str, given: _Flow) -> _Flow:
        if path in self._unread:
            return ()
        name = node.id or path
        match node:
            case StepNode() | ChildNode():
                if node.schema_check == "strict" and node.input is None:
                    self.compare(given, f"{path}/input_schema", node.input_schema)
                runtime = node.schema_check == "runtime"
                return self.known(_Given(f"{path}/output_schema", node.output_schema, f"the output of {name}", runtime))
            case SleepNode():
                return given
            case SignalNode():
                what = f"the payload of the signal of {name}"
                return self.known(_Given(f"{path}/output_schema", node.output_schema, what))
            case ParallelNode():
                return self._through_branches(node, path, given)
            case MapNode():
                return self._through_map(node, path, given)
            case ChooseNode():
                return self._through_cases(node, path, given)

    def _through_branches(self, node: ParallelNode, path: str, given: _Flow) -> _Flow:
        members = {}
        unchecked = False
        complete = bool(node.branches)
        for index, branch in enumerate(node.branches):
            results = self.through(branch, f"{path}/parallel/{index}", given)
            if results:
                members[branch[-1].id] = self._composer.any_of([result.schema for result in results])
                unchecked |= any(result.unchecked for result in results)
            else:
                complete = False
        if not complete:
            return ()
        schema = self._composer.object_of(members)
        return (_Given(f"{path}/parallel", schema, f"the output of {node.id or path}", unchecked, True),)

    def _through_map(self, node: MapNode, path: str, given: _Flow) -> _Flow:
        over = f"{path}/map/over"
        items = [] if over in self._unread else [self._item(node, over, one) for one in given]
        inside = _distinct(one for one in items if one is not None)
        results = self.through(node.body, f"{path}/map/do", inside)
        if not results:
            return ()
        schema = self._composer.array_of(self._composer.any_of([result.schema for result in results]))
        unchecked = any(result.unchecked for result in results)
        return (_Given(f"{path}/map", schema, f"the output of {node.id or path}", unchecked, True),)

    def _item(self, node: MapNode, over: str, given: _Given) -> _Given | None:
        what = f"the items at {shown(node.over)} of {given.what}"
        try:
            schema = self._composer.items_at(given.schema, parse_pointer(node.over))
        except NoArray as error:
            self._faults.add(over, f"does not lead to an array in {given.what} ({given.path}): {error}")
            return None
        return replace(given, schema=schema, what=what, unchecked=False, composed=True)

    def _through_cases(self, node: ChooseNode, path: str, given: _Flow) -> _Flow:
        results: list[_Given] = []
        for index, case in enumerate(node.cases):
            key = "otherwise" if case.when is None else "do"
            results.extend(self.through(case.body, f"{path}/choose/{index}/{key}", given))
        if all(case.when is not None for case in node.cases):
            results.extend(given)
        return _distinct(results)

    def _reason(self, given: object | None, taken: object) -> str | None:
        """Return why something is not taken, or None. Equal pairs of schemas are compared once."""
        self._budget.left -= _STEPS_PER_PAIR
        key = (self._text(given), self._text(taken)) if self._budget.left >= 0 else None
        if key is None:
            return _TOO_MUCH
        if key not in self._reasons:
            self._budget.left -= (len(key[0]) + len(key[1])) // _CHARS_PER_STEP
            self._reasons[key] = _TOO_MUCH if self._budget.left < 0 else mismatch(given, taken, self._budget)
        return self._reasons[key]

    def _text(self, schema: object | None) -> str:
        """Return the canonical text of a schema, which is made once; "" for None."""
        if not isinstance(schema, dict):
            return "" if schema is None else canonical_value(schema)
        if id(schema) not in self._texts:
            self._budget.left -= self._composer.weight(schema) // _SCHEMAS_PER_STEP
            self._texts[id(schema)] = (schema, canonical_value(schema))
        return self._texts[id(schema)][1]


def _distinct(given: Iterable[_Given]) -> _Flow:
    """Leave out what stands there before: from the same place, with the same schema."""
    return tuple({(one.path, one.what, id(one.schema)): one for one in given}.values())
