"""What flows through containers: the schemas that meet there, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost_server.domain.manifest import Manifest
from fencepost_server.domain.schema_compose import Composer, NoArray
from fencepost_server.domain.schema_match import WorkBudget, mismatch
from tests.unit.domain.manifests import faults, manifest, read

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
ORDER = {
    "type": "object",
    "required": ["lines"],
    "properties": {"lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}, "n": INTEGER},
    "$defs": {
        "line": {"type": "object", "required": ["no"], "properties": {"no": INTEGER, "sub": {"$ref": "#/$defs/line"}}}
    },
}
WITH_NO = {"type": "object", "required": ["no"], "properties": {"no": NUMBER}}


def step(node_id: str, takes: object = None, gives: object = None, **more: object) -> dict[str, object]:
    """Return a step with these schemas."""
    schemas = {"input_schema": takes, "output_schema": gives}
    return {"id": node_id, "step": "do", **{key: value for key, value in schemas.items() if value is not None}, **more}


def branches(*bodies: list[object]) -> dict[str, object]:
    """Return a parallel node."""
    return {"id": "p", "parallel": list(bodies)}


def mapped(over: str, *body: object) -> dict[str, object]:
    """Return a map node."""
    return {"id": "m", "map": {"over": over, "do": list(body)}}


def choose(*bodies: list[object], otherwise: list[object] | None = None) -> dict[str, object]:
    """Return a choose node."""
    cases: list[object] = [{"when": {"at": "", "exists": True}, "do": body} for body in bodies]
    return {"id": "c", "choose": cases if otherwise is None else [*cases, {"otherwise": otherwise}]}


def child(takes: object, gives: object, **more: object) -> dict[str, object]:
    """Return a child node."""
    return {"id": "w", "workflow": "other", "input_schema": takes, "output_schema": gives, **more}


SLEEP = {"id": "s", "sleep": "1s"}
SIGNAL = {"id": "g", "wait_signal": "go"}
LINES = {"type": "array", "items": STRING}
LISTS = {"type": "array", "items": {"properties": {"a": LINES}}}
OF_P = {
    "type": "object",
    "required": ["x", "y"],
    "properties": {"x": STRING, "y": NUMBER},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [
        manifest(step("a", gives=STRING), SLEEP, step("b", takes=STRING)),
        manifest(SLEEP, step("b", takes=STRING), input_schema=STRING),
        manifest({**SIGNAL, "output_schema": STRING}, step("b", takes=STRING)),
        manifest(SIGNAL, step("b", takes=STRING, schema_check="runtime")),
        manifest(SIGNAL, step("b")),
        manifest(child(STRING, INTEGER), step("b", takes=NUMBER), input_schema=STRING),
        manifest(child(STRING, INTEGER, schema_check="runtime"), input_schema=INTEGER, output_schema=STRING),
        manifest(
            branches([step("x", STRING, STRING)], [step("y", STRING, INTEGER)]), step("b", OF_P), input_schema=STRING
        ),
        manifest(branches([step("x", gives=STRING)], [step("y", gives=INTEGER)]), output_schema=OF_P),
        manifest(branches([step("x")], [step("y", gives=INTEGER, schema_check="runtime")]), output_schema=OF_P),
        manifest(
            branches([step("x", gives={"$ref": "#/$defs/a", "$defs": {"a": STRING}})], [step("y", gives=INTEGER)]),
            step("b", OF_P),
        ),
        manifest(mapped("/lines", step("x", WITH_NO, STRING)), step("b", LINES), input_schema=ORDER),
        manifest(mapped("", step("x", STRING)), input_schema=LINES),
        manifest(mapped("/0/a", step("x", STRING)), input_schema=LISTS),
        manifest(mapped("/lines", step("x", INTEGER, schema_check="runtime"))),
        manifest(mapped("/lines", step("x", INTEGER, input={"$from": "m#"}))),
        manifest(mapped("/lines", step("x"))),
        manifest(
            mapped("/lines", step("x", gives=ORDER), {**mapped("/lines", step("y", WITH_NO, STRING)), "id": "n"}),
            step("b", {"type": "array", "items": LINES}),
        ),
        manifest(choose([step("x", gives=STRING)], otherwise=[step("y", gives=INTEGER)]),
                 step("b", {"type": ["string", "number"]})),
        manifest(choose([step("x", STRING, STRING)]), step("b", STRING), input_schema=STRING),
        manifest(choose([step("x", gives=STRING)], [SLEEP]), step("b", STRING), input_schema=STRING),
        manifest(step("a", gives=STRING), branches([SLEEP], [step("y", gives=INTEGER)]), step("b", {
            "type": "object", "required": ["s"], "properties": {"s": STRING},
        })),
        manifest(
            branches([choose([step("x1", gives=STRING)], otherwise=[step("x2", gives=INTEGER)])]),
            step("b", {"type": "object", "properties": {"c": {"type": ["string", "integer"]}}}),
        ),
        manifest(step("a", gives=STRING), step("b", INTEGER, input={"$from": "a#"})),
        manifest(step("a", gives=STRING), child(INTEGER, STRING, input=1), input_schema=True),
    ],
)  # fmt: skip
def test_what_fits_is_accepted(value: object) -> None:
    found = read(value)
    assert isinstance(found, Manifest)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            manifest(step("a", gives=STRING), SLEEP, step("b", INTEGER)),
            [("/sequence/2/input_schema", "the output of a (/sequence/0/output_schema): may be string")],
        ),
        (
            manifest(SIGNAL, step("b", STRING)),
            [(
                "/sequence/1/input_schema",
                "the payload of the signal of g: may be anything (/sequence/0/output_schema is not set)",
            )],
        ),
        (
            manifest(child(STRING, INTEGER), step("b", STRING), input_schema=INTEGER),
            [
                ("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be integer"),
                ("/sequence/1/input_schema", "the output of w (/sequence/0/output_schema): may be integer"),
            ],
        ),
        (
            manifest(branches([step("x", INTEGER)], [SLEEP, step("y", INTEGER)]), input_schema=STRING),
            [
                ("/sequence/0/parallel/0/0/input_schema", "the input of the workflow (/input_schema): may be string"),
                ("/sequence/0/parallel/1/1/input_schema", "the input of the workflow (/input_schema): may be string"),
            ],
        ),
        (
            manifest(branches([step("x", gives=INTEGER)], [step("y", gives=INTEGER)]), step("b", OF_P)),
            [("/sequence/1/input_schema", "the output of p (/sequence/0/parallel): /x: may be integer")],
        ),
        (
            manifest(branches([step("x", gives=STRING)]), step("b", OF_P)),
            [("/sequence/1/input_schema", "the output of p (/sequence/0/parallel): \"y\" is required")],
        ),
        (
            manifest(branches([step("x", gives=STRING)], [step("y")]), output_schema=OF_P),
            [("/output_schema", "the output of p (/sequence/0/parallel): /y: may be anything")],
        ),
        (
            manifest(mapped("/lines", step("x", STRING)), input_schema=ORDER),
            [(
                "/sequence/0/map/do/0/input_schema",
                'the items at "/lines" of the input of the workflow (/input_schema): may be object',
            )],
        ),
        (
            manifest(mapped("/lines", step("x", STRING))),
            [(
                "/sequence/0/map/do/0/input_schema",
                'the items at "/lines" of the input of the workflow (/input_schema): may be anything',
            )],
        ),
        (
            manifest(mapped("", step("x", gives=INTEGER)), step("b", LINES), input_schema=LINES),
            [("/sequence/1/input_schema", "the output of m (/sequence/0/map): /*: may be integer")],
        ),
        (
            manifest(
                choose([step("x", gives=STRING)], [step("y", gives=INTEGER)]), step("b", STRING), input_schema=NUMBER
            ),
            [
                ("/sequence/1/input_schema", "the output of y (/sequence/0/choose/1/do/0/output_schema): may be int"),
                ("/sequence/1/input_schema", "the input of the workflow (/input_schema): may be number"),
            ],
        ),
        (
            manifest(choose([step("x", gives=STRING)], otherwise=[step("y", INTEGER)]), output_schema=STRING),
            [
                (
                    "/sequence/0/choose/1/otherwise/0/input_schema",
                    "the input of the workflow: may be anything (/input_schema is not set)",
                ),
                (
                    "/output_schema",
                    "the output of y: may be anything (/sequence/0/choose/1/otherwise/0/output_schema is not set)",
                ),
            ],
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_at_the_side_that_takes(value: object, expected: list[tuple[str, str]]) -> None:
    found = faults(value)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert [
        message[: len("does not take " + start)] for (_, message), (_, start) in zip(found, expected, strict=True)
    ] == [f"does not take {start}" for _, start in expected]


@pytest.mark.parametrize(
    ("over", "schema", "reason"),
    [
        ("", STRING, "may be string"),
        ("/n", ORDER, "may be integer"),
        ("/n/x", ORDER, "nothing is there, because what is above it may be integer"),
        ("/x", {"type": "object", "additionalProperties": False}, "nothing can be there"),
        ("/x/y", {"type": "object", "additionalProperties": False}, "nothing can be there"),
        ("/lines/first", ORDER, "nothing is there, because what is above it may be array"),
    ],
)
def test_a_map_over_what_is_never_an_array_is_refused(over: str, schema: object, reason: str) -> None:
    assert faults(manifest(mapped(over, step("x", STRING)), input_schema=schema)) == [
        ("/sequence/0/map/over", f"does not lead to an array in the input of the workflow (/input_schema): {reason}")
    ]


@pytest.mark.parametrize(
    "value",
    [
        manifest(5, step("b", STRING)),
        manifest(step("a", gives={"type": "x"}), SLEEP, step("b", STRING)),
        manifest(branches([5], [step("y")]), step("b", STRING)),
        manifest(branches([step("x", gives={"type": "x"})], [step("y")]), step("b", STRING)),
        manifest({"id": "p", "parallel": 5}, step("b", STRING)),
        manifest({"id": "m", "map": {"over": "x", "do": [step("x", STRING)]}}, input_schema=STRING),
        manifest({"id": "m", "map": {"over": "", "do": []}}, step("b", STRING), input_schema=LINES),
        manifest({"id": "a", "step": "do", "sleep": "1s"}, step("b", STRING)),
        manifest(choose([5]), step("b", STRING), input_schema=STRING),
        manifest(step("b", STRING, input={"$from": 5})),
        manifest(step("a"), step("b", STRING, input={"$from": "x#"})),
        manifest({**SIGNAL, "output_schema": {"type": "x"}}, step("b", STRING)),
    ],
)
def test_one_fault_is_told_once_and_what_follows_it_is_not_compared(value: object) -> None:
    assert len(faults(value)) == 1


def test_many_choices_in_a_row_are_compared_within_the_budget() -> None:
    def choices(count: int) -> list[object]:
        return [
            {**choose([step(f"x{n}", {**STRING, "title": f"{n}"}, {**STRING, "maxLength": n})]), "id": f"c{n}"}
            for n in range(count)
        ]

    assert read(manifest(*choices(60), step("b", STRING), input_schema=STRING)) is not None
    found = faults(manifest(*choices(499), input_schema=STRING))
    assert found[0][1].endswith("the schemas are too large or too entangled to compare")


def test_containers_of_containers_cost_no_more_than_the_budget() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {f"p{n}": INTEGER for n in range(100)}}}}
    value: dict[str, object] = step("x", gives=schema)
    for level in range(20):
        value = {"id": f"p{level}", "parallel": [[value], [step(f"y{level}", gives=schema)]]}
    assert faults(manifest(value, step("b", STRING)))[0][0] == "/sequence/1/input_schema"


LISTED = {"type": "array", "items": WITH_NO}
COMPOSED: list[tuple[Callable[[Composer], object], object, bool]] = [
    (lambda composer: composer.object_of({"a/b": ORDER}),
     {"properties": {"a/b": {"properties": {"lines": LISTED}}}}, True),
    (lambda composer: composer.object_of({"a": {"$ref": "#x", "$defs": {"x": {"$anchor": "x"}}}}),
     {"properties": {"a": STRING}}, False),
    (lambda composer: composer.object_of({"a": {"$id": "urn:a", "$ref": "#", "type": "string"}}),
     {"properties": {"a": STRING}}, True),
    (lambda composer: composer.object_of({"a": {"$defs": {"x": {"$id": "urn:a", **STRING}}, "$ref": "#/$defs/x"}}),
     {"properties": {"a": STRING}}, False),
    (lambda composer: composer.object_of({"a": {"$ref": "#/x", "x": {"$ref": "#/y"}, "y": STRING}}),
     {"properties": {"a": STRING}}, False),
    (lambda composer: composer.object_of({"a": {"$ref": "#/$defs/x", "$defs": {"x": False}}}),
     {"properties": {"a": STRING}}, True),
    (lambda composer: composer.array_of(composer.object_of({"a": ORDER})),
     {"items": {"properties": {"a": {"properties": {"lines": {"items": WITH_NO}}}}}}, True),
    (lambda composer: composer.any_of([ORDER, None]), {"type": "object"}, False),
    (lambda composer: composer.any_of([ORDER, {"const": {"lines": []}}]), {"required": ["lines"]}, True),
    (lambda composer: composer.items_at({"items": STRING, "prefixItems": [INTEGER]}, ()),
     {"type": ["string", "integer"]}, True),
    (lambda composer: composer.items_at({"items": STRING, "prefixItems": [INTEGER]}, ()), STRING, False),
    (lambda composer: composer.items_at({"properties": {"a": LINES}}, ("a",)), STRING, True),
    (lambda composer: composer.items_at({"properties": {"0": LINES}}, ("0",)), STRING, False),
    (lambda composer: composer.items_at({"type": "object", "properties": {"0": LINES}}, ("0",)), STRING, True),
    (lambda composer: composer.items_at({"allOf": [{"items": {"minLength": 1}}, LINES]}, ()),
     {"minLength": 1, **STRING}, True),
    (lambda composer: composer.items_at(ORDER, ("lines", "3", "no")), STRING, False),
]  # fmt: skip


@pytest.mark.parametrize(("compose", "accepted", "fits"), COMPOSED)
def test_what_is_composed_says_no_more_than_its_parts(
    compose: Callable[[Composer], object], accepted: object, fits: bool
) -> None:
    try:
        schema = compose(Composer(WorkBudget(10_000)))
    except NoArray:
        schema = True
    assert (mismatch(schema, accepted) is None) is fits


def test_references_are_written_anew_wherever_the_part_stands() -> None:
    composer = Composer(WorkBudget(10_000))
    twice = composer.object_of({"x": composer.array_of(ORDER)})
    assert mismatch(twice, {"properties": {"x": {"items": {"properties": {"lines": {"items": WITH_NO}}}}}}) is None
    assert mismatch(twice, {"properties": {"x": {"items": {"properties": {"lines": {"items": STRING}}}}}}) is not None
    assert ORDER["properties"]["lines"] == {"type": "array", "items": {"$ref": "#/$defs/line"}}  # type: ignore[index]  # a JSON value
