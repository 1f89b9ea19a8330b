"""What is wrong with a manifest: every fault at once, each with its place."""

from __future__ import annotations

import json

import pytest

from fencepost_server.domain.manifest import ManifestInvalid, ManifestLimits, StepNode, parse_manifest
from tests.unit.domain.manifests import faults, manifest, node, read

NAME_MESSAGE = " is not a name: 1 to 200 letters, digits and . _ - / of ASCII, beginning with a letter or digit"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, [("", "must be an object, not 5")]),
        ([], [("", "must be an object, not an array")]),
        (None, [("", "must be an object, not null")]),
        (
            {},
            [("", "id is missing"), ("", "compatibility_id is missing"), ("", "sequence is missing")],
        ),
        (manifest(id=5), [("/id", "must be a string, not 5")]),
        (manifest(id=""), [("/id", '""' + NAME_MESSAGE)]),
        (manifest(id="-a"), [("/id", '"-a"' + NAME_MESSAGE)]),
        (manifest(id="a" * 201), [("/id", '"' + "a" * 59 + "…" + NAME_MESSAGE)]),
        (manifest(id="é"), [("/id", '"é"' + NAME_MESSAGE)]),
        (manifest(id="a b"), [("/id", '"a b"' + NAME_MESSAGE)]),
        (manifest(id="a\n"), [("/id", '"a\\n"' + NAME_MESSAGE)]),
        (manifest(id=None), [("/id", "must not be null: leave the key out or give it a value")]),
        (manifest(compatibility_id=2026), [("/compatibility_id", "must be a string, not 2026")]),
        (manifest(sequence=[]), [("/sequence", "must not be empty")]),
        (manifest(sequence={}), [("/sequence", "must be an array, not an object")]),
        (manifest("step"), [("/sequence/0", 'must be an object, not "step"')]),
        (manifest({}), [("/sequence/0", "id is missing"), ("/sequence/0", "step is missing")]),
        (manifest(node(step=["a"])), [("/sequence/0/step", "must be a string, not an array")]),
        (manifest(node(queue="a b")), [("/sequence/0/queue", '"a b"' + NAME_MESSAGE)]),
        (manifest(node(), node()), [("/sequence/1/id", "a is already the id of /sequence/0")]),
        (
            manifest(node(), node(id="b"), node(), {"id": "b", "sleep": "1d"}),
            [
                ("/sequence/2/id", "a is already the id of /sequence/0"),
                ("/sequence/3/id", "b is already the id of /sequence/1"),
            ],
        ),
        (manifest(sequnce=[]), [("/sequnce", 'unknown key "sequnce"; did you mean sequence?')]),
        (manifest(**{"a/b": 1}), [("/a~1b", 'unknown key "a/b"')]),
        (manifest(node(tiemout="1s")), [("/sequence/0/tiemout", 'unknown key "tiemout"; did you mean timeout?')]),
        (
            manifest({"id": "a", "stpe": "x"}),
            [("/sequence/0", "step is missing"), ("/sequence/0/stpe", 'unknown key "stpe"; did you mean step?')],
        ),
        (
            manifest(node(retry={"max_attemps": 1, "multiplyer": 1})),
            [
                ("/sequence/0/retry/max_attemps", 'unknown key "max_attemps"; did you mean max_attempts?'),
                ("/sequence/0/retry/multiplyer", 'unknown key "multiplyer"; did you mean multiplier?'),
            ],
        ),
        (manifest(node(retry=3)), [("/sequence/0/retry", "must be an object, not 3")]),
        (manifest(node(schema_check="lax")), [("/sequence/0/schema_check", 'must be strict or runtime, not "lax"')]),
        (manifest(node(schema_check=True)), [("/sequence/0/schema_check", "must be strict or runtime, not true")]),
    ],
)  # fmt: skip
def test_each_fault_has_its_place(value: object, expected: list[tuple[str, str]]) -> None:
    assert faults(value) == expected


DURATION_MESSAGE = "is not a duration such as 500ms, 30s, 5m, 1h30m or 1d"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("timeout", 30, "must be a duration with its unit, such as 30s, not 30"),
        ("timeout", "30", f"'30' {DURATION_MESSAGE}"),
        ("timeout", "1.5s", f"'1.5s' {DURATION_MESSAGE}"),
        ("timeout", "0s", "must be from 1ms to 365d"),
        ("timeout", "366d", "must be from 1ms to 365d"),
        ("timeout", "99999d", "'99999d' is longer than 3650d"),
        ("timeout", None, "must not be null: leave the key out or give it a value"),
        ("queue_timeout", "0s", "must be from 1ms to 365d"),
        ("total_timeout", 1, "must be a duration with its unit, such as 30s, not 1"),
        ("undo/timeout", "366d", "must be from 1ms to 365d"),
        ("undo/lease", "1ms", "must be from 1s to 1d"),
        ("undo/queue", 1, "must be a string, not 1"),
        ("undo/retry", [], "must be an object, not an array"),
        ("undo/undo_unfinished", "yes", 'must be true or false, not "yes"'),
        ("undo/undo_unfinished", None, "must not be null: leave the key out or give it a value"),
        ("input", None, "must not be null: leave the key out or give it a value"),
        ("lease", "999ms", "must be from 1s to 1d"),
        ("lease", "25h", "must be from 1s to 1d"),
        ("lease", {}, "must be a duration with its unit, such as 30s, not an object"),
        ("retry/initial_delay", "8d", "must be from 0s to 7d"),
        ("retry/initial_delay", "2m", "2m is longer than max_delay (1m)"),
        ("retry/max_delay", "8d", "must be from 0s to 7d"),
        ("retry/max_attempts", 0, "must be an integer from 1 to 1000000, not 0"),
        ("retry/max_attempts", 1.5, "must be an integer from 1 to 1000000, not 1.5"),
        ("retry/max_attempts", 10**30, f"must be an integer from 1 to 1000000, not {10**30}"),
        ("retry/max_attempts", "5", 'must be an integer, not "5"'),
        ("retry/max_attempts", True, "must be an integer, not true"),
        ("retry/max_corrective_attempts", -1, "must be an integer from 0 to 1000, not -1"),
        ("retry/multiplier", 0.5, "must be a number from 1 to 1000, not 0.5"),
        ("retry/multiplier", [2], "must be a number, not an array"),
        ("retry/jitter", -0.1, "must be a number from 0 to 1, not -0.1"),
        ("retry/jitter", 1.1, "must be a number from 0 to 1, not 1.1"),
    ],
)
def test_each_value_has_a_range(key: str, value: object, message: str) -> None:
    outer, _, inner = key.partition("/")
    required = {"step": "undo-it"} if outer == "undo" else {}
    step = node(**{outer: {**required, inner: value} if inner else value})
    assert faults(manifest(step)) == [(f"/sequence/0/{key}", message)]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e1000000", "0.10000000000000000000001e1", "1e-400"])
def test_numbers_beyond_floats_are_judged_like_others(number: str) -> None:
    text = json.dumps(manifest(node(retry={"max_attempts": "@"}))).replace('"@"', number)
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text)
    assert [fault.path for fault in refusal.value.violations] == ["/sequence/0/retry/max_attempts"]


def test_all_faults_are_found_at_once() -> None:
    found = faults(
        {
            "compatibility_id": "",
            "input_schema": {"type": "strin"},
            "output_schema": {"$ref": "http://127.0.0.1:9/x"},
            "extra": 1,
            "sequence": [
                node(timeout="x", output_schema={"minLength": -1, "properties": {"a/b": {"pattern": "("}}}),
                node(lease=5, retry={"max_attempts": 0, "jitter": 2}),
                node(id="c", output_schema={"type": "integer"}),
                node(id="d", input_schema={"type": "string"}, output_schema={"type": "null"}),
                5,
            ],
        }
    )
    assert [path for path, _ in found] == [
        "",
        "/compatibility_id",
        "/input_schema/type",
        "/output_schema/$ref",
        "/sequence/0/timeout",
        "/sequence/0/output_schema/minLength",
        "/sequence/0/output_schema/properties/a~1b/pattern",
        "/sequence/1/id",
        "/sequence/1/lease",
        "/sequence/1/retry/max_attempts",
        "/sequence/1/retry/jitter",
        "/sequence/4",
        "/extra",
        "/sequence/3/input_schema",
    ]


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (manifest(node(input_schema=NUMBER, output_schema=INTEGER), input_schema=INTEGER, output_schema=NUMBER), []),
        (manifest(node(output_schema=INTEGER), node(id="b")), []),
        (manifest(node(), input_schema=STRING), []),
        (
            manifest(node(input_schema=STRING), input_schema=INTEGER),
            [("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be integer")],
        ),
        (
            manifest(node(input_schema=STRING)),
            [("/sequence/0/input_schema", "the input of the workflow: may be anything (/input_schema is not set)")],
        ),
        (
            manifest(node(output_schema=INTEGER), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer")],
        ),
        (
            manifest(node(), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a: may be anything (/sequence/0/output_schema is not set)")],
        ),
        (
            manifest(node(output_schema=NUMBER), output_schema=INTEGER),
            [("/output_schema", "the output of a (/sequence/0/output_schema): may be number")],
        ),
        (manifest(node(input_schema=STRING, schema_check="runtime"), input_schema=INTEGER), []),
        (manifest(node(output_schema=NUMBER, schema_check="runtime"), output_schema=INTEGER), []),
        (
            manifest(node(output_schema=INTEGER, schema_check="runtime"), node(id="b", input_schema=STRING)),
            [("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer")],
        ),
        (
            manifest(
                node(input_schema=STRING, output_schema=INTEGER),
                node(id="b", input_schema=STRING, output_schema=INTEGER),
                input_schema=INTEGER,
                output_schema=STRING,
            ),
            [
                ("/sequence/0/input_schema", "the input of the workflow (/input_schema): may be integer"),
                ("/sequence/1/input_schema", "the output of a (/sequence/0/output_schema): may be integer"),
                ("/output_schema", "the output of b (/sequence/1/output_schema): may be integer"),
            ],
        ),
    ],
)
def test_what_one_side_gives_the_next_one_takes(value: object, expected: list[tuple[str, str]]) -> None:
    if not expected:
        read(value)
        return
    found = faults(value)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(
        message.startswith(f"does not take {start}") for (_, message), (_, start) in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "yaml", "expected"),
    [
        ("{", False, "Expecting property name enclosed in double quotes (line 1, column 2)"),
        ('{"id": "a",\n "id": "b"}', False, 'duplicate key "id" in one object'),
        ("\ud800", False, "a lone surrogate (U+D800) at character 1"),
        ("id: [", True, "expected the node content, but found '<stream end>' (line 1, column 6)"),
        ("", True, "must be an object, not null"),
        ("id: a", False, "Expecting value (line 1, column 1)"),
    ],
)
def test_a_syntax_error_stands_alone(text: str, yaml: bool, expected: str) -> None:
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text, yaml=yaml)
    assert [(fault.path, fault.message) for fault in refusal.value.violations] == [("", expected)]


def test_yaml_that_is_not_json_is_refused_with_all_its_faults() -> None:
    text = "id: &a wf\ncompatibility_id: *a\nid: 1\nsequence: [{step: !x y, 1: 2}]"
    with pytest.raises(ManifestInvalid) as refusal:
        parse_manifest(text, yaml=True)
    assert [fault.path for fault in refusal.value.violations] == [
        *["/id", "/compatibility_id", "/id", "/sequence/0/step", "/sequence/0"]
    ]


def test_unquoted_yaml_is_what_the_core_schema_says() -> None:
    text = "id: no\ncompatibility_id: 2026-11-01\nsequence: [{id: 1_000, step: on, timeout: 30s}]"
    found = parse_manifest(text, yaml=True)
    (step,) = found.nodes
    assert isinstance(step, StepNode)
    assert (found.workflow_id, found.compatibility_id, step.id, step.handler) == ("no", "2026-11-01", "1_000", "on")


def test_a_manifest_is_limited_in_bytes_as_sent_and_as_canonical_text() -> None:
    text = json.dumps(manifest(node(output_schema={"title": "é" * 100})), ensure_ascii=False)
    size = len(text.encode())
    parse_manifest(text, limits=ManifestLimits(max_bytes=size))
    with pytest.raises(ManifestInvalid, match=f"has {size} bytes; at most {size - 1} are accepted"):
        parse_manifest(text, limits=ManifestLimits(max_bytes=size - 1))
    grows = json.dumps(manifest(node(output_schema={"enum": [0.1 + n / 10 for n in range(9)] * 9 + [10]})))
    canonical = len(parse_manifest(grows).canonical.encode())
    assert canonical > len(grows.replace(" ", ""))
    with pytest.raises(ManifestInvalid, match=f"has {canonical} bytes in its canonical form"):
        parse_manifest(grows.replace(" ", ""), limits=ManifestLimits(max_bytes=canonical - 1))


def test_nodes_are_limited() -> None:
    nodes = [node(id=f"n{n}") for n in range(1001)]
    assert len(read(manifest(*nodes[:1000])).nodes) == 1000
    assert faults(manifest(*nodes)) == [("/sequence", "has 1001 items; at most 1000 are accepted")]


def test_the_list_of_faults_ends_with_how_many_more_there_are() -> None:
    found = faults(manifest(*[node(id=f"n{n}", lease="0s") for n in range(250)]))
    assert len(found) == 101
    assert found[99][0] == "/sequence/99/lease"
    assert found[100] == ("", "and 150 more faults")
    assert len(faults(manifest(node(a=1, b=2)), max_violations=2)) == 2
