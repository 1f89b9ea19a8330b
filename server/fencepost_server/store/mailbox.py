"""Questions to code runs, left for other servers whose workers have the code, and their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fencepost_server.domain.model import Payload
from fencepost_server.store.arrays import Texts, columns
from fencepost_server.store.connection import Database
from fencepost_server.store.queries import query


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a run. ``timeout``: seconds for which an answer is waited for."""

    query_id: str
    namespace: str
    run_id: str
    name: str
    input: Payload
    timeout: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An output; or why there is none, as the reason and the message of an error."""

    output: Payload | None
    failure: tuple[str, str] | None = None


def _payload(json_text: str | None, binary: Any, metadata: str | None) -> Payload:
    return Payload(json_text, None if binary is None else bytes(binary), metadata)


async def worker_connected(database: Database, namespace: str, handler: str, queue: str, server_timeout: float) -> bool:
    """Whether a worker that is connected, to any server, takes DECIDE tasks with that handler. ``queue``: from that
    queue; empty: from any.
    """
    rows = await database.rows(
        query("query", "worker_connected"),
        {
            "namespace": namespace,
            "handler": handler,
            "queue": queue,
            "server_timeout": timedelta(seconds=server_timeout),
        },
    )
    return bool(rows[0][0])


async def post(database: Database, server_id: str, handler: str, question: Question) -> None:
    """Leave a question for the other servers."""
    await database.rows(
        query("query", "post"),
        {
            "query_id": question.query_id,
            "namespace": question.namespace,
            "handler": handler,
            "run_id": question.run_id,
            "name": question.name,
            "json": question.input.json,
            "binary": question.input.binary,
            "metadata": question.input.metadata,
            "server": server_id,
            "timeout": timedelta(seconds=question.timeout),
        },
    )


async def take(database: Database, server_id: str, deciders: Iterable[tuple[str, str]]) -> list[Question]:
    """Questions that workers with these (namespace, handler) can answer, each given to one server."""
    namespaces, handlers = columns(list(deciders), Texts, Texts)
    rows = await database.rows(
        query("query", "take"), {"server": server_id, "namespaces": namespaces, "handlers": handlers}
    )
    return [
        Question(query_id, namespace, run_id, name, _payload(*value), timeout)
        for query_id, namespace, run_id, name, *value, timeout in rows
    ]


async def answer(database: Database, server_id: str, query_id: str, reply: Reply) -> None:
    """Leave the answer to a question that this server took."""
    output = reply.output or Payload()
    await database.rows(
        query("query", "answer"),
        {
            "query_id": query_id,
            "server": server_id,
            "json": output.json,
            "binary": output.binary,
            "metadata": output.metadata,
            "failure": None if reply.failure is None else json.dumps(reply.failure),
        },
    )


async def give_back(database: Database, server_id: str, query_id: str) -> None:
    """Let another server answer a question that this one took."""
    await database.rows(query("query", "give_back"), {"query_id": query_id, "server": server_id})


async def fetch(database: Database, server_id: str) -> list[tuple[str, Reply]]:
    """The answers that are there for this server's callers, each once, by the questions' ids."""
    rows = await database.rows(query("query", "fetch"), {"server": server_id})
    found = []
    for query_id, json_text, binary, metadata, failure in rows:
        if failure is None:
            found.append((query_id, Reply(_payload(json_text, binary, metadata))))
        else:
            reason, message = json.loads(failure)
            found.append((query_id, Reply(None, (reason, message))))
    return found


async def withdraw(database: Database, query_id: str) -> None:
    """Nobody waits for the answer any more."""
    await database.rows(query("query", "withdraw"), {"query_id": query_id})
