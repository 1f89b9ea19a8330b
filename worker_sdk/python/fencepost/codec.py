"""Python values to payloads and back.

What a payload may be made from, and what becomes of it:

- None, bool, int of any size, finite float, str, list, tuple, dict: themselves. Dict keys that are numbers,
  bools or None become strings, as `json` does.
- dataclasses, `msgspec.Struct`, TypedDict, NamedTuple and pydantic models: objects (NamedTuple: an array);
  date and time types, UUID, Decimal and Enum: their usual text or value.
- sets and bytes only where a declared type says so: as a field of one of these classes, or in the annotation
  of what a step returns. Elsewhere they are refused: a set has no order and bytes have no JSON, so each would
  come back as something else. A step that is declared to return ``bytes`` sends a binary payload.
- never: NaN, infinities, cycles, lone surrogates, any other class.

JSON to Python: without a type, plain values with exact integers; with one, `msgspec`'s strict conversion (no
text becomes a number), or pydantic's where the type is one of pydantic's, also inside the others. Fields that the
type does not know are ignored. A JSON number that no Python float can hold is refused, unless its type is Decimal.

Callers: the client, and the executor around every step. Nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from fencepost.errors import NotDecodable, NotEncodable

T = TypeVar("T")

_SCALARS = (
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
    uuid.UUID,
    decimal.Decimal,
    enum.Enum,
)
_NEEDS_DECLARATION = (bytes, bytearray, memoryview, set, frozenset)

MAX_METADATA_ENTRIES = 32
MAX_METADATA_BYTES = 4_096
"""As JSON."""


@dataclass(frozen=True, slots=True)
class Value:
    """A payload as it travels: ``json`` text or ``binary``, with ``metadata`` for whoever reads it.

    Neither of the two stands for JSON null. A step or a client that declares `Value` gets it untouched, and
    one that returns it sends it untouched.
    """

    json: str | None = None
    binary: bytes | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def decode(self, type: Any = Any) -> Any:
        """The value as ``type`` (plain JSON by default). Raises NotDecodable."""
        return codec_for(type).decode(self)

    @property
    def size(self) -> int:
        """Its length in bytes."""
        if self.json is not None:
            return utf8_length(self.json)
        return len(self.binary or b"")


NULL = Value()
PLAIN_TYPES = frozenset({dict, list, str, int, float, bool})
"""The types of nearly all values; none of them is awaitable, so nobody needs to look further."""

_set_json, _set_binary, _set_metadata = (
    cast("Callable[[Value, object], None]", getattr(Value, name).__set__) for name in ("json", "binary", "metadata")
)


def json_value(text: str) -> Value:
    """``Value(json=text)`` in a third of the time: one is made for each step's input and output, and the constructor of
    a frozen class sets each field by a call of its own.
    """
    value = object.__new__(Value)
    _set_json(value, text)
    _set_binary(value, None)
    _set_metadata(value, {})
    return value


def utf8_length(text: str) -> int:
    """The length of ``text`` in UTF-8.

    Raises NotEncodable if it has a lone surrogate, which UTF-8 can't say.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise NotEncodable(f"it has a lone surrogate, {text[error.start]!r}, which is not Unicode") from None


def encode(value: object, *, declared: bool = False) -> Value:
    """Make a payload of ``value``.

    ``declared`` tells that the annotation of the value mentions sets or bytes, and so allows them. Raises
    NotEncodable.
    """
    if value is None:
        return NULL
    if type(value) is Value:
        return _by_hand(value)
    try:
        if declared:
            if isinstance(value, bytes | bytearray | memoryview):
                return Value(binary=bytes(value))
            value = msgspec.to_builtins(value, str_keys=True, enc_hook=plain)
        text = _write(value)
        utf8_length(text)
        return json_value(text)
    except NotEncodable:
        raise
    except RecursionError:
        raise NotEncodable("it is nested too deeply, or contains itself") from None
    except Exception as error:
        # Methods of the user's classes run in here, so anything can come out; whatever it is, there is no
        # JSON.
        raise NotEncodable(_first_line(error)) from error


def _by_hand(value: Value) -> Value:
    """A payload that a user has made. Raises NotEncodable for what no frame can have: found as late as there, it would
    take all that travels with it along.
    """
    json_text: object = value.json
    binary: object = value.binary
    if json_text is not None and not isinstance(json_text, str):
        raise NotEncodable(f"the json of a Value is text, not {type(json_text).__name__}")
    if binary is not None and not isinstance(binary, bytes):
        raise NotEncodable(f"the binary of a Value is bytes, not {type(binary).__name__}")
    utf8_length(value.json or "")
    check_metadata(value.metadata)
    return value


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raises NotEncodable if it is no text by name, or beyond what the server takes."""
    if not isinstance(metadata, Mapping):
        raise NotEncodable(f"the metadata of a Value is a mapping, not {type(metadata).__name__}")
    if not metadata:
        return
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise NotEncodable("names and values of metadata are text")
    text = json.dumps(dict(metadata))
    if len(metadata) > MAX_METADATA_ENTRIES or len(text) > MAX_METADATA_BYTES:
        raise NotEncodable(f"its metadata has more than {MAX_METADATA_ENTRIES} entries or {MAX_METADATA_BYTES} bytes")
    for name, told in metadata.items():
        utf8_length(name + told)


def plain(value: object) -> object:
    """One step from ``value`` towards what JSON has; the encoder goes on from there."""
    serializer = getattr(type(value), "__pydantic_serializer__", None)
    if serializer is not None:
        # Aliases, because that is what the same model reads.
        return serializer.to_python(value, mode="json", by_alias=True)
    if isinstance(value, msgspec.Struct) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return msgspec.to_builtins(value, str_keys=True, enc_hook=plain)
    if isinstance(value, _SCALARS):
        return msgspec.to_builtins(value)
    if isinstance(value, _NEEDS_DECLARATION):
        raise NotEncodable(
            f"{type(value).__name__} has no JSON of its own: convert it, or declare it as what is returned"
        )
    if inspect.isawaitable(value):
        raise NotEncodable(f"{type(value).__qualname__} is an awaitable, which has no JSON: await it first")
    raise NotEncodable(f"{type(value).__module__}.{type(value).__qualname__} has no JSON")


def _writer() -> Callable[[object], str]:
    """What writes JSON as compact as it gets: what json's own encoder does, without the layers around its part in C,
    which take longer than a short text.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    quote = json.encoder.encode_basestring

    def write(value: object) -> str:
        # One for each text, with a memory of its own of what the value is in: threads must not share that.
        return "".join(make({}, plain, quote, None, ":", ",", False, False, False)(value, 0))

    try:
        known = make is not None and write([1.5, {"a": None}]) == encoder.encode([1.5, {"a": None}])
    except TypeError:
        known = False
    return write if known else encoder.encode


_write = _writer()


def declares_sets_or_bytes(declared_type: Any) -> bool:
    """Whether an annotation allows sets or bytes in a value: it mentions them outside of classes."""
    return _mentions(declared_type, _NEEDS_DECLARATION)


class Codec(Generic[T]):
    """Converts payloads from and to one declared type."""

    __slots__ = ("_decode_json", "_wants_bytes", "_wants_value", "declares", "type")

    def __init__(self, declared_type: Any) -> None:
        self.type = declared_type
        self.declares = declares_sets_or_bytes(declared_type)
        self._wants_bytes = declared_type in (bytes, Any, object)
        self._wants_value = declared_type is Value
        self._decode_json = _reader(declared_type)

    def encode(self, value: T) -> Value:
        """Make a payload of ``value``. Raises NotEncodable."""
        return encode(value, declared=self.declares)

    def decode(self, value: Value) -> T:
        """The payload as the declared type. Raises NotDecodable."""
        if self._wants_value:
            return cast("T", value)
        if value.binary is not None:
            if not self._wants_bytes:
                raise NotDecodable(f"a binary payload is not {_name(self.type)}")
            return cast("T", value.binary)
        if self.type is bytes:
            raise NotDecodable("JSON is not bytes")
        try:
            return cast("T", self._decode_json("null" if value.json is None else value.json))
        except Exception as error:
            # Validators and __post_init__ of the user's classes run in here, so anything can come out.
            raise NotDecodable(f"not {_name(self.type)}: {_first_line(error)}") from error


@functools.lru_cache(maxsize=1024)
def _cached(declared_type: Any) -> Codec[Any]:
    return Codec(declared_type)


def codec_for(declared_type: Any) -> Codec[Any]:
    """The codec of a type, made once. Raises TypeError for an annotation that no JSON can be converted to."""
    try:
        hash(declared_type)
    except TypeError:
        return Codec(declared_type)
    return _cached(declared_type)


def _reader(declared_type: Any) -> Callable[[str], Any]:
    if declared_type is Value or declared_type is bytes:
        return json.loads
    if (pydantic := sys.modules.get("pydantic")) is not None and _mentions_pydantic(declared_type):
        return cast("Callable[[str], Any]", pydantic.TypeAdapter(declared_type).validate_json)
    if declared_type in (Any, object):
        return msgspec.json.Decoder().decode
    kinds = list(_kinds(msgspec.inspect.type_info(declared_type), set()))
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.CustomType) and not _can_come_of_json(kind.cls):
            where = "" if kind.cls is declared_type else f", which {_name(declared_type)} mentions"
            raise TypeError(f"JSON can't be converted to {_name(kind.cls)}{where}")
    decode: Callable[[str], Any] = msgspec.json.Decoder(declared_type, dec_hook=_decode_custom).decode
    if any(isinstance(kind, msgspec.inspect.DataclassType) and _defaults(kind.cls) for kind in kinds):
        return lambda text: _completed(decode(text))
    return decode


def _kinds(part: object, seen: set[int]) -> Iterator[msgspec.inspect.Type]:
    """A type, and all that it mentions, those of its classes' fields too. They may mention each other."""
    if isinstance(part, tuple):
        for each in part:
            yield from _kinds(each, seen)
    elif isinstance(part, msgspec.inspect.Field):
        yield from _kinds(part.type, seen)
    elif isinstance(part, msgspec.inspect.Type) and id(part) not in seen:
        seen.add(id(part))
        yield part
        for name in part.__struct_fields__:
            yield from _kinds(getattr(part, name), seen)


def _can_come_of_json(cls: Any) -> bool:
    """Whether a class that msgspec does not know is a model of pydantic's, or plain values are instances of it."""
    origin = get_origin(cls) or cls
    plain_values = (dict, list, str, int, float, type(None))
    return _mentions_pydantic(cls) or (isinstance(origin, type) and any(issubclass(t, origin) for t in plain_values))


def _decode_custom(declared_type: Any, plain_value: object) -> Any:
    """A model inside a class that msgspec reads: from JSON again, which models read otherwise than Python's values.
    Anything else is what it is; msgspec sees whether it is an instance.
    """
    if _mentions_pydantic(declared_type):
        return codec_for(declared_type)._decode_json(_write(plain_value))
    return plain_value


@functools.lru_cache(maxsize=1024)
def _defaults(cls: Any) -> Mapping[str, Any]:
    """The fields of a dataclass that its constructor sets to a plain default if they are not given."""
    if not dataclasses.is_dataclass(cls) or "__slots__" in vars(get_origin(cls) or cls):
        return {}
    fields = dataclasses.fields(cls)
    return {field.name: field.default for field in fields if field.init and field.default is not dataclasses.MISSING}


def _completed(value: T) -> T:
    """Give the dataclasses in a value the defaults that the JSON left out, as their constructors do: msgspec leaves
    these to the attributes of the class, and then does not see them when it encodes the same instance.
    """
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if part is None or isinstance(part, (str, int, float)) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            waiting.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            waiting.extend(part)
        elif isinstance(part, msgspec.Struct):
            waiting.extend(getattr(part, name) for name in part.__struct_fields__)
        elif dataclasses.is_dataclass(part):
            cls: Any = type(part)
            for name, default in _defaults(cls).items():
                vars(part).setdefault(name, default)
            waiting.extend(getattr(part, field.name, None) for field in dataclasses.fields(part))
    return value


def _mentions(declared_type: Any, wanted: tuple[type, ...], seen: tuple[Any, ...] = ()) -> bool:
    """Whether an annotation mentions one of ``wanted`` outside of classes, which speak for their fields."""
    if declared_type in seen:
        return False
    inside: tuple[Any, ...] = get_args(declared_type)
    if is_typeddict(declared_type):
        # A TypedDict's values are plain dicts, so what its fields declare must be known from here. It may
        # name itself.
        inside = tuple(get_type_hints(declared_type).values())
    origin = getattr(declared_type, "__origin__", None)
    if declared_type in wanted or origin in wanted:
        return True
    return any(_mentions(part, wanted, (*seen, declared_type)) for part in inside)


def _mentions_pydantic(declared_type: Any) -> bool:
    if hasattr(declared_type, "__pydantic_validator__"):
        return True
    return any(_mentions_pydantic(argument) for argument in get_args(declared_type))


def _name(declared_type: Any) -> str:
    return declared_type.__qualname__ if isinstance(declared_type, type) else str(declared_type)


def _first_line(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - __str__ is the user's too; the class's name is enough
        text = ""
    return text or type(error).__name__
