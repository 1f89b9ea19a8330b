"""A worker's stream as a state machine: frames and commits in, frames out. No I/O, no clock of its own.

``receive`` takes the worker's frames in order; the engine calls ``settle`` after commits; ``take`` hands frames
to the one writer. The rules are those of docs/protocol.md. What is kept here (which tasks are out, what room is
left) only saves asking: the truth is in the rows, and every outcome is decided there by its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.config import Config
from fencepost_server.domain.errors import (
    DatabaseUnavailable,
    DuplicateHello,
    FencepostError,
    FrameOutOfOrder,
    FrameTooLarge,
    InvalidFrame,
    SessionTimedOut,
)
from fencepost_server.domain.model import LeasedTask, Outcome
from fencepost_server.engine.leases import Renewal
from fencepost_server.engine.operations import Answer, Report, ReportKind
from fencepost_server.session.frames import (
    Ref,
    checkpointed,
    completed,
    failed,
    released,
    result_message,
    size_of,
    task_message,
)
from fencepost_server.session.heartbeats import Heard, hear, results
from fencepost_server.session.hello import Greeting
from fencepost_server.session.outbox import Outbox
from fencepost_server.store.tasks import Lease
from fencepost_server.wire.payloads import duration
from fencepost_server.wire.status import item_error, reason_number

Item = TypeVar("Item", pb.CompleteItem, pb.FailItem, pb.ReleaseItem, pb.CheckpointItem)
_UNANSWERED_PINGS = 3


class Desk(Protocol):
    """What a session asks of the engine."""

    def report(self, reports: Sequence[Report]) -> None:
        """Queue reports."""

    def renew(self, renewal: Renewal) -> None:
        """Queue a heartbeat."""

    def wake(self) -> None:
        """Room became free."""


@dataclass(slots=True)
class _Out:
    """A lease on this stream. ``reporting``: its outcome waits for its commit."""

    token: int
    depth: int
    tasks_number: int
    reporting: bool = False


class Session:
    """One stream; implements engine.operations.WorkerSession."""

    def __init__(self, session_id: str, greeting: Greeting, config: Config, desk: Desk) -> None:
        self.session_id = session_id
        self.namespace = greeting.namespace
        self.handlers = greeting.handlers
        self.nonce = greeting.nonce
        self.error: FencepostError | None = None
        """Why the stream has to end, once it has to."""
        self.outbox = Outbox(config.outbox_bytes, greeting.max_frame_bytes)
        self._config = config
        self._desk = desk
        self._capacity = greeting.capacity
        self._max_frame_bytes = greeting.max_frame_bytes
        self._out: dict[tuple[str, int], _Out] = {}
        self._reserved = 0
        self._open = True
        self._leaving = False
        self._drained = False
        self._last_frame = 1
        self._tasks_number = 0
        self._heard: set[tuple[str, int]] = set()
        self._pending = 0
        self.thinned = asyncio.Event()
        self._ping = 0
        self._pong = 0

    # What the engine asks

    @property
    def open(self) -> bool:
        """False once the stream has ended."""
        return self._open

    def room(self) -> int:
        """How many further tasks it can take."""
        return 0 if self._unfit else self._capacity - len(self._out) - self._reserved

    @property
    def _unfit(self) -> bool:
        """Takes no task now: it ends, its pings are not answered, or enough tasks wait to be written already."""
        return (
            not self._open
            or self._leaving
            or self.error is not None
            or self._ping - self._pong > 1
            or self.outbox.laden
        )

    def reserve(self, tasks: int) -> None:
        """Keep room for a claim under way."""
        self._reserved += tasks

    def last_frame(self) -> int:
        """The id of the last frame received."""
        return self._last_frame

    def eager_depth(self, run_id: str, task_id: int) -> int | None:
        """How many tasks in a row the slot of this task got without a claim; None if its slot is not free after it."""
        out = self._out.get((run_id, task_id))
        if out is None or self._unfit or self.room() < 0:
            return None
        return out.depth

    def knows(self, ref: Ref) -> bool:
        """Whether the lease is on this stream."""
        out = self._out.get((ref[0], ref[1]))
        return out is not None and out.token == ref[2]

    def settle(self, answers: Sequence[tuple[Report, Answer]], tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Send answers, then tasks. Returns the tasks that could not be put on the stream."""
        self._settled(len(answers))
        answered: dict[int, list[pb.ItemResult]] = {}
        for report, answer in answers:
            goes_on = report.kind is ReportKind.CHECKPOINT and answer.outcome is not Outcome.LEASE_LOST
            out = self._out.get((report.run_id, report.task_id))
            if out is not None and out.token == report.token and not goes_on:
                del self._out[report.run_id, report.task_id]
            answered.setdefault(report.frame_id, []).append(result_message(report.index, answer))
        if not self._open:
            return tasks
        for frame_id, items in answered.items():
            self._send_results(frame_id, items)
        if self._leaving or self.error is not None:
            return tasks
        return self._send_tasks(tasks) if tasks else ()

    def give_up(self, report: Report, error: FencepostError) -> None:
        """A report could not be committed: the worker is told, or, when it is the database's fault, has to come
        back.
        """
        self._settled(1)
        out = self._out.get((report.run_id, report.task_id))
        if out is not None and report.kind is not ReportKind.CHECKPOINT:
            out.reporting = False
        if isinstance(error, DatabaseUnavailable):
            self.end(error)
        else:
            answer = Answer(Outcome.REFUSED, error.reason, error.message)
            self._send_results(report.frame_id, [result_message(report.index, answer)])

    def revoke(self, ref: Ref, reason: str) -> None:
        """A lease was ended by somebody else."""
        if not self.knows(ref):
            return
        untold = self._untold(ref)
        del self._out[ref[0], ref[1]]
        task = pb.TaskRef(run_id=ref[0], task_id=ref[1], fencing_token=ref[2])
        frame = pb.SessionResponse(revoke=pb.Revoke(tasks=[task], reason=reason_number(reason)))
        if untold:
            self.outbox.push_behind(frame.SerializeToString())
        else:
            self._push(frame)
        self._desk.wake()

    def _untold(self, ref: Ref) -> bool:
        """The task waits to be written: what is said of it has to come behind it."""
        return self._out[ref[0], ref[1]].tasks_number > self._tasks_number - self.outbox.waiting

    def cancel(self, ref: Ref, reason: str, remaining: float) -> None:
        """A step should stop: its lease is revoked after so many seconds."""
        if self.knows(ref) and self._open:
            task = pb.TaskRef(run_id=ref[0], task_id=ref[1], fencing_token=ref[2])
            cancel = pb.Cancel(reason=reason_number(reason), remaining=duration(max(0.0, remaining)))
            if self._untold(ref):
                cancel.tasks.append(task)
                self.outbox.push_behind(pb.SessionResponse(cancel=cancel).SerializeToString())
            else:
                self.outbox.push_cancel(task, cancel)
                self._check_reader()

    # What the stream asks

    def adopt(self, ref: Ref) -> None:
        """A lease that the process held over a reconnect."""
        self._out[ref[0], ref[1]] = _Out(ref[2], 0, 0)

    def take(self) -> bytes | None:
        """The next frame to write."""
        was_laden = self.outbox.laden
        data = self.outbox.take()
        if was_laden and not self.outbox.laden:
            self._desk.wake()
        return data

    @property
    def crowded(self) -> bool:
        """Read no further until ``thinned`` is set: too many reports wait for their commit."""
        if self._pending < self._config.max_client_ops:
            return False
        self.thinned.clear()
        return True

    def _settled(self, reports: int) -> None:
        self._pending -= reports
        if self._pending < self._config.max_client_ops:
            self.thinned.set()

    @property
    def idle(self) -> bool:
        """Nothing is out, waits for its commit, or waits to be written."""
        return not self._out and self.settled

    @property
    def finished(self) -> bool:
        """The worker was asked to go and has nothing here any more."""
        return self._drained and self.idle

    @property
    def settled(self) -> bool:
        """Nothing waits for its commit or to be written."""
        return not self._pending and self.outbox.empty

    def welcome(self, message: pb.Welcome) -> None:
        """The first frame."""
        self._push(pb.SessionResponse(welcome=message))

    def drain(self, reason: str, grace: float) -> None:
        """Ask the worker to go elsewhere, and lease it nothing more."""
        if not self._drained and self._open:
            self._leaving = self._drained = True
            self._push(pb.SessionResponse(drain=pb.Drain(reason=reason, grace=duration(grace))))

    def tick(self) -> None:
        """Once a ping interval: ping, or give the worker up."""
        if self._pending >= self._config.max_client_ops:
            self._pong = self._ping  # its answers are among what is not read now, which is no fault of the worker
        if self._ping - self._pong >= _UNANSWERED_PINGS:
            self.end(SessionTimedOut(f"{_UNANSWERED_PINGS} pings were not answered"))
            return
        self._ping += 1
        self._push(pb.SessionResponse(ping=pb.Ping(number=self._ping)))

    def end(self, error: FencepostError) -> None:
        """The stream has to end, for the first such reason."""
        if self.error is None and self._open:
            self.error = error
            self.outbox.on_output()

    def close(self) -> None:
        """The stream has ended. Nothing is sent any more; tasks that were still to be written go back at once."""
        self._open = False
        first_unwritten = next(self.outbox.unwritten(), self._tasks_number + 1)
        self._give_back(lambda _, out: out.tasks_number >= first_unwritten)
        self.outbox.close()

    def leave(self) -> None:
        """The worker wants no more tasks, or can't report any: it said Goodbye, or its side of the stream has ended."""
        self._leaving = True

    # Frames of the worker

    def receive(self, frame: pb.SessionRequest | None, size: int) -> None:
        """One frame, or None for bytes that are none. Raises a FencepostError that ends the stream."""
        expected = self._last_frame + 1
        if size > self._config.max_frame_bytes:
            raise FrameTooLarge(f"frame {expected} has {size} bytes, more than {self._config.max_frame_bytes}")
        if frame is None:
            self._last_frame = expected
            self._refuse(expected, InvalidFrame("the bytes are not a SessionRequest"))
            return
        if frame.frame_id != expected:
            raise FrameOutOfOrder(f"frame {frame.frame_id} came where {expected} was expected")
        self._last_frame = expected
        match frame.WhichOneof("frame"):
            case "complete":
                self._reports(expected, frame.complete.items, completed)
            case "heartbeat":
                self._heartbeat(expected, frame.heartbeat)
            case "checkpoint":
                self._reports(expected, frame.checkpoint.items, checkpointed)
            case "fail":
                self._reports(expected, frame.fail.items, failed)
            case "release":
                self._reports(expected, frame.release.items, released)
            case "pong":
                self._pong = min(max(self._pong, frame.pong.number), self._ping)
            case "capacity":
                self._set_capacity(expected, frame.capacity.capacity)
            case "goodbye":
                self._goodbye(expected)
            case "hello":
                raise DuplicateHello("Hello was sent a second time")
            case _:
                self._refuse(expected, InvalidFrame("the frame has no content that this server knows"))

    def _goodbye(self, frame_id: int) -> None:
        """The first is answered behind the tasks that are on their way: the worker may close once it has read it."""
        if self._leaving:
            self._acknowledge(frame_id)
        else:
            self.leave()
            self.outbox.push_behind(pb.SessionResponse(ack=pb.Ack(frame_id=frame_id)).SerializeToString())

    def _set_capacity(self, frame_id: int, capacity: int) -> None:
        if not 0 <= capacity <= self._config.max_capacity:
            self._refuse(frame_id, InvalidFrame(f"capacity must be between 0 and {self._config.max_capacity}"))
            return
        self._capacity = capacity
        self._acknowledge(frame_id)
        self._desk.wake()

    def _reports(
        self,
        frame_id: int,
        items: Sequence[Item],
        make: Callable[[Item, str, int], Report],
    ) -> None:
        """Queue what is well formed; answer at once what is not."""
        if len(items) > self._config.max_frame_items:
            self._refuse(frame_id, FrameTooLarge(f"{len(items)} items are more than {self._config.max_frame_items}"))
            return
        reports: list[Report] = []
        refused: list[pb.ItemResult] = []
        for index, item in enumerate(items):
            try:
                report = make(item, self.namespace, self._config.max_payload_bytes)
            except FencepostError as error:
                answer = Answer(Outcome.REFUSED, error.reason, error.message, error.violations)
                refused.append(result_message(index, answer))
                continue
            report.session, report.frame_id, report.index = self, frame_id, index
            out = self._out.get((report.run_id, report.task_id))
            if out is not None and out.token == report.token and report.kind is not ReportKind.CHECKPOINT:
                out.reporting = True
            reports.append(report)
        self._pending += len(reports)
        if refused or not items:
            self._send_results(frame_id, refused)
        if reports:
            self._desk.report(reports)

    def _heartbeat(self, frame_id: int, heartbeat: pb.Heartbeat) -> None:
        """Renew what is listed; take back what this worker should list and does not."""
        try:
            heard = hear(heartbeat, self._config)
        except FencepostError as error:
            self._refuse(frame_id, error)
            return
        refs = list(heard.indexes)
        # Only what is out can be missed: nothing else that a worker lists is kept.
        self._heard.update(key for ref in refs if (key := (ref[0], ref[1])) in self._out)
        if not heartbeat.more:
            self._take_back(heartbeat.last_tasks_number)
        if heard.refused or not refs:
            self._send_results(frame_id, heard.refused)
        if refs:
            self._desk.renew(
                Renewal(
                    self.session_id,
                    self.namespace,
                    refs,
                    lambda answered: self._renewed(frame_id, heard, answered),
                    lambda: self._open,
                    heard.progress,
                )
            )

    def _renewed(self, frame_id: int, heard: Heard, answered: dict[Ref, Lease | None]) -> None:
        for ref, lease in answered.items():
            if lease is None and self.knows(ref) and not self._out[ref[0], ref[1]].reporting:
                del self._out[ref[0], ref[1]]
        if self._open and answered:
            self._send_results(frame_id, results(heard, answered))
            self._desk.wake()

    def _take_back(self, last_tasks_number: int) -> None:
        """Leases that were sent up to that frame and are not listed never arrived: their tasks are offered again."""
        heard, self._heard = self._heard, set()
        self._give_back(
            lambda key, out: 0 < out.tasks_number <= last_tasks_number and not out.reporting and key not in heard
        )

    def _give_back(self, never_arrived: Callable[[tuple[str, int], _Out], bool]) -> None:
        lost = [(key, out) for key, out in self._out.items() if never_arrived(key, out)]
        for key, _ in lost:
            del self._out[key]
        if lost:
            self._desk.report([Report(ReportKind.UNDELIVERED, *key, out.token, self.namespace) for key, out in lost])

    # Frames to the worker

    def _send_tasks(self, tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Pack tasks into frames that the worker can take."""
        unsent: list[LeasedTask] = []
        frame: list[LeasedTask] = []
        size = 0
        for task in tasks:
            needed = size_of(task)
            if frame and size + needed > self._max_frame_bytes:
                unsent.extend(self._send_frame(frame))
                frame, size = [], 0
            frame.append(task)
            size += needed
        unsent.extend(self._send_frame(frame))
        return unsent

    def _send_frame(self, tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Put tasks on the stream, in several frames if they are too large. Returns those too large for any frame."""
        number = self._tasks_number + 1
        message = pb.SessionResponse(
            tasks=pb.Tasks(
                tasks_number=number,
                last_frame_id=min(task.frame_id for task in tasks),
                tasks=[task_message(task) for task in tasks],
            )
        )
        data = message.SerializeToString()
        if len(data) > self._max_frame_bytes:
            if len(tasks) == 1:
                return tasks
            middle = len(tasks) // 2
            return [*self._send_frame(tasks[:middle]), *self._send_frame(tasks[middle:])]
        self._tasks_number = number
        for task in tasks:
            self._out[task.run_id, task.task_id] = _Out(task.token, task.eager_depth, number)
        self.outbox.push_behind(data)
        return ()

    def _send_results(self, frame_id: int, items: Sequence[pb.ItemResult]) -> None:
        """Answer items of a frame, in several frames if the answers are too large for one."""
        data = pb.SessionResponse(ack=pb.Ack(frame_id=frame_id, results=items)).SerializeToString()
        if len(data) > self._max_frame_bytes and len(items) > 1:
            middle = len(items) // 2
            self._send_results(frame_id, items[:middle])
            self._send_results(frame_id, items[middle:])
        else:
            self.outbox.push_bytes(data)
            self._check_reader()

    def _acknowledge(self, frame_id: int) -> None:
        self._push(pb.SessionResponse(ack=pb.Ack(frame_id=frame_id)))

    def _refuse(self, frame_id: int, error: FencepostError) -> None:
        """A frame as a whole is refused; the stream goes on."""
        self._push(pb.SessionResponse(ack=pb.Ack(frame_id=frame_id, error=item_error(error))))

    def _push(self, message: pb.SessionResponse) -> None:
        self.outbox.push(message)
        self._check_reader()

    def _check_reader(self) -> None:
        if self.outbox.overfull:
            self.end(SessionTimedOut("the worker does not read what it is sent"))
