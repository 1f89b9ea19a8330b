"""What batches lock and read, and what loops and calls send: parameters, indexes, and how many rows each may touch."""

from __future__ import annotations

import hashlib
import uuid
from datetime import timedelta
from typing import Any

from fencepost_server.domain.model import PARKED_UNTIL
from fencepost_server.store.arrays import Blobs, Ints, Texts, Times, Uuids
from fencepost_server.store.tasks import NO_RUN
from tests.plans.planned import Planned
from tests.plans.rows import KEYS, NOW, OF_A_RUN, SOME, N, run_ids, session_id

REFS = {"run_ids": Uuids(SOME), "task_ids": Ints([2] * N), "tokens": Ints([1] * N), "namespace": "default"}
LIMITS = {
    "gap": timedelta(seconds=5),
    "hold": timedelta(seconds=30),
    "server_timeout": timedelta(seconds=10),
    "max_places": 2000,
}
LIST: dict[str, Any] = {
    "lead": 0,
    "namespace": "default",
    "workflow_id": "",
    "user_id": "",
    "parent_run_id": None,
    "key": "",
    "value": "",
    "created_after": NOW - timedelta(days=1000),
    "before_at": NOW,
    "before_run": SOME[0],
    "states": Ints(),
    "failures": Texts(),
    "keys": Texts(),
    "values": Texts(),
    "scan": 100,
    "limit": 100,
}

OF_REMOVED = {
    "namespace": "default",
    "workflow_id": "wf7",
    "hash": hashlib.sha256(b"7").digest(),
    "after_at": NOW - timedelta(days=10),
    "after_run": session_id(0),
    "until_at": NOW + timedelta(days=10),
    "until_run": session_id(0),
    "scan": 50,
}

_GIVEN: dict[str, tuple[str, str, dict[str, Any], set[str], int]] = {
    # name: file, statement, parameters, indexes that may be used, rows that may be touched
    "lock deployments": (
        "batch",
        "lock_deployments",
        {"namespaces": Texts(["default"] * N), "workflow_ids": Texts(f"wf{n}" for n in range(1, N + 1))},
        {"deployment_pkey"},
        100,
    ),
    "lock runs": ("batch", "lock_runs", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "lock runs, skipping": ("batch", "lock_runs_skipping", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "lock tasks": ("batch", "lock_tasks", {"run_ids": Uuids(SOME), "task_ids": Ints([2] * N)}, {"task_pkey"}, 100),
    "read deciders": ("batch", "read_deciders", {"run_ids": Uuids(SOME)}, {"task_pkey"}, 100),
    "blocked deciders": (
        "task",
        "blocked_deciders",
        {
            "namespace": "default",
            "queues": Texts(["default"]),
            "handlers": Texts(["code@1"]),
            "until": PARKED_UNTIL,
            "after": NO_RUN,
            "limit": 200,
        },
        {"task_ready", "run_pkey"},
        700,  # all that are blocked of a handler are read for a page
    ),
    "read outcomes": (
        "batch",
        "read_outcomes",
        {"run_ids": Uuids(SOME), "task_ids": Ints([2] * N)},
        {"event_pkey"},
        150,
    ),
    "read keys": ("batch", "read_keys", KEYS, {"run_key_pkey"}, 100),
    "read runs": ("batch", "read_runs", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "live runs of a definition": (
        "definition",
        "live_runs",
        {**OF_REMOVED, "limit": 20},
        {"run_list_workflow"},
        60,
    ),
    "count live runs": ("definition", "count_live_runs", OF_REMOVED, {"run_list_workflow"}, 60),
    "active parents": (
        "definition",
        "active_parents",
        {"namespace": "default", "workflow_ids": Texts(f"wf{n}" for n in range(1, N + 1)), "mark": "{"},
        {"deployment_pkey", "definition_pkey"},
        60,
    ),
    "removals": (
        "definition",
        "removals",
        {"after_namespace": "default", "after_workflow": "wf7", "after_hash": b"", "limit": 1000},
        {"deployment_pkey", "definition_pkey", "definition_hash"},
        510,
    ),
    "read definitions": (
        "batch",
        "read_definitions",
        {"hashes": Blobs([hashlib.sha256(b"7").digest()])},
        {"definition_hash"},
        20,
    ),
    "delete tasks": ("batch", "delete_tasks", {"run_ids": Uuids(SOME), "task_ids": Ints([2] * N)}, {"task_pkey"}, 150),
    "claim": (
        "task",
        "claim",
        {
            "namespace": "default",
            "queues": Texts(["q1", "q3"]),
            "handlers": Texts(["h1", "h3"]),
            "priorities": Ints([2, 4]),
            "sessions": Uuids([session_id(1)] * N),
            "limit": 20,
            "max_bytes": 1 << 20,
        },
        {"task_ready", "task_pkey", "run_pkey", "event_pkey", "cluster_pkey", "checkpoint_pkey"},
        500,
    ),
    "renew": ("task", "renew", {**REFS, "progress": Texts([])}, {"task_pkey"}, 150),
    "renew, telling": ("task", "renew", {**REFS, "progress": Texts(['{"json": "1"}'] * 5)}, {"task_pkey"}, 150),
    "read leases": ("task", "read_leases", REFS, {"task_pkey"}, 100),
    "adopt": ("task", "adopt", {**REFS, "session": session_id(5)}, {"task_pkey"}, 150),
    "session's leases": (
        "task",
        "session_leases",
        {"sessions": Uuids([session_id(n) for n in range(1, 4)]), "limit": 100_000},
        {"task_session"},
        1600,
    ),
    "expired": (
        "task",
        "expired",
        {"after_at": NOW - timedelta(days=1), "after_run": str(uuid.UUID(int=0)), "after_task": 0, "limit": 250},
        {"task_lease"},
        2000,
    ),
    "shorten": (
        "task",
        "shorten",
        {"sessions": Uuids([session_id(10)]), "grace": timedelta(seconds=1)},
        {"task_session", "task_pkey"},
        2500,
    ),
    "long sessions": (
        "task",
        "long_sessions",
        {"sessions": Uuids([session_id(10)]), "grace": timedelta(seconds=1)},
        {"task_session"},
        600,
    ),
    **{
        f"list runs by {name}": (
            "run",
            "list_runs",
            {**LIST, **params},
            {index, "run_pkey", "run_attribute_pkey"},
            most,
        )
        for name, params, index, most in (
            ("nothing", {}, "run_list", 350),
            ("state", {"states": Ints([3]), "scan": 1000}, "run_list", 350),
            ("rare state", {"states": Ints([1]), "scan": 1000}, "run_list", 2100),
            ("failure", {"failures": Texts(["x", "y", "z"]), "scan": 1000}, "run_list", 2100),
            (
                "rare label",
                {"keys": Texts(["all", "few"]), "values": Texts(["v", "no"]), "scan": 500},
                "run_list",
                1600,
            ),
            ("workflow", {"lead": 1, "workflow_id": "wf7"}, "run_list_workflow", 350),
            ("user", {"lead": 2, "user_id": "u7"}, "run_list_user", 350),
            ("parent", {"lead": 3, "parent_run_id": run_ids(5)[4]}, "run_list_parent", 350),
            ("label", {"lead": 4, "key": "few", "value": "v7"}, "run_attribute_list", 350),
            ("frequent label", {"lead": 4, "key": "all", "value": "v"}, "run_attribute_list", 350),
        )
    },
    "count candidates": (
        "run",
        "count_candidates",
        {
            **LIST,
            "workflow_id": "wf7",
            "user_id": "u7",
            "keys": Texts(["all", "few", "no"]),
            "values": Texts(["v", "v7", ""]),
            "most": 300,
        },
        {"run_list_workflow", "run_list_user", "run_attribute_list"},
        1200,
    ),
    "retention: definitions": (
        "retention",
        "definitions",
        {"namespace": "default", "workflow_id": "wf100", "hash": b"", "limit": 100},
        {"definition_pkey"},
        100,
    ),
    "retention: old": (
        "retention",
        "old",
        {
            "namespaces": Texts(["default"] * N),
            "workflow_ids": Texts(f"wf{n}" for n in range(1, N + 1)),
            "keeps": [3600.0] * 20,
            "after_ats": Times([NOW - timedelta(days=1000)] * N),
            "after_runs": Uuids([SOME[0]] * N),
        },
        {"run_list_workflow"},
        20,
    ),
    "retention: page": (
        "retention",
        "page",
        {
            "namespace": "default",
            "workflow_id": "wf7",
            "keep": 3600,
            "after_at": NOW - timedelta(days=1000),
            "after_run": SOME[0],
            "limit": 50,
        },
        {"run_list_workflow"},
        50,
    ),
    "retention: lock": ("retention", "lock", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "retention: needed": (
        "retention",
        "needed",
        {"run_ids": Uuids(SOME)},
        {"run_pkey", "message_once", "undo_origin", "run_chain"},
        100,
    ),
    "retention: remember": (
        "retention",
        "remember",
        {"run_ids": Uuids(SOME), "memory": timedelta(days=30)},
        {"run_pkey", "run_key_pkey"},
        150,
    ),
    "retention: hide": (
        "retention",
        "hide",
        {"run_ids": Uuids(SOME[:1])},
        {"run_pkey", "run_attribute_pkey"},
        10,
    ),
    "retention: delete": ("retention", "delete", {"run_ids": Uuids(SOME)}, OF_A_RUN, 500),
    "retention: lock hidden": (
        "retention",
        "lock_hidden",
        {"left": Uuids(SOME[:1])},
        {"run_list", "run_list_workflow", "run_list_user"},
        5,
    ),
    "retention: delete slice": ("retention", "delete_slice", {"run_id": SOME[0], "limit": 100}, OF_A_RUN, 60),
    "retention: outlived": (
        "retention",
        "outlived",
        {
            "namespace": "default",
            "kind": 1,
            "workflow_id": "wf2",
            "user_id": "",
            "key": "",
            "limit": 100,
            "memory": timedelta(days=30),
        },
        {"run_key_pkey", "run_pkey"},
        400,
    ),
    "retention: forget keys": ("retention", "forget_keys", {"limit": 100}, {"run_key_expiry"}, 400),
    "open steps": ("task", "open_steps", {"run_id": SOME[0]}, {"task_pkey", "session_pkey"}, 20),
    "open waits": ("wait", "open_waits", {"run_id": SOME[0]}, {"timer_pkey", "wait_pkey", "child_pkey"}, 40),
    "pending signals": ("wait", "pending_signals", {"run_id": SOME[0]}, {"signal_pkey"}, 10),
    "probe": (
        "cluster",
        "probe",
        {"server": str(uuid.uuid4()), **LIMITS},
        # the first timer and the first schedule that fall due, and any one message: one row each
        {"task_ready", "task_lease", "server_pkey", "cluster_pkey", "session_ended", "timer_due", "schedule_due"}
        | {"message_pkey", "message_once"},
        22_000,
    ),
    "count ready": (
        "cluster",
        "count_ready",
        {
            "namespaces": Texts(["default"] * 20),
            "queues": Texts(f"q{n}" for n in range(20)),
            "handlers": Texts(f"h{n % 7}" for n in range(20)),
            "priorities": Ints([1 + n % 5 for n in range(20)]),
            "most": 100,
        },
        {"task_ready"},
        2_500,
    ),
    "get run": ("run", "get_run", {"run_id": SOME[0], "namespace": "default"}, {"run_pkey"}, 5),
    "payloads": ("run", "payloads", {"run_id": SOME[0]}, {"run_pkey", "event_pkey"}, 10),
    "progress": ("run", "progress", {"run_ids": Uuids(SOME)}, {"run_pkey"}, 100),
    "history": ("run", "history", {"run_id": SOME[0], "after": 0, "limit": 100}, {"event_pkey"}, 10),
    "run by key": (
        "run",
        "run_by_key",
        {"namespace": "default", "kind": 1, "workflow_id": "wf2", "user_id": "", "key": "k1"},
        {"run_key_pkey"},
        5,
    ),
}


IN_ORDER = {
    *(name for name in _GIVEN if name.startswith("list runs")),
    *("live runs of a definition", "count live runs", "count ready"),
    *("count candidates", "retention: definitions", "retention: old", "retention: page", "retention: outlived"),
}
"""Ranges of indexes, read in their order up to a limit."""

SCANS = {"probe": frozenset({"message", "session"})}
"""Of messages the first will do. Sessions go an hour after their end; without statistics they are all read."""

CALLS_AND_LOOPS = {
    name: Planned(*given, lone=name == "probe", in_order=name in IN_ORDER, scans=SCANS.get(name, frozenset()))
    for name, given in _GIVEN.items()
}
