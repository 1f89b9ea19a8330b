"""Answers questions to code runs: from the run in memory, or by replaying its history for the question alone.

A question changes nothing and needs no lease, so a run that is replayed for it is dropped right after. It may be one
that has ended. Used in the users' loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fencepost.code_run import CodeRun
from fencepost.failure import Failed, clean, failed
from fencepost.frames import fill_failure
from fencepost.history_pages import Page, Reading
from fencepost.models import FailureKind, fill_payload, value_of
from fencepost.sdk_log import SdkLog
from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.watchdog import REPLAYED_A_SECOND, TurnInterrupted, Watchdog
from fencepost.workflow_errors import NondeterminismError, UnknownQuery

if TYPE_CHECKING:
    from fencepost.advances import Asked
    from fencepost.identity import WorkflowKey
    from fencepost.session import Session
    from fencepost.workflow import Workflow

logger = SdkLog("fencepost.worker")

UNKNOWN_QUERY = "UNKNOWN_QUERY"
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
class Answer:
    """What ``session`` has to send."""

    session: Session
    item: pb.QueryResultItem


@dataclass(slots=True)
class _Replay:
    asked: Asked
    events: list[run_pb2.Event] = field(default_factory=list)


class Queries:
    """The questions that one worker answers. ``say`` brings readings and answers to the session's thread."""

    def __init__(
        self,
        workflows: Mapping[WorkflowKey, Workflow[..., Any]],
        watchdog: Watchdog,
        say: Callable[[Reading | Answer], None],
    ) -> None:
        self._workflows = workflows
        self._watchdog = watchdog
        self._say = say
        self._replays: dict[Reading, _Replay] = {}

    def replay(self, asked: Asked) -> None:
        """Answer by a replay of the run's history up to what the question asks for."""
        query = asked.query
        if (query.workflow_id, query.compatibility_id) not in self._workflows:
            text = f"this worker has no workflow {query.workflow_id} of compatibility_id {query.compatibility_id}"
            self._fail(asked, Failed(FailureKind.OPERATIONAL, "NO_WORKER", clean(text)))
            return
        reading = Reading(asked.session, query.run_id, 0, query.last_seq)
        self._replays[reading] = _Replay(asked)
        self._say(reading)

    def page(self, page: Page) -> bool:
        """Take a page of a history that was read for a question; False if it was read for something else."""
        replay = self._replays.get(page.reading)
        if replay is None:
            return False
        replay.events.extend(page.events)
        if page.is_last:
            del self._replays[page.reading]
            if page.error is None:
                self._replayed(replay)
            else:
                text = clean(f"the history can't be read: {page.error.message}")
                self._fail(replay.asked, Failed(FailureKind.OPERATIONAL, page.error.reason, text))
        return True

    def _replayed(self, replay: _Replay) -> None:
        query = replay.asked.query
        workflow = self._workflows[query.workflow_id, query.compatibility_id]
        run = CodeRun(
            workflow,
            query.run_id,
            seen_seq=query.seen_seq,
            advance_no=0,
            user_id=query.user_id,
            max_payload_bytes=replay.asked.max_payload_bytes,
        )
        subject = f"run {query.run_id} of workflow {query.workflow_id}, replayed for a query,"
        try:
            self._watchdog.run(subject, len(replay.events) / REPLAYED_A_SECOND, run.feed, replay.events)
        except NondeterminismError as error:
            self._fail(replay.asked, Failed(FailureKind.PERMANENT, error.reason, clean(error.message)))
        except (TurnInterrupted, Exception) as error:
            logger.exception("%s could not be replayed", subject)
            self._fail(replay.asked, failed(error, _MAX_ANSWER_BYTES))
        else:
            self.answer(replay.asked, run)
        finally:
            self._watchdog.drop(subject, run.evict)

    def answer(self, asked: Asked, run: CodeRun) -> None:
        """Let a run in memory answer."""
        query = asked.query
        subject = f"query {query.name!r} of run {query.run_id}"
        item = pb.QueryResultItem(query_id=query.query_id)
        try:
            value = self._watchdog.run(subject, 0.0, run.query, query.name, value_of(query.input))
            if value.size > _MAX_ANSWER_BYTES:
                text = f"the answer has {value.size} bytes, over the limit of {_MAX_ANSWER_BYTES}"
                self._fail(asked, Failed(FailureKind.PERMANENT, "PAYLOAD_TOO_LARGE", text))
                return
            fill_payload(item.output, value)
            # Present even if it is null, which leaves the payload empty.
            item.output.SetInParent()
        except UnknownQuery as error:
            self._fail(asked, Failed(FailureKind.PERMANENT, UNKNOWN_QUERY, clean(str(error.args[0]))))
        except (TurnInterrupted, Exception) as error:  # noqa: BLE001 - the user's code: what it raises is the answer
            self._fail(asked, failed(error, _MAX_ANSWER_BYTES))
        else:
            self._say(Answer(asked.session, item))

    def _fail(self, asked: Asked, failure: Failed) -> None:
        item = pb.QueryResultItem(query_id=asked.query.query_id)
        fill_failure(item.failure, failure)
        self._say(Answer(asked.session, item))
