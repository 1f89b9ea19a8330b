"""Delivering messages of the outbox in a batch: which are this batch's to deliver, and what becomes of children that
are to be started or told to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fencepost_server.domain.errors import FencepostError, InvalidRequest
from fencepost_server.domain.jsontext import parse
from fencepost_server.domain.model import Failure, FailureKind, Payload, RunState
from fencepost_server.domain.rows import Control
from fencepost_server.engine.changes import Changes
from fencepost_server.engine.children import MAX_DEPTH, answer_for_missing, never_started
from fencepost_server.engine.fold import Act
from fencepost_server.engine.operations import Deliver, MessageKind, Start
from fencepost_server.store import batch, extras
from fencepost_server.store.batch import Locked
from fencepost_server.store.extras import Need
from fencepost_server.store.pipeline import Session


def workflows(delivers: Iterable[Deliver]) -> set[tuple[str, str]]:
    """The (namespace, workflow_id) of the children that are to be started."""
    return {
        (deliver.namespace, json.loads(deliver.body)["workflow"])
        for deliver in delivers
        if deliver.kind is MessageKind.START_CHILD
    }


async def deliverable(session: Session, acts: Sequence[Act], changes: Changes) -> list[Act]:
    """Without the messages that another server delivers just now, or has."""
    ids = [act.message_id for act in acts if isinstance(act, Deliver)]
    ours = await extras.lock_messages(session, ids)
    kept = []
    for act in acts:
        if isinstance(act, Deliver) and act.message_id not in ours:
            changes.handled.append(act)
        else:
            kept.append(act)
    return kept


async def wanted(
    session: Session, acts: list[Act], locked: Locked, changes: Changes
) -> tuple[list[tuple[Start, Deliver]], list[Act]]:
    """The children to start, each with its message; and what is left to do to runs that exist, or are about to."""
    early = [act for act in acts if isinstance(act, Deliver) and _is_being_deleted(act, locked)]
    changes.handled += early  # found again, until it is gone
    starting = {
        act.run_id: act
        for act in acts
        if isinstance(act, Deliver) and act.kind is MessageKind.START_CHILD and act.run_id not in locked.runs
    }
    starts = await _starts(session, list(starting.values()), changes)
    begun = {start.run_id for start, _ in starts}
    missing = [
        act
        for act in acts
        if isinstance(act, Deliver) and act.run_id not in locked.runs and act.run_id not in begun
        and act.run_id not in starting
    ]  # fmt: skip
    await _tell_of_missing(session, missing, changes)
    gone = {id(act) for act in (*missing, *starting.values(), *early)}
    return starts, [act for act in acts if id(act) not in gone]


def _is_being_deleted(deliver: Deliver, locked: Locked) -> bool:
    """A child is to be started whose id an older one has yet, which was not kept."""
    run = locked.runs.get(deliver.run_id)
    return deliver.kind is MessageKind.START_CHILD and run is not None and not run.namespace


async def _starts(session: Session, delivers: list[Deliver], changes: Changes) -> list[tuple[Start, Deliver]]:
    """Children with their input, but for those whose parent is about to end."""
    if not delivers:
        return []
    bodies = [json.loads(deliver.body) for deliver in delivers]
    needs = [Need("run_state", (deliver.source_run,)) for deliver in delivers]
    needs += [
        Need("payload", (deliver.source_run, body["input_seq"])) for deliver, body in zip(delivers, bodies, strict=True)
    ]
    found = await extras.read(session, needs, changes.now)
    starts = []
    for index, (deliver, body) in enumerate(zip(delivers, bodies, strict=True)):
        parent, payload = found[index], found[len(delivers) + index]
        changes.handled.append(deliver)
        changes.rows.add("delete_message", deliver.message_id)
        state = RunState(parent[0][0]) if parent else RunState.TERMINATED
        done = state in (RunState.COMPLETED, RunState.CONTINUED) and body.get("detached", False)
        if not parent or not payload or (_is_ending(state, parent[0][3]) and not done):
            changes.rows.add("insert_message", *answer_for_missing(deliver, never_started()))
            changes.messages = True
            continue
        if body["depth"] > MAX_DEPTH:  # of a code run; a graph's node has failed before it comes so far
            refuse(deliver, InvalidRequest(f"more than {MAX_DEPTH} runs would be inside each other"), changes)
            continue
        json_text, binary, metadata = payload[0]
        value = Payload(json_text, None if binary is None else bytes(binary), metadata)
        starts.append(
            (
                Start(
                    deliver.run_id, deliver.namespace, body["workflow"], None, value,
                    None if binary is not None else parse(json_text or "null"), b"", b"", body["user_id"], "", "",
                    body["priority"], parent=(deliver.source_run, body["parent_seq"]), depth=body["depth"],
                ),
                deliver,
            )
        )  # fmt: skip
    return starts


def _is_ending(state: RunState, control: str | None) -> bool:
    return state.final or (control is not None and Control.from_json(control).is_ending)


async def _tell_of_missing(session: Session, missing: list[Deliver], changes: Changes) -> None:
    """Messages to runs that are not there. One that tells a child to end can have overtaken its start, on another
    server: it comes again. Only a child whose start was dropped, or a run that is forgotten, is really missing.
    """
    if not missing:
        return
    pending = await extras.read(session, [Need("pending_start", (act.run_id,)) for act in missing], changes.now)
    # After the look for starts: whichever of them was delivered meanwhile has made its run.
    known = await batch.read_runs(session, [act.run_id for act in missing])
    for deliver, start in zip(missing, pending, strict=True):
        changes.handled.append(deliver)
        if start or deliver.run_id in known:
            continue
        changes.rows.add("delete_message", deliver.message_id)
        if deliver.kind in (MessageKind.CANCEL_CHILD, MessageKind.TERMINATE_CHILD):
            changes.rows.add("insert_message", *answer_for_missing(deliver, never_started()))
            changes.messages = True


def refuse(deliver: Deliver, error: FencepostError, changes: Changes) -> None:
    """A child can't be started: its parent is told of a failure."""
    failure = Failure(FailureKind.PERMANENT, error.reason, error.message)
    changes.rows.add("insert_message", *answer_for_missing(deliver, failure, RunState.FAILED))
    changes.messages = True
