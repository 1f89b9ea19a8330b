"""A worker's stream as a state machine: frames and commits in, frames out. No I/O, no clock of its own.

``receive`` takes the worker's frames in order; the engine calls ``settle`` after commits; ``take`` hands frames
to the one writer. The rules are those of docs/protocol.md. What is kept here (which tasks are out, what room is
left) only saves asking: the truth is in the rows, and every outcome is decided there by its token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from fencepost_server.domain.model import DECIDE_TASK, LeasedTask, Outcome
from fencepost_server.domain.ops import HistoryEvent
from fencepost_server.engine.leases import Renewal
from fencepost_server.engine.operations import Answer, Report, ReportKind
from fencepost_server.session.advances import advanced
from fencepost_server.session.decider import Decider
from fencepost_server.session.frames import (
    Ref,
    ack_message,
    ack_messages,
    checkpointed,
    completed,
    events_message,
    failed,
    released,
    result_message,
    too_many,
)
from fencepost_server.session.heartbeats import Heard, hear, results
from fencepost_server.session.hello import Greeting
from fencepost_server.session.leases import Key, Leases, Out, goes_on
from fencepost_server.session.outbox import Outbox
from fencepost_server.session.packing import Packing
from fencepost_server.session.pending import Pending
from fencepost_server.session.pulse import RAN_OUT, Pulse
from fencepost_server.session.questions import Answered, Questions
from fencepost_server.store.tasks import Lease
from fencepost_server.wire.payloads import duration
from fencepost_server.wire.status import item_error, reason_number

Item = TypeVar("Item", pb.CompleteItem, pb.FailItem, pb.ReleaseItem, pb.CheckpointItem, pb.AdvanceItem)


class Desk(Protocol):
    """What a session asks of the engine."""

    def report(self, reports: Sequence[Report]) -> None:
        """Queue reports."""

    def renew(self, renewal: Renewal) -> None:
        """Queue a heartbeat."""

    def wake(self) -> None:
        """Room became free."""


class Session:
    """One stream; implements engine.operations.WorkerSession."""

    def __init__(self, session_id: str, greeting: Greeting, config: Config, desk: Desk) -> None:
        self.session_id = self.key = session_id
        self.namespace = greeting.namespace
        self.handlers = greeting.handlers
        self.nonce = greeting.nonce
        self.error: FencepostError | None = None
        """Why the stream has to end, once it has to."""
        self.outbox = Outbox(config.outbox_bytes, greeting.max_frame_bytes)
        self._config = config
        self._desk = desk
        self._max_frame_bytes = greeting.max_frame_bytes
        self._leases = Leases(greeting.capacity, greeting.workflow_capacity)
        self._questions = Questions(config.outbox_bytes // 2, self.outbox)
        self._open = True
        self._leaving = False
        self._drained = False
        self._said_goodbye = False
        self._last_frame = 1
        self._tasks_number = 0
        self._heard: set[Key] = set()
        self._pending = Pending(config.max_client_ops, config.max_client_bytes)
        self.thinned = self._pending.thinned
        self._pulse = Pulse()
        self.decider = Decider(self, self._leases.decides, greeting.workflows) if greeting.workflows else None
        """Its other side, if it has code workflows."""

    # What the engine asks

    @property
    def open(self) -> bool:
        """False once the stream has ended."""
        return self._open

    def room(self) -> int:
        """How many further tasks it can take."""
        return 0 if self.unfit else self._leases.steps.room

    @property
    def unfit(self) -> bool:
        """Takes no task now: it ends, its pings are not answered, a lease of it has run out and it has not shown since
        that it is there, or enough tasks wait to be written already.
        """
        return not self._open or self._leaving or self.error is not None or self._pulse.weak or self.outbox.laden

    def reserve(self, tasks: int) -> None:
        """Keep room for a claim under way."""
        self._leases.steps.reserved += tasks

    def last_frame(self) -> int:
        """The id of the last frame received."""
        return self._last_frame

    def eager_depth(self, run_id: str, task_id: int) -> int | None:
        """How many tasks in a row the slot of this task got without a claim; None if its slot is not free after it."""
        out = self._leases.get(run_id, task_id)
        if out is None or self.unfit or self._leases.side(task_id).room < 0:
            return None
        return out.depth

    def knows(self, ref: Ref) -> bool:
        """Whether the lease is on this stream."""
        return self._leases.current(*ref) is not None

    def settle(self, answers: Sequence[tuple[Report, Answer]], tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Send answers, then tasks. Returns the tasks that could not be put on the stream."""
        self._pending.settled([report for report, _ in answers])
        for report, answer in answers:
            out = self._leases.current(report.run_id, report.task_id, report.token)
            if out is not None:
                if goes_on(report, answer):
                    out.reporting = False
                else:
                    self._leases.drop(report.run_id, report.task_id)
        if not self._open:
            return tasks
        for frame in ack_messages(answers, self._max_frame_bytes):
            self._send_ack(frame)
        if self._leaving or self.error is not None:
            return tasks
        return self._send_tasks(tasks) if tasks else ()

    def give_up(self, report: Report, error: FencepostError) -> None:
        """A report could not be committed: the worker is told, or, when it is the database's fault, has to come
        back.
        """
        self._pending.settled((report,))
        out = self._leases.get(report.run_id, report.task_id)
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
        self._leases.drop(ref[0], ref[1])
        ping = self._pulse.doubt() if reason in RAN_OUT else None
        task = pb.TaskRef(run_id=ref[0], task_id=ref[1], fencing_token=ref[2])
        frame = pb.SessionResponse(revoke=pb.Revoke(tasks=[task], reason=reason_number(reason)))
        if untold:
            self.outbox.push_behind(frame.SerializeToString())
        else:
            self._push(frame)
        if ping is not None:
            self._send_ping(ping)
        self._desk.wake()

    def _untold(self, ref: Ref) -> bool:
        """The task waits to be written: what is said of it has to come behind it."""
        out = self._leases.get(ref[0], ref[1])
        return out is not None and out.tasks_number > self._tasks_number - self.outbox.waiting

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

    def push_events(self, ref: Ref, after_seq: int, events: Sequence[HistoryEvent], last_seq: int = 0) -> None:
        """New events of a code run that this session holds: as many as fit into a frame. None while too much waits to
        be written before them: the next heartbeat tells of them.
        """
        if self.knows(ref) and self._open and (events or last_seq):
            frame = events_message(ref, after_seq, events, self._max_frame_bytes, last_seq)
            if not self._untold(ref):
                self._push(frame)
            elif not self.outbox.full:
                self.outbox.push_behind(frame.SerializeToString())

    # What others ask

    def ask(self, query: pb.Query, answered: Answered) -> None:
        """Put a question to the worker; ``answered`` is called once, with what it says, or with NoWorker when it is
        gone. Raises Overloaded.
        """
        self._questions.ask(query.query_id, pb.SessionResponse(query=query).SerializeToString(), answered)

    @property
    def stays(self) -> bool:
        """It is not about to go."""
        return self._open and not self._leaving and self.error is None

    def forget_question(self, query_id: str) -> None:
        """Nobody waits for its answer any more."""
        self._questions.forget(query_id)

    # What the stream asks

    def adopt(self, ref: Ref, workflow_id: str = "") -> None:
        """A lease that the process held over a reconnect; of a DECIDE task, with the run's workflow."""
        self._leases.put(ref[0], ref[1], Out(ref[2], 0, 0, workflow_id=workflow_id))

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
        if not self._pending.full:
            return False
        self.thinned.clear()
        return True

    @property
    def idle(self) -> bool:
        """Nothing is out, waits for its commit, or waits to be written."""
        return not self._leases and self.settled

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
        """Ask the worker to go elsewhere, and lease it nothing more. Told behind the tasks that are on their way: who
        holds nothing when it reads this does not come back for what it has not read.
        """
        if not self._drained and self._open:
            self._leaving = self._drained = True
            drain = pb.Drain(reason=reason, grace=duration(grace))
            self.outbox.push_behind(pb.SessionResponse(drain=drain).SerializeToString())

    def tick(self) -> float:
        """Ping, or give the worker up. Returns the ping intervals until the next time: half of one after the last."""
        if self._pending.full:
            self._pulse.excuse()  # its answers are among what is not read now, which is no fault of the worker
        if self._pulse.gone:
            self.end(SessionTimedOut("three pings were not answered"))
        else:
            self._send_ping(self._pulse.beat())
        return 0.5 if self._pulse.gone else 1.0

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
        self._questions.close()

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
            case "advance":
                self._reports(expected, frame.advance.items, advanced)
            case "query_result":
                self._answers(expected, frame.query_result)
            case "release":
                self._reports(expected, frame.release.items, released)
            case "pong":
                if self._pulse.answered(frame.pong.number):
                    self._desk.wake()
            case "capacity":
                self._set_capacity(expected, frame.capacity)
            case "goodbye":
                self._goodbye(expected)
            case "hello":
                raise DuplicateHello("Hello was sent a second time")
            case _:
                self._refuse(expected, InvalidFrame("the frame has no content that this server knows"))

    def _goodbye(self, frame_id: int) -> None:
        """The first is answered behind the tasks that are on their way: the worker may close once it has read it."""
        if self._said_goodbye:
            self._acknowledge(frame_id)
        else:
            self._said_goodbye = True
            self.leave()
            self.outbox.push_behind(ack_message(frame_id).SerializeToString())

    def _set_capacity(self, frame_id: int, frame: pb.Capacity) -> None:
        most = self._config.max_capacity
        for name, capacity in (("capacity", frame.capacity), ("workflow_capacity", frame.workflow_capacity)):
            if not 0 <= capacity <= most:
                self._refuse(frame_id, InvalidFrame(f"{name} must be between 0 and {most}"))
                return
        self._leases.steps.capacity = frame.capacity
        self._leases.decides.capacity = frame.workflow_capacity
        self._acknowledge(frame_id)
        self._desk.wake()

    def _answers(self, frame_id: int, frame: pb.QueryResult) -> None:
        """Answers to questions: they change nothing, so that they wait for no commit."""
        if len(frame.items) > self._config.max_frame_items:
            self._refuse(frame_id, too_many(len(frame.items), self._config.max_frame_items))
        else:
            self._send_results(frame_id, self._questions.receive(frame.items, self._config.max_payload_bytes))

    def _reports(
        self,
        frame_id: int,
        items: Sequence[Item],
        make: Callable[[Item, str, int], Report],
    ) -> None:
        """Queue what is well formed; answer at once what is not."""
        if len(items) > self._config.max_frame_items:
            self._refuse(frame_id, too_many(len(items), self._config.max_frame_items))
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
            self._leases.reported(report)
            reports.append(report)
        self._pending.add(reports)
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
        self._heard.update(key for ref in refs if (key := (ref[0], ref[1])) in self._leases)
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
            out = self._leases.current(*ref)
            if lease is None and out is not None and not out.reporting:
                self._leases.drop(ref[0], ref[1])
        if self._open and answered:
            self._send_results(frame_id, results(heard, answered))
            self._desk.wake()

    def _take_back(self, last_tasks_number: int) -> None:
        """Leases that were sent up to that frame and are not listed never arrived: their tasks are offered again."""
        heard, self._heard = self._heard, set()
        self._give_back(
            lambda key, out: 0 < out.tasks_number <= last_tasks_number and not out.reporting and key not in heard
        )

    def _give_back(self, never_arrived: Callable[[Key, Out], bool]) -> None:
        lost = [(key, out) for key, out in self._leases.items() if never_arrived(key, out)]
        for key, _ in lost:
            self._leases.drop(*key)
        if lost:
            self._desk.report([Report(ReportKind.UNDELIVERED, *key, out.token, self.namespace) for key, out in lost])

    # Frames to the worker

    def _send_tasks(self, tasks: Sequence[LeasedTask]) -> Sequence[LeasedTask]:
        """Put tasks on the stream. Returns those that are too large for any frame."""
        packing = Packing(self._max_frame_bytes, self._tasks_number)
        packing.add(tasks)
        for number, data, sent in packing.frames:
            for task in sent:
                workflow_id = task.workflow_id if task.task_id == DECIDE_TASK else ""
                out = Out(task.token, task.eager_depth, number, workflow_id=workflow_id)
                self._leases.put(task.run_id, task.task_id, out)
            self.outbox.push_behind(data)
        self._tasks_number = packing.number
        return packing.unsent

    def _send_results(self, frame_id: int, items: Sequence[pb.ItemResult]) -> None:
        self._send_ack(ack_message(frame_id, items))

    def _send_ack(self, frame: pb.SessionResponse) -> None:
        """Answer items of a frame, in several frames if the answers are too large for one."""
        data = frame.SerializeToString()
        if len(data) > self._max_frame_bytes and len(items := frame.ack.results) > 1:
            for half in (items[: len(items) // 2], items[len(items) // 2 :]):
                self._send_results(frame.ack.frame_id, half)
        else:
            self.outbox.push_bytes(data)
            self._check_reader()

    def _send_ping(self, number: int) -> None:
        self._push(pb.SessionResponse(ping=pb.Ping(number=number)))

    def _acknowledge(self, frame_id: int) -> None:
        self._push(ack_message(frame_id))

    def _refuse(self, frame_id: int, error: FencepostError) -> None:
        """A frame as a whole is refused; the stream goes on."""
        self._push(pb.SessionResponse(ack=pb.Ack(frame_id=frame_id, error=item_error(error))))

    def _push(self, message: pb.SessionResponse) -> None:
        self.outbox.push(message)
        self._check_reader()

    def _check_reader(self) -> None:
        if self.outbox.overfull:
            self.end(SessionTimedOut("the worker does not read what it is sent"))
