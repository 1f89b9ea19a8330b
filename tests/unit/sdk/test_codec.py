"""Values become JSON exactly or not at all, and come back as what a handler declares."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import pickle
import uuid
from typing import Any, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost import NotDecodable, NotEncodable, Value, codec
from fencepost.codec import NULL, codec_for, encode, json_value

MORNING = dt.datetime(2026, 11, 29, 8, 30, tzinfo=dt.UTC)


@dataclasses.dataclass
class Line:
    sku: str
    count: int


@dataclasses.dataclass
class Order:
    lines: list[Line]
    tags: set[str] = dataclasses.field(default_factory=set)
    blob: bytes = b""
    discount: float = 0.0


class Point(msgspec.Struct):
    x: int
    y: int | None = None


class Price(pydantic.BaseModel):
    amount: decimal.Decimal
    currency: str = pydantic.Field(alias="cur")


@dataclasses.dataclass(frozen=True)
class Ticket:
    id: str
    priority: int = 3
    parent: Ticket | None = None
    tags: list[str] = dataclasses.field(default_factory=list)


class Envelope(msgspec.Struct):
    tickets: dict[str, list[Ticket]]


@dataclasses.dataclass
class Basket:
    price: Price
    others: list[Price] | None = None


class Nothing:
    pass


@dataclasses.dataclass
class Vague:
    what: list[Nothing | None]


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: int


class Tree(TypedDict, total=False):
    value: int
    children: list[Tree]


class Tagged(TypedDict):
    tags: set[str]


plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain_json)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert codec_for(Any).decode(encode(value)) == value


@given(st.integers(min_value=-(10**400), max_value=10**400))
def test_integers_of_any_size_are_exact(number: int) -> None:
    payload = encode({"n": number})
    assert payload.json == f'{{"n":{number}}}'
    assert payload.decode() == {"n": number}
    assert payload.decode(dict[str, int]) == {"n": number}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Line("a", 2), {"sku": "a", "count": 2}),
        ({"line": Line("a", 2), "at": [Point(1)]}, {"line": {"sku": "a", "count": 2}, "at": [{"x": 1, "y": None}]}),
        (
            Order([Line("a", 2)], {"gift"}, b"x"),
            {"lines": [{"sku": "a", "count": 2}], "tags": ["gift"], "blob": "eA==", "discount": 0.0},
        ),
        (Price(amount=decimal.Decimal("1.10"), cur="EUR"), {"amount": "1.10", "cur": "EUR"}),
        ([Price(amount=decimal.Decimal(1), cur="EUR")], [{"amount": "1", "cur": "EUR"}]),
        (Pair(1, 2), [1, 2]),
        ((1, (2,)), [1, [2]]),
        (Colour.RED, "red"),
        (MORNING, "2026-11-29T08:30:00Z"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (decimal.Decimal("0.1"), "0.1"),
        ({1: "a", None: "b", False: "c"}, {"1": "a", "null": "b", "false": "c"}),
        ("\x00", "\x00"),
        ("𝄞", "𝄞"),
    ],
)
def test_declared_classes_become_objects(value: object, text: object) -> None:
    payload = encode(value)
    assert payload.json is not None
    assert json.loads(payload.json) == text


def test_a_value_of_json_is_that_of_the_constructor() -> None:
    made = json_value("1")
    assert (made, repr(made)) == (Value(json="1"), repr(Value(json="1")))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == dataclasses.replace(made) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.json = "2"  # type: ignore[misc]  # the point


def test_none_is_the_empty_payload() -> None:
    assert encode(None) is NULL
    assert NULL.decode() is None


def test_a_float_stays_one() -> None:
    assert encode(1.0).json == "1.0"
    assert encode(1e300).decode() == 1e300


@pytest.mark.parametrize(
    "value", [{"a": [1, 2.5, None, True, {1: -0.0, None: 1e300}], "ü\n": "\x00\u2028"}, [], '"', 7]
)
def test_the_text_is_that_of_json(value: Any) -> None:
    """On each Python: what it takes of json is not promised to stay."""
    assert encode(value).json == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert codec._write.__qualname__ == "_writer.<locals>.write"


def cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


class Broken(dict[str, int]):
    def items(self) -> Any:
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "Out of range float"),
        ({"a": [math.inf]}, "Out of range float"),
        (Order([], discount=math.nan), "Out of range float"),
        (b"x", "bytes has no JSON"),
        ({"a": b"x"}, "bytes has no JSON"),
        ({1, 2}, "set has no JSON"),
        ([frozenset()], "frozenset has no JSON"),
        (cycle(), "Circular reference"),
        (deep(100_000), "nested too deeply"),
        ("\ud800", "lone surrogate"),
        ({"a": "\udfff"}, "lone surrogate"),
        (object(), "builtins.object has no JSON"),
        (Line, "has no JSON"),
        ({(1, 2): 3}, "keys must be"),
        pytest.param(10**5000, "digits", id="an integer that Python does not print"),
        (Broken(a=1), "gone"),
    ],
)
def test_what_has_no_json_is_refused_with_a_reason(value: object, says: str) -> None:
    with pytest.raises(NotEncodable, match=says) as caught:
        encode(value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.reason == "NOT_ENCODABLE"


@pytest.mark.parametrize(
    ("declared", "value", "text"),
    [
        (set[int], {7}, "[7]"),
        (list[set[int]], [{7}], "[[7]]"),
        (dict[str, bytes], {"a": b"x"}, '{"a":"eA=="}'),
        (set[int] | None, {7}, "[7]"),
        (Tagged, {"tags": {"a"}}, '{"tags":["a"]}'),
    ],
)
def test_sets_and_bytes_are_encoded_where_they_are_declared(declared: Any, value: object, text: str) -> None:
    codec = codec_for(declared)
    payload = codec.encode(value)
    assert payload.json == text
    assert codec.decode(payload) == value


@pytest.mark.parametrize("declared", [list[int], dict[str, Any], Tree, Order, Any, None])
def test_a_declaration_without_sets_or_bytes_does_not_allow_them(declared: Any) -> None:
    with pytest.raises(NotEncodable):
        codec_for(declared).encode({"a": {1}})


def test_declared_bytes_travel_as_a_binary_payload() -> None:
    codec = codec_for(bytes)
    payload = codec.encode(b"\x00\xff")
    assert payload == Value(binary=b"\x00\xff")
    assert codec.decode(payload) == b"\x00\xff"
    assert payload.decode() == b"\x00\xff"


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        (Order, '{"lines":[{"sku":"a","count":2}],"new":1}', Order([Line("a", 2)])),
        (Point, '{"x":1}', Point(1)),
        (Price, '{"amount":"1.10","cur":"EUR"}', Price(amount=decimal.Decimal("1.10"), cur="EUR")),
        (list[Price], '[{"amount":1,"cur":"EUR"}]', [Price(amount=decimal.Decimal(1), cur="EUR")]),
        (Tree, '{"value":1,"children":[{"value":2}]}', {"value": 1, "children": [{"value": 2}]}),
        (Pair, "[1,2]", Pair(1, 2)),
        (decimal.Decimal, "1e400", decimal.Decimal("1e400")),
        (Colour, '"red"', Colour.RED),
        (dt.datetime, '"2026-11-29T08:30:00Z"', MORNING),
        (int, "18446744073709551617", 2**64 + 1),
        (Any, "18446744073709551617", 2**64 + 1),
    ],
)
def test_json_becomes_the_declared_type(declared: Any, text: str, value: object) -> None:
    assert codec_for(declared).decode(Value(json=text)) == value


@pytest.mark.parametrize(
    ("declared", "payload"),
    [
        (Order, Value(json='{"lines":[{"sku":"a"}]}')),
        (Order, NULL),
        (int, Value(json='"1"')),
        (int, Value(json="1.5")),
        (Price, Value(json='{"amount":"x"}')),
        (Any, Value(json="1e400")),
        (Any, Value(json="[")),
        (Any, Value(json="NaN")),
        (str, Value(json='"\\ud800"')),
        (int, Value(binary=b"1")),
        (bytes, Value(json='"eA=="')),
    ],
)
def test_what_does_not_fit_the_type_is_refused(declared: Any, payload: Value) -> None:
    with pytest.raises(NotDecodable) as caught:
        codec_for(declared).decode(payload)
    assert caught.value.reason == "NOT_DECODABLE"


def test_a_class_that_refuses_with_an_error_of_its_own_is_not_decodable() -> None:
    @dataclasses.dataclass
    class Picky:
        x: int

        def __post_init__(self) -> None:
            raise KeyError("never")

    with pytest.raises(NotDecodable, match="never"):
        codec_for(Picky).decode(Value(json='{"x":1}'))


def test_a_type_that_no_json_becomes_is_refused_when_it_is_declared() -> None:
    class Opaque:
        pass

    with pytest.raises(TypeError, match="Opaque"):
        codec_for(Opaque)


@pytest.mark.parametrize(
    ("declared", "made", "text"),
    [
        (Ticket, Ticket("a"), '{"id":"a"}'),
        (Ticket, Ticket("a", parent=Ticket("b")), '{"id":"a","parent":{"id":"b"}}'),
        (list[Ticket], [Ticket("a", 4)], '[{"id":"a","priority":4}]'),
        (Envelope, Envelope({"x": [Ticket("a")]}), '{"tickets":{"x":[{"id":"a"}]}}'),
    ],
)
def test_what_was_decoded_is_encoded_like_what_was_constructed(declared: Any, made: object, text: str) -> None:
    """With the defaults of its fields: whoever gets it next may have none."""
    decoded = codec_for(declared).decode(Value(json=text))
    assert decoded == made
    assert encode(decoded) == encode(made)
    assert "priority" in (encode(decoded).json or "")


def test_models_of_pydantic_may_be_inside_of_other_classes() -> None:
    price = Price(amount=decimal.Decimal("1.50"), cur="EUR")
    basket = codec_for(Basket).decode(Value(json='{"price":{"amount":"1.50","cur":"EUR"},"others":[]}'))
    assert basket == Basket(price, [])
    assert codec_for(Basket).decode(encode(Basket(price, [price]))) == Basket(price, [price])
    with pytest.raises(NotDecodable, match=r"(?s)cur.*\$\.price"):
        codec_for(Basket).decode(Value(json='{"price":{"amount":"1.50"}}'))


def test_a_class_that_no_json_becomes_is_refused_inside_of_others_too() -> None:
    with pytest.raises(TypeError, match="JSON can't be converted to Nothing, which Vague mentions"):
        codec_for(Vague)
    assert codec_for(dict[str, object]).decode(Value(json='{"a":[1]}')) == {"a": [1]}


def test_a_value_passes_untouched() -> None:
    payload = Value(json='{"a": 1}', metadata={"k": "v"})
    assert encode(payload) is payload
    assert codec_for(Value).decode(payload) is payload


MADE_WRONG: list[dict[str, Any]] = [
    {"json": {"a": 1}}, {"json": b'"\xc3\xa4"'}, {"json": "\ud800"}, {"binary": "text"}, {"binary": bytearray(b"x")},
    {"json": "1", "metadata": {"a": 1}}, {"json": "1", "metadata": {"a": "\ud800"}}, {"metadata": None},
    {"json": "1", "metadata": {"a": "x" * 4_096}}, {"json": "1", "metadata": {str(n): "" for n in range(33)}},
]  # fmt: skip


@pytest.mark.parametrize("parts", MADE_WRONG, ids=range(len(MADE_WRONG)))
def test_a_value_that_no_frame_can_have_is_refused_where_it_is_made(parts: dict[str, Any]) -> None:
    with pytest.raises(NotEncodable):
        encode(Value(**parts))


def test_sizes_are_in_bytes() -> None:
    assert encode("é").size == 4
    assert encode("abc").size == 5
    assert Value(binary=b"123").size == 3
    assert NULL.size == 0
