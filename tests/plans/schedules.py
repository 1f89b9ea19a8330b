"""The statements of schedules: parameters, indexes, and how many rows each may touch."""

from __future__ import annotations

from typing import Any

from fencepost_server.store.arrays import Ints, Texts, Times, Uuids
from tests.plans.planned import Planned
from tests.plans.rows import NOW, session_id
from tests.plans.rows import SOME as RUNS

N = 100
"""Schedules that are fired in one go."""
SOME = Uuids(session_id(n) for n in range(1, N + 1))
"""Ids of schedules, which are made as those of sessions are."""
TIMES = Times([NOW] * N)
ONE = {"namespace": "default", "schedule_id": "s77"}
PAYLOAD = {"spec": "{}", "input": None, "input_binary": None, "input_metadata": None}
LOOKED_AT: dict[str, tuple[dict[str, Any], set[str], int]] = {
    # statement: parameters, indexes that may be used, rows that may be touched
    "lock_due": ({"limit": 100}, {"schedule_due"}, 320),
    "running": ({"run_ids": Uuids(RUNS[:N])}, {"run_pkey", "run_chain"}, 60),
    "advance": (
        {
            "uuids": SOME,
            **dict.fromkeys(("next_fire_ats", "starting_ats", "pending_ats", "last_fire_ats", "due_ats"), TIMES),
            **dict.fromkeys(("skipped_overlaps", "skipped_misseds"), Ints([1] * N)),
        },
        {"schedule_uuid"},
        60,
    ),
    "park": ({"uuid": SOME[0], "due_at": NOW, "error": "x"}, {"schedule_uuid"}, 3),
    "first_due": ({}, {"schedule_due"}, 3),
    "settle": (
        {"uuids": SOME, "fire_ats": TIMES, "run_ids": SOME, "errors": Texts([""] * N)},
        {"schedule_uuid"},
        100,
    ),
    "hurry": ({"uuids": SOME}, {"schedule_uuid"}, 60),
    "started": ({"uuid": SOME[0], "run_id": SOME[0], "runs": 1}, {"schedule_uuid"}, 3),
    "lock": (ONE, {"schedule_pkey"}, 3),
    "get": (ONE, {"schedule_pkey"}, 3),
    "list": ({"namespace": "default", "after": "s5", "limit": 100, "bytes": 1 << 20}, {"schedule_pkey"}, 350),
    "change": (
        {
            "uuid": SOME[0],
            **PAYLOAD,
            **dict.fromkeys(("next_fire_at", "starting_at", "pending_at", "due_at"), NOW),
            "version": 1,
            "update_request": "",
            "paused": False,
            "pause_reason": "",
            "skipped_overlap": 0,
        },
        {"schedule_uuid"},
        3,
    ),
    "delete": (ONE, {"schedule_pkey"}, 3),
    "runs_of": (
        {"namespace": "default", "kind": 4, "keys": Texts(f"k{n}" for n in range(N)), "origin": b"\0"},
        {"run_key_pkey"},
        60,
    ),
}

SCHEDULES = {
    f"schedules: {name}": Planned("schedule", name, *given, in_order=name == "list")
    for name, given in LOOKED_AT.items()
}
