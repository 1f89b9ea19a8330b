"""What decisions read and write beyond runs, tasks and events (extra.sql): what is asked for, what may be touched."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from fencepost_server.domain.model import PARKED_UNTIL
from fencepost_server.store import extras
from fencepost_server.store.arrays import Blobs, Ints, Uuids, columns
from tests.plans.planned import Planned
from tests.plans.rows import KEYS, NOW, OF_A_RUN, SOME, N

NULL = ("null", None, None)
EACH: dict[str, tuple[tuple[Any, ...], set[str]]] = {
    # statement of extra.sql: what it is asked for, or given, of each run; indexes that may be used
    "payload": ((1,), {"event_pkey"}),
    "scope": ((2,), {"scope_pkey"}),
    "outputs": ((2,), {"output_pkey", "event_pkey"}),
    "recorded": ((2, 3, 1), {"output_pkey"}),
    "wait": (("go",), {"wait_pkey"}),
    "signal": (("go",), {"signal_pkey"}),
    "matches": ((), {"wait_pkey", "signal_pkey"}),
    "timer": ((1, 1), {"timer_pkey"}),
    "fired_timers": ((), {"timer_pkey"}),
    "open_tasks": ((), {"task_pkey"}),
    "open_task": ((2,), {"task_pkey"}),
    "park": ((), {"task_pkey"}),
    "unpark": ((), {"task_pkey"}),
    "unblock": ((), {"task_pkey"}),
    "next_undo": ((), {"undo_unfinished", "undo_pkey", "event_pkey"}),
    "take_stopped": ((), {"stopped_task_pkey", "timer_pkey"}),
    "child": ((2,), {"child_pkey"}),
    "children": ((), {"child_pkey"}),
    "request": (("r",), {"request_pkey"}),
    "run_state": ((), {"run_pkey"}),
    "pending_start": ((), {"message_once"}),
    "child_on_its_way": (("00000000-0000-4000-8000-000000000001",), {"message_once"}),
    "update_scope": ((2, 2, 2, 2), {"scope_pkey"}),
    "update_undo": ((4, 2), {"undo_pkey"}),
    "update_child": ((2, '{"node": 0}'), {"child_pkey"}),
    "cancel_task": ((2, NOW, "RUN_ENDED"), {"task_pkey"}),
    "restore_task": ((2, 1, None, None, None, 1), {"task_pkey"}),
    "save_checkpoint": ((2, 2, *NULL), {"task_pkey"}),
    "park_timer": ((1, 1, "{}"), {"timer_pkey"}),
    "stop_timers": ((), {"timer_pkey"}),
    "delete_timer": ((1, 1), {"timer_pkey"}),
    "delete_wait": ((1, "go"), {"wait_pkey"}),
    "delete_signal": ((1, "go"), {"signal_pkey"}),
    "delete_scope": ((2,), {"scope_pkey", "output_pkey"}),
    "delete_child": ((2,), {"child_pkey"}),
    "delete_undo": ((4,), {"undo_pkey"}),
    "delete_stopped": ((), {"stopped_task_pkey"}),
    "delete_checkpoint": ((2,), {"checkpoint_pkey"}),
    "clear_ended": ((), OF_A_RUN),
    "history": ((1,), {"event_pkey"}),
    "attributes": ((), {"run_pkey"}),
    "chain_end": ((), {"run_chain"}),
    "op_event": ((1,), {"event_pkey"}),
    "op_scheduled": ((1,), {"event_pkey"}),
    "unread_signals": ((), {"signal_pkey", "event_pkey"}),
    "signals_size": ((), {"signal_pkey"}),
    "wake_decider": ((NOW,), {"task_pkey"}),
    "lease_decider": (("00000000-0000-4000-8000-000000000001", 2, NOW), {"task_pkey"}),
    "reset_decider": ((), {"task_pkey"}),
    "set_attributes": (('{"a": "b"}',), {"run_pkey", "run_attribute_pkey"}),
    "take_signals": (("[1]",), {"signal_pkey"}),
    "end_wait": ((1,), {"wait_pkey"}),
    "delete_grace": ((), {"timer_pkey"}),
}
AS_A_WHOLE: dict[str, tuple[dict[str, Any], set[str], int]] = {
    # statement of extra.sql that is not asked for by run: parameters, indexes, rows that may be touched
    "key_holder": (
        {"a": KEYS["namespaces"], "b": KEYS["workflow_ids"], "c": KEYS["keys"]},
        {"run_key_pkey"},
        100,
    ),
    "move_undo": (
        {"a": Uuids(SOME), "b": Uuids(str(uuid.uuid4()) for _ in SOME), "c": Ints([10] * N)},
        {"undo_pkey"},
        200,
    ),
    "move_key": (
        {
            "a": KEYS["namespaces"],
            "b": KEYS["workflow_ids"],
            "c": KEYS["keys"],
            "d": Uuids(SOME),
            "e": Uuids(SOME),
            "f": Blobs([b"\0"] * N),
        },
        {"run_key_pkey"},
        200,
    ),
    "removed": (
        {"a": KEYS["namespaces"], "b": KEYS["workflow_ids"], "c": Blobs([b"\0"] * N)},
        {"deployment_pkey"},
        100,
    ),
    "lock_messages": ({"ids": Ints(range(1, N + 1))}, {"message_pkey"}, 100),
    "delete_message": ({"a": Ints(range(1, N + 1))}, {"message_pkey"}, 100),
    "due_timers": (
        {"after_at": NOW - timedelta(days=1000), "after_run": SOME[0], "after_seq": 0, "after_kind": 0, "limit": 500},
        {"timer_due"},
        600,
    ),
    "messages": ({"after": 100, "limit": 500}, {"message_pkey"}, 600),
}


def of_each(statement: str) -> dict[str, Any]:
    """The parameters of a statement of extra.sql for some runs."""
    types = {**extras._READS, **extras._WRITES}[statement]
    rows = [(run_id, *EACH[statement][0]) for run_id in SOME]
    given = dict(zip("abcdefghijkl", columns(rows, *types), strict=False))
    return given | ({"until": PARKED_UNTIL, "now": NOW} if statement in extras._READS else {})


EXTRA = {
    **{
        f"extra: {name}": Planned("extra", name, of_each(name), indexes, 600 if name == "clear_ended" else 200)
        for name, (_, indexes) in EACH.items()
    },
    **{f"extra: {name}": Planned("extra", name, *rest) for name, rest in AS_A_WHOLE.items()},
}
