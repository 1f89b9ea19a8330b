"""YAML 1.2 core, as far as it means JSON."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain import yamltext
from fencepost_server.domain.jsontext import canonical_value, parse
from fencepost_server.domain.yamltext import YamlError, parse_yaml


def faults(text: str) -> list[tuple[str, str]]:
    """Return the faults of a text as (path, message)."""
    with pytest.raises(YamlError) as refusal:
        parse_yaml(text)
    return [(fault.path, fault.message) for fault in refusal.value.violations]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("NULL", None),
        ("nil", "nil"),
        ("0o14", 12),
        ("014", 14),
        ("010", 10),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("0O14", "0O14"),
        ("-0x1F", "-0x1F"),
        ("1_000", "1_000"),
        ("0x_1", "0x_1"),
        ("+12", 12),
        ("-0", 0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("1.e+3", 1000.0),
        (".", "."),
        ("+", "+"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("e3", "e3"),
        ("1e400", Decimal("1e400")),
        ("18446744073709551617", 18446744073709551617),
        ("9" * 1000, int("9" * 1000)),
        ("2026-11-01", "2026-11-01"),
        ("2026-11-01T10:00:00Z", "2026-11-01T10:00:00Z"),
        ("12:30:45", "12:30:45"),
        ("1h30m", "1h30m"),
        ("=", "="),
        ("٣", "٣"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("|\n  1\n", "1\n"),
        (">-\n  a\n  b\n", "a b"),
        ('"\\0\\x41\\u00e9\\U0001F600"', "\0Aé😀"),
        ('"\\ud83d\\ude00"', "😀"),
        ("a #b", "a"),
        ("a#b", "a#b"),
        ("%YAML 1.2\n---\nno", "no"),
        ("--- a\n...\n", "a"),
        ("", None),
        ("# nothing\n", None),
        ("---\n", None),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    read = parse_yaml(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb:\n  - x\n  - {c: [d, e]}\n", {"a": 1, "b": ["x", {"c": ["d", "e"]}]}),
        ("a:\nb: ''\n", {"a": None, "b": ""}),
        ("{a, b: 1}", {"a": None, "b": 1}),
        ("[a: 1, b]", [{"a": 1}, "b"]),
        ("? a\n: b\n", {"a": "b"}),
        ("'<<': 1\n'1': 2\n\"~\": 3\n", {"<<": 1, "1": 2, "~": 3}),
        ("a: <<\n", {"a": "<<"}),
        ("- - - a\n", [[["a"]]]),
        ('{"a": [1, 2.5, null, true, "x"], "b": {}}', {"a": [1, 2.5, None, True, "x"], "b": {}}),
        ("no: no\non: 1\n", {"no": "no", "on": 1}),
    ],
)
def test_collections_become_objects_and_arrays(text: str, value: object) -> None:
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1\nb: 2\n", [("/a", "anchors are not accepted (line 1, column 4)")]),
        (
            "a: &x [1]\nb: *x\n",
            [
                ("/a", "anchors are not accepted (line 1, column 4)"),
                ("/b", "aliases are not accepted (line 2, column 4)"),
            ],
        ),
        ("a: !!str 1\n", [("/a", "tags are not accepted (line 1, column 4)")]),
        ("- ! a\n", [("/0", "tags are not accepted (line 1, column 3)")]),
        ("a: !<tag:x> {b: 1}\n", [("/a", "tags are not accepted (line 1, column 4)")]),
        ("!!binary aGk=", [("", "tags are not accepted (line 1, column 1)")]),
        ("%TAG ! tag:x,2000:\n---\na", [("", "tags are not accepted (line 2, column 1)")]),
        ("a:\n  <<: {b: 1}\n", [("/a", "merge keys are not accepted (line 2, column 3)")]),
        (
            "a: {b: 1, b: 2}\na: 3\n",
            [("/a/b", "duplicate key (line 1, column 11)"), ("/a", "duplicate key (line 2, column 1)")],
        ),
        ("1: a\n", [("", "keys are strings: quote 1 (line 1, column 1)")]),
        ("x: {true: a}\n", [("/x", "keys are strings: quote true (line 1, column 5)")]),
        ("? [a]\n: b\n", [("", "keys are strings, not collections (line 1, column 5)")]),
        ("{a: {: b}}", [("/a", "keys are strings, not empty (line 1, column 7)")]),
        ("a: .inf\nb: [-.INF, .NaN]\n", [
            ("/a", ".inf is not JSON (line 1, column 4)"),
            ("/b/0", "-.INF is not JSON (line 2, column 5)"),
            ("/b/1", ".NaN is not JSON (line 2, column 12)"),
        ]),
        ("a: " + "9" * 1001, [("/a", "a number has more than 1000 digits (line 1, column 4)")]),
        ("a: 0x" + "f" * 900, [("/a", "a number has more than 1000 digits (line 1, column 4)")]),
        ("a: 0x" + "f" * 9000, [("/a", "a number has more than 1000 digits (line 1, column 4)")]),
        ("a: 1e9999999", [("/a", "a number has an exponent beyond ±1000000 (line 1, column 4)")]),
        ("--- 1\n--- 2\n--- 3\n", [("", "more than one document (line 2, column 1)")]),
        ("%YAML 1.1\n---\nno", [("", "only YAML 1.2 is accepted (line 2, column 1)")]),
        ('a: "\\ud83d"', [("/a", "a lone surrogate (line 1, column 4)")]),
        ('"\\Uffffffff"', [("", "an escape or a directive has no meaning")]),
        ('a: "\\U00110000"', [("", "an escape or a directive has no meaning")]),
        ("%YAML 1.11\n---\na", [("", "an escape or a directive has no meaning")]),
        ("a: \x07", [("", "the character U+0007 at position 4 is not allowed")]),
        ("a: '\ud800'", [("", "the character U+D800 at position 5 is not allowed")]),
        ("a: 1\nb: x\u2028y", [("", "a raw U+2028 in line 2: write it as an escape in double quotes")]),
        ("a: 1\n b: 2", [("", "mapping values are not allowed here (line 2, column 3)")]),
        ("\ta: 1", [("", "found character '\\t' that cannot start any token (line 1, column 1)")]),
        ("a: [1", [("", "expected ',' or ']', but got '<stream end>' (line 1, column 6)")]),
    ],
)  # fmt: skip
def test_what_json_cannot_say_is_refused_with_its_place(text: str, expected: list[tuple[str, str]]) -> None:
    assert faults(text) == expected


def test_nesting_is_limited_as_in_json() -> None:
    assert parse_yaml("[" * 128 + "]" * 128) == parse("[" * 128 + "]" * 128)
    ((path, message),) = faults("[" * 129 + "]" * 129)
    assert path == "/0" * 128
    assert message.startswith("collections are nested more than 128 deep")
    assert faults("- " * 129 + "a")[0][1].startswith("collections are nested more than 128 deep")


def test_the_number_of_values_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamltext, "MAX_NODES", 100)
    assert parse_yaml(f"[{'1, ' * 98}1]") == [1] * 99
    assert faults(f"[{'1, ' * 99}1]") == [("", "more than 100 values (line 1, column 299)")]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029"), max_size=8),
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text("abé ", max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(documents)
def test_json_with_escapes_means_the_same_as_yaml(value: object) -> None:
    text = json.dumps(value)
    assert canonical_value(parse_yaml(text)) == canonical_value(parse(text))


pieces = st.one_of(
    st.sampled_from("-?:[]{},'\"\\|>#&*!%@`~ \t\r\n\x85a1é"),
    st.sampled_from(["- ", ": ", "? ", ", ", "\n  ", "&x ", "*x", "!!str ", "---", "...", "<<"]),
    st.sampled_from(["\\u", "\\xZZ", "\\Uffffffff", "%YAML 1.", "%TAG ! x:"]),
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_any_text_is_either_one_json_value_or_has_faults(text: str) -> None:
    try:
        value = parse_yaml(text)
    except YamlError as error:
        value = None
        found = error.violations
    else:
        found = ()
    assert found or canonical_value(parse(canonical_value(value))) == canonical_value(value)
