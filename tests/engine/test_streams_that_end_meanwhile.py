"""A stream ends between the decision of a batch and its commit: what the batch leased to it is nobody's, and free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencepost.v1 import worker_service_pb2 as pb
from fencepost_server.session.session import Session
from tests.engine.rows import fetch
from tests.fixtures.api import Api
from tests.fixtures.manifests import handler_names, manifest
from tests.fixtures.raw_worker import RawWorker
from tests.fixtures.servers import StartInProcessServer
from tests.fixtures.waiting import eventually

Connect = Callable[[str], Api]
ConnectWorker = Callable[..., Awaitable[RawWorker]]


async def test_next_steps_leased_to_streams_of_several_namespaces_that_have_ended_are_ready_again_for_free(
    in_process_server: StartInProcessServer, connect_api: Connect, connect_worker: ConnectWorker, dsn: str
) -> None:
    """Row 48, I14: each goes back in its own namespace; in another one it would be nobody's lease, and run out."""
    server = await in_process_server(dsn, lanes=1, disconnect_grace=60.0)
    engine = server.app.engine
    api = connect_api(server.grpc_address)
    completions: list[tuple[RawWorker, pb.Task]] = []
    for namespace in ("one", "two", "three"):
        await api.register(manifest(2), namespace=namespace)
        await api.start(namespace=namespace)
        worker = await connect_worker(server.grpc_address, namespace=namespace, handlers=handler_names(2))
        completions.append((worker, await worker.task()))
    commits = 0

    async def end_streams() -> None:
        """The first commit waits until the others' reports have come; they are then one batch."""
        nonlocal commits
        commits += 1
        if commits == 1:
            for worker, task in completions[1:]:
                await worker.send(pb.Complete(items=[pb.CompleteItem(task=task.task)]))
            await eventually(lambda: engine.lanes[0].depth == 2)
        if commits == 2:
            sessions = [session for session in engine.dispatcher.sessions if isinstance(session, Session)]
            assert len(sessions) == len(completions)
            # The first one's next step is on the stream: else it would go back as well.
            await eventually(lambda: all(session.outbox.empty for session in sessions))
            for session in sessions:
                session.close()

    engine.committer.after_commit = end_streams
    first, task = completions[0]
    assert (await first.complete(task)).outcome == pb.ITEM_OUTCOME_OK

    async def free() -> bool:
        rows = await fetch(dsn, "select namespace, attempt from task where lease_session is null and task_id > 2")
        return sorted(rows) == [("three", 0), ("two", 0)]

    await eventually(free)
