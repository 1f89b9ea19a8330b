"""A worker beside a program: in a thread of it, so that one command shows an example."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fencepost import Step, Worker, Workflow

CONNECT_TIMEOUT = 10.0  # seconds


@contextmanager
def worker_beside(
    address: str, workflows: Sequence[Workflow[..., Any]], steps: Sequence[Step[..., Any]]
) -> Iterator[Worker]:
    """A worker that is connected when the block begins, and finishes what it has begun when the block ends.

    Raises SystemExit with what to do if there is no server, and whatever ended the worker.
    """
    worker = Worker(address, steps, workflows=workflows)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - it is raised to the program
            errors.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    try:
        if not worker.wait_connected(CONNECT_TIMEOUT) and not errors:
            raise SystemExit(f"there is no server at {address}: start one with `make dev`")
        yield worker
    finally:
        worker.stop()
        thread.join()
    if errors:
        raise errors[0]
