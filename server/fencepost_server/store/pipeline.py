"""Statements of one connection, many at a time: they gather until ``sync``, which sends them in one write and reads all
their results.

psycopg connects, adapts values and knows the errors; between these this speaks to libpq itself (``psycopg.pq``): a
cursor for each statement took half of a small transaction's processor time. Every statement is prepared when it is
first sent over a connection, up to a bound, and values travel in binary form. Not all of these names are promised to
stay, so server/pyproject.toml allows no other minor version of psycopg.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.pq.abc import PGresult

Params = Mapping[str, Any]
StatementKey = tuple[bytes, tuple[int, ...]]
"""A statement and the types of its parameters."""

MAX_PREPARED = 200
"""Statements that a connection keeps prepared; any further one is parsed each time."""

_BAD, _SYNC, _ABORTED, _FAILED = (
    ConnStatus.BAD,
    ExecStatus.PIPELINE_SYNC,
    ExecStatus.PIPELINE_ABORTED,
    ExecStatus.FATAL_ERROR,
)
_NOTHING = (_FAILED, _ABORTED)
_STALE = (psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidSqlStatementName)
_PLACEHOLDER = re.compile(rb"%(?:%|\((\w+)\)s)?")


class Connection(psycopg.AsyncConnection[Any]):
    """A connection that knows what is prepared on it. ``prepares``: whether anything may be."""

    prepares = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prepared: dict[StatementKey, bytes] = {}
        """The names under which statements are prepared."""
        self.names = 0
        """How many there were. None is given twice: it may be known to the server although what came with it failed."""
        self.transformer: Any = None
        """Kept, because it remembers how each type is read and written."""

    @classmethod
    async def connect(cls, conninfo: str = "", **kwargs: Any) -> Connection:
        """The driver's own, which leaves the socket open if its time is up, in a cycle of the error, the frames that it
        has come through and the half-made connection: until the collector comes by, which with an idle server is never.
        """
        try:
            return await super().connect(conninfo, **kwargs)
        except psycopg.Error as error:
            for each in (error, error.__context__):
                if each is not None:
                    clear_frames(each.__traceback__)
            raise


class Result:
    """What a statement returns, once it has been executed."""

    __slots__ = ("_result", "_transformer")

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._result: PGresult | None = None

    def rows(self) -> list[Any]:
        """All rows; none of a statement that has none. To be called after the ``sync`` that sent it."""
        result = self._result
        assert result is not None, "the statement was not executed yet"
        if not (count := result.ntuples):
            return []
        self._transformer.set_pgresult(result)
        rows: list[Any] = self._transformer.load_rows(0, count, tuple)
        self._transformer.set_pgresult(None)  # which may be large
        return rows

    @property
    def affected(self) -> int:
        """How many rows it returned or changed."""
        return (self._result and self._result.command_tuples) or 0


class Session:
    """See the module. Made by ``pipelined``."""

    __slots__ = ("_connection", "_loop", "_pgconn", "_sent", "_socket", "_transformer", "_waiter")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._transformer = connection.transformer
        # In the order in which results come: what takes that of a statement, or the key of one that is being prepared.
        self._sent: list[Result | StatementKey] = []
        self._loop = asyncio.get_running_loop()
        self._socket = self._pgconn.socket
        self._waiter: asyncio.Future[None] | None = None

    def send(self, statement: bytes, params: Params | None = None) -> Result:
        """Queue a statement. Raises what a value can't be sent for."""
        transformer = self._transformer
        values: Sequence[Any] | None = None
        types: tuple[int, ...] = ()
        formats: Sequence[Format] | None = None
        text = statement
        if params is not None:
            text, names, wanted = _compiled(statement)
            values = transformer.dump_sequence([params[name] for name in names], wanted)
            types, formats = transformer.types, transformer.formats
        prepared = self._connection.prepared
        name = prepared.get((statement, types))
        if name is None and self._connection.prepares and len(prepared) < MAX_PREPARED:
            name = self._prepare(statement, text, types)
        if name is None:
            self._pgconn.send_query_params(text, values, types, formats, Format.BINARY)
        else:
            self._pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        result = Result(transformer)
        self._sent.append(result)
        return result

    def _prepare(self, statement: bytes, text: bytes, types: tuple[int, ...]) -> bytes:
        self._connection.names += 1
        name = self._connection.prepared[statement, types] = b"fencepost_%d" % self._connection.names
        self._pgconn.send_prepare(name, text, types)
        self._sent.append((statement, types))
        return name

    async def sync(self) -> None:
        """One round trip: everything queued so far has been executed, or this raises the first error of it."""
        await self._round_trip()

    async def _round_trip(self) -> None:
        sent, self._sent = self._sent, []
        self._pgconn.pipeline_sync()
        failed: PGresult | None = None
        try:
            if self._pgconn.flush():
                await self._flush()
            for waiting in sent:
                result = await self._next()
                if result is None:
                    raise psycopg.InternalError("fewer results than statements")
                status = result.status
                if status == _FAILED:
                    failed = failed or result
                if isinstance(waiting, Result):
                    waiting._result = None if status in _NOTHING else result
                elif status in _NOTHING:
                    # What else was prepared stays so, whatever failed later.
                    self._connection.prepared.pop(waiting, None)
            await self._next()
        except psycopg.OperationalError as error:
            # What the server has said before it hung up says more than that it did.
            if failed is not None:
                raise error_from_result(failed) from error
            raise
        if failed is not None:
            raise self._error(failed)

    def _error(self, failed: PGresult) -> psycopg.Error:
        error = error_from_result(failed)
        if isinstance(error, _STALE):
            # A column has another type by now, or a pooler has lost what was prepared: prepared anew, it works.
            self._connection.prepared.clear()
            stale = psycopg.OperationalError(f"what was prepared is of no use any more: {error}")
            stale.__cause__ = error
            return stale
        return error

    async def rows(self, statement: bytes, params: Params | None = None) -> list[Any]:
        """Queue a statement and wait for it and all before it."""
        result = self.send(statement, params)
        await self.sync()
        return result.rows()

    async def _next(self) -> PGresult | None:
        """The result of the next statement; None after the last one."""
        pgconn = self._pgconn
        idle = 0
        while True:
            while pgconn.is_busy():
                await self._wait()
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None:
                return None if result.status == _SYNC else result
            # None stands between two statements. On a connection that has gone it would come for ever.
            idle += 1
            if idle > 1 and pgconn.status == _BAD:
                raise psycopg.OperationalError("the connection is lost")

    async def _flush(self) -> None:
        """Send what the socket did not take at once, reading meanwhile: the server may wait for that."""
        while self._pgconn.flush():
            await self._wait(writing=True)
            self._pgconn.consume_input()

    async def _wait(self, *, writing: bool = False) -> None:
        """Until there is something to read, or room to write. The loop has forgotten the socket when this ends: libpq
        may close it at the next read, and its number is another one's then.
        """
        self._waiter = waiter = self._loop.create_future()
        self._loop.add_reader(self._socket, self._ready)
        if writing:
            self._loop.add_writer(self._socket, self._ready)
        try:
            await waiter
        finally:
            self._waiter = None
            self._loop.remove_reader(self._socket)
            if writing:
                self._loop.remove_writer(self._socket)

    def _ready(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@asynccontextmanager
async def pipelined(connection: Connection) -> AsyncIterator[Session]:
    """The connection in pipeline mode within the block. What was queued and not synced at the end is synced; if the
    block fails, its error is raised, and what the statements still say is dropped.
    """
    if connection.transformer is None:
        connection.transformer = Transformer(connection)
    session = Session(connection)
    connection.pgconn.enter_pipeline_mode()
    try:
        yield session
        await session._round_trip()
    except asyncio.CancelledError:
        connection.pgconn.finish()  # what it still says is nobody's answer
        raise
    except BaseException:
        if session._sent:
            with suppress(psycopg.Error):
                await session._round_trip()
        raise
    finally:
        with suppress(psycopg.OperationalError):
            connection.pgconn.exit_pipeline_mode()


@lru_cache(maxsize=1000)
def _compiled(statement: bytes) -> tuple[bytes, tuple[str, ...], list[PyFormat]]:
    """The statement with numbers for ``%(name)s``, and the names in their order."""
    numbers: dict[bytes, int] = {}

    def numbered(found: re.Match[bytes]) -> bytes:
        name = found[1]
        if name is None:
            if found[0] == b"%%":
                return b"%"
            raise ValueError(f"a single % in a statement with parameters: {statement.decode()}")
        return b"$%d" % numbers.setdefault(name, len(numbers) + 1)

    text = _PLACEHOLDER.sub(numbered, statement)
    return text, tuple(name.decode() for name in numbers), [PyFormat.AUTO] * len(numbers)
