"""Runs under everything that workers and servers can do to them at once end well, with legal histories (I2–I6, I13)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.histories import check_run, tokens_of
from tests.engine.rows import count, execute, fetch
from tests.engine.tasks import end
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED, RawWorker, StreamEnded
from tests.fixtures.servers import InProcessServer, StartInProcessServer
from tests.fixtures.waiting import paced

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]
STEPS = 3
NODES = [f"n{n}" for n in range(1, STEPS + 1)]
OPERATIONAL, CORRECTIVE, PERMANENT = (
    run_pb2.FAILURE_KIND_OPERATIONAL,
    run_pb2.FAILURE_KIND_CORRECTIVE,
    run_pb2.FAILURE_KIND_PERMANENT,
)


@dataclass(slots=True)
class Effects:
    """What workers saw and were told, over all of them."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """The tokens that each step was leased with, in the order in which they were looked at."""
    accepted: dict[tuple[str, int], int] = field(default_factory=dict)
    """The token whose completion was answered OK first."""

    def leased(self, task: pb.Task) -> None:
        key = (task.task.run_id, task.task.task_id)
        token, known = task.task.fencing_token, self.tokens.setdefault(key, [])
        assert token not in known, "a token was given twice (I3)"
        assert token <= self.accepted.get(key, token), "a completed step was leased again (I5)"
        known.append(token)

    def completed(self, task: pb.Task, result: pb.ItemResult) -> None:
        key = (task.task.run_id, task.task.task_id)
        assert result.outcome in (OK, ALREADY_DONE, LEASE_LOST, REFUSED)
        if result.outcome in (OK, ALREADY_DONE):
            assert self.accepted.setdefault(key, task.task.fencing_token) == task.task.fencing_token


class Chaos:
    """A worker that does its work, and everything else too. Its server may change at each reconnect."""

    def __init__(self, worker: RawWorker, effects: Effects, chance: random.Random) -> None:
        self.worker = worker
        self.effects = effects
        self.chance = chance
        self.past: list[pb.Task] = []

    async def run(self) -> None:
        while True:
            try:
                await self.turn()
            except StreamEnded:
                # Refused for the time being if the server can't write it down just now: the next turn tries it again.
                with contextlib.suppress(StreamEnded):
                    await self.worker.reconnect(held=[])

    async def turn(self) -> None:
        try:
            task = await self.worker.task(timeout=0.1)
        except (AssertionError, TimeoutError):
            await self.worker.heartbeat()
            return
        self.effects.leased(task)
        self.past.append(task)
        await self.act(task)
        if self.past and self.chance.random() < 0.5:
            await self.repeat(self.chance.choice(self.past))

    async def act(self, task: pb.Task) -> None:
        what = self.chance.choices(
            ["complete", "twice", "bad output", "fail", "corrective", "release", "reconnect", "forget", "expire"],
            [12, 2, 1, 2, 1, 1, 1, 1, 1],
        )[0]
        if what == "complete":
            self.effects.completed(task, await self.worker.complete(task, "1"))
        elif what == "twice":
            for result in await self.worker.complete_all([(task, "1"), (task, "1"), (task, "2")]):
                if result.index < 2:
                    self.effects.completed(task, result)
                else:
                    assert result.outcome == LEASE_LOST
        elif what == "bad output":
            assert (await self.worker.complete(task, '"x"')).outcome in (REFUSED, LEASE_LOST)
        elif what in ("fail", "corrective"):
            await self.worker.fail(task, OPERATIONAL if what == "fail" else CORRECTIVE)
        elif what == "release":
            await self.worker.release(task)
        elif what == "reconnect":
            await self.worker.reconnect()
            self.effects.completed(task, await self.worker.complete(task, "1"))
        elif what == "forget":
            await self.worker.reconnect(held=[])

    async def repeat(self, task: pb.Task) -> None:
        """Send an outcome of a lease that is long gone, or says so."""
        before = self.effects.accepted.get((task.task.run_id, task.task.task_id))
        result = await self.worker.complete(task, "1")
        if before is not None:
            assert result.outcome == (ALREADY_DONE if before == task.task.fencing_token else LEASE_LOST)
        self.effects.completed(task, result)


async def expire_some(dsn: str) -> None:
    """Let leases run out, a few at a time, as if their workers had been silent."""
    while True:
        await paced(0.15)
        await execute(
            dsn,
            "update task set lease_expires_at = clock_timestamp() where (run_id, task_id) in"
            " (select run_id, task_id from task where lease_session is not null order by random() limit 3)",
        )


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_workers_do_every_run_ends_once_with_a_legal_history(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker, seed: int
) -> None:
    settings = {"poll_interval": 0.05, "disconnect_grace": 0.2, "eager_limit": 2, "lane_batch": 7}
    settings |= {"outage_gap": 60.0, "connect_timeout": 30.0}  # a slow machine is not an outage
    servers: list[InProcessServer] = [await in_process_server(dsn, **settings) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    policy = {"max_attempts": 1000, "max_corrective_attempts": 1000, "initial_delay": "10ms", "max_delay": "20ms"}
    await api.register(manifest(STEPS, output_schema={"type": "integer"}, retry=policy))
    runs = [r.started.run_id for r in await api.start_many([api.start_request() for _ in range(30)])]
    effects, chance = Effects(), random.Random(seed)
    workers = [
        await connect_worker(servers[n % 2].grpc_address, handlers=handler_names(STEPS), capacity=n + 2)
        for n in range(4)
    ]
    busy = [asyncio.create_task(Chaos(worker, effects, chance).run()) for worker in workers]
    busy.append(asyncio.create_task(expire_some(dsn)))
    ending = asyncio.gather(*(api.wait(run_id, timeout=120) for run_id in runs))
    watched: list[asyncio.Future[Any]] = [ending, *busy]
    done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    await end(busy)
    assert done == {ending}, [task.exception() for task in done if task is not ending]
    for run in await ending:
        assert run.state == run_pb2.RUN_STATE_COMPLETED
        events = await check_run(api, dsn, run.run_id, NODES)
        for event in events:
            if event.WhichOneof("kind") == "step_completed":
                key = (run.run_id, event.step_completed.task_id)
                assert effects.accepted.get(key, event.step_completed.fencing_token) == tokens_of([event])[0]
    for key, token in effects.accepted.items():
        assert token == max(effects.tokens[key]), "a completed step was leased again (I5)"
    assert sum(map(len, effects.tokens.values())) > len(runs) * STEPS * 1.2, "too peaceful to show anything"
    assert await count(dsn, "task") == 0


async def test_the_times_of_a_history_never_run_backwards_though_the_clock_does(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """As after a failover to a machine whose clock is behind: the last event's time holds."""
    server = await in_process_server(dsn)
    api = connect_api(server.grpc_address)
    await api.register(manifest(2))
    run_id = (await api.start()).run_id
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await worker.task()
    await execute(dsn, "update event set at = at + interval '1 h'")
    await execute(dsn, "update run set last_event_at = last_event_at + interval '1 h'")
    await worker.complete(task)
    await worker.complete(await worker.task())
    events = await check_run(api, dsn, run_id, ["n1", "n2"])
    assert len({event.event_time.ToNanoseconds() for event in events}) == 1


async def test_final_states_absorb(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """I4: nothing that anybody reports afterwards is written, by whichever server."""
    servers = [await in_process_server(dsn, poll_interval=0.05) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    await api.register(manifest())
    runs = [(await api.start()).run_id for _ in range(2)]
    first = await connect_worker(servers[0].grpc_address)
    taken = await first.tasks(2)
    workers = [first, await connect_worker(servers[1].grpc_address)]
    await workers[0].complete(taken[0])
    await workers[1].fail(taken[1], PERMANENT)
    before = await fetch(dsn, "select r.*, e.* from run r join event e using (run_id) order by 1, seq")
    for worker in workers:
        for task in taken:
            await worker.complete(task, "2")
            await worker.fail(task)
            await worker.release(task)
            await worker.heartbeat([task])
    after = await fetch(dsn, "select r.*, e.* from run r join event e using (run_id) order by 1, seq")
    assert after == before
    ends = {kinds(await api.history(run_id))[-1] for run_id in runs}
    assert ends == {"run_completed", "run_failed"}
