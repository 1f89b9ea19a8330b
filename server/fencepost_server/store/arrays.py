"""Columns of a batch as Postgres arrays of one fixed type.

Hot statements take one array a column (``unnest``). A plain list would be sent as int2[], int4[] or int8[]
depending on its values, and each mix of types is a prepared statement of its own; these classes fix the type,
so there is one. They are sent in binary form, laid out here: integers, ids and names by a look into a table of those
that came before. Ids and times that come back are read by such tables, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from psycopg import AsyncConnection
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format
from psycopg.types.string import TextBinaryLoader, TextLoader

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_NULL = b"\xff\xff\xff\xff"


def _text_element(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data


class _Laid(dict[Any, Any]):
    """How values are laid out as elements, by value: most come again and again, also from one batch to the next. When
    there are too many it begins anew.
    """

    def __init__(self, lay_out: Callable[[Any], Any], most: int) -> None:
        super().__init__()
        self._lay_out = lay_out
        self._most = most

    def __missing__(self, value: Any) -> Any:
        if len(self) >= self._most:
            self.clear()
        laid = self[value] = _NULL if value is None else self._lay_out(value)
        return laid

    def join(self, values: Iterable[object]) -> bytes:
        """The elements of a column."""
        return b"".join(map(self.__getitem__, values))


class _Read(_Laid):
    """The same for what comes back: values by the bytes that they came in, which are a view until they are kept."""

    def __missing__(self, view: Any) -> Any:
        return super().__missing__(bytes(view))


_INTS = _Laid(lambda v: struct.pack("!iq", 8, v), 10_000)
_NAMES = _Laid(_text_element, 1_000)
# A run's id is laid out in several columns of a batch, and comes back in the next one.
_UUIDS = _Laid(lambda v: b"\0\0\0\x10" + bytes.fromhex(v.replace("-", "")), 50_000)


class Column(list[Any]):
    """Base of the columns. ``element_oid`` and ``array_oid`` are Postgres type numbers (pg_type.dat)."""

    element_oid: ClassVar[int]
    array_oid: ClassVar[int]
    __slots__ = ()

    def elements(self) -> bytes:
        """The elements, each with its length in front."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """The array in Postgres's binary form: one dimension, lower bound 1."""
        if not self:
            return struct.pack("!iii", 0, 0, self.element_oid)
        if self[0] is None and self.count(None) == len(self):  # as many columns of a batch are
            return struct.pack("!iiiii", 1, 1, self.element_oid, len(self), 1) + _NULL * len(self)
        return struct.pack("!iiiii", 1, 1 if None in self else 0, self.element_oid, len(self), 1) + self.elements()


class Ints(Column):
    """int8[]; elements int or None."""

    element_oid, array_oid = 20, 1016

    def elements(self) -> bytes:
        """See Column."""
        return _INTS.join(self)


class Texts(Column):
    """text[]; elements str or None."""

    element_oid, array_oid = 25, 1009

    def elements(self) -> bytes:
        """See Column."""
        return b"".join([_NULL if v is None else _text_element(v) for v in self])


class Names(Texts):
    """text[] of few short texts, which come again and again; elements str or None. (Of more than the table has room for
    each would be laid out anew.)
    """

    def elements(self) -> bytes:
        """See Column."""
        return _NAMES.join(self)


class Blobs(Column):
    """bytea[]; elements bytes or None."""

    element_oid, array_oid = 17, 1001

    def elements(self) -> bytes:
        """See Column."""
        return b"".join([_NULL if v is None else len(v).to_bytes(4, "big") + v for v in self])


class Uuids(Column):
    """uuid[]; elements str (with hyphens) or None."""

    element_oid, array_oid = 2950, 2951

    def elements(self) -> bytes:
        """See Column."""
        return _UUIDS.join(self)


class Times(Column):
    """timestamptz[]; elements aware datetimes or None."""

    element_oid, array_oid = 1184, 1185

    def elements(self) -> bytes:
        """See Column. Most rows of a batch have the batch's one time, so that each value is laid out once."""
        known: dict[Any, bytes] = {None: _NULL}
        parts = []
        for v in self:
            part = known.get(v)
            if part is None:
                part = known[v] = struct.pack("!iq", 8, _micros(v))
            parts.append(part)
        return b"".join(parts)


class Bools(Column):
    """bool[]; elements bool."""

    element_oid, array_oid = 16, 1000

    def elements(self) -> bytes:
        """See Column."""
        return b"".join(b"\0\0\0\1\1" if v else b"\0\0\0\1\0" for v in self)


def _uuid_text(data: bytes) -> str:
    h = data.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def _time(data: bytes) -> datetime:
    return _EPOCH + timedelta(microseconds=int.from_bytes(data, "big", signed=True))


def _micros(value: datetime) -> int:
    delta = value - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


class _ColumnDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Column) -> Buffer:
        return obj.encode()


_UUID_TEXTS = _Read(_uuid_text, 50_000)
_TIMES = _Read(_time, 10_000)


class _TableLoader(Loader):
    """Looks values up. The driver calls what ``load`` is: a method of a dict, with no frame of Python's in between."""

    format = Format.BINARY
    table: ClassVar[_Read]

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self.load = self.table.__getitem__  # type: ignore[method-assign, assignment]  # see the class

    def load(self, data: Buffer) -> Any:
        """Replaced for each loader; the base class wants one."""
        raise NotImplementedError


class _UuidLoader(_TableLoader):
    """Run and session ids are str everywhere in the server: they come from the wire and go back to it."""

    table = _UUID_TEXTS


class _TimeLoader(_TableLoader):
    """In UTC, whatever the database's time zone is. The rows of a batch have few times."""

    table = _TIMES


class _TextUuidLoader(Loader):
    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


def register(connection: AsyncConnection[object]) -> None:
    """Teach a connection these columns, the str form of uuid and json, and times in UTC."""
    adapters = connection.adapters
    for column in (Ints, Texts, Names, Blobs, Uuids, Times, Bools):
        dumper = type(f"{column.__name__}Dumper", (_ColumnDumper,), {"oid": column.array_oid})
        adapters.register_dumper(column, dumper)
    adapters.register_loader("uuid", _UuidLoader)
    adapters.register_loader("uuid", _TextUuidLoader)
    adapters.register_loader("timestamptz", _TimeLoader)
    # json columns come back as the text that was stored: nothing here looks into a payload.
    adapters.register_loader("json", TextBinaryLoader)
    adapters.register_loader("json", TextLoader)


def columns(rows: Sequence[Sequence[object]], *types: type[Column]) -> list[Column]:
    """Turn rows into one column a type: ``columns([(1, "a")], Ints, Texts) == [Ints([1]), Texts(["a"])]``."""
    if not rows:
        return [t() for t in types]
    return [t(values) for t, values in zip(types, zip(*rows, strict=True), strict=True)]
