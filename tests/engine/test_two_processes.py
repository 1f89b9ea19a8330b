"""Two servers as real processes on one database: equal starts make one run, which outlives one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fencepost.v1 import run_pb2
from tests.engine.histories import check_run
from tests.engine.rows import count
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import ALREADY_DONE, OK, RawWorker
from tests.fixtures.servers import StartServerProcess

ConnectWorker = Callable[..., Awaitable[RawWorker]]


async def test_equal_starts_over_two_processes_make_one_run_which_outlives_the_death_of_one(
    server_process: StartServerProcess, dsn: str, connect_api: Callable[[str], Api], connect_worker: ConnectWorker
) -> None:
    """I6, I7, I13: killed with a worker on it, whose step goes on over the other server at its first attempt."""
    settings = {"poll_interval": 0.1, "disconnect_grace": 5.0}
    first, second = server_process(dsn, wait=False, **settings), server_process(dsn, wait=False, **settings)
    for process in (first, second):
        process.wait_serving()
    apis = [connect_api(process.grpc_address) for process in (first, second)]
    await apis[0].register(manifest(3))
    started = await asyncio.gather(*(apis[n % 2].start(request_key="k") for n in range(300)))
    [run_id] = {answer.run_id for answer in started}
    assert sum(answer.created for answer in started) == 1
    assert await count(dsn, "run") == 1
    worker = await connect_worker(first.grpc_address, handlers=handler_names(3))
    done = await worker.task()
    assert (await worker.complete(done, "1")).outcome == OK
    task = await worker.task()
    first.kill()
    elsewhere = await connect_worker(
        second.grpc_address,
        handlers=handler_names(3),
        hello=False,
        process_nonce=worker.hello().process_nonce,
    )
    await elsewhere.drop()
    welcome = await elsewhere.reconnect(held=[task.task], previous_session_ids=worker.sessions)
    assert [held.kept for held in welcome.held] == [True]
    assert (await elsewhere.complete(done, "1")).outcome == ALREADY_DONE
    assert (await elsewhere.complete(task, "2")).outcome == OK
    last = await elsewhere.task()
    assert (last.node_id, last.attempt, last.input.json) == ("n3", 1, "2")
    assert (await elsewhere.complete(last, "3")).outcome == OK
    run = await apis[1].wait(run_id)
    assert (run.state, run.output.json) == (run_pb2.RUN_STATE_COMPLETED, "3")
    await check_run(apis[1], dsn, run_id, ["n1", "n2", "n3"])
