"""JSON text: strict parsing, one canonical spelling per value, and the fingerprint built on it.

Every payload passes through `parse`, so the work is left to the C scanner of the standard library and this
module only adds what that scanner lets through: duplicate keys, NaN, lone surrogates, and what has no limit
there (nesting, digits, exponents). Nothing is lost on the way in: an integer of any accepted size is an exact
int, and a number with a fraction or an exponent is a float only if that float prints back as the same number
and, where it has no fraction, is that very number; else it is a Decimal (1e400, 0.1234567890123456789, 1e23).

Hence the invariants that the tests hold:

- `parse` and `canonical` accept exactly the same texts;
- two texts have the same canonical text if and only if they denote the same value;
- a canonical text is accepted and is its own canonical text.

**Canonical text.** Keys sorted by code point, no white space, strings with no escapes but `\\"`, `\\\\`,
`\\b`, `\\f`, `\\n`, `\\r`, `\\t` and `\\u00xx` (lower case) for the other control characters. A number is
`[-]digits[e[-]exponent]`, where digits neither begin nor end with 0 and the exponent is a plain decimal, left
out when it is 0; zero is `0`, whatever its sign. So 1, 1.0 and 10e-1 are all `1`; 100 is `1e2`; -0.25 is
`-25e-2`; 2**64 and 2**64+1 differ. Neither RFC 8785 nor any float-based printer has that property, because
both print the nearest double.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable
from decimal import Decimal
from hashlib import sha256
from itertools import accumulate
from typing import Any

MAX_DEPTH = 128
"""Arrays and objects inside each other, the outermost counting as 1."""
MAX_DIGITS = 1_000
"""Digits of one number as written, before and after the point together."""
MAX_EXPONENT = 10**6
"""Largest magnitude of an exponent, both as written and in the canonical spelling."""

_EXACT_FLOAT_CHARS = 16
"""A literal this short has at most 15 digits beside its point or e: a double holds 15 exactly."""
_TINY = 1e-300
_EXACT_INTEGERS = 2.0**53
"""Up to here a float with no fraction is exact. Past it, 1e23 would be less than 10**23 to whoever compares."""
_QUOTED_CHARS = 100

_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE_ESCAPE = re.compile(
    r"\\u[dD](?:"
    r"[89abAB]..(?!\\u[dD][c-fC-F])"  # a high one that no low one follows
    r"|[c-fC-F](?<!\\u[dD][89abAB]..\\u[dD].))"  # a low one that no high one precedes
)
_ALL_BUT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def _writer(encoder: json.JSONEncoder) -> Callable[[object], str]:
    """``encoder.encode``, but for what is in itself, with the encoder in C made once and not anew for each text: that
    takes as long as a short text does.
    """
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    quote = json.encoder.encode_basestring_ascii if encoder.ensure_ascii else json.encoder.encode_basestring
    separators = encoder.key_separator, encoder.item_separator
    try:
        chunks = make(None, encoder.default, quote, None, *separators, False, False, encoder.allow_nan)
    except TypeError:  # a Python that has it not, or otherwise
        return encoder.encode
    return lambda value: "".join(chunks(value, 0))


_quote: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode
_write_plain = _writer(json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")))
dumps = _writer(json.JSONEncoder())
"""As json.dumps, for what the server writes of its own."""


def loads(text: str) -> Any:
    """As json.loads, for what the server has written by ``dumps``: that has no white space around it."""
    value, end = _read_plain(text)
    assert end == len(text), "this was not written by dumps"
    return value


_read_plain = json.JSONDecoder().raw_decode


class JsonError(ValueError):
    """The text is not JSON as accepted here; `message` says why, for whoever sent it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def parse(text: str) -> object:
    """Check `text` strictly and return its value.

    Objects become dicts (in the order written), arrays lists, numbers int, float or Decimal (see the module's
    docstring).

    Raises:
        JsonError: not RFC 8259 JSON (NaN, a raw control character, a byte order mark, …), a duplicate key, a
            lone surrogate, nesting past MAX_DEPTH, or a number past MAX_DIGITS or MAX_EXPONENT.
    """
    if not text.isascii():
        _refuse_raw_surrogates(text)
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise JsonError(f"arrays and objects are nested more than {MAX_DEPTH} deep")
    # A text too short to hold a number over the limit needs no check of each integer.
    decoder = _SHORT if len(text) <= MAX_DIGITS else _LONG
    try:
        value: object = _decode(decoder, text)
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    if "\\u" in text and _SURROGATE_ESCAPE.search(text) is not None:
        _refuse_escaped_surrogates(text)
    return value


def canonical(text: str) -> str:
    """Return the canonical spelling of the JSON value in `text`; raises JsonError as `parse` does."""
    return canonical_value(parse(text))


def canonical_value(value: object) -> str:
    """Return the canonical text of a value as `parse` makes them.

    Raises:
        JsonError: something in it is not JSON (another type, a NaN, an infinity) or past the limits.
    """
    pieces: list[str] = []
    _append_canonical(value, pieces.append)
    return "".join(pieces)


def written(value: object) -> str:
    """Return plain JSON text of a value as `parse` makes them, for readers: keys in their order, no white space,
    integers as digits only, so that whoever parses it gets integers.
    """
    try:
        return _write_plain(value)
    except TypeError:  # a Decimal, which the writer of the standard library does not know
        pieces: list[str] = []
        _append_written(value, pieces.append)
        return "".join(pieces)


def fingerprint(workflow_id: str, canonical_input: str) -> bytes:
    """Return the 32 bytes that tell whether two requests ask for the same run.

    SHA-256 over two fields, the workflow id and the canonical input, each written as its length in bytes
    (unsigned, 8 bytes, big-endian) followed by its UTF-8 bytes. The lengths keep ("ab", "c") and ("a", "bc")
    apart.
    """
    digest = sha256()
    for field in (workflow_id, canonical_input):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def parse_number(token: str) -> int | float | Decimal:
    """Return the value of one decimal number, which may have leading zeros or a bare point (`007`, `1.`).

    For readers of other notations. Raises JsonError for a number past the limits.
    """
    if "." in token or "e" in token or "E" in token:
        return _parse_float(token)
    return _parse_int(token)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"duplicate key {_quote(key[:_QUOTED_CHARS])} in one object")
            seen.add(key)
    return members


def _parse_int(token: str) -> int:
    if len(token) > MAX_DIGITS:
        _decompose(token)
    return int(token)


def _parse_float(token: str) -> float | Decimal:
    value = float(token)
    exact = -_EXACT_INTEGERS <= value <= _EXACT_INTEGERS
    if exact and len(token) <= _EXACT_FLOAT_CHARS and not -_TINY < value < _TINY:
        return value
    if exact and len(token) <= MAX_DIGITS and (token == repr(value) or not token.strip("-0.")):
        return value
    number = _decompose(token)
    if exact and _decompose(repr(value)) == number:
        return value
    return Decimal(token)


def _refuse_constant(name: str) -> object:
    raise JsonError(f"{name} is not JSON")


def _decompose(token: str) -> tuple[str, str, int]:
    """Return sign, digits without zeros at either end, and exponent; refuse a number past the limits.

    Zero is ("", "", 0). The exponent is checked twice: as written, and after the digits are made an integer,
    so that what is accepted has a canonical text that is accepted too.
    """
    match = _NUMBER.fullmatch(token)
    if match is None:
        raise JsonError(f"{_quote(token[:_QUOTED_CHARS])} is not a number")
    sign, whole, fraction, written_exponent = match.groups(default="")
    if len(whole) + len(fraction) > MAX_DIGITS:
        raise JsonError(f"a number has more than {MAX_DIGITS} digits")
    exponent = _exponent(written_exponent) if written_exponent else 0
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return "", "", 0
    exponent += len(digits) - len(significant) - len(fraction)
    if abs(exponent) > MAX_EXPONENT:
        raise JsonError(f"a number has an exponent beyond ±{MAX_EXPONENT}")
    return sign, significant, exponent


def _exponent(written: str) -> int:
    magnitude = written.lstrip("+-").lstrip("0")
    if len(magnitude) > len(str(MAX_EXPONENT)) or int(magnitude or "0") > MAX_EXPONENT:
        raise JsonError(f"a number has an exponent beyond ±{MAX_EXPONENT}")
    return -int(magnitude or "0") if written.startswith("-") else int(magnitude or "0")


def _depth(text: str) -> int:
    """Return how deep the brackets outside strings go: exact for valid JSON, else never less than a reader
    gets to see before the first error.
    """
    # Escapes go first: without what stands between them, two escapes could be read as another one.
    unescaped = text.encode().replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = unescaped.translate(None, _ALL_BUT_STRUCTURE)
    outside = b"".join(structure.split(b'"')[::2])
    return max(accumulate(array("b", outside.translate(_STEPS))), default=0)


def _refuse_raw_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code, place = ord(text[error.start]), error.start + 1
        raise JsonError(f"a lone surrogate (U+{code:04X}) at character {place}") from None


def _refuse_escaped_surrogates(text: str) -> None:
    # The text is valid JSON by now, so backslashes stand in strings only and pair up from the left: once the
    # escaped ones are blanked out, every \u left is an escape.
    lone = _LONE_SURROGATE_ESCAPE.search(text.replace("\\\\", "  "))
    if lone is not None:
        escape = text[lone.start() : lone.start() + len("\\uXXXX")]
        raise JsonError(f"a lone surrogate ({escape}) at character {lone.start() + 1}")


def _append_canonical(value: object, append: Callable[[str], None]) -> None:
    if isinstance(value, str):
        append(_quote(value))
    elif value is None or isinstance(value, bool):
        append("null" if value is None else "true" if value else "false")
    elif isinstance(value, dict):
        before = "{"
        for key in sorted(value):
            append(f"{before}{_quote(key)}:")
            _append_canonical(value[key], append)
            before = ","
        append("}" if value else "{}")
    elif isinstance(value, list):
        before = "["
        for item in value:
            append(before)
            _append_canonical(item, append)
            before = ","
        append("]" if value else "[]")
    else:
        append(_canonical_number(value))


def _append_written(value: object, append: Callable[[str], None]) -> None:
    if isinstance(value, dict):
        before = "{"
        for key, member in value.items():
            append(f"{before}{_quote(key)}:")
            _append_written(member, append)
            before = ","
        append("}" if value else "{}")
    elif isinstance(value, list):
        before = "["
        for item in value:
            append(before)
            _append_written(item, append)
            before = ","
        append("]" if value else "[]")
    else:
        append(str(value) if isinstance(value, Decimal) else _write_plain(value))


def _canonical_number(value: object) -> str:
    if not isinstance(value, int | float | Decimal):
        raise JsonError(f"a value of type {type(value).__name__} is not JSON")
    token = str(value)
    if isinstance(value, int) and len(token) <= MAX_DIGITS:
        digits = token.rstrip("0")
        return token if len(digits) == len(token) or not value else f"{digits}e{len(token) - len(digits)}"
    whole, _, fraction = token.partition(".")
    if isinstance(value, float) and fraction.isdecimal() and fraction != "0":
        # A float prints without zeros at either end, but for the one before the point.
        if whole in {"0", "-0"}:
            return f"{whole[:-1]}{fraction.lstrip('0')}e-{len(fraction)}"
        return f"{whole}{fraction}e-{len(fraction)}"
    sign, digits, exponent = _decompose(token)
    return f"{sign}{digits or '0'}e{exponent}" if exponent else f"{sign}{digits or '0'}"


_SHORT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_parse_float, parse_constant=_refuse_constant)
_LONG = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_parse_float, parse_int=_parse_int, parse_constant=_refuse_constant
)


def _decode(decoder: json.JSONDecoder, text: str) -> object:
    """The value of a text. Most have no white space around it, which takes as long to look for as a short value."""
    try:
        value, end = decoder.raw_decode(text)
    except json.JSONDecodeError:
        return decoder.decode(text)
    return value if end == len(text) else decoder.decode(text)
