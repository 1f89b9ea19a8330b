"""What a start's keys stand for (semantics: starting a run).

Three keys of callers, asked in this order, memory before state:

- the **request id** makes one call repeatable: it gets its first answer again;
- the **request key** names a run for ever: the same key again is that run, whatever its state;
- the **dedupe key** names a run until it has ended: then it is free again, in the transaction of the end.

And one of our own: the **schedule key** names the run of one fire time. Whoever tries that time again finds the run,
also when the schedule asks for another input by now; so its fingerprint is no digest, but tells what started the run.

A start whose answer is an existing run is remembered under its request id and its request key as bound to that run.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost_server.domain.errors import (
    DedupeKeyConflict,
    FencepostError,
    RequestIdConflict,
    RequestKeyConflict,
)
from fencepost_server.domain.model import RunRow
from fencepost_server.engine.operations import Start, Started
from fencepost_server.store.batch import Key, KeyRow

REQUEST_KEY, REQUEST_ID, DEDUPE_KEY, SCHEDULE_KEY = 1, 2, 3, 4
"""Kinds of run_key."""


def has_keys(start: Start) -> bool:
    """Whether a start brings any key."""
    return bool(start.request_key or start.request_id or start.dedupe_key or start.schedule_key)


def keys_of(start: Start) -> Iterable[tuple[Key, bytes]]:
    """The keys that a start brings, each with the fingerprint that it is remembered with."""
    if (key := _request_key(start)) is not None:
        yield key, start.fingerprint
    if (key := _request_id(start)) is not None:
        yield key, start.request_fingerprint
    if (key := _dedupe_key(start)) is not None:
        yield key, start.fingerprint
    if (key := _schedule_key(start)) is not None:
        yield key, start.schedule_origin.encode()


def dedupe_key_of(run: RunRow) -> Key:
    """The key that a run holds until it has ended."""
    return (run.namespace, DEDUPE_KEY, run.workflow_id, "", run.dedupe_key)


def _request_key(start: Start) -> Key | None:
    if not start.request_key:
        return None
    return (start.namespace, REQUEST_KEY, start.workflow_id, start.user_id, start.request_key)


def _request_id(start: Start) -> Key | None:
    return (start.namespace, REQUEST_ID, "", "", start.request_id) if start.request_id else None


def _dedupe_key(start: Start) -> Key | None:
    return (start.namespace, DEDUPE_KEY, start.workflow_id, "", start.dedupe_key) if start.dedupe_key else None


def _schedule_key(start: Start) -> Key | None:
    return (start.namespace, SCHEDULE_KEY, "", "", start.schedule_key) if start.schedule_key else None


class Keys:
    """The keys of a batch's starts as the table has them after the insert, while the starts claim them one
    after the other.
    """

    def __init__(self, stored: dict[Key, KeyRow]) -> None:
        self._stored = stored
        self.rebound: dict[Key, KeyRow] = {}
        """Rows of this transaction that turned out to stand for another run."""
        self.released: dict[Key, str] = {}
        """Rows of this transaction (with their run id) whose start was refused or bound."""

    def recall(self, start: Start) -> Started | FencepostError | None:
        """What the request id or the request key remembers, or None: asked for a start that can't make a run."""
        row = self._foreign(start, _request_id(start))
        if row is not None:
            if row.fingerprint != start.request_fingerprint:
                return _conflict(RequestIdConflict, "request id", start.request_id, row, start.request_fingerprint)
            return Started(row.run_id, row.created, row.definition_hash, row.input_differs)
        row = self._foreign(start, _request_key(start))
        if row is not None:
            if row.fingerprint != start.fingerprint:
                return _conflict(RequestKeyConflict, "request key", start.request_key, row, start.fingerprint)
            return Started(row.run_id, False, row.definition_hash)
        row = self._foreign(start, _schedule_key(start))
        return None if row is None else Started(row.run_id, False, row.definition_hash)

    def claim(self, start: Start, definition_hash: bytes) -> Started | FencepostError | None:
        """The answer of a start that makes no run, or None: its keys are its own and it makes the run."""
        answer = self._answer(start)
        if answer is not None:
            self._let_go(start, answer)
            return answer
        for key, fingerprint in keys_of(start):
            if key not in self._stored:  # its row was let go by an earlier start of the batch: it is this one's now
                self._stored[key] = self.rebound[key] = KeyRow(start.run_id, definition_hash, fingerprint, True)
                self.released.pop(key, None)
        return None

    def _answer(self, start: Start) -> Started | FencepostError | None:
        remembered = self.recall(start)
        row = self._foreign(start, _dedupe_key(start))
        if remembered is not None or row is None:
            return remembered
        differs = row.fingerprint != start.fingerprint
        if differs and not start.bind_duplicate:
            return _conflict(DedupeKeyConflict, "dedupe key", start.dedupe_key, row, start.fingerprint)
        return Started(row.run_id, False, row.definition_hash, input_differs=differs)

    def _foreign(self, start: Start, key: Key | None) -> KeyRow | None:
        row = None if key is None else self._stored.get(key)
        return row if row is not None and row.run_id != start.run_id else None

    def _let_go(self, start: Start, answer: Started | FencepostError) -> None:
        """No run of this id comes to be, so no key may stand for it. A request id and a request key remember whose
        run they were answered with; a dedupe key is that run's alone.
        """
        for key, fingerprint in keys_of(start):
            row = self._stored.get(key)
            if row is not None and row.run_id != start.run_id:
                continue
            if key[1] != DEDUPE_KEY and isinstance(answer, Started):
                self._stored[key] = self.rebound[key] = KeyRow(
                    answer.run_id, answer.definition_hash, fingerprint, False, answer.input_differs
                )
                self.released.pop(key, None)  # an earlier start of the batch brought it first and was refused
            elif row is not None:
                del self._stored[key]
                self.rebound.pop(key, None)
                self.released[key] = start.run_id


def _conflict(
    error: type[RequestKeyConflict | RequestIdConflict | DedupeKeyConflict],
    what: str,
    key: str,
    row: KeyRow,
    fingerprint: bytes,
) -> FencepostError:
    return error(
        f"the {what} {key!r} was used by run {row.run_id} with another request",
        metadata={
            "existing_run_id": row.run_id,
            "existing_fingerprint": row.fingerprint.hex(),
            "request_fingerprint": fingerprint.hex(),
        },
    )
