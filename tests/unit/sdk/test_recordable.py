"""What the SDK takes for recordable is what the server takes: its parser is the judge."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fencepost import NotEncodable, Value
from fencepost.codec import encode
from fencepost.recordable import MAX_DEPTH, MAX_DIGITS, recordable
from fencepost.v1 import payload_pb2
from fencepost_server.domain.errors import PayloadTooLarge
from fencepost_server.domain.jsontext import JsonError, parse
from fencepost_server.wire.payloads import payload_in

TEXTS = (
    "", "{", "nul", "NaN", "-Infinity", "[1,]", ' [1, "a"] ', '"\t"', "01", "1.5E+308", "1e1000000", "1e-1000001",
    "1e+00000000000000001", f"1e{'9' * 5000}", "-" + "1" * MAX_DIGITS, "1" * (MAX_DIGITS + 1), f"0.{'1' * MAX_DIGITS}",
    '{"a":1,"a":2}', '{"a":{"b":1,"c":2},"b":1}', '{"1":1, "1":2}', '{"\\u0061":1,"a":2}', '"\\ud800"',
    '"\\ude00\\ud83d"',
    '{"\\ud800":1}', '"\\ud83d\\ude00"', '"\\\\ud800"', "[" * MAX_DEPTH + "]" * MAX_DEPTH,
    "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), '{"a":' * MAX_DEPTH + "[]" + "}" * MAX_DEPTH, "[" * 5000,
    '"' + "[" * 500 + '"', '["\\"' + "[" * 500 + '"]', '["\\\\","' + "[" * 500 + '"]',
)  # fmt: skip


def server_takes(text: str) -> bool:
    try:
        parse(text)
    except JsonError:
        return False
    return True


def sdk_takes(value: Value, given: object) -> bool:
    try:
        assert recordable(value, given=given) is value
    except NotEncodable:
        return False
    return True


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_that_somebody_has_written_is_taken_if_the_server_takes_it(text: str) -> None:
    value = Value(json=text)
    assert sdk_takes(value, value) == server_takes(text)


def any_value(rng: Random, depth: int) -> Any:
    kind = rng.randrange(8)
    if depth and kind < 3:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if depth and kind < 6:
        keys = ("1", 1, 2, -1, "-1", 1.5, "1.5", True, "true", None, "null", "a", '"1', "")
        return {rng.choice(keys): any_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice((None, True, 7, 1e22, "", '[{"1":', '\\"]', 10 ** (MAX_DIGITS - 1), 10**MAX_DIGITS, "9" * 2000))


def test_what_the_encoder_has_written_is_taken_if_the_server_takes_it() -> None:
    rng, taken = Random(1), [0, 0]
    for _ in range(1000):
        given = any_value(rng, 4)
        for _ in range(rng.choice((0, 0, MAX_DEPTH - 4, MAX_DEPTH - 2, MAX_DEPTH))):
            given = [given] if rng.randrange(2) else {"a": given}
        value = encode(given)
        expected = server_takes(value.json or "null")
        assert sdk_takes(value, given) == expected, given
        taken[expected] += 1
    assert min(taken) > 100, taken


def test_binary_payloads_and_null_are() -> None:
    assert sdk_takes(Value(binary=b"\xff{"), None)
    assert sdk_takes(Value(), None)


METADATA: tuple[dict[str, str], ...] = (
    {}, {"a": "b"}, {str(n): "x" for n in range(32)}, {str(n): "x" for n in range(33)}, {"a": "x" * 4087},
    {"a": "x" * 4088}, {"a": "ä" * 681}, {"a": "ä" * 682},
)  # fmt: skip


@pytest.mark.parametrize("metadata", METADATA, ids=range(len(METADATA)))
@pytest.mark.parametrize("content", [{"json": "1"}, {"binary": b"1"}, {}], ids=["json", "binary", "null"])
def test_metadata_is_taken_if_the_server_takes_it(metadata: dict[str, str], content: dict[str, Any]) -> None:
    try:
        payload_in(payload_pb2.Payload(**content, metadata=metadata), 100, "output")
    except PayloadTooLarge:
        expected = False
    else:
        expected = True
    assert sdk_takes(Value(**content, metadata=metadata), None) == expected


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": "\ud800"}, {"\ud800": "a"}], ids=range(4))
def test_metadata_that_is_no_text_is_refused(metadata: Any) -> None:
    assert not sdk_takes(Value(json="1", metadata=metadata), None)
