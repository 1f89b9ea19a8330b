"""One example: every operation is done by the servers and by the oracle, and then all that can be seen is compared.

After each operation the scene waits until the servers have done what follows of it by itself (tasks are leased to
workers that have room, what is due has happened); what they have not done within a limit, they do not do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from fencepost.v1 import run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.fixtures.raw_worker import seconds
from tests.fixtures.refusals import ApiError
from tests.properties.comparing import differing_events, differing_rows, differing_run, failure_of
from tests.properties.oracle import Oracle, Started
from tests.properties.oracle_model import Answer, Outcome, Task
from tests.properties.oracle_run import LEASE_LOST, Run
from tests.properties.real import Real, payload, ref
from tests.properties.workflows import Manifest

LIMIT = 30.0
TICK = 0.01


@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """A lease that a worker was given: run is an index."""

    run: int
    task_id: int
    token: int
    worker: int


@dataclass(frozen=True, slots=True)
class Reported:
    """An outcome that was sent."""

    lease: Lease
    outcome: Outcome


class Scene:
    """The oracle and the servers, side by side."""

    def __init__(self, oracle: Oracle, real: Real) -> None:
        self.oracle = oracle
        self.real = real
        self.run_ids: list[str] = []
        self.workflows: list[str] = []
        self.leases: list[Lease] = []
        self.capacities = [0, 0]
        self.reported: list[Reported] = []
        self.trace: list[str] = []
        self.now = 0.0
        self._keys: dict[str, tuple[int, int]] = {}
        self._looks = 0

    def agree(self, what: str, found: object, wanted: object) -> None:
        """Compare an answer of the servers with the oracle's."""
        self.trace.append(f"{what} -> {found}")
        assert found == wanted, self._story(f"{what}: the server says {found}, the oracle {wanted}")

    def _story(self, message: str) -> str:
        lines = [message, "operations:", *self.trace]
        return "\n  ".join(lines)

    # Callers

    async def register(self, server: int, manifest: Manifest) -> None:
        """Register a manifest."""
        found = await self.real.register(server, manifest)
        name = f"register {manifest['id']} {manifest['compatibility_id']}"
        self.agree(name, found, self.oracle.register(manifest))

    async def start(self, server: int, workflow_id: str, data: Any, **fields: Any) -> None:
        """Start a run, or find one by a key."""
        sent = dict(fields)
        for name in ("start_delay", "run_timeout"):
            if name in sent:
                sent[name] = seconds(sent[name])
        if sent.pop("bind", False):
            sent["on_active_duplicate"] = run_service_pb2.DUPLICATE_POLICY_BIND
        response = await self.real.start(server, workflow_id, data, sent)
        wanted = self.oracle.start(workflow_id, data, self.now, **fields)
        if not isinstance(response, ApiError) and wanted.created and wanted.run == len(self.run_ids):
            self.run_ids.append(response.run_id)
            self.workflows.append(workflow_id)
        self.agree(f"start {workflow_id} {data} {fields}", self._started(response), wanted)
        await self.settle()

    def _started(self, response: Any) -> Started:
        if isinstance(response, ApiError):
            return Started(response.reason, self._index(response.metadata.get("existing_run_id", "")))
        return Started("OK", self._index(response.run_id), response.created, response.input_differs)

    def _index(self, run_id: str) -> int:
        return self.run_ids.index(run_id) if run_id in self.run_ids else -1

    async def call(self, server: int, name: str, run: int, fields: dict[str, Any], wanted: Answer) -> None:
        """A call on a run, and its repeat at the other server if it has a request id; the oracle has answered."""
        for at in (server, 1 - server) if fields.get("request_id") else (server,):
            found = await self.real.call(at, name, self.run_ids[run], **fields)
            if found.code != "OK":
                found = Answer(found.code, found.state if wanted.state else "")
            self.agree(f"{name} of run {run} {fields}", found, wanted)
        await self.settle()

    async def signal(self, server: int, run: int, data: Any, request_id: str, wanted: Answer) -> None:
        """The signal that all waits wait for."""
        fields = {"signal_name": "go", "payload": payload(data), "request_id": request_id}
        await self.call(server, "SignalRun", run, fields, wanted)

    # Workers

    def ref(self, lease: Lease) -> pb.TaskRef:
        """As workers name it."""
        return ref(self.run_ids[lease.run], lease.task_id, lease.token)

    async def set_capacity(self, worker: int, capacity: int) -> None:
        """How many tasks a worker takes from now on."""
        self.capacities[worker] = capacity
        self.trace.append(f"worker {worker} takes {capacity}")
        await self.real.capacity(worker, capacity)
        await self.settle()

    async def report(self, lease: Lease, outcome: Outcome, first: int, repeats: int = 0) -> None:
        """Report an outcome over one worker's stream, then over the others' in turn; all must be told the same."""
        run = self.oracle.runs[lease.run]
        for time in range(1 + repeats):
            worker = (first + time) % 2
            wanted = run.report(lease.task_id, lease.token, outcome, self.now)
            found = await self.real.report(worker, self.ref(lease), outcome)
            self.agree(f"worker {worker} reports {lease}: {outcome}", found, wanted)
            if lease.worker == worker and lease in self.leases:
                self.leases.remove(lease)
        self.reported.append(Reported(lease, outcome))
        await self.settle()

    async def forge(self, lease: Lease, off: int, outcome: Outcome, worker: int) -> None:
        """Report with a token that is not the lease's (I2)."""
        token = lease.token + off
        wanted = self.oracle.runs[lease.run].report(lease.task_id, token, outcome, self.now)
        found = await self.real.report(worker, ref(self.run_ids[lease.run], lease.task_id, token), outcome)
        self.agree(f"worker {worker} reports {lease} with token {token}: {outcome}", found, wanted)
        await self.settle()

    async def checkpoint(self, lease: Lease, number: int, state: Any) -> None:
        """Save a state of a step."""
        wanted = self.oracle.runs[lease.run].checkpoint(lease.task_id, lease.token, number, state, self.now)
        found = await self.real.checkpoint(lease.worker, self.ref(lease), number, state)
        self.agree(f"checkpoint {number} of {lease}", found, wanted)
        await self.settle()

    async def heartbeat(self, worker: int) -> None:
        """Renew all leases of a worker; it forgets those that it has lost."""
        leases = sorted(lease for lease in self.leases if lease.worker == worker)
        wanted = [self.oracle.runs[ls.run].heartbeat(ls.task_id, ls.token, self.now) for ls in leases]
        found = await self.real.heartbeat(worker, [self.ref(lease) for lease in leases])
        self.agree(f"worker {worker} heartbeats {leases}", found, wanted)
        for lease, (answer, _) in zip(leases, wanted, strict=True):
            if answer == LEASE_LOST:
                self.leases.remove(lease)

    # Time

    async def expire(self, lease: Lease) -> None:
        """Let a lease run out."""
        self.trace.append(f"{lease} runs out")
        self.oracle.runs[lease.run].tasks[lease.task_id].lease_until = self.now
        await self.real.expire(self.ref(lease))
        await self.settle()

    async def hasten(self, run: int, index: int) -> None:
        """Let a timer be due."""
        timers = [timer for timer in self.oracle.runs[run].timers if not timer.fired]
        timer = timers[index % len(timers)]
        self.trace.append(f"run {run}: timer {timer.seq} {timer.kind} is due")
        timer.fire_at = self.now
        await self.real.hasten(self.run_ids[run], timer.seq, timer.kind)
        await self.settle()

    # What follows by itself

    async def settle(self) -> None:
        """Wait until the servers have done what the oracle says that follows. Fails at the limit."""
        # More than once: what was due may have begun what takes next to no time.
        for _ in range(3):
            self.now += TICK
            self.oracle.pass_time(self.now)
        loop = asyncio.get_running_loop()
        end = loop.time() + LIMIT
        while differences := [difference async for difference in self._differences()]:
            assert loop.time() < end, self._story("\n  ".join([*differences, ""]))
            await asyncio.sleep(0.005)

    async def _differences(self) -> AsyncIterator[str]:
        for worker in range(2):
            await self._take(worker)
        self._looks += 1
        rows = await self.real.rows(self.run_ids)
        for run, run_id in enumerate(self.run_ids):
            oracle = self.oracle.runs[run]
            differs = False
            for difference in [*differing_rows(oracle, rows[run_id]), *await self._told(oracle, run_id)]:
                differs = True
                yield f"run {run} ({self.workflows[run]}): {difference}"
            if not differs:
                await self._let_go(run)
        for difference in self._room():
            yield difference

    async def _told(self, oracle: Run, run_id: str) -> list[str]:
        server = self._looks % 2
        message = await self.real.get(server, run_id)
        events = await self.real.history(1 - server, run_id, message.last_seq)
        return [*differing_run(oracle, message), *differing_events(oracle.events, events)]

    async def _take(self, worker: int) -> None:
        """Tell the oracle which tasks have come."""
        for task in await self.real.arrived(worker):
            run = self._index(task.task.run_id)
            token = task.task.fencing_token
            self.trace.append(f"worker {worker} gets run {run} task {task.task.task_id} token {token}")
            try:
                leased = self.oracle.runs[run].lease(task.task.task_id, token, str(worker), self.now)
            except (AssertionError, KeyError) as error:
                raise AssertionError(self._story(repr(error))) from error
            self.leases.append(Lease(run, task.task.task_id, token, worker))
            self._check(run, leased, task)
        lost = {(ref.run_id, ref.task_id, ref.fencing_token) for ref in await self.real.revoked(worker)}
        for lease in list(self.leases):
            if (self.run_ids[lease.run], lease.task_id, lease.token) in lost and lease.worker == worker:
                still = self.oracle.runs[lease.run].held(lease.task_id, lease.token)
                assert still is None, self._story(f"{lease} was revoked")
                self.leases.remove(lease)

    def _check(self, run: int, leased: Task, task: pb.Task) -> None:
        """A task says what the oracle knows of it."""
        place = (run, leased.task_id)
        assert self._keys.setdefault(task.idempotency_key, place) == place, self._story("a key came twice")
        undoes = leased.undoes
        wanted = {
            "kind": pb.TASK_KIND_UNDO if undoes else pb.TASK_KIND_STEP,
            "workflow": self.workflows[run],
            "handler": leased.handler,
            "node": leased.node_id,
            "attempt": leased.attempt,
            "input": leased.input.data,
            "feedback": leased.feedback,
            "corrects": leased.last_failure if leased.corrects else None,
            "checkpoint": leased.checkpoint,
            "unfinished": undoes is not None and undoes.unfinished,
            "output": undoes.output if undoes else None,
        }
        state = task.checkpoint.state.json
        feedback = task.feedback.feedback.json
        found = {
            "kind": task.kind,
            "workflow": task.workflow_id,
            "handler": task.handler,
            "node": task.node_id,
            "attempt": task.attempt,
            "input": json.loads(task.input.json or "null"),
            "feedback": json.loads(feedback or "null") if leased.feedback != "violations" else "violations",
            "corrects": failure_of(task.feedback) if task.HasField("feedback") else None,
            "checkpoint": (task.checkpoint.number, json.loads(state)) if task.HasField("checkpoint") else None,
            "unfinished": task.unfinished,
            "output": json.loads(task.undo_output.json or "null"),
        }
        assert found == wanted, self._story(f"the task of run {run} is {found}, expected {wanted}")

    async def _let_go(self, run: int) -> None:
        """Leases of a run that the oracle knows to be lost, and the server too: their worker asks and forgets them."""
        oracle = self.oracle.runs[run]
        for worker in range(2):
            mine = [lease for lease in self.leases if (lease.run, lease.worker) == (run, worker)]
            if any(oracle.held(lease.task_id, lease.token) is None for lease in mine):
                await self.heartbeat(worker)

    def _room(self) -> Iterator[str]:
        """A worker has room, and there is a task for it."""
        waiting = [
            (index, task.task_id)
            for index, run in enumerate(self.oracle.runs)
            for task in run.tasks.values()
            if run.may_lease(task)
        ]
        for worker in range(2):
            held = sum(lease.worker == worker for lease in self.leases)
            if waiting and held < self.capacities[worker]:
                yield f"worker {worker} has room for {waiting} (run, task)"

    # What may be chosen from

    def pick_lease(self, index: int) -> Lease:
        """One of the leases that are out."""
        leases = sorted(self.leases)
        return leases[index % len(leases)]

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease counts."""
        return self.oracle.runs[lease.run].held(lease.task_id, lease.token) is not None

    def undoes(self, lease: Lease) -> bool:
        """Whether the lease counts and is that of an undo."""
        task = self.oracle.runs[lease.run].held(lease.task_id, lease.token)
        return task is not None and task.undoes is not None
