"""Strict JSON, its canonical text and fingerprints, held against a small reader written from RFC 8259."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_server.domain.jsontext import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_EXPONENT,
    JsonError,
    canonical,
    canonical_value,
    dumps,
    fingerprint,
    loads,
    parse,
    written,
)

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')
SPACE = re.compile(r"[ \t\n\r]*")
CONSTANTS = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Number:
    """A number by its value, so that Python's 1 == True cannot hide anything."""

    value: Decimal


class Reader:
    """The reference: slow and plain."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def document(self) -> object:
        value = self.value(0)
        self.skip(SPACE)
        self.want(self.at == len(self.text))
        return value

    def value(self, depth: int) -> object:
        self.skip(SPACE)
        if self.take("{"):
            return self.members(depth + 1)
        if self.take("["):
            return self.items(depth + 1)
        if self.text.startswith('"', self.at):
            return self.string()
        for name, constant in CONSTANTS.items():
            if self.text.startswith(name, self.at):
                self.at += len(name)
                return constant
        return self.number()

    def members(self, depth: int) -> object:
        self.want(depth <= MAX_DEPTH)
        found: dict[str, object] = {}
        while not (self.take("}") if not found else self.closes("}")):
            self.skip(SPACE)
            key = self.string()
            self.want(key not in found)
            self.skip(SPACE)
            self.want(self.take(":"))
            found[key] = self.value(depth)
        return found

    def items(self, depth: int) -> object:
        self.want(depth <= MAX_DEPTH)
        found: list[object] = []
        while not (self.take("]") if not found else self.closes("]")):
            found.append(self.value(depth))
        return found

    def string(self) -> str:
        token = self.skip(STRING)
        value = json.loads(token or "x")
        assert isinstance(value, str)
        value.encode()
        return value

    def number(self) -> Number:
        token = self.skip(NUMBER)
        self.want(bool(token))
        mantissa, _, exponent = token.lower().partition("e")
        self.want(sum(character.isdigit() for character in mantissa) <= MAX_DIGITS)
        magnitude = exponent.lstrip("+-0")
        self.want(len(magnitude) <= 7 and int(magnitude or "0") <= MAX_EXPONENT)
        value = Decimal(token)
        if value:
            _, digits, power = value.as_tuple()
            assert isinstance(power, int)
            zeros = len(digits) - len("".join(map(str, digits)).rstrip("0"))
            self.want(abs(power + zeros) <= MAX_EXPONENT)
        return Number(value)

    def closes(self, bracket: str) -> bool:
        self.skip(SPACE)
        if self.take(bracket):
            return True
        self.want(self.take(","))
        return False

    def take(self, character: str) -> bool:
        self.skip(SPACE)
        found = self.text.startswith(character, self.at)
        self.at += found
        return found

    def skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match.group() if match else ""

    def want(self, condition: bool) -> None:
        if not condition:
            raise ValueError(self.at)


def reference(text: str) -> object:
    """Return what the reference reads, or raise ValueError."""
    return Reader(text).document()


def modelled(value: object) -> object:
    """Return what `parse` returned in the terms of the reference."""
    if isinstance(value, dict):
        return {key: modelled(member) for key, member in value.items()}
    if isinstance(value, list):
        return [modelled(item) for item in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    assert isinstance(value, int | float | Decimal)
    return Number(Decimal(repr(value)) if isinstance(value, float) else Decimal(value))


def accepted(text: str, read: object) -> bool:
    """Tell whether a reader takes the text."""
    assert callable(read)
    try:
        read(text)
    except ValueError:
        return False
    return True


numbers = st.builds(
    lambda sign, digits, exponent: Number(Decimal(f"{sign}{digits}e{exponent}")),
    st.sampled_from(["", "-"]),
    st.one_of(st.integers(0, 20), st.integers(0, 10**30), st.just(2**64), st.just(2**64 + 1)),
    st.one_of(st.integers(-3, 3), st.integers(-400, 400)),
)
characters = st.characters(exclude_categories=["Cs"])
strings = st.text(st.one_of(st.sampled_from('"\\/\b\f\n\r\t\0\x1f\x7f\u2028é😀ud8'), characters), max_size=5)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, strings),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("abAB\0éz"), inner, max_size=4)
    ),
    max_leaves=12,
)
seeds = st.integers(0, 2**32).map(Random)


def spell(value: object, random: Random) -> str:
    """Return one of the many texts of a value."""
    space = "".join(random.choices(" \t\n\r", k=random.choice([0, 0, 0, 1, 3])))
    if isinstance(value, dict):
        members = [f"{spell(key, random)}{space}:{spell(member, random)}" for key, member in value.items()]
        random.shuffle(members)
        text = "{" + space + ",".join(members) + "}"
    elif isinstance(value, list):
        text = "[" + space + ",".join(spell(item, random) for item in value) + "]"
    elif isinstance(value, str):
        text = '"' + "".join(spell_character(character, random) for character in value) + '"'
    elif isinstance(value, Number):
        text = spell_number(value.value, random)
    else:
        text = json.dumps(value)
    return space + text + space


def spell_character(character: str, random: Random) -> str:
    units = character.encode("utf-16-be")
    escape = "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
    short = json.dumps(character)[1:-1]
    must = character in '"\\' or character < " "
    return random.choice([escape, escape.upper().replace("\\U", "\\u"), short] + [character] * (not must) * 3)


def spell_number(value: Decimal, random: Random) -> str:
    sign, digit_tuple, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    zeros = random.choice([0, 0, 1, 5])
    digits = "".join(map(str, digit_tuple)) + "0" * zeros
    exponent -= zeros
    after = random.choice([0, 0, 1, len(digits), len(digits) + 2])
    digits = digits.zfill(after + 1)
    whole, fraction = digits[: len(digits) - after].lstrip("0") or "0", digits[len(digits) - after :]
    exponent += after
    text = ("-" if sign else "") + whole + (f".{fraction}" if fraction else "")
    if exponent or random.random() < 0.3:
        plus = random.choice(["", "+"]) if exponent >= 0 else "-"
        text += random.choice("eE") + plus + "0" * random.choice([0, 0, 2]) + str(abs(exponent))
    return text


@given(values, seeds, seeds)
def test_the_canonical_text_is_independent_of_key_order_white_space_and_spelling(
    value: object, one: Random, other: Random
) -> None:
    text = spell(value, one)
    assert canonical(text) == canonical(spell(value, other))
    assert reference(canonical(text)) == reference(text) == value


@given(values, seeds)
def test_a_canonical_text_is_its_own_canonical_text(value: object, random: Random) -> None:
    text = canonical(spell(value, random))
    assert canonical(text) == text


@given(numbers, numbers)
def test_texts_share_their_canonical_text_exactly_if_their_values_are_equal(one: Number, other: Number) -> None:
    assert (canonical(str(one.value)) == canonical(str(other.value))) == (one.value == other.value)


@given(values, seeds)
def test_parsing_loses_nothing(value: object, random: Random) -> None:
    text = spell(value, random)
    assert modelled(parse(text)) == value
    assert canonical_value(parse(text)) == canonical(text)


fragments = st.one_of(
    st.sampled_from("{}[]\",:\\-+.eE01 \t\n\0é'\u00a0٣\ufeff"),
    st.sampled_from(["true", "null", "NaN", "Infinity", '"a"', '"b":', "//", "\ud800", "\udc00"]),
    st.sampled_from(["\\u", "d83d", "DE00", "\\ud83d", "\\udE00"]),
    st.sampled_from(["1" * 999, "0" * 999, "1000000", "1001", "[" * 127, "]" * 127]),
)


@given(st.lists(fragments, max_size=12).map("".join))
def test_parse_and_canonical_accept_what_the_rfc_and_the_limits_do(text: str) -> None:
    expected = accepted(text, reference)
    assert accepted(text, parse) == expected
    assert accepted(text, canonical) == expected


@given(values, seeds, st.data())
def test_a_text_with_one_edit_is_judged_as_the_reference_judges_it(
    value: object, random: Random, data: st.DataObject
) -> None:
    text = spell(value, random)
    start = data.draw(st.integers(0, len(text)))
    edited = text[:start] + data.draw(fragments) + text[start + data.draw(st.integers(0, 2)) :]
    expected = accepted(edited, reference)
    assert accepted(edited, parse) == expected
    if expected:
        assert modelled(parse(edited)) == reference(edited)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", "1"),
        ("1.0", "1"),
        ("1e0", "1"),
        ("10e-1", "1"),
        ("0", "0"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e999999", "0"),
        ("100", "1e2"),
        ("-0.25", "-25e-2"),
        ("12.50", "125e-1"),
        ("1E400", "1e400"),
        ("1e-400", "1e-400"),
        ("18446744073709551616", "18446744073709551616"),
        ("18446744073709551617", "18446744073709551617"),
        ("0.10000000000000000000001", "10000000000000000000001e-23"),
        ("1e1000000", "1e1000000"),
        ('{"b": 1, "a": [ ], "é": {}, "B": null}', '{"B":null,"a":[],"b":1,"é":{}}'),
        ('"\\u0000\\u001F\\b\\f\\n\\r\\t\\/\\u0022\\\\"', '"\\u0000\\u001f\\b\\f\\n\\r\\t/\\"\\\\"'),
        ('"\\ud83d\\uDE00\\u00e9\\u007f\\u2028"', '"😀é\x7f\u2028"'),
        ('{"\\uffff": 1, "\\ud83d\\ude00": 2}', '{"\uffff":1,"😀":2}'),
        (" \t\r\n true ", "true"),
    ],
)
def test_the_canonical_form_is_the_documented_one(text: str, expected: str) -> None:
    assert canonical(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value (line 1, column 1)"),
        ('{"a": 1,\n "b" 2}', "Expecting ':' delimiter (line 2, column 6)"),
        ("1 2", "Extra data"),
        ("\ufeff1", "Expecting value"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("01", "Extra data"),
        ("1.", "Extra data"),
        ("+1", "Expecting value"),
        ("'a'", "Expecting value"),
        ('"a\tb"', "Invalid control character"),
        ('"\\x41"', "Invalid \\escape"),
        ('{"a": 1, "b": {"c": 1, "\\u0063": 2}}', 'duplicate key "c" in one object'),
        ('["\ud800"]', "a lone surrogate (U+D800) at character 3"),
        ('["\\ud800"]', "a lone surrogate (\\ud800) at character 3"),
        ('"\\udc00\\ud800"', "a lone surrogate (\\udc00) at character 2"),
        ('"\\ud83d\\ude00\\ude00"', "a lone surrogate (\\ude00) at character 14"),
        ('"\\ud83d\\ud83d\\ude00"', "a lone surrogate (\\ud83d) at character 2"),
        ('"\\ud83d\\\\ude00"', "a lone surrogate (\\ud83d) at character 2"),
        ('"\\\\\\ud83d"', "a lone surrogate (\\ud83d) at character 4"),
        ("1" * 1001, "a number has more than 1000 digits"),
        (f"-0.{'1' * 1000}", "a number has more than 1000 digits"),
        (f"[{'7' * 5000}]", "a number has more than 1000 digits"),
        ("1e1000001", "a number has an exponent beyond ±1000000"),
        ("0e-1000001", "a number has an exponent beyond ±1000000"),
        ("0.01e-999999", "a number has an exponent beyond ±1000000"),
        (f"1e{'9' * 6000}", "a number has an exponent beyond ±1000000"),
        ("[" * 129 + "]" * 129, "arrays and objects are nested more than 128 deep"),
        ("[" * 200_000, "arrays and objects are nested more than 128 deep"),
        ('{"a":' * 129 + "1" + "}" * 129, "arrays and objects are nested more than 128 deep"),
    ],
)
def test_what_is_not_accepted_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(JsonError) as refusal:
        parse(text)
    assert refusal.value.message.startswith(message)
    with pytest.raises(JsonError):
        canonical(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 128 + "]" * 128,
        f"[{','.join(['[[]]'] * 500)}]",
        json.dumps("[" * 500),
        json.dumps(['"' + "[" * 200, '\n"' + "{" * 200, "\\" + "[" * 200]),
        f'{{"{"[" * 200}": "\\n\\"{"[" * 200}"}}',
        json.dumps("9" * 5000),
        "9" * 1000,
        f"-{'9' * 1000}",
        f"0.{'9' * 999}",
        f"1e{'0' * 5000}1",
        '"\\ud83d\\ude00\\ud83d\\ude00"',
        '"\\\\ud800 \\\\\\\\udc00"',
        '"\\u0000\\ufffe"',
    ],
)
def test_what_only_looks_like_a_breach_of_a_limit_is_accepted(text: str) -> None:
    assert modelled(parse(text)) == reference(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("123456789012345678901", 123456789012345678901),
        ("1.0", 1.0),
        ("1e5", 100000.0),
        ("-0.0", -0.0),
        ("0.1", 0.1),
        ("0.30000000000000004", 0.30000000000000004),
        ("9007199254740992.0", 9007199254740992.0),
        ("9007199254740993.0", Decimal(9007199254740993)),
        ("1e23", Decimal("1e23")),
        ("1e400", Decimal("1e400")),
        ("1e-400", Decimal("1e-400")),
        ("5e-324", 5e-324),
        ("4e-324", Decimal("4e-324")),
        ("0.12345678901234567891", Decimal("0.12345678901234567891")),
    ],
)
def test_a_number_is_a_float_only_where_that_loses_nothing(text: str, value: object) -> None:
    read = parse(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN"), b"x", {1}, object(), 10**1000])
def test_values_that_are_not_json_have_no_canonical_text(value: object) -> None:
    if value == 10**1000:
        value = 10**1000 + 1
    with pytest.raises(JsonError):
        canonical_value([value])


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, {1: -0.0}], "ü\n": "\x00\u2028"}, [], '"', 7])
def test_what_the_server_writes_of_its_own_is_that_of_json(value: object) -> None:
    """On each Python: what it takes of json is not promised to stay."""
    assert dumps(value) == json.dumps(value)
    assert loads(dumps(value)) == json.loads(json.dumps(value))
    assert dumps.__qualname__ == "_writer.<locals>.<lambda>"
    with pytest.raises(AssertionError):
        loads("{} ")


def test_the_fingerprint_is_sha256_over_length_prefixed_fields() -> None:
    assert (
        fingerprint("café", '{"a":1}') == sha256(b"\0\0\0\0\0\0\0\5caf\xc3\xa9\0\0\0\0\0\0\0\7" + b'{"a":1}').digest()
    )
    assert fingerprint("order", "{}").hex() == ("ff1c0a766cb253e58b3a81a1840fa1dd63b73e5ee727d9a3ccaf9c5ec498688e")


@given(st.text(characters, max_size=5), st.text(characters, max_size=5), st.integers(0, 5))
def test_the_fingerprint_keeps_its_fields_apart(workflow: str, text: str, cut: int) -> None:
    whole = workflow + text
    split = whole[:cut], whole[cut:]
    assert (fingerprint(*split) == fingerprint(workflow, text)) == (split == (workflow, text))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ('{"b": 100, "a": [1.5, 12345678901234567890]}', '{"b":100,"a":[1.5,12345678901234567890]}'),
        ("[1e400, 100, {}, [], null, true, false]", "[1E+400,100,{},[],null,true,false]"),
        ('{"é": "\\u0000", "d": {"n": 0.1234567890123456789}}', '{"é":"\\u0000","d":{"n":0.1234567890123456789}}'),
    ],
)
def test_what_is_written_for_readers_has_integers_as_digits_and_says_the_same(text: str, plain: str) -> None:
    assert written(parse(text)) == plain
    assert canonical(plain) == canonical(text)
