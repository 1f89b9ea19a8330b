"""What servers know of each other, the probe that serves all loops, and rows about sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fencepost_server.config import Config
from fencepost_server.domain.errors import InvalidHello
from fencepost_server.domain.violation import Violation
from fencepost_server.store.arrays import Ints, Texts, Uuids, columns
from fencepost_server.store.connection import Database
from fencepost_server.store.queries import query
from fencepost_server.store.runs import in_order

MAX_READY_PLACES = 2000
"""A probe tells no more places than that."""
MAX_COUNTED = 1000
"""So many tasks of a place are counted."""


@dataclass(frozen=True, slots=True)
class ReadyWork:
    """Tasks that wait in one place, and in how many seconds the first is due (negative: since)."""

    namespace: str
    queue: str
    handler: str
    priority: int
    due_in: float


@dataclass(frozen=True, slots=True)
class Probe:
    """What there is to do."""

    ready: list[ReadyWork]
    first_expiry_in: float | None
    other_servers: int
    ended_sessions: list[str]
    """Those of this server that ended of late, by its own word or because their process is at another server."""
    first_timer_in: float | None
    """In how many seconds the first timer is due; None: none is."""
    messages: bool
    """Runs have something to tell each other."""
    first_schedule_in: float | None
    """In how many seconds the first schedule is due; None: none is."""


async def probe(database: Database, config: Config, server_id: str) -> Probe:
    """The one statement of an idle server: its heartbeat, the outage guard, and what there is to do."""
    rows = await database.single(
        query("cluster", "probe"),
        {
            "server": server_id,
            "gap": timedelta(seconds=config.outage_gap),
            "hold": timedelta(seconds=config.heartbeat_interval + config.disconnect_grace),
            "max_places": MAX_READY_PLACES,
            "server_timeout": timedelta(seconds=config.server_timeout),
        },
    )
    ready, ended, others, messages = [], [], 0, False
    expiry = timer = schedule = None
    for what, namespace, queue, handler, number, seconds in rows:
        if what == 1:
            ready.append(ReadyWork(namespace, queue, handler, number, seconds))
        elif what == 2:
            expiry = seconds
        elif what == 3:
            others = number
        elif what == 4:
            ended.append(namespace)
        elif what == 5:
            timer = seconds
        elif what == 6:
            messages = number is not None
        elif what == 7:
            schedule = seconds
    return Probe(ready, expiry, others, ended, timer, messages, schedule)


async def count_ready(database: Database, places: Sequence[ReadyWork]) -> list[tuple[str, str, int, float]]:
    """Of places in which tasks wait: namespace, queue, how many, counted up to 1,000, and the seconds since which the
    first of them has waited.
    """
    namespaces, queues, handlers, priorities = columns(
        [(work.namespace, work.queue, work.handler, work.priority) for work in places], Texts, Texts, Texts, Ints
    )
    params = {"namespaces": namespaces, "queues": queues, "handlers": handlers, "priorities": priorities}
    return await in_order(database, query("cluster", "count_ready"), {**params, "most": MAX_COUNTED})


async def forget(database: Database) -> None:
    """Bounded housekeeping of gone servers, ended sessions and expired request ids."""
    await database.rows(query("cluster", "forget"))


async def notify(database: Database, payloads: Sequence[str]) -> None:
    """Tell the other servers."""
    await database.rows(query("cluster", "notify"), {"payloads": Texts(payloads)})


async def time(database: Database) -> datetime:
    """The database's clock (I11)."""
    now: datetime = (await database.rows(query("cluster", "time")))[0][0]
    return now


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A worker's stream, for people and for the reconnect."""

    session_id: str
    namespace: str
    server_id: str
    nonce: str
    worker_name: str
    sdk: str
    deciders: tuple[tuple[str, str], ...] = ()
    """(queue, handler) pairs of the code workflows that it has."""
    handlers: tuple[tuple[str, str], ...] = ()
    """(queue, handler) pairs of the steps that it takes."""


async def open_session(database: Database, row: SessionRow, previous: Sequence[str]) -> tuple[datetime, list[str]]:
    """Write a session down, and that those of ``previous`` which were of the same process have ended. Returns the
    database's time and these. Raises InvalidHello if the session's id was used before.
    """
    async with database.transaction() as session:
        opened = await session.rows(
            query("cluster", "open_session"),
            {
                "session": row.session_id,
                "namespace": row.namespace,
                "server": row.server_id,
                "nonce": row.nonce,
                "worker_name": row.worker_name,
                "sdk": row.sdk,
                "workflows": Texts([handler for _, handler in row.deciders]),
                "workflow_queues": Texts([queue for queue, _ in row.deciders]),
                "handlers": Texts([handler for _, handler in row.handlers]),
                "handler_queues": Texts([queue for queue, _ in row.handlers]),
            },
        )
        if not opened:
            raise InvalidHello("session_id was used before", violations=[Violation("session_id", "was used before")])
        own = []
        if previous:
            params = {"sessions": Uuids(previous), "namespace": row.namespace, "nonce": row.nonce}
            session.send(query("cluster", "leave_sessions"), params)
            own = [r[0] for r in await session.rows(query("cluster", "own_sessions"), params)]
        now = (await session.rows(query("cluster", "time")))[0][0]
    return now, own


async def close_sessions(database: Database, session_ids: Sequence[str]) -> None:
    """Note that sessions have ended."""
    await database.rows(query("cluster", "close_session"), {"sessions": Uuids(session_ids)})


async def unserved(
    database: Database, namespace: str, places: Sequence[tuple[str, str]], server_timeout: float
) -> set[tuple[str, str]]:
    """Which of these (queue, handler) no worker takes steps from that is connected, to any server."""
    queues, handlers = columns(places, Texts, Texts)
    rows = await database.rows(
        query("cluster", "unserved"),
        {
            "namespace": namespace,
            "queues": queues,
            "handlers": handlers,
            "server_timeout": timedelta(seconds=server_timeout),
        },
    )
    return {(queue, handler) for queue, handler in rows}


async def raise_epoch(database: Database) -> int:
    """Let every token from now on be larger than any before. Returns the new epoch."""
    epoch: int = (await database.rows(query("cluster", "raise_epoch")))[0][0]
    return epoch
