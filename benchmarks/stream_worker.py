"""Very many workers in one process: `python -m benchmarks.stream_worker ADDRESS NAME`.

Each has a connection and a stream of its own, and does what the protocol asks of a worker and no more: it answers
pings, renews its leases, and holds the tasks that it gets. Commands are lines of JSON on standard input, answers lines
of JSON on standard output. To complete is to complete all that they hold, and all that they get from then on:

| command | answer |
|---|---|
| `{"do": "connect", "streams": 1000, "capacity": 10}` | `{"event": "connected"}` once each has its Welcome |
| `{"do": "hold", "tasks": 10000}` | `{"event": "holding"}` once they hold so many |
| `{"do": "complete", "steps": 100000}` | `{"event": "completed", "acknowledged": …, "lost": …}` |
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import uvloop

from benchmarks.plan import STEPS
from benchmarks.worker import say
from benchmarks.workflow import handler_name
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.worker_service_pb2_grpc import WorkerServiceStub

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_RENEW = 10.0
_LIMIT = 300.0
_CONNECTING_AT_A_TIME = 50

Key = tuple[str, int]


class Hands:
    """What all workers of the process hold and have done together."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.completing = False
        self._changed = asyncio.Event()
        self._errors: list[BaseException] = []

    def add(self, **counts: int) -> None:
        """Count what a worker has got or done."""
        self.counts.update(counts)
        self._changed.set()

    def failed(self, error: BaseException) -> None:
        """A worker has lost its stream: nobody waits any longer."""
        self._errors.append(error)
        self._changed.set()

    async def until(self, name: str, count: int) -> None:
        """Wait for a number. Raises TimeoutError, and what a stream ended with."""
        async with asyncio.timeout(_LIMIT):
            while self.counts[name] < count and not self._errors:
                self._changed.clear()
                await self._changed.wait()
        if self._errors:
            raise self._errors[0]


class StreamWorker:
    """One worker on its own connection."""

    def __init__(self, address: str, name: str, capacity: int, hands: Hands) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._call: Any = WorkerServiceStub(self._channel).Session()
        self._name = name
        self._capacity = capacity
        self._hands = hands
        self._frame_id = 0
        self._tasks_number = 0
        self._held: dict[Key, pb.Task] = {}
        self._completed: dict[int, Sequence[Key]] = {}
        self._writing = asyncio.Lock()

    async def connect(self) -> None:
        """Open the stream. Raises grpc.aio.AioRpcError."""
        handlers = [pb.Handler(name=handler_name(index), queue="default") for index in range(STEPS)]
        await self._send(
            hello=pb.Hello(
                protocol_version=1,
                worker_name=self._name,
                process_nonce=uuid.uuid4().hex,
                capacity=self._capacity,
                handlers=handlers,
            )
        )
        answer = await self._call.read()
        if answer is grpc.aio.EOF or answer.WhichOneof("frame") != "welcome":
            raise ConnectionError(f"{self._name} was not welcomed")

    async def run(self) -> None:
        """Do what the server says, for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._renew())
                while (frame := await self._call.read()) is not grpc.aio.EOF:
                    await self._take(frame)
                raise ConnectionError(f"the stream of {self._name} ended")
        except* (grpc.aio.AioRpcError, ConnectionError) as errors:
            self._hands.failed(errors.exceptions[0])

    async def complete(self) -> None:
        """Complete all that it holds."""
        await self._complete(list(self._held))

    async def _take(self, frame: Any) -> None:
        match frame.WhichOneof("frame"):
            case "ping":
                await self._send(pong=pb.Pong(number=frame.ping.number))
            case "tasks":
                self._tasks_number = frame.tasks.tasks_number
                tasks = {_key(task.task): task for task in frame.tasks.tasks}
                self._held |= tasks
                self._hands.add(holding=len(tasks))
                if self._hands.completing:
                    await self._complete(list(tasks))
            case "ack" if frame.ack.frame_id in self._completed:
                keys = self._completed[frame.ack.frame_id]
                outcomes = [result.outcome for result in frame.ack.results]
                for result in frame.ack.results:
                    self._held.pop(keys[result.index], None)
                right = outcomes.count(pb.ITEM_OUTCOME_OK)
                self._hands.add(acknowledged=right, lost=len(outcomes) - right)
            case _:  # the Acks of heartbeats, and what asks for something that is not done here
                pass

    async def _complete(self, keys: Sequence[Key]) -> None:
        tasks = [self._held[key] for key in keys]
        outputs = [json.dumps({"n": json.loads(task.input.json)["n"] + 1}) for task in tasks]
        items = [
            pb.CompleteItem(task=task.task, output=Payload(json=output))
            for task, output in zip(tasks, outputs, strict=True)
        ]
        if items:
            await self._send(keys, complete=pb.Complete(items=items))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW)
            if self._held:
                tasks = [task.task for task in self._held.values()]
                await self._send(heartbeat=pb.Heartbeat(tasks=tasks, last_tasks_number=self._tasks_number))

    async def _send(self, completed: Sequence[Key] = (), **frame: Any) -> None:
        async with self._writing:
            self._frame_id += 1
            if completed:
                self._completed[self._frame_id] = completed
            await self._call.write(pb.SessionRequest(frame_id=self._frame_id, **frame))


def _key(task: pb.TaskRef) -> Key:
    return task.run_id, task.task_id


async def main(address: str, name: str) -> None:
    """Do what standard input says, until it ends."""
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    say("ready")
    hands = Hands()
    workers: list[StreamWorker] = []
    async with asyncio.TaskGroup() as group:
        while line := await commands.readline():
            command = json.loads(line)
            match command["do"]:
                case "connect":
                    names = [f"{name}-{number}" for number in range(command["streams"])]
                    workers = [StreamWorker(address, name, command["capacity"], hands) for name in names]
                    for first in range(0, len(workers), _CONNECTING_AT_A_TIME):
                        some = workers[first : first + _CONNECTING_AT_A_TIME]
                        await asyncio.gather(*(worker.connect() for worker in some))
                    for worker in workers:
                        group.create_task(worker.run())
                    say("connected")
                case "hold":
                    await hands.until("holding", command["tasks"])
                    say("holding")
                case "complete":
                    hands.completing = True
                    await asyncio.gather(*(worker.complete() for worker in workers))
                    await hands.until("acknowledged", command["steps"])
                    say("completed", acknowledged=hands.counts["acknowledged"], lost=hands.counts["lost"])
                case other:
                    raise ValueError(f"{other}: no such command")


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
