"""A decider by hand: a worker that sends the Advances that a test tells it to, and commands to put in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.flows import OpenScene, Scene
from tests.fixtures.raw_worker import RawWorker

CONTINUE, WAIT, COMPLETE, FAIL, AS_NEW, BLOCK = (
    pb.ADVANCE_OUTCOME_CONTINUE,
    pb.ADVANCE_OUTCOME_WAIT,
    pb.ADVANCE_OUTCOME_COMPLETE,
    pb.ADVANCE_OUTCOME_FAIL,
    pb.ADVANCE_OUTCOME_CONTINUE_AS_NEW,
    pb.ADVANCE_OUTCOME_BLOCK,
)
CODE = pb.WorkflowHandler(workflow_id="code", compatibility_id="1")
MANIFEST = '{"id": "code", "compatibility_id": "1", "code": {}}'


def payload(value: Any) -> Payload:
    """As JSON."""
    return Payload(json=json.dumps(value))


def seconds(value: float) -> Duration:
    """A duration."""
    return Duration(seconds=int(value), nanos=round((value % 1) * 1e9))


def call(op: int, handler: str, value: Any = None, **options: Any) -> pb.Command:
    """A remote step."""
    text = json.dumps(options) if options else ""
    return pb.Command(op=op, schedule_step=pb.ScheduleStep(handler=handler, input=payload(value), options=text))


def local(op: int, output: Any = None, name: str = "f", **more: Any) -> pb.Command:
    """A local step that has completed."""
    record = pb.RecordLocalStep(name=name, output=payload(output), attempts=1, **more)
    return pb.Command(op=op, record_local_step=record)


def timer(op: int, delay: float) -> pb.Command:
    """A timer."""
    return pb.Command(op=op, start_timer=pb.StartTimer(delay=seconds(delay)))


def signal(op: int, name: str, timeout: float | None = None) -> pb.Command:
    """A wait for a signal."""
    wait = pb.AwaitSignal(signal_name=name, timeout=None if timeout is None else seconds(timeout))
    return pb.Command(op=op, await_signal=wait)


def child(op: int, workflow: str, value: Any = None, **options: Any) -> pb.Command:
    """A child run."""
    text = json.dumps(options) if options else ""
    return pb.Command(op=op, start_child=pb.StartChild(workflow_id=workflow, input=payload(value), options=text))


def cancel(op: int, of_seq: int = 0) -> pb.Command:
    """Stop an op."""
    return pb.Command(cancel_op=pb.CancelOp(op=op, of_seq=of_seq))


@dataclass(slots=True)
class Held:
    """A DECIDE task on lease, and what its worker knows. ``seen``: all events that it was told, in order."""

    worker: RawWorker
    task: pb.Task
    seq: int = 0
    advance_no: int = 0
    seen: list[run_pb2.Event] = field(default_factory=list)

    def item(self, *commands: pb.Command, outcome: Any = WAIT, **fields: Any) -> pb.AdvanceItem:
        """The next Advance."""
        return pb.AdvanceItem(
            task=self.task.task, advance_no=self.advance_no + 1, seen_seq=self.seq, commands=commands, outcome=outcome,
            **fields,
        )  # fmt: skip

    async def advance(self, *commands: pb.Command, outcome: Any = WAIT, **fields: Any) -> pb.ItemResult:
        """Send it, and go on from its answer."""
        [result] = await send(self.worker, self.item(*commands, outcome=outcome, **fields))
        if result.outcome == pb.ITEM_OUTCOME_OK and outcome != BLOCK:
            self.advance_no += 1
            self.seen += result.advance.events
            self.seq = max([self.seq, *result.advance.seqs, *(event.seq for event in result.advance.events)])
        return result

    async def wait(self) -> None:
        """Give the run back, once there is nothing that this worker has not seen."""
        while (await self.advance()).advance.kept:
            pass

    async def complete(self, output: Any = None, *commands: pb.Command) -> pb.ItemResult:
        """The function has returned."""
        return await self.advance(*commands, outcome=COMPLETE, output=payload(output))

    async def fail(self, code: str = "BROKEN", *commands: pb.Command) -> pb.ItemResult:
        """The function has raised."""
        failure = run_pb2.Failure(kind=run_pb2.FAILURE_KIND_PERMANENT, code=code, message="told to")
        return await self.advance(*commands, outcome=FAIL, failure=failure)

    def kinds(self) -> list[str]:
        """What the worker was told of, in order."""
        return [str(event.WhichOneof("kind")) for event in self.seen]


async def send(worker: RawWorker, *items: pb.AdvanceItem) -> list[pb.ItemResult]:
    """Send Advances in one frame, and return what became of each."""
    results = await worker.results(await worker.send(pb.Advance(items=items)), len(items))
    for item, result in zip(items, results, strict=True):
        gone = result.outcome == pb.ITEM_OUTCOME_LEASE_LOST or (
            result.outcome == pb.ITEM_OUTCOME_OK and not result.advance.kept
        )
        if gone and worker.held.get((item.task.run_id, item.task.task_id)) == item.task:
            del worker.held[item.task.run_id, item.task.task_id]
    return results


@dataclass(slots=True)
class Code:
    """A scene with a worker that decides code runs, beside the scene's own, which runs steps."""

    scene: Scene
    decider: RawWorker

    async def start(self, value: Any = None, **fields: Any) -> str:
        """Start a run of the code workflow."""
        return await self.scene.start(value, "code", **fields)

    async def take(self, worker: RawWorker | None = None) -> Held:
        """The next DECIDE task."""
        return held(worker or self.decider, await (worker or self.decider).task())

    async def begin(self, *commands: pb.Command, outcome: Any = WAIT, value: Any = None, **fields: Any) -> Held:
        """Start a run, and advance it once."""
        await self.start(value, **fields)
        run = await self.take()
        await run.advance(*commands, outcome=outcome)
        return run

    async def again(self, run: Held) -> Held:
        """The DECIDE task of a run whose lease was given back: with what has happened since."""
        new = await self.take()
        assert new.task.task.run_id == run.task.task.run_id
        assert new.task.task.fencing_token > run.task.task.fencing_token
        return new


def held(worker: RawWorker, task: pb.Task) -> Held:
    """From a task."""
    assert task.kind == pb.TASK_KIND_DECIDE
    decide = task.decide
    seq = decide.events[-1].seq if decide.events else decide.after_seq
    return Held(worker, task, seq, decide.advance_no, list(decide.events))


async def another_decider(scene: Scene, workers: Sequence[pb.WorkflowHandler] = (CODE,), **hello: Any) -> RawWorker:
    """One more worker that decides."""
    hello = {"workflow_capacity": 100, **hello}
    worker = RawWorker(scene.server.grpc_address, handlers=(), capacity=0, workflows=list(workers), **hello)
    await worker.connect()
    return worker


async def open_code(open_scene: OpenScene, **settings: Any) -> Code:
    """A scene for code runs; its decider has to be closed."""
    scene = await open_scene(**settings)
    await scene.api.register(MANIFEST)
    return Code(scene, await another_decider(scene))
