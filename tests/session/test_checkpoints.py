"""Checkpoints: saved under the fence, given to the next attempt, and no end of a lease."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from fencepost.v1 import run_pb2
from fencepost.v1 import worker_service_pb2 as pb
from fencepost.v1.payload_pb2 import Payload
from tests.engine.rows import count, execute
from tests.fixtures.api import Api, kinds
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, LEASE_LOST, OK, REFUSED, RawWorker
from tests.fixtures.servers import InProcessServer, StartInProcessServer

ConnectWorker = Callable[..., Awaitable[RawWorker]]
Connect = Callable[[str], Api]
AT_ONCE = {"initial_delay": "0s", "max_attempts": 10}


async def leased(api: Api, worker: RawWorker, n_steps: int = 1) -> pb.Task:
    """The first task of a run whose steps are tried again at once."""
    await api.register(manifest(n_steps, retry=AT_ONCE))
    await api.start(input='"in"')
    return await worker.task()


async def test_the_next_attempt_gets_the_newest_checkpoint_and_the_next_step_none(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    worker = await connect_worker(server.grpc_address, handlers=handler_names(2))
    task = await leased(api, worker, 2)
    assert not task.HasField("checkpoint")
    for number in (1, 2, 30):
        assert (await worker.checkpoint(task, number, f"[{number}.10]")).outcome == OK
    [step] = (await api.get(task.task.run_id)).open_steps
    assert (step.state, step.checkpoint_number) == (run_pb2.STEP_STATE_LEASED, 30)
    assert [result.outcome for result in await worker.heartbeat([task])] == [OK], "the lease stays with the worker"
    await worker.fail(task)
    again = await worker.task()
    assert (again.attempt, again.checkpoint.number, again.checkpoint.state.json) == (2, 30, "[30.10]")
    assert (await worker.checkpoint(again, 31, "31")).outcome == OK
    await worker.fail(again)
    third = await worker.task()
    assert (third.checkpoint.number, third.checkpoint.state.json) == (31, "31")
    await worker.complete(third, "1")
    after = await worker.task()
    assert not after.HasField("checkpoint")
    assert await count(dsn, "checkpoint") == 0, "nobody needs it any more"
    assert "checkpoint" not in " ".join(kinds(await api.history(task.task.run_id))), "it is no event"


async def test_a_number_that_is_not_larger_changes_nothing(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    assert (await worker.checkpoint(task, 5, '"five"')).outcome == OK
    for number, state in ((5, '"five"'), (5, '"other"'), (4, '"four"'), (1, '"one"')):
        assert (await worker.checkpoint(task, number, state)).outcome == ALREADY_DONE
    await worker.fail(task)
    again = await worker.task()
    assert again.checkpoint.state.json == '"five"'
    assert (await worker.checkpoint(again, 5, '"other"')).outcome == ALREADY_DONE, "numbers go on over attempts"


async def test_the_last_checkpoint_travels_with_the_failure(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """Row 38 of the field's failures: four checkpoints at once, then the failure."""
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    frames = [
        await worker.send(
            pb.Checkpoint(items=[pb.CheckpointItem(task=task.task, number=n, state=Payload(json=f"{n}"))])
        )
        for n in (1, 2, 3)
    ]
    assert (await worker.fail(task, checkpoint=(4, "4"))).outcome == OK
    assert [(await worker.results(frame, 1))[0].outcome for frame in frames] == [OK] * 3
    again = await worker.task()
    assert (again.checkpoint.number, again.checkpoint.state.json) == (4, "4")


async def test_an_older_checkpoint_in_a_failure_does_not_replace_a_newer_one(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    await worker.checkpoint(task, 7, "7")
    assert (await worker.fail(task, checkpoint=(7, "8"))).outcome == OK
    again = await worker.task()
    assert (again.checkpoint.number, again.checkpoint.state.json) == (7, "7")


async def test_a_failure_that_is_sent_again_is_known_by_its_checkpoint_too(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    """I6."""
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    assert (await worker.fail(task, checkpoint=(1, "1"))).outcome == OK
    assert (await worker.fail(task, checkpoint=(1, "1"))).outcome == ALREADY_DONE
    assert (await worker.fail(task, checkpoint=(1, "2"))).outcome == LEASE_LOST
    assert (await worker.fail(task)).outcome == LEASE_LOST


async def test_a_stale_token_saves_nothing(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """I2, row 10 of the field's failures."""
    worker = await connect_worker(server.grpc_address)
    stale = await leased(api, worker)
    await worker.checkpoint(stale, 1, "1")
    await worker.fail(stale)
    current = await worker.task()
    assert (await worker.checkpoint(stale, 2, "2")).outcome == LEASE_LOST
    await worker.complete(current)
    for task in (stale, current):
        assert (await worker.checkpoint(task, 3, "3")).outcome == LEASE_LOST
    nobody = pb.TaskRef(run_id=str(uuid.uuid4()), task_id=1, fencing_token=1)
    assert (await worker.checkpoint(nobody, 1)).outcome == LEASE_LOST
    assert await count(dsn, "checkpoint") == 0


async def test_a_worker_whose_lease_ran_out_and_was_not_taken_over_still_saves(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker, dsn: str
) -> None:
    """The token decides, not the time."""
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    await execute(dsn, "update cluster set hold_until = clock_timestamp() + interval '1 h'")
    await execute(dsn, "update task set lease_expires_at = clock_timestamp() - interval '1 s'")
    assert (await worker.checkpoint(task, 1)).outcome == OK


async def test_checkpoints_of_one_frame_are_answered_each_by_itself(
    server: InProcessServer, api: Api, connect_worker: ConnectWorker
) -> None:
    worker = await connect_worker(server.grpc_address)
    task = await leased(api, worker)
    items = [
        pb.CheckpointItem(task=task.task, number=number, state=Payload(json=json))
        for number, json in ((0, "0"), (1, "{"), (2, "2"), (1, "1"), (3, "3"))
    ]
    results = await worker.results(await worker.send(pb.Checkpoint(items=items)), 5)
    assert [result.outcome for result in results] == [REFUSED, REFUSED, OK, ALREADY_DONE, OK]
    await worker.fail(task)
    assert (await worker.task()).checkpoint.number == 3


async def test_a_checkpoint_that_is_as_large_as_a_payload_may_be_reaches_the_next_attempt(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """Row 57 of the field's failures, with bytes that no JSON column could hold."""
    server = await in_process_server(dsn)
    worker = await connect_worker(server.grpc_address)
    task = await leased(connect_api(server.grpc_address), worker)
    state = Payload(binary=b"\0" * (1 << 20), metadata={"codec": "none"})
    item = pb.CheckpointItem(task=task.task, number=1, state=state)
    [result] = await worker.results(await worker.send(pb.Checkpoint(items=[item])), 1)
    assert result.outcome == OK
    await worker.fail(task)
    assert (await worker.task()).checkpoint.state == state


async def test_checkpoints_outlive_the_worker_and_are_sent_again_over_a_reconnect(
    in_process_server: StartInProcessServer, dsn: str, connect_api: Connect, connect_worker: ConnectWorker
) -> None:
    """The Ack was lost with the stream: the same again, at another server, is ALREADY_DONE."""
    servers = [await in_process_server(dsn) for _ in range(2)]
    api = connect_api(servers[0].grpc_address)
    worker = await connect_worker(servers[0].grpc_address)
    task = await leased(api, worker)
    await worker.checkpoint(task, 1, "1")
    elsewhere = await connect_worker(servers[1].grpc_address, capacity=0)
    assert (await elsewhere.checkpoint(task, 1, "1")).outcome == ALREADY_DONE
    assert (await elsewhere.checkpoint(task, 2, "2")).outcome == OK
    await worker.reconnect(held=[])
    again = await worker.task()
    assert (again.attempt, again.checkpoint.number) == (1, 2)
