"""Whether everything that one JSON Schema lets out is something that another one lets in.

`mismatch` proves, at registration, that the output of a node can be the input of the next. It is meant to be
sound and plain, not complete: None means that each value of the output schema is a value of the input schema;
anything else is a reason, and what cannot be decided is a reason too (a node may leave the check to run
time).

How: the output is a list of facts (see `schema_facts`), and each keyword of the input has to follow from
them. Where that fails, the output is split into cases (the branches of an `anyOf` or `oneOf`, the values of
an `enum`, the types it may have) and each case has to be proved. A keyword of the output that is not
understood only narrows it, so it may be ignored; a keyword of the input must not be. `format` and the content
keywords are annotations here (see `schema`) and decide nothing.

Recursion ends by depth, by a budget of work, or by induction: a question that comes up again deeper inside
the value is taken as answered, because a value has an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fencepost_server.domain import schema_facts as known
from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.schema import CompiledSchema, compile_schema
from fencepost_server.domain.schema_facts import Document, Facts
from fencepost_server.domain.schema_rules import Question, rule_for, say, type_names
from fencepost_server.domain.violation import shown

MAX_DEPTH = 64
"""Questions inside each other, past which a pair of schemas counts as undecided."""
MAX_WORK = 20_000
"""Steps of one comparison, past which a pair of schemas counts as undecided."""

_CHECK_COST = 10
"""Steps that compiling a small schema counts as."""


@dataclass(slots=True)
class WorkBudget:
    """The steps that several comparisons may take together; counted down as they are done."""

    left: int

    def spend(self, steps: int = 1) -> None:
        """Take steps off, or end the comparison that wants more than there are."""
        self.left -= steps
        if self.left < 0:
            raise _TooMuchWork


class _TooMuchWork(Exception):
    """A budget is used up."""


def mismatch(output_schema: object | None, input_schema: object | None, budget: WorkBudget | None = None) -> str | None:
    """Return None if every value of `output_schema` is a value of `input_schema`, else why not, in one line.

    Both are valid schemas as `compile_schema` accepts them, or None: without an input schema everything is
    accepted, without an output schema anything may come. Comparisons with the same `budget` share its steps,
    beside the limit that each has.
    """
    if input_schema is None:
        return None
    if output_schema is None:
        output_schema = True
    elif canonical_value(output_schema) == canonical_value(input_schema):
        return None
    total = budget or WorkBudget(MAX_WORK)
    own = WorkBudget(min(MAX_WORK, total.left))
    given = own.left
    try:
        return _Proof(output_schema, input_schema, own).subset((output_schema,), input_schema, "", 0)
    except _TooMuchWork:
        return "the schemas are too large or too entangled to compare"
    finally:
        total.left -= given - max(own.left, 0)


class _Proof:
    """One comparison: the two documents, the steps left, and the questions that are open."""

    def __init__(self, output_root: object, input_root: object, budget: WorkBudget) -> None:
        self._output = Document(output_root)
        self._input = Document(input_root)
        self._budget = budget
        self._open: dict[tuple[int, ...], int] = {}
        self._checks: dict[int, CompiledSchema | None] = {}

    def subset(self, outputs: tuple[object, ...], accepted: object, place: str, level: int) -> str | None:
        """Return None if a value that keeps to all of `outputs` keeps to `accepted`, else the reason."""
        facts = known.flatten(self._output, outputs)
        self._budget.spend(1 + len(facts or ()))
        if facts is None or accepted is True or not known.types(facts):
            return None
        if not isinstance(accepted, dict):
            return say(place, "must not be there")
        question = (*sorted(id(schema) for schema in outputs if schema is not True), id(accepted))
        if question in self._open:
            return None if level > self._open[question] else say(place, "a schema refers to itself")
        if len(self._open) >= MAX_DEPTH:
            return say(place, f"the schemas are nested more than {MAX_DEPTH} deep")
        self._open[question] = level
        try:
            return self._prove_in_cases(facts, accepted, place, level)
        finally:
            del self._open[question]

    def excludes(self, outputs: tuple[object, ...], accepted: object, depth: int = 0) -> bool:
        """Tell whether it is plain that no value keeps to all of `outputs` and to `accepted`."""
        facts = known.flatten(self._output, outputs)
        others = known.flatten(self._input, (accepted,))
        if facts is None or others is None:
            return True
        self._budget.spend(1 + len(facts) + len(others))
        shared = known.types(facts) & known.types(others)
        if not shared or self._no_value_fits(facts, others) or self._no_value_fits(others, facts):
            return True
        if shared != {"object"} or depth >= MAX_DEPTH:
            return False
        return any(
            self.excludes(
                known.property_schemas(facts, name),
                {"allOf": list(known.property_schemas(others, name))},
                depth + 1,
            )
            for name in sorted(known.required(facts) | known.required(others))
        )

    def same(self, one: object, other: object) -> bool:
        """Tell whether two values are equal as JSON; what refers to another place never is."""
        self._budget.spend()
        if isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys() or not one.keys().isdisjoint(("$ref", "$dynamicRef")):
                return False
            return all(self.same(value, other[key]) for key, value in one.items())
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self.same, one, other))
        # Python takes True for 1.
        return isinstance(one, bool) == isinstance(other, bool) and known.exact(one) == known.exact(other)

    def target(self, reference: object) -> object | None:
        """Return the schema that a `$ref` in the accepting schema means, or None."""
        return self._input.target(reference)

    def _prove_in_cases(self, facts: Facts, accepted: dict[str, object], place: str, level: int) -> str | None:
        reason = self._prove(facts, accepted, place, level)
        if reason is None:
            return None
        if not facts:
            return say(place, "may be anything (the output schema does not describe it)")
        branches = _branches(facts)
        for case in branches or _kinds(facts):
            reason_of_case = self.subset(tuple(case), accepted, place, level)
            if reason_of_case is not None:
                return reason_of_case if branches else reason
        return None if branches or _kinds(facts) else reason

    def _prove(self, facts: Facts, accepted: dict[str, object], place: str, level: int) -> str | None:
        if any(self.same(fact, accepted) for fact in facts):
            return None
        values = known.finite_values(facts)
        check = self._check(accepted) if values is not None and len(values) == 1 else None
        if values is not None and check is not None:
            return None if check.is_valid(values[0]) else say(place, f"{shown(values[0])} is not accepted")
        types = known.types(facts)
        for keyword in accepted:
            rule = rule_for(keyword, types)
            if rule is not None:
                reason = rule(self, Question(facts, accepted, keyword, types, place, level))
                if reason is not None:
                    return reason
        return None

    def _check(self, accepted: dict[str, object]) -> CompiledSchema | None:
        """Return a part of the accepting schema, compiled, unless it refers to other parts."""
        if id(accepted) not in self._checks:
            self._budget.spend(_CHECK_COST)
            self._checks[id(accepted)] = compile_schema(accepted) if known.is_closed(accepted) else None
        return self._checks[id(accepted)]

    def _no_value_fits(self, finite: Facts, others: Facts) -> bool:
        values = known.finite_values(finite)
        if values is None:
            return False
        self._budget.spend(len(values) + _CHECK_COST * len(others))
        checks = [compile_schema(dict(fact)) for fact in others if known.is_closed(fact)]
        return all(any(not check.is_valid(value) for check in checks) for value in values)


def _branches(facts: Facts) -> list[list[object]]:
    """Return facts that are each a part of `facts` and cover them together, as the schema itself lists them."""
    for place, fact in enumerate(facts):
        for keyword in ("anyOf", "oneOf"):
            if keyword in fact:
                rest = _without(fact, keyword)
                branches = known.listed(fact, keyword)
                return [[*facts[:place], rest, *facts[place + 1 :], branch] for branch in branches]
    values = known.finite_values(facts)
    if values is None or len(values) == 1:
        return []
    return [[*facts, {"const": value}] for value in values]


def _kinds(facts: Facts) -> list[list[object]]:
    """Return facts that cover `facts` together, by the types that are possible, if they do not tell a value."""
    types = known.types(facts)
    if known.finite_values(facts) is not None or types == known.ALL_TYPES:
        return []
    if types <= {"boolean", "null"}:
        return [[*facts, {"const": value}] for value in (False, True, None)]
    names = type_names(types)
    return [[*facts, {"type": name}] for name in names] if len(names) > 1 else []


def _without(fact: Mapping[str, object], keyword: str) -> dict[str, object]:
    # What counts as evaluated depends on the keyword that goes.
    gone = {keyword, "unevaluatedItems", "unevaluatedProperties"}
    return {name: value for name, value in fact.items() if name not in gone}
