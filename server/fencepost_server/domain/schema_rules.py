"""One rule for each asserting keyword of JSON Schema: what facts about a value guarantee it.

A rule gets a `Question` and answers None (the facts guarantee the keyword) or the reason why that is not
plain. `schema_match` asks the questions and answers those that the rules ask back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from fencepost_server.domain import schema_facts as known
from fencepost_server.domain.jsontext import canonical_value
from fencepost_server.domain.schema_facts import Facts
from fencepost_server.domain.violation import cut_message, pointer, shown


class Prover(Protocol):
    """What a rule may ask in turn."""

    def subset(self, outputs: tuple[object, ...], accepted: object, place: str, level: int) -> str | None:
        """Return None if a value that keeps to all of `outputs` keeps to `accepted`, else the reason."""

    def excludes(self, outputs: tuple[object, ...], accepted: object) -> bool:
        """Tell whether it is plain that no value keeps to all of `outputs` and to `accepted`."""

    def same(self, one: object, other: object) -> bool:
        """Tell whether two values are equal as JSON; what refers to another place never is."""

    def target(self, reference: object) -> object | None:
        """Return the schema that a `$ref` in the accepting schema means, or None."""


@dataclass(frozen=True, slots=True)
class Question:
    """Do the facts guarantee one keyword of `accepted`? `level` counts steps down into the value."""

    facts: Facts
    accepted: Mapping[str, object]
    keyword: str
    types: frozenset[str]
    place: str
    level: int

    @property
    def wanted(self) -> object:
        """The keyword's value."""
        return self.accepted[self.keyword]


Rule = Callable[[Prover, Question], str | None]


def rule_for(keyword: str, types: frozenset[str]) -> Rule | None:
    """Return the rule of a keyword, or None if it asserts nothing about values of these types."""
    concerned, rule = _RULES.get(keyword, (frozenset[str](), None))
    return None if types.isdisjoint(concerned) else rule


def say(place: str, what: str) -> str:
    """Return a reason that names the place inside the value."""
    return cut_message(f"{place}: {what}" if place else what)


def type_names(types: frozenset[str]) -> list[str]:
    """Return the names that JSON Schema has for a set of types."""
    if known.FRACTION in types:
        return sorted((types - known.NUMBERS) | {"number"})
    return sorted(types)


def _type(_proof: Prover, ask: Question) -> str | None:
    extra = ask.types - known.named_types(ask.wanted)
    if not extra:
        return None
    accepted = " or ".join(type_names(known.named_types(ask.wanted)))
    return say(ask.place, f"may be {' or '.join(type_names(extra))}; accepted is {accepted}")


def _values(_proof: Prover, ask: Question) -> str | None:
    accepted = [ask.wanted] if ask.keyword == "const" else known.listed(ask.accepted, "enum")
    values = known.finite_values(ask.facts)
    if values is None:
        return say(ask.place, f"is not limited to the values of {ask.keyword} that are accepted")
    spelled = {canonical_value(value) for value in accepted}
    extra = next((value for value in values if canonical_value(value) not in spelled), spelled)
    return None if extra is spelled else say(ask.place, f"{shown(extra)} is not accepted")


def _bound(*proofs: tuple[str, Callable[[Any, Any], Any]]) -> Rule:
    """Return the rule for a limit: any of these keywords proves it if it compares so with the limit."""

    def rule(_proof: Prover, ask: Question) -> str | None:
        for fact in ask.facts:
            for keyword, holds in proofs:
                if keyword in fact and holds(known.exact(fact[keyword]), known.exact(ask.wanted)):
                    return None
        return say(ask.place, f"{ask.keyword} {shown(ask.wanted)} is not guaranteed")

    return rule


def _least(keyword: str) -> Rule:
    """Return the rule for a least length or count, for which 0 asks nothing."""
    proved = _bound((keyword, operator.ge))

    def rule(proof: Prover, ask: Question) -> str | None:
        if isinstance(ask.wanted, int | float | Decimal) and ask.wanted <= _certain_count(ask):
            return None
        return proved(proof, ask)

    return rule


def _certain_count(ask: Question) -> int:
    return len(known.required(ask.facts)) if ask.keyword == "minProperties" else 0


def _equal(*keywords: str) -> Rule:
    """Return the rule for keywords compared as they stand: one fact has them all, with equal values."""

    def rule(proof: Prover, ask: Question) -> str | None:
        if ask.wanted is False and ask.keyword == "uniqueItems":
            return None
        wanted = {name: ask.accepted[name] for name in keywords if name in ask.accepted}
        for fact in ask.facts:
            if proof.same({name: fact[name] for name in keywords if name in fact}, wanted):
                return None
        return say(ask.place, f"{ask.keyword} cannot be compared unless both schemas have the same")

    return rule


def _undecided(_proof: Prover, ask: Question) -> str | None:
    return None if ask.wanted is True else say(ask.place, f"{ask.keyword} cannot be compared")


def _required(_proof: Prover, ask: Question) -> str | None:
    certain = known.required(ask.facts)
    for name in known.listed(ask.accepted, "required"):
        if name not in certain:
            return say(ask.place, f"{shown(name)} is required and may be missing")
    return None


def _dependent_required(_proof: Prover, ask: Question) -> str | None:
    certain = known.required(ask.facts)
    for name, needs in known.mapped(ask.accepted, "dependentRequired").items():
        held = certain.union(*(known.listed(known.mapped(f, "dependentRequired"), name) for f in ask.facts))
        if not held.issuperset(needs if isinstance(needs, list) else ()):
            return say(ask.place, f"what {shown(name)} needs beside it may be missing")
    return None


def _properties(proof: Prover, ask: Question) -> str | None:
    for name, schema in known.mapped(ask.accepted, "properties").items():
        outputs = known.property_schemas(ask.facts, name)
        reason = proof.subset(outputs, schema, ask.place + pointer((name,)), ask.level + 1)
        if reason is not None:
            return reason
    return None


def _pattern_properties(proof: Prover, ask: Question) -> str | None:
    for pattern, schema in known.mapped(ask.accepted, "patternProperties").items():
        place = f"{ask.place}/*"
        told = tuple(
            patterns[pattern] for fact in ask.facts if pattern in (patterns := known.mapped(fact, "patternProperties"))
        )
        cases = [told] if told else list(known.undescribed(ask.facts, {}))
        if not told:
            names = [name for name in known.described(ask.facts) if known.matches(pattern, name)]
            cases.extend(known.property_schemas(ask.facts, name) for name in names)
        for outputs in cases:
            reason = proof.subset(outputs, schema, place, ask.level + 1)
            if reason is not None:
                return reason
    return None


def _additional_properties(proof: Prover, ask: Question) -> str | None:
    patterns = known.mapped(ask.accepted, "patternProperties")
    properties = known.mapped(ask.accepted, "properties")
    for name in known.described(ask.facts):
        if name in properties or any(known.matches(pattern, name) for pattern in patterns):
            continue
        outputs = known.property_schemas(ask.facts, name)
        reason = proof.subset(outputs, ask.wanted, ask.place + pointer((name,)), ask.level + 1)
        if reason is not None:
            return reason
    for outputs in known.undescribed(ask.facts, patterns):
        reason = proof.subset(outputs, ask.wanted, f"{ask.place}/*", ask.level + 1)
        if reason is not None:
            return say(ask.place, "may have properties that are not accepted (its additionalProperties is not false)")
    return None


def _property_names(proof: Prover, ask: Question) -> str | None:
    told = tuple(fact["propertyNames"] for fact in ask.facts if "propertyNames" in fact)
    reason = proof.subset((*told, {"type": "string"}), ask.wanted, ask.place, ask.level + 1)
    if reason is None:
        return None
    closed = all(proof.subset(case, False, "", ask.level + 1) is None for case in known.undescribed(ask.facts, {}))
    names: list[object] = list(known.described(ask.facts))
    if closed and (not names or proof.subset(({"enum": names},), ask.wanted, "", ask.level + 1) is None):
        return None
    return say(ask.place, "may have properties with names that are not accepted")


def _prefix_items(proof: Prover, ask: Question) -> str | None:
    for index, schema in enumerate(known.listed(ask.accepted, "prefixItems")):
        outputs = known.item_schemas(ask.facts, index)
        reason = proof.subset(outputs, schema, f"{ask.place}/{index}", ask.level + 1)
        if reason is not None:
            return reason
    return None


def _items(proof: Prover, ask: Question) -> str | None:
    first = len(known.listed(ask.accepted, "prefixItems"))
    # The last index stands for all after it: from there on, the items of the output are described alike.
    last = max(first, known.prefix_length(ask.facts))
    for index in range(first, last + 1):
        place = f"{ask.place}/{index if index < last else '*'}"
        reason = proof.subset(known.item_schemas(ask.facts, index), ask.wanted, place, ask.level + 1)
        if reason is not None:
            return reason
    return None


def _all_of(proof: Prover, ask: Question) -> str | None:
    for schema in known.listed(ask.accepted, "allOf"):
        reason = proof.subset(tuple(ask.facts), schema, ask.place, ask.level)
        if reason is not None:
            return reason
    return None


def _any_of(proof: Prover, ask: Question) -> str | None:
    reasons = []
    for schema in known.listed(ask.accepted, "anyOf"):
        reason = proof.subset(tuple(ask.facts), schema, ask.place, ask.level)
        if reason is None:
            return None
        reasons.append(reason)
    return say(ask.place, f"may fit no branch of anyOf ({'; '.join(reasons)})")


def _one_of(proof: Prover, ask: Question) -> str | None:
    facts = tuple(ask.facts)
    branches = known.listed(ask.accepted, "oneOf")
    reasons = []
    for place, schema in enumerate(branches):
        reason = proof.subset(facts, schema, ask.place, ask.level)
        if reason is None:
            if all(proof.excludes(facts, other) for other in branches[:place] + branches[place + 1 :]):
                return None
            return say(ask.place, "may fit more than one branch of oneOf")
        reasons.append(reason)
    return say(ask.place, f"may fit no branch of oneOf ({'; '.join(reasons)})")


def _not(proof: Prover, ask: Question) -> str | None:
    if proof.excludes(tuple(ask.facts), ask.wanted):
        return None
    return _equal("not")(proof, ask)


def _conditional(proof: Prover, ask: Question) -> str | None:
    facts = tuple(ask.facts)
    if _equal("if", "then", "else")(proof, ask) is None:
        return None
    for keyword, other_side in (("then", proof.excludes(facts, ask.wanted)), ("else", _fits(proof, ask))):
        if keyword in ask.accepted and not other_side:
            reason = proof.subset(facts, ask.accepted[keyword], ask.place, ask.level)
            if reason is not None:
                return reason
    return None


def _fits(proof: Prover, ask: Question) -> bool:
    return proof.subset(tuple(ask.facts), ask.wanted, ask.place, ask.level) is None


def _dependent_schemas(proof: Prover, ask: Question) -> str | None:
    for name, schema in known.mapped(ask.accepted, "dependentSchemas").items():
        if proof.subset(known.property_schemas(ask.facts, name), False, "", ask.level + 1) is not None:
            reason = proof.subset(tuple(ask.facts), schema, ask.place, ask.level)
            if reason is not None:
                return reason
    return None


def _reference(proof: Prover, ask: Question) -> str | None:
    target = proof.target(ask.wanted)
    if target is None:
        return say(ask.place, f"the reference {shown(ask.wanted)} cannot be followed")
    return proof.subset(tuple(ask.facts), target, ask.place, ask.level)


_ANY, _NUMBER = known.ALL_TYPES, known.NUMBERS
_ARRAY, _OBJECT, _STRING = frozenset(("array",)), frozenset(("object",)), frozenset(("string",))
_contains = _equal("contains", "minContains", "maxContains")

# Keywords that are not here assert nothing.
_RULES: Mapping[str, tuple[frozenset[str], Rule]] = {
    "$dynamicRef": (_ANY, _undecided),
    "$ref": (_ANY, _reference),
    "additionalProperties": (_OBJECT, _additional_properties),
    "allOf": (_ANY, _all_of),
    "anyOf": (_ANY, _any_of),
    "const": (_ANY, _values),
    "contains": (_ARRAY, _contains),
    "dependentRequired": (_OBJECT, _dependent_required),
    "dependentSchemas": (_OBJECT, _dependent_schemas),
    "enum": (_ANY, _values),
    "exclusiveMaximum": (_NUMBER, _bound(("exclusiveMaximum", operator.le), ("maximum", operator.lt))),
    "exclusiveMinimum": (_NUMBER, _bound(("exclusiveMinimum", operator.ge), ("minimum", operator.gt))),
    "if": (_ANY, _conditional),
    "items": (_ARRAY, _items),
    "maxItems": (_ARRAY, _bound(("maxItems", operator.le))),
    "maxLength": (_STRING, _bound(("maxLength", operator.le))),
    "maxProperties": (_OBJECT, _bound(("maxProperties", operator.le))),
    "maximum": (_NUMBER, _bound(("maximum", operator.le), ("exclusiveMaximum", operator.le))),
    "minItems": (_ARRAY, _least("minItems")),
    "minLength": (_STRING, _least("minLength")),
    "minProperties": (_OBJECT, _least("minProperties")),
    "minimum": (_NUMBER, _bound(("minimum", operator.ge), ("exclusiveMinimum", operator.ge))),
    "multipleOf": (_NUMBER, _equal("multipleOf")),
    "not": (_ANY, _not),
    "oneOf": (_ANY, _one_of),
    "pattern": (_STRING, _equal("pattern")),
    "patternProperties": (_OBJECT, _pattern_properties),
    "prefixItems": (_ARRAY, _prefix_items),
    "properties": (_OBJECT, _properties),
    "propertyNames": (_OBJECT, _property_names),
    "required": (_OBJECT, _required),
    "type": (_ANY, _type),
    "unevaluatedItems": (_ARRAY, _undecided),
    "unevaluatedProperties": (_OBJECT, _undecided),
    "uniqueItems": (_ARRAY, _equal("uniqueItems")),
}
