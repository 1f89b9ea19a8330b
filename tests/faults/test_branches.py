"""All that can happen to the branches of one run happens at once: they complete in one batch or in several, while the
run is cancelled, terminated, paused or failed at one server or another. Each run has one history without gaps and one
end, and nothing comes after it (row 50 of the field's failures; I4).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import grpc
import pytest

from fencepost.v1 import run_pb2, run_service_pb2
from fencepost.v1 import worker_service_pb2 as pb
from tests.engine.flows import HANDLERS, PERMANENT, state_of, step, value_of, workflow
from tests.faults.scene import STAYING, Scene, count
from tests.fixtures.api import DEADLINE, Api, kinds
from tests.fixtures.raw_worker import LEASE_LOST, OK, RawWorker
from tests.fixtures.refusals import decode

RUNS = 250
BRANCHES = "abcd"
FINAL = {
    "run_completed": "COMPLETED",
    "run_failed": "FAILED",
    "run_cancelled": "CANCELLED",
    "run_terminated": "TERMINATED",
}
FORK = workflow({"id": "both", "parallel": [[step(name, undo=True)] for name in BRANCHES]}, step("e"))
"""Four branches that begin at once, each to be undone, and a step after their join."""

Meanwhile = Callable[[Api, str, list[pb.Task], RawWorker], Awaitable[None]]


async def cancel(api: Api, run_id: str, tasks: list[pb.Task], worker: RawWorker) -> None:
    """In between comes a cancel."""
    await commanded(api, "Cancel", run_id)


async def terminate(api: Api, run_id: str, tasks: list[pb.Task], worker: RawWorker) -> None:
    """In between comes the end."""
    await commanded(api, "Terminate", run_id)


async def fail(api: Api, run_id: str, tasks: list[pb.Task], worker: RawWorker) -> None:
    """In between one of the branches fails for good; it may be gone by then."""
    await worker.fail(random.choice(tasks), PERMANENT)


async def pause(api: Api, run_id: str, tasks: list[pb.Task], worker: RawWorker) -> None:
    """In between comes a pause, and a resume after it."""
    await commanded(api, "Pause", run_id)
    await commanded(api, "Resume", run_id)


async def commanded(api: Api, name: str, run_id: str) -> None:
    """Ask something of a run that may have ended by now."""
    request = getattr(run_service_pb2, f"{name}RunRequest")(run_id=run_id)
    try:
        await getattr(api.runs, f"{name}Run")(request, timeout=DEADLINE)
    except grpc.aio.AioRpcError as error:
        if decode(error).reason != "ILLEGAL_TRANSITION":
            raise


@pytest.mark.parametrize("meanwhile", [cancel, terminate, fail, pause])
async def test_branches_that_complete_together_with_something_in_between_leave_one_history_and_one_end(
    scene: Scene, meanwhile: Meanwhile
) -> None:
    here, there = [await scene.serve(**STAYING) for _ in range(2)]  # with so much at once a pong can be late
    api, other = scene.api(here.grpc_address), scene.api(there.grpc_address)
    await api.register(FORK)
    worker = await scene.raw(here.grpc_address, handlers=HANDLERS, capacity=RUNS * len(BRANCHES))
    results = await api.start_many([api.start_request() for _ in range(RUNS)])
    run_ids = [result.started.run_id for result in results]
    by_run: dict[str, list[pb.Task]] = {}
    for task in await worker.tasks(RUNS * len(BRANCHES), 30):
        by_run.setdefault(task.task.run_id, []).append(task)
    rest = asyncio.create_task(_complete_the_rest(worker))
    await asyncio.gather(*_everything(by_run, worker, meanwhile, (api, other)))
    ends = Counter([_checked(await other.wait(run_id, 30), await api.history(run_id)) for run_id in run_ids])
    rest.cancel()
    await asyncio.gather(rest, return_exceptions=True)
    if meanwhile is pause:
        assert set(ends) == {"COMPLETED"}
    for table in ("task", "scope", "output", "undo"):
        assert await count(scene.dsn, table) == 0, table


def _everything(
    by_run: dict[str, list[pb.Task]], worker: RawWorker, meanwhile: Meanwhile, apis: tuple[Api, Api]
) -> list[Awaitable[None]]:
    """For a few runs together: two frames with two results of each, and what comes in between, in any order."""
    work: list[Awaitable[None]] = []
    runs = list(by_run.values())
    for at in range(0, len(runs), 5):
        few = runs[at : at + 5]
        for tasks in few:
            random.shuffle(tasks)
        work.append(_complete(worker, [task for tasks in few for task in tasks[:2]]))
        work.append(_complete(worker, [task for tasks in few for task in tasks[2:]]))
        work += [meanwhile(random.choice(apis), tasks[0].task.run_id, tasks, worker) for tasks in few]
    random.shuffle(work)
    return work


async def _complete(worker: RawWorker, tasks: Iterable[pb.Task]) -> None:
    results = await worker.complete_all([(task, f'"{task.handler}"') for task in tasks])
    assert {result.outcome for result in results} <= {OK, LEASE_LOST}


async def _complete_the_rest(worker: RawWorker) -> None:
    """Whatever else comes: steps after the join, undoing."""
    while True:
        await _complete(worker, [await worker.task(60)])


def _checked(run: run_pb2.Run, events: list[run_pb2.Event]) -> str:
    """A history is whole, and ends once, as its run did. Returns how."""
    told = kinds(events)
    assert [kind for kind in told if kind in FINAL] == [told[-1]], told
    state = FINAL[told[-1]]
    assert (state_of(run), run.last_seq) == (state, len(events))
    over = [event.step_completed.task_id for event in events if event.HasField("step_completed")]
    over += [event.step_failed.task_id for event in events if event.HasField("step_failed")]
    over += [event.step_cancelled.task_id for event in events if event.HasField("step_cancelled")]
    assert len(over) == len(set(over)), told
    scheduled = [event.seq for event in events if event.HasField("step_scheduled")]
    assert set(over) <= set(scheduled)
    completed = [event for event in events if event.HasField("step_completed")]
    undone = [event.undo_scheduled.of_seq for event in events if event.HasField("undo_scheduled")]
    assert told.count("scope_closed") <= 1
    if state == "COMPLETED":
        joined = next(event.scope_closed.output for event in events if event.HasField("scope_closed"))
        assert value_of(joined) == {name: name for name in BRANCHES}
        assert undone == []
    elif state != "TERMINATED":
        undoable = [event.seq for event in completed if event.step_completed.node_id in BRANCHES]
        assert undone == undoable[::-1], told
        assert told.count("undo_completed") == len(undoable)
    return state
