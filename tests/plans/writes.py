"""What batches write, and the statements of definitions, sessions and questions."""

from __future__ import annotations

import hashlib
import uuid
from datetime import timedelta
from typing import Any

from fencepost_server.store.arrays import Blobs, Bools, Ints, Texts, Times, Uuids
from tests.plans.planned import Planned
from tests.plans.rows import KEYS, NOW, SOME, N, session_id

SERVER = str(uuid.UUID(hashlib.md5(b"v7").hexdigest()))
SESSIONS = Uuids(session_id(n) for n in range(1, N + 1))
HASH = hashlib.sha256(b"7").digest()
WORKFLOW = {"namespace": "default", "workflow_id": "wf7"}
DEFINITION = {**WORKFLOW, "hash": HASH}
OF_SESSIONS = {"sessions": SESSIONS, "namespace": "default", "nonce": "n"}

Given = dict[str, tuple[dict[str, Any], set[str], int]]
"""By statement: parameters, indexes that may be used, rows that may be touched."""


def ints(value: int = 1) -> Ints:
    """A column of the same number."""
    return Ints([value] * N)


def nulls(kind: type[Any]) -> Any:
    """A column of nulls."""
    return kind([None] * N)


BATCH: Given = {
    "update_keys": (
        {
            **KEYS,
            "run_ids": Uuids(SOME),
            "hashes": Blobs([HASH] * N),
            "fingerprints": Blobs([b"\0"] * N),
            "created": Bools([True] * N),
            "input_differs": Bools([False] * N),
        },
        {"run_key_pkey"},
        150,
    ),
    "delete_keys": ({**KEYS, "run_ids": Uuids(SOME)}, {"run_key_pkey"}, 100),
    "update_runs": (
        {
            "run_ids": Uuids(SOME),
            **dict.fromkeys(("states", "node_indexes", "next_seqs", "output_seqs"), ints()),
            "last_event_ats": Times([NOW] * N),
            "failures": nulls(Texts),
            "ended_ats": nulls(Times),
            "controls": nulls(Texts),
        },
        {"run_pkey"},
        100,
    ),
    "update_tasks": (
        {
            "run_ids": Uuids(SOME),
            "task_ids": ints(2),
            "visible_ats": Times([NOW] * N),
            **dict.fromkeys(
                ("attempts", "operational_failures", "corrective_failures", "redeliveries", "tokens"), ints()
            ),
            **dict.fromkeys(("last_failures", "feedbacks", "outcomes"), nulls(Texts)),
            "resume_ats": nulls(Times),
        },
        {"task_pkey"},
        100,
    ),
}
CLUSTER: Given = {
    "forget": ({}, {"run_key_expiry", "session_ended", "query_expiry", "server_pkey", "session_pkey"}, 30_000),
    "own_sessions": (OF_SESSIONS, {"session_pkey"}, 60),
    "leave_sessions": (OF_SESSIONS, {"session_pkey"}, 100),
    "unserved": (
        {
            "namespace": "default",
            "queues": Texts(["q1", "q2"]),
            "handlers": Texts(["h1", "nobody's"]),
            "server_timeout": timedelta(seconds=10),
        },
        {"session_serving", "server_pkey"},
        3_000,
    ),
    "close_session": ({"sessions": SESSIONS}, {"session_pkey"}, 100),
}
DEFINITIONS: Given = {
    "lock_deployment": (WORKFLOW, {"deployment_pkey"}, 3),
    "activate": (DEFINITION, {"deployment_pkey"}, 3),
    "same_compatibility": ({**WORKFLOW, "compatibility_id": "1"}, {"definition_compatibility_id"}, 3),
    "remove": (DEFINITION, {"definition_pkey", "definition_hash"}, 3),
    "refuse_starts": (DEFINITION, {"deployment_pkey"}, 3),
    "get": (DEFINITION, {"definition_pkey", "definition_hash", "deployment_pkey"}, 5),
    "deployed": (WORKFLOW, {"deployment_pkey"}, 3),
    "list": (
        {
            "namespace": "default",
            "workflow_id": "",
            "after_workflow": "",
            "before_at": NOW,
            "before_hash": b"",
            "limit": 100,
        },
        {"definition_pkey", "definition_compatibility_id", "deployment_pkey"},
        310,
    ),
    "read_for_starts": (
        {
            "namespaces": Texts(["default"] * N),
            "workflow_ids": Texts(f"wf{n}" for n in range(1, N + 1)),
            "hashes": Blobs(hashlib.sha256(str(n).encode()).digest() for n in range(1, N + 1)),
        },
        {"definition_pkey", "definition_compatibility_id", "definition_hash"},
        60,
    ),
}
RUNS: Given = {
    "latest": ({"namespace": "default", "run_id": SOME[0]}, {"run_pkey", "run_chain"}, 5),
    "workflows": ({"run_ids": Uuids(SOME)}, {"run_pkey"}, 60),
}
QUESTIONS: Given = {
    "worker_connected": (
        {"namespace": "default", "handler": "code@2", "queue": "", "server_timeout": timedelta(seconds=10)},
        {"session_deciding", "server_pkey"},
        200,
    ),
    "take": (
        {"server": SERVER, "namespaces": Texts(["default"] * 2), "handlers": Texts(["h1", "h2"])},
        {"query_open", "query_pkey"},
        500,
    ),
    "answer": (
        {"query_id": SOME[0], "server": SERVER, **dict.fromkeys(("json", "binary", "metadata", "failure"))},
        {"query_pkey"},
        3,
    ),
    "give_back": ({"query_id": SOME[0], "server": SERVER}, {"query_pkey"}, 3),
    "fetch": ({"server": SERVER}, {"query_answered"}, 1000),
    "withdraw": ({"query_id": SOME[0]}, {"query_pkey"}, 3),
}
SCANS = {"forget": frozenset({"session"})}
"""For those whose server is gone. There are as many as worker streams, and those that have ended within an hour."""
WRITES = {
    f"{file}: {name}": Planned(
        file, name, *given, in_order=(file, name) == ("definition", "list"), scans=SCANS.get(name, frozenset())
    )
    for file, all_given in (
        ("batch", BATCH),
        ("cluster", CLUSTER),
        ("definition", DEFINITIONS),
        ("run", RUNS),
        ("query", QUESTIONS),
    )
    for name, given in all_given.items()
}
